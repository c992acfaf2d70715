"""What a retry gets: the status, head and bytes of the first answer, or a run of its own where none is kept."""

import asyncio
import gzip
import hashlib

import pytest

from tests.support import RawAnswer, RawUpstream, chunked, close, early, play, reply, then

from .conftest import Gate, Start, end_to_end, post

MIB = 1024 * 1024
RICH = [
    ("ETag", '"v1"'),
    ("Link", "</a>; rel=next"),
    ("LINK", "</b>; rel=prev"),
    ("Content-Type", "application/vnd.shop+json; charset=utf-8"),
    ("Content-Disposition", 'attachment; filename="a, b.pdf"'),
    ("X-Request-Id", "u1"),
    ("x-oDD-cASe", "  kept  as it is"),
    ("X-Empty", ""),
    ("X-Latin", b"caf\xe9"),
]
MOMENTARY = [
    ("Date", "Mon, 01 Jan 2024 00:00:00 GMT"),
    ("Connection", "keep-alive, X-Hop"),
    ("Keep-Alive", "timeout=5"),
    ("X-Hop", "1"),
    ("Proxy-Authenticate", "Basic"),
]
KEPT = {200: b"{}", 201: b"made", 202: b"soon", 204: b"", 207: b"<m/>", 406: b"no", 410: b"gone", 422: b'{"bad":1}'}
REPLY_STATUSES = {**KEPT, 205: b"", 226: b"im", 304: b"", 300: b"many", 400: b"bad", 405: b"", 411: b"", 413: b"big"}


def replayed(answer: RawAnswer) -> bool:
    return answer.value("Idempotent-Replayed") == "true"


# ---- C05 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", sorted(REPLY_STATUSES))
async def test_c05_a_replay_repeats_status_head_and_bytes(
    gate: Gate, twin: Gate, upstream: Start, key: str, status: int
) -> None:
    body = REPLY_STATUSES[status]
    extra = {201: [("Location", "/orders/9?x=%2F")], 202: [("Location", "/jobs/1"), ("Retry-After", "3")]}
    up = await upstream(reply(status, body, [*RICH, *MOMENTARY, *extra.get(status, [])], reason=b"Odd Reason, kept"))
    first = await gate.ask(post(key=key))
    for one in (gate, twin):  # from memory, from the store
        again = await one.ask(post(key=key))
        assert up.executions["/orders", key] == 1
        assert again.status_line == first.status_line == b"HTTP/1.1 %d Odd Reason, kept" % status
        assert again.body == first.body == body
        assert end_to_end(again) == end_to_end(first)
        assert end_to_end(first) == [
            (name.encode(), (value if isinstance(value, bytes) else value.encode()).strip())
            for name, value in (*RICH, *extra.get(status, []))
            if name != "X-Request-Id"
        ]
        assert again.value("X-Request-Id") == first.value("X-Request-Id") == "u1"
        assert replayed(again)
        assert again.value("Idempotency-Status") == "replayed"
        assert again.value("Date") not in (None, MOMENTARY[0][1])
        for name in ("Connection", "Keep-Alive", "X-Hop", "Proxy-Authenticate", "Transfer-Encoding"):
            assert not again.values(name)
            assert not first.values(name)
    assert not replayed(first)
    assert first.value("Idempotency-Status") == "executed"
    assert first.value("Date") == MOMENTARY[0][1]


async def test_c05_credentials_and_our_own_words_of_the_upstream_do_not_come_back(
    gate: Gate, twin: Gate, upstream: Start, key: str
) -> None:
    forged = [("Idempotent-Replayed", "true"), ("Idempotency-Status", "replayed"), ("idempotency-record", "0" * 12)]
    up = await upstream(reply(201, b"x", [("Set-Cookie", "sid=one"), ("X-Auth-Token", "t"), *forged]))
    first = await gate.ask(post(key=key))
    assert first.value("Set-Cookie") == "sid=one"
    assert not replayed(first)
    assert first.value("Idempotency-Record") != "0" * 12
    for one in (gate, twin):
        again = await one.ask(post(key=key))
        assert up.executions["/orders", key] == 1
        assert replayed(again)
        assert not again.values("Set-Cookie")
        assert not again.values("X-Auth-Token")
        assert again.value("Idempotency-Record") == first.value("Idempotency-Record")


# ---- C06 --------------------------------------------------------------------------------------------------------

