"""Whose key it is, and what it is for: no reply ever crosses from one caller or operation to another."""

import pytest

from tests.support import RawAnswer, Turn, reply, request

from .conftest import TRUSTED, Gate, Start, post


async def echo(turn: Turn) -> None:
    """Answer with what was asked, and by whom, so that a reply that strayed is seen."""
    asked = turn.request
    told = [asked.line, *asked.values("Host"), *asked.values("X-Tenant"), *asked.values("X-Customer-Id")]
    told += [*asked.values("Authorization"), asked.body]
    await reply(201, b"|".join(told))(turn)


def code(answer: RawAnswer) -> str | None:
    """The gateway's problem code, None for an answer of the upstream."""
    if answer.value("Content-Type") != "application/problem+json":
        return None
    return answer.body.decode().partition('"code":"')[2].partition('"')[0]


# ---- C09 --------------------------------------------------------------------------------------------------------


async def test_c09a_two_bearer_tokens_with_one_key_execute_each_and_see_their_own_reply(
    gate: Gate, upstream: Start, key: str
) -> None:
    up = await upstream(echo)
    for _ in range(2):
        one = await gate.ask(post("/by-token", key, b"{}", ("Authorization", "Bearer one")))
        two = await gate.ask(post("/by-token", key, b"{}", ("Authorization", "Bearer two")))
        assert up.executions["/by-token", key] == 2
        assert (one.status, two.status) == (201, 201)
        assert b"Bearer one" in one.body
        assert b"Bearer two" in two.body


@pytest.mark.parametrize("separator", [":", "|", "/", "%3A", "=", ";", "\\"])
async def test_c09b_no_separator_makes_two_identities_meet(
    gate: Gate, upstream: Start, key: str, separator: str
) -> None:
    up = await upstream(echo)
    a, b, c = f"a{key}", "b", "c"
    asked = [(f"{a}{separator}{b}", c), (a, f"{b}{separator}{c}")]
    answers = [await gate.ask(post("/by-customer", k, b"{}", ("X-Customer-Id", whose))) for whose, k in asked]
    assert sum(up.executions.values()) == 2
    assert [answer.status for answer in answers] == [201, 201]
    assert answers[0].value("Idempotency-Record") != answers[1].value("Idempotency-Record")
    assert [whose.encode() in answer.body for (whose, _), answer in zip(asked, answers, strict=True)] == [True, True]
    pairs = [(f"{a}{separator}{b}", c), (a, f"{b}{separator}{c}")]
    both = [
        await gate.ask(post("/by-both", key, b"{}", ("X-Tenant", tenant), ("X-Customer-Id", customer)))
        for tenant, customer in pairs
    ]
    assert up.executions["/by-both", key] == 2
    assert [answer.status for answer in both] == [201, 201]


async def test_c09b_a_control_character_as_separator_is_refused(gate: Gate, upstream: Start, key: str) -> None:
    up = await upstream(echo)
    for whose, k in (("a\x1fb", key), ("a", f"{key}\x1fb")):
        answer = await gate.ask(post("/by-customer", k, b"{}", ("X-Customer-Id", whose)))
        assert not up.requests
        assert answer.status == 400


async def test_c09c_callers_without_credentials_share_nothing(gate: Gate, upstream: Start, key: str) -> None:
    up = await upstream(echo)
    for source in ("127.0.0.1", TRUSTED):
        for value in (None, "", "Bearer", "Bearer  "):
            lines = [] if value is None else [("Authorization", value)]
            answer = await gate.ask(post("/by-token", key, b"{}", *lines), source)
            assert not up.requests
            assert (answer.status, code(answer)) == (400, "scope-missing")


