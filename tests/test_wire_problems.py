"""The gateway's own answers say what the table says, and docs/problems.md says the same to clients."""

import json
import re
from pathlib import Path

import pytest

from gateway import wire

BASE = "/.well-known/idempotency#"
SECTIONS = {
    part.split("\n", 1)[0]: part.split("\n", 1)[1]
    for part in (Path(__file__).parents[1] / "docs" / "problems.md").read_text().split("\n## ")[1:]
}


def lines(problem: wire.Problem) -> dict[str, str]:
    status, *rest = problem.head.decode("ascii").removesuffix("\r\n").split("\r\n")
    assert status.startswith(f"HTTP/1.1 {problem.status} ")
    found = dict(line.split(": ", 1) for line in rest)
    assert len(found) == len(rest)
    return found


@pytest.mark.parametrize("code", wire.RULES)
def test_each_problem_carries_the_members_and_headers_of_its_rule(code):
    rule = wire.RULES[code]
    problem = wire.problem(code, type_base=BASE, request_id="01JD", record="29808f52e400")
    body, head = json.loads(problem.body), lines(problem)
    assert body["type"] == BASE + code
    assert body["code"] == code
    assert body["title"] == rule.title
    assert body["status"] == problem.status == rule.status
    assert (body["next"], body["effect"]) == (rule.next, rule.effect)
    assert (body["record"], body["request_id"]) == ("29808f52e400", "01JD")
    assert head["Content-Type"] == "application/problem+json"
    assert head["Cache-Control"] == "no-store"
    assert head["Idempotency-Status"] == rule.outcome
    assert head["Idempotency-Record"] == "29808f52e400"
    assert head["X-Request-Id"] == "01JD"
    assert head["X-Should-Retry"] == ("true" if rule.next == "retry_same_key" else "false")
    assert ("Retry-After" in head) == ("retry_after" in body) == (rule.retry_after is not None)
    assert "Proxy-Status" not in head


@pytest.mark.parametrize("code", wire.RULES)
def test_each_detail_is_sentences_that_say_whether_anything_was_sent(code):
    for blocked in (False, True):
        detail = json.loads(wire.problem(code, type_base=BASE, request_id="1", blocked=blocked).body)["detail"]
        assert "{" not in detail
        assert "sent" in detail or "carried out" in detail
        assert detail.endswith(".")


@pytest.mark.parametrize("code", wire.RULES)
def test_a_503_means_that_nothing_was_sent(code):
    rule = wire.RULES[code]
    if rule.status == 503:
        assert rule.effect == "none"
        assert "Nothing was sent" in rule.detail
    if rule.status in (502, 504):
        assert rule.effect in ("pending", "unknown")


def test_every_code_has_a_section_and_every_section_a_code():
    assert list(SECTIONS) == list(wire.RULES)


@pytest.mark.parametrize("code", wire.RULES)
def test_a_section_says_what_the_table_says(code):
    rule, facts = wire.RULES[code], SECTIONS[code].split("\n", 1)[0]
    assert facts.startswith(f"`{rule.status}`")
    assert f"`Idempotency-Status: {rule.outcome}`" in facts
    assert f"`next: {rule.next}`" in facts
    assert f"`effect: {rule.effect}`" in facts
    assert ("check_outcome" in facts) == (rule.blocked_detail is not None)
    assert ("closes the connection" in facts) == rule.closes
    named = re.search(r"members: ((?:`\w+`(?:, )?)+)", facts)
    assert sorted(re.findall(r"`(\w+)`", named[1]) if named else []) == sorted(rule.members)
    wait = re.search(r"`Retry-After: (\d+)`", facts)
    assert (int(wait[1]) if wait else None) == rule.retry_after


def test_an_unknown_outcome_is_504_after_a_timeout_and_502_otherwise_and_names_the_cause():
    late = wire.problem(
        "outcome-unknown", type_base=BASE, request_id="1", cause="http_response_timeout", retry_after=61
    )
    cut = wire.problem("outcome-unknown", type_base=BASE, request_id="1", cause="connection_terminated", retry_after=61)
    assert (late.status, cut.status) == (504, 502)
    assert lines(late)["Proxy-Status"] == "idempotency-gateway; error=http_response_timeout"
    assert lines(late)["Retry-After"] == "61"
    assert "after 61 s" in json.loads(late.body)["detail"]
    assert json.loads(late.body)["cause"] == "http_response_timeout"


@pytest.mark.parametrize("code", ["outcome-unknown", "in-doubt"])
def test_what_never_runs_again_by_itself_sends_the_client_to_the_outcome(code):
    problem = wire.problem(code, type_base=BASE, request_id="1", retry_after=61, blocked=True)
    assert json.loads(problem.body)["next"] == "check_outcome"
    assert lines(problem)["X-Should-Retry"] == "false"
    assert "Retry-After" not in lines(problem)
    assert "retry_after" not in json.loads(problem.body)


def test_a_policy_may_choose_the_status_of_a_reused_key():
    problem = wire.problem("key-reused", type_base=BASE, request_id="1", status=409, original_status=None)
    assert problem.status == json.loads(problem.body)["status"] == 409
    assert "original_status" not in json.loads(problem.body)


@pytest.mark.parametrize("reason", ["repeated", "empty", "too_long", "not_printable", "not_a_string"])
def test_a_bad_key_is_explained_without_being_shown(reason):
    body = json.loads(wire.problem("key-invalid", type_base=BASE, request_id="1", reason=reason).body)
    assert body["reason"] == reason
    assert re.search(r"cannot be used\. It [^.]+", body["detail"])
    assert f"* `{reason}`" in SECTIONS["key-invalid"]


@pytest.mark.parametrize(
    "reason", ["malformed", "target", "host", "control_character", "framing", "expectation", "connection"]
)
def test_an_invalid_request_is_explained(reason):
    body = json.loads(wire.problem("request-invalid", type_base=BASE, request_id="1", reason=reason).body)
    assert re.search(r"is not valid\. It[s ]|is not valid\. One ", body["detail"])
    assert f"* `{reason}`" in SECTIONS["request-invalid"]


def test_a_code_or_member_outside_the_table_is_refused():
    with pytest.raises(KeyError):
        wire.problem("teapot", type_base=BASE, request_id="1")
    with pytest.raises(ValueError, match="has no member route"):
        wire.problem("key-reused", type_base=BASE, request_id="1", route="transfers")