BINARY = {
    "all-bytes": (reply(200, bytes(range(256)) * 64, [("Content-Type", "application/pdf")]), bytes(range(256)) * 64),
    "empty": (reply(200, b""), b""),
    "chunked": (chunked([b"a", b"\r\n0\r\n\r\n", b"\x00" * 5000]), b"a\r\n0\r\n\r\n" + b"\x00" * 5000),
    "json": (reply(200, b'{"a":1,  "a":2, "n":"\\u0000"}\n'), b'{"a":1,  "a":2, "n":"\\u0000"}\n'),
    "gzip": (
        reply(200, gzip.compress(b"x" * 999, mtime=0), [("Content-Encoding", "gzip")]),
        gzip.compress(b"x" * 999, mtime=0),
    ),
    "until-close": (then(play(b"HTTP/1.1 200 OK\r\n\r\n\xff\x00no length"), close()), b"\xff\x00no length"),
}


@pytest.mark.parametrize("kind", BINARY)
async def test_c06_bodies_come_back_byte_for_byte(gate: Gate, twin: Gate, upstream: Start, key: str, kind: str) -> None:
    action, written = BINARY[kind]
    up = await upstream(action)
    answers = [await one.ask(post(key=key)) for one in (gate, gate, twin)]
    assert up.executions["/orders", key] == 1
    assert {hashlib.sha256(answer.body).hexdigest() for answer in answers} == {hashlib.sha256(written).hexdigest()}
    assert [answer.framing for answer in answers] == ["length"] * 3
    assert [replayed(answer) for answer in answers] == [False, True, True]


# ---- C08 --------------------------------------------------------------------------------------------------------

