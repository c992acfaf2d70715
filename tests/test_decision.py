"""The tables of decision: complete over their closed sets, and right for every status and every cause."""

import datetime as dt
import enum
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import decision
from gateway.config import OnStoreFailure, load
from gateway.decision import (
    TRANSITIONS,
    Answered,
    ClaimAgain,
    Forward,
    ForwardUnprotected,
    Refuse,
    Replay,
    retry_after_seconds,
    settle,
    state_diagram,
)
from gateway.model import (
    Acquired,
    ClaimOutcome,
    Completed,
    Conflict,
    Fingerprint,
    Held,
    InDoubt,
    Lease,
    Mismatch,
    NeverSent,
    NoReply,
    OtherRecipe,
    Settlement,
    State,
    TookOver,
    Unavailable,
)

ROOT = Path(__file__).parents[1]
PRINT = Fingerprint(1, b"digest")
LEASE = Lease(b"id", bytes(16), 30_000, 20.0)
KEPT = Completed(201, bytes(15) + b"2", dt.date(2030, 1, 1), 1000, 5.0, PRINT)
TOMBSTONE = Completed(201, bytes(15) + b"2", None, 1000, 5.0, PRINT)

DECISIONS = [
    (Acquired(LEASE, 1, None), Forward(LEASE, 1, None)),
    (Acquired(LEASE, 2, TookOver.EXPIRED), Forward(LEASE, 2, TookOver.EXPIRED)),
    (Completed(201, KEPT.claim_id, KEPT.reply_on, 1000, 5.0, PRINT), Replay(KEPT)),
    (TOMBSTONE, Refuse("reply-not-stored", None, 5.0, 201)),
    (Held(700, 5.0), Refuse("outstanding", 700, 5.0)),
    (InDoubt(700, 5.0), Refuse("in-doubt", 700, 5.0)),
    (InDoubt(None, 5.0), Refuse("in-doubt", None, 5.0)),
    (Mismatch(5.0, 422), Refuse("key-reused", None, 5.0, 422)),
    (Mismatch(5.0, None), Refuse("key-reused", None, 5.0, None)),
    (OtherRecipe(PRINT), ClaimAgain(PRINT)),
    (Conflict(), Refuse("store-unavailable")),
]


# ---- deciding on a claim ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_store_failure", OnStoreFailure)
@pytest.mark.parametrize(("outcome", "action"), DECISIONS)
def test_what_a_claim_found_decides_whatever_the_policy_for_a_lost_store(outcome, action, on_store_failure):
    assert decision.decide(outcome, on_store_failure) == action


@pytest.mark.parametrize("cause", ["timeout", "read_only", "starting"])
def test_without_the_store_the_policy_decides_whatever_the_cause(cause):
    assert decision.decide(Unavailable(cause), OnStoreFailure.REJECT) == Refuse("store-unavailable")
    assert decision.decide(Unavailable(cause), OnStoreFailure.FORWARD) == ForwardUnprotected()


def test_the_decisions_tried_cover_every_outcome_and_every_action():
    outcomes = {type(outcome) for outcome, _ in DECISIONS} | {Unavailable}
    actions = {type(action) for _, action in DECISIONS} | {ForwardUnprotected}
    assert outcomes == set(typing.get_args(ClaimOutcome))
    assert actions == set(typing.get_args(decision.Action))


def test_only_an_acquired_lease_or_the_policys_word_leads_to_the_upstream():
    for outcome, _ in DECISIONS:
        action = decision.decide(outcome, OnStoreFailure.FORWARD)
        assert isinstance(action, Forward | ForwardUnprotected) == isinstance(outcome, Acquired)


# ---- settling ---------------------------------------------------------------------------------------------------

REFUSALS = {400, 405, 406, 410, 411, 413, 414, 415, 422}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory):
    """The two built-in policies, as a file gets them that says nothing of outcomes."""
    file = tmp_path_factory.mktemp("policies") / "gateway.yaml"
    file.write_text(
        """
service: ledger
store: {dsn: "postgresql://localhost/x"}
upstreams: {ledger: {url: "http://127.0.0.1:8081"}}
defaults: {scope: none, on_missing_key: reject}
routes:
  once: {match: POST /once, policy: at-most-once}
  again: {match: POST /again, policy: at-least-once}
"""
    )
    routes = load(file).routes
    return {"at-most-once": routes["once"].policy, "at-least-once": routes["again"].policy}


def expected(policy: str, status: int) -> Settlement:
    """The contract in words: successes, redirects and deterministic refusals are stored, the rest is released."""
    if policy == "at-most-once" and status in {500, 502, 504}:
        return Settlement.HOLD
    return Settlement.COMPLETE if 200 <= status < 400 or status in REFUSALS else Settlement.RELEASE


@pytest.mark.parametrize("policy", ["at-most-once", "at-least-once"])
def test_every_status_settles_as_the_contract_says(policies, policy):
    for status in range(200, 600):
        verdict = settle(Answered(status, whole=True), policies[policy].outcomes.settlement)
        wanted = expected(policy, status)
        assert verdict.settlement is wanted, status
        assert verdict.forwarded, status
        assert verdict.keep == (wanted is Settlement.COMPLETE), status
        assert verdict.binds == (wanted is Settlement.COMPLETE or not 400 <= status < 500), status
        assert verdict.reason == "status", status