async def test_c09d_a_refreshed_token_is_still_the_same_account(gate: Gate, upstream: Start, key: str) -> None:
    up = await upstream(echo)
    answers = [
        await gate.ask(post("/by-customer", key, b"{}", ("X-Customer-Id", "C-1"), ("Authorization", f"Bearer {token}")))
        for token in ("old", "new")
    ]
    assert up.executions["/by-customer", key] == 1
    assert answers[1].value("Idempotent-Replayed") == "true"
    assert answers[1].body == answers[0].body


async def test_c09e_a_scope_header_is_believed_from_the_trusted_proxy_only(
    gate: Gate, upstream: Start, key: str
) -> None:
    up = await upstream(echo)
    asked = post("/by-proxy", key, b"{}", ("X-Tenant", "acme"))
    forged = await gate.ask(asked)
    assert not up.requests
    assert (forged.status, code(forged)) == (403, "scope-forged")
    true = await gate.ask(asked, TRUSTED)
    assert up.executions["/by-proxy", key] == 1
    assert true.status == 201
    again = await gate.ask(asked)
    assert up.executions["/by-proxy", key] == 1
    assert (again.status, again.value("Idempotent-Replayed")) == (403, None)
    missing = await gate.ask(post("/by-proxy", key, b"{}"), TRUSTED)
    assert (missing.status, code(missing)) == (400, "scope-missing")


@pytest.mark.parametrize("values", [("a", "a"), ("a", "b"), ("", "a"), ("a", "")])
async def test_c09f_two_scope_lines_are_refused(gate: Gate, upstream: Start, key: str, values: tuple[str, str]) -> None:
    up = await upstream(echo)
    lines = [("X-Customer-Id", value) for value in values]
    answer = await gate.ask(post("/by-customer", key, b"{}", *lines))
    assert not up.requests
    assert (answer.status, code(answer)) == (400, "scope-missing")


async def test_c09_scope_is_what_is_forwarded_and_case_and_blanks_of_its_line_do_not_matter(
    gate: Gate, upstream: Start, key: str
) -> None:
    up = await upstream(echo)
    for line in (("X-Customer-Id", "C-1"), ("x-customer-id", "  C-1\t"), ("X-CUSTOMER-ID", "C-1  ")):
        await gate.ask(post("/by-customer", key, b"{}", line))
    assert up.executions["/by-customer", key] == 1
    other = await gate.ask(post("/by-customer", key, b"{}", ("X-Customer-Id", "c-1")))
    assert up.executions["/by-customer", key] == 2
    assert other.status == 201


# ---- C10 --------------------------------------------------------------------------------------------------------


async def test_c10_a_key_used_elsewhere_never_brings_an_unrelated_answer(
    gate: Gate, twin: Gate, upstream: Start, key: str
) -> None:
    up = await upstream(echo)
    first = await gate.ask(post("/orders", key))
    assert first.status == 201
    others = [
        ("POST", "/orders/7/cancel"),
        ("PATCH", "/orders/7"),
        ("DELETE", "/orders/7"),
        ("PUT", "/orders/8"),
        ("POST", "/Orders"),
        ("POST", "/orders/"),
        ("POST", "/orders?dry=1"),
    ]
    for one in (gate, twin):
        for method, path in others:
            answer = await one.ask(post(path, key, method=method))
            if answer.status == 201:
                assert answer.body.startswith(f"{method} {path} ".encode())
            else:
                assert (answer.status, code(answer)) == (422, "key-reused"), (method, path)
        replayed = await one.ask(post("/orders", key))
        assert up.executions["/orders", key] == 1
        assert (replayed.body, replayed.value("Idempotent-Replayed")) == (first.body, "true")
    assert up.executions["/orders/", key] == 0  # the same operation: another path of it is a mismatch
    assert up.executions["/Orders", key] == 2  # no route: passed on, like every request without protection


async def test_c10_two_virtual_hosts_never_share_an_answer(gate: Gate, twin: Gate, upstream: Start, key: str) -> None:
    up = await upstream(echo)
    assert (await gate.ask(post(key=key, host="one.test"))).status == 201
    for one in (gate, twin):
        other = await one.ask(post(key=key, host="two.test"))
        assert up.executions["/orders", key] == 1
        assert (other.status, code(other)) == (422, "key-reused")
    assert (await twin.ask(post(key=key, host="ONE.test"))).value("Idempotent-Replayed") == "true"