EIGHT = b"0123456789abcdef" * (8 * MIB // 16)
LARGE = {
    "length": reply(201, EIGHT, [("Location", "/orders/9")]),
    "chunks": chunked([EIGHT[:MIB]] * 8, 201, [("Location", "/orders/9")]),
    "until-close": then(play(b"HTTP/1.1 201 Created\r\nLocation: /orders/9\r\n\r\n" + EIGHT), close()),
}


@pytest.mark.parametrize("kind", LARGE)
async def test_c08_a_reply_too_large_to_keep_is_relayed_whole_and_blocks_a_second_run(
    gate: Gate, twin: Gate, upstream: Start, key: str, kind: str
) -> None:
    up = await upstream(LARGE[kind])
    first = await gate.ask(post(key=key))
    assert (first.status, len(first.body)) == (201, 8 * MIB)
    assert hashlib.sha256(first.body).digest() == hashlib.sha256(EIGHT).digest()
    assert first.value("Idempotency-Status") == "executed"
    for one in (gate, twin):
        again = await one.ask(post(key=key))
        assert up.executions["/orders", key] == 1
        assert again.status == 409
        assert b'"code":"reply-not-stored"' in again.body
        assert b'"original_status":201' in again.body
        assert b'"location":"/orders/9"' in again.body
    exactly = await gate.ask(post("/large", key))
    assert exactly.status == 201
    assert replayed(await twin.ask(post("/large", key))), "8 MiB is within this route's limit"
    assert up.executions["/large", key] == 1


async def test_c08_twenty_large_replies_at_once_stay_within_bounded_memory(
    gate: Gate, upstream: Start, key: str
) -> None:
    up = await upstream(LARGE["chunks"])
    await gate.ask(post(key=key))
    before = gate.forget_peak()
    clients = [gate.client() for _ in range(20)]
    try:
        for number, client in enumerate(clients):
            await client.__aenter__()
            await client.send(post(key=f"{key}-{number}"))
        await up.until(lambda: up.bytes_written > 20 * MIB)  # nobody reads: what is held now is held for slow readers
        answers = [await client.read_answer() for client in clients]
    finally:
        await asyncio.gather(*(client.hang_up() for client in clients))
    growth = gate.memory("VmHWM") - before
    assert [(answer.status, len(answer.body)) for answer in answers] == [(201, 8 * MIB)] * 20
    assert growth < 64 * MIB, growth
    again = await gate.ask(post(key=f"{key}-7"))
    assert up.executions["/orders", f"{key}-7"] == 1
    assert again.status == 409


async def test_c08_a_large_reply_that_breaks_off_ends_the_connection_and_is_not_run_again(
    gate: Gate, upstream: Start, key: str
) -> None:
    head = b"HTTP/1.1 201 Created\r\nContent-Length: %d\r\n\r\n" % len(EIGHT)
    up = await upstream(then(play(head + EIGHT[: 3 * MIB]), close()))
    with pytest.raises(asyncio.IncompleteReadError):
        await gate.ask(post(key=key))
    again = await gate.ask(post(key=key))
    assert up.executions["/orders", key] == 1
    assert again.status == 409
    assert b'"code":"reply-not-stored"' in again.body


async def test_c08_a_stream_under_a_key_is_relayed_as_it_comes_and_not_run_again(
    gate: Gate, twin: Gate, upstream: Start, key: str
) -> None:
    more = asyncio.Event()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"

    async def events(turn) -> None:  # type: ignore[no-untyped-def]
        await turn.send(head + b"data: 1\n\n")
        await more.wait()
        await turn.send(b"data: 2\n\n")
        turn.close()

    up = await upstream(events)
    async with gate.client() as client:
        await client.send(post(key=key))
        answer = await client.read_head()
        assert await client.read_chunk(answer) == b"data: 1\n\n"
        again = await twin.ask(post(key=key))
        assert up.executions["/orders", key] == 1
        assert again.status == 409
        assert b'"code":"reply-not-stored"' in again.body, "its tombstone stands before it ends"
        more.set()
        assert await client.read_chunk(answer) == b"data: 2\n\n"
        assert await client.read_chunk(answer) == b""


# ---- C16 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403, 404, 408, 409, 421, 423, 425, 429, 499, 500, 503, 520, 999])
async def test_c16_what_may_pass_is_relayed_and_a_retry_runs_at_once(
    gate: Gate, twin: Gate, upstream: Start, key: str, status: int
) -> None:
    up = await upstream([reply(status, b"not now", [("Retry-After", "2")]), reply(201, b"made")])
    first = await gate.ask(post(key=key))
    assert (first.status, first.body) == (status, b"not now")
    assert (first.value("Idempotency-Status"), first.value("Retry-After")) == ("released", "2")
    second = await twin.ask(post(key=key))
    assert up.executions["/orders", key] == 2
    assert (second.status, second.value("Idempotency-Status")) == (201, "executed")
    third = await gate.ask(post(key=key))
    assert up.executions["/orders", key] == 2
    assert replayed(third)


@pytest.mark.parametrize("status", [400, 405, 406, 410, 411, 413, 414, 415, 422])
async def test_c16_a_refusal_that_stays_one_is_kept(gate: Gate, upstream: Start, key: str, status: int) -> None:
    up = await upstream([reply(status, b"never"), reply(201)])
    first, second = await gate.ask(post(key=key)), await gate.ask(post(key=key))
    assert up.executions["/orders", key] == 1
    assert (first.status, second.status, second.body) == (status, status, b"never")
    assert replayed(second)


async def test_c16_after_a_transient_refusal_the_corrected_request_may_come(
    gate: Gate, upstream: Start, key: str
) -> None:
    up = await upstream([reply(403), reply(201)])
    await gate.ask(post(key=key, body=b'{"amount":1}'))
    corrected = await gate.ask(post(key=key, body=b'{"amount":2}'))
    assert up.executions["/orders", key] == 2
    assert corrected.status == 201


async def test_c16_after_a_5xx_another_request_under_the_key_is_a_mismatch(
    gate: Gate, upstream: Start, key: str
) -> None:
    up = await upstream([reply(500), reply(201)])
    await gate.ask(post(key=key, body=b'{"amount":1}'))
    other = await gate.ask(post(key=key, body=b'{"amount":2}'))
    assert up.executions["/orders", key] == 1
    assert other.status == 422


async def test_c16_the_services_own_409_and_422_are_told_from_the_gateways(
    gate: Gate, upstream: Start, key: str
) -> None:
    release = asyncio.Event()

    async def slow(turn) -> None:  # type: ignore[no-untyped-def]
        await release.wait()
        await reply(409, b"theirs")(turn)

    up = await upstream([slow, reply(422, b"theirs")])
    first = asyncio.create_task(gate.ask(post(key=key)))
    await up.wait_for_requests(1)
    ours = await gate.ask(post(key=key))
    assert (ours.status, ours.value("Idempotency-Status")) == (409, "outstanding")
    assert ours.value("Content-Type") == "application/problem+json"
    assert 1 <= int(ours.value("Retry-After") or 0) <= 10
    release.set()
    theirs = await first
    assert (theirs.status, theirs.value("Idempotency-Status"), theirs.body) == (409, "released", b"theirs")
    kept = await gate.ask(post(key=key))
    assert (kept.status, kept.value("Idempotency-Status"), kept.body) == (422, "executed", b"theirs")
    mismatch = await gate.ask(post(key=key, body=b"{}"))
    assert (mismatch.status, mismatch.value("Idempotency-Status")) == (422, "mismatch")
    assert up.executions["/orders", key] == 2


# ---- C28 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_accepts", ["gzip", "identity"])
async def test_c28_bytes_and_content_encoding_always_agree(
    gate: Gate, twin: Gate, upstream: Start, key: str, first_accepts: str
) -> None:
    packed = gzip.compress(b"plain" * 70, mtime=0)

    async def by_accept(turn) -> None:  # type: ignore[no-untyped-def]
        wanted = turn.request.values("Accept-Encoding") == [b"gzip"]
        await reply(201, packed if wanted else b"plain" * 70, [("Content-Encoding", "gzip")] if wanted else [])(turn)

    up = await upstream(by_accept)
    first = await gate.ask(post("/orders", key, b"{}", ("Accept-Encoding", first_accepts)))
    expected = (packed, ["gzip"]) if first_accepts == "gzip" else (b"plain" * 70, [])
    assert (first.body, [v.decode() for v in first.values("Content-Encoding")]) == expected
    for accepts in ("identity", None, "gzip;q=0", "gzip", "br", "zstd", "gzip, gzip"):
        for one in (gate, twin):
            lines = [] if accepts is None else [("Accept-Encoding", accepts)]
            again = await one.ask(post("/orders", key, b"{}", *lines))
            assert up.executions["/orders", key] == 1
            assert (again.body, [v.decode() for v in again.values("Content-Encoding")]) == expected


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "gzip, gzip", "deflate", "nonsense"])
@pytest.mark.parametrize("path", ["/orders", "/open"])
async def test_c28_a_body_that_is_not_what_its_coding_says_is_relayed_as_it_is(
    gate: Gate, upstream: Start, key: str, coding: str, path: str
) -> None:
    up = await upstream(reply(200, b"not packed at all", [("Content-Encoding", coding)]))
    for _ in range(2):
        answer = await gate.ask(post(path, key))
        assert (answer.status, answer.body, answer.value("Content-Encoding")) == (200, b"not packed at all", coding)
    assert up.executions[path, key] == (1 if path == "/orders" else 2)