@pytest.mark.parametrize("policy", ["at-most-once", "at-least-once"])
def test_an_answer_that_is_not_whole_settles_alike_but_is_never_kept(policies, policy):
    for status in range(200, 600):
        verdict = settle(Answered(status, whole=False), policies[policy].outcomes.settlement)
        wanted = expected(policy, status)
        assert verdict.settlement is wanted, status
        assert not verdict.keep, status
        assert verdict.reason == ("too_large" if wanted is Settlement.COMPLETE else "status"), status


@pytest.mark.parametrize("policy", ["at-most-once", "at-least-once"])
def test_statuses_outside_every_class_are_released_and_bind(policies, policy):
    for status in (600, 799, 999):
        verdict = settle(Answered(status, whole=True), policies[policy].outcomes.settlement)
        assert (verdict.settlement, verdict.binds) == (Settlement.RELEASE, True)


@pytest.mark.parametrize("settlement", Settlement)
def test_a_policy_may_settle_any_status_in_any_way(settlement):
    for status in range(200, 600):
        verdict = settle(Answered(status, whole=True), lambda _: settlement)
        assert verdict.settlement is settlement
        assert verdict.keep == (settlement is Settlement.COMPLETE)


def test_what_the_policy_holds_binds_whatever_its_status():
    for status in range(200, 600):
        assert settle(Answered(status, whole=True), lambda _: Settlement.HOLD).binds, status


@pytest.mark.parametrize("settlement", Settlement)
def test_a_failure_never_asks_the_policys_statuses(settlement):
    never = settle(NeverSent("connection_refused"), lambda _: settlement)
    assert (never.settlement, never.forwarded, never.binds, never.keep) == (Settlement.RELEASE, False, False, False)
    held = settle(NoReply("connection_terminated", reused=False), lambda _: settlement)
    assert (held.settlement, held.forwarded, held.binds, held.keep) == (Settlement.HOLD, True, True, False)


@pytest.mark.parametrize(
    ("cause", "reused", "reason"),
    [
        ("http_response_timeout", False, "timeout"),
        ("http_response_timeout", True, "timeout"),
        ("connection_read_timeout", True, "timeout"),
        ("connection_terminated", False, "reset"),
        ("connection_terminated", True, "reset_on_reused_connection"),
        ("http_response_incomplete", False, "reset"),
        ("http_protocol_error", True, "reset_on_reused_connection"),
    ],
)
def test_why_it_is_held_tells_timeouts_resets_and_reused_connections_apart(cause, reused, reason):
    assert settle(NoReply(cause, reused), lambda _: Settlement.COMPLETE).reason == reason


# ---- how long a client should wait ------------------------------------------------------------------------------

SECONDS = st.floats(-1e6, 1e6)


@given(st.lists(st.floats(0, 1e6), max_size=64), SECONDS, SECONDS, st.floats(0, 1, exclude_max=True))
def test_retry_after_is_a_whole_number_from_1_to_10_and_not_beyond_the_lease(durations, elapsed, remaining, jitter):
    wait = retry_after_seconds(durations, elapsed, remaining, jitter)
    assert isinstance(wait, int)
    assert 1 <= wait <= 10
    assert wait <= max(1, round(remaining))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=64), st.floats(0, 100), st.floats(0, 1, exclude_max=True))
def test_jitter_only_lengthens_and_by_a_quarter_at_the_most(durations, elapsed, jitter):
    plain = retry_after_seconds(durations, elapsed, 60, 0)
    assert plain <= retry_after_seconds(durations, elapsed, 60, jitter) <= round(plain * 1.25) + 1


def test_it_follows_the_ninetieth_percentile_less_what_has_passed():
    durations = [1.0] * 8 + [5.0, 7.0]
    assert retry_after_seconds(durations, 0, 60, 0) == 7
    assert retry_after_seconds(durations, 3, 60, 0) == 4
    assert retry_after_seconds(durations, 100, 60, 0) == 1
    assert retry_after_seconds([], 0, 60, 0) == 1


# ---- the state machine ------------------------------------------------------------------------------------------


def test_every_state_is_entered_and_left():
    assert {step.target for step in TRANSITIONS} == {*State, None}
    assert {step.source for step in TRANSITIONS} == {*State, None}


def test_no_step_stands_twice():
    steps = [(step.source, step.event, step.target) for step in TRANSITIONS]
    assert len(steps) == len(set(steps))


def test_a_completed_record_changes_only_by_expiring():
    assert {(step.event, step.target) for step in TRANSITIONS if step.source is State.COMPLETED} == {("expire", None)}


def test_nothing_but_a_claim_or_a_takeover_leads_to_an_execution():
    into = {step.event for step in TRANSITIONS if step.target is State.IN_PROGRESS and step.source != step.target}
    assert into == {"claim", "takeover"}


def test_the_documented_diagram_is_current():
    assert (ROOT / "docs" / "state-machine.md").read_text("utf-8") == state_diagram(), (
        "write what state_diagram() returns to docs/state-machine.md"
    )


def test_the_diagram_names_every_state_and_step():
    text = state_diagram()
    for state in State:
        assert state.value in text
    for step in TRANSITIONS:
        assert f": {step.event}" in text
        assert step.condition in text


@pytest.mark.parametrize("closed", [Settlement, State, TookOver, OnStoreFailure])
def test_closed_sets_have_distinct_values(closed: type[enum.Enum]):
    assert len({member.value for member in closed}) == len(list(closed))