# ---- C18 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (["K", "K"], "repeated"),
        (["K", "other"], "repeated"),
        (["K", ""], "repeated"),
        (["K, b"], "repeated"),
        (['"K", "b"'], "repeated"),
        ([""], "empty"),
        (["   "], "empty"),
        (['""'], "empty"),
        (["K" * 256], "too_long"),
        (["K" * 6000], "too_long"),
        (["K" * 8000], "too_long"),
        (['"' + "K" * 256 + '"'], "too_long"),
        ([b"k\xe9y"], "not_printable"),
        (["K\tK"], "not_printable"),
        (['"K'], "not_a_string"),
        (['"K"x'], "not_a_string"),
        (['"K";a=1'], "not_a_string"),
        (['"K\\n"'], "not_a_string"),
    ],
)
async def test_c18_a_key_that_can_be_read_in_two_ways_is_refused(
    gate: Gate, upstream: Start, values: list[str | bytes], reason: str
) -> None:
    up = await upstream(echo)
    answer = await gate.ask(request("POST", "/orders", [("Idempotency-Key", value) for value in values], b"{}"))
    assert not up.requests
    assert (answer.status, code(answer)) == (400, "key-invalid")
    assert f'"reason":"{reason}"'.encode() in answer.body
    assert answer.value("Idempotency-Status") == "refused"


@pytest.mark.parametrize("value", [b"k\x00y", b"k\x01y", b"k\x7fy", b"k\ry", b"k\ny"])
async def test_c18_a_control_byte_in_the_key_never_arrives(gate: Gate, upstream: Start, value: bytes) -> None:
    up = await upstream(echo)
    answer = await gate.ask(request("POST", "/orders", [("Idempotency-Key", value)], b"{}"))
    assert not up.requests
    assert answer.status == 400
    assert answer.value("Content-Type") == "application/problem+json"


async def test_c18_quoted_bare_and_padded_forms_are_one_key_and_the_line_arrives_as_it_came(
    gate: Gate, upstream: Start, key: str
) -> None:
    up = await upstream(echo)
    for name, value in (
        ("Idempotency-Key", f'"{key}"'),
        ("idempotency-key", key),
        ("IDEMPOTENCY-KEY", f"  {key} \t"),
        ("iDeMpOtEnCy-KeY", f'  "{key}"'),
    ):
        answer = await gate.ask(request("POST", "/orders", [(name, value)], b"{}"))
        assert len(up.requests) == 1
        assert answer.status == 201
    assert up.requests[0].values("Idempotency-Key") == [f'"{key}"'.encode()]
    longest = await gate.ask(post(key=key.ljust(255, "x")))
    assert longest.status == 201


async def test_c18_a_missing_key_is_refused_or_passed_on_as_the_route_says(gate: Gate, upstream: Start) -> None:
    up = await upstream(echo)
    refused = await gate.ask(post("/orders"))
    assert not up.requests
    assert (refused.status, code(refused)) == (400, "key-missing")
    for _ in range(2):
        passed = await gate.ask(post("/optional"))
        assert (passed.status, passed.value("Idempotency-Status")) == (201, "unprotected")
    assert up.executions["/optional", ""] == 2
    empty = await gate.ask(post("/optional", ""))
    assert up.executions["/optional", ""] == 2
    assert (empty.status, code(empty)) == (400, "key-invalid")


async def test_c18_a_stripped_key_protects_and_does_not_arrive(gate: Gate, upstream: Start, key: str) -> None:
    up = await upstream(echo)
    for _ in range(2):
        assert (await gate.ask(post("/stripped", key))).status == 201
    assert up.executions["/stripped", ""] == 1