async def test_c28_a_compressed_request_arrives_as_it_was_sent(gate: Gate, upstream: Start, key: str) -> None:
    packed = gzip.compress(b'{"amount":1}', mtime=0)
    for path in ("/orders", "/open"):
        up = await upstream(reply(200))
        await gate.ask(post(path, key, packed, ("Content-Encoding", "gzip")))
        assert up.requests[0].body == packed
        assert up.requests[0].values("Content-Encoding") == [b"gzip"]
        await up.__aexit__()


# ---- C37 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [303, 302, 301, 307, 308, 300])
@pytest.mark.parametrize("path", ["/orders", "/open"])
async def test_c37_redirects_are_relayed_never_followed_and_replayed(
    replicas: tuple[Gate, Gate], upstream: Start, key: str, status: int, path: str
) -> None:
    async with RawUpstream(reply(200, b"elsewhere")) as other:
        location = "/orders/9?a=%2f" if status == 303 else f"http://127.0.0.1:{other.port}/caught"
        up = await upstream(reply(status, b"see there", [] if status == 300 else [("Location", location)]))
        for number, one in enumerate((replicas[0], *replicas)):
            answer = await one.ask(post(path, key))
            assert up.executions[path, key] == (1 if path == "/orders" else number + 1)
            assert (answer.status, answer.body) == (status, b"see there")
            assert answer.value("Location") == (None if status == 300 else location)
            assert replayed(answer) == (path == "/orders" and number > 0)
        assert other.connections == 0
    assert {request.method for request in up.requests} == {"POST"}


# ---- early refusals ---------------------------------------------------------------------------------------------


async def test_c36c_a_refusal_before_the_body_was_read_arrives_and_is_no_success(
    gate: Gate, upstream: Start, key: str
) -> None:
    async def refuse(turn) -> None:  # type: ignore[no-untyped-def]
        await turn.reader.readexactly(64 * 1024)
        await reply(413, b"too much", close_after=True)(turn)

    up = await upstream(early(refuse))
    body = b"x" * (5 * MIB)
    for path in ("/large", "/open"):
        answer = await gate.ask(post(path, key, body))
        assert (answer.status, answer.body) == (413, b"too much")
    again = await gate.ask(post("/large", key, body))
    assert sum(request.path == "/large" for request in up.requests) == 1
    assert (again.status, replayed(again)) == (413, True)
