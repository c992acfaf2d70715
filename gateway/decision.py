"""The two decisions of the protocol, as tables: what to do about a claim, how to settle what the upstream did.

Pure functions over closed sets; no I/O, no clock, no log. Each ends in `assert_never`, so that the type checker
names what a new outcome forgot. `TRANSITIONS` is the state machine that PostgreSQL's statements implement;
docs/state-machine.md is generated from it.
"""

from collections.abc import Callable, Sequence
from typing import Literal, assert_never

import msgspec

from gateway.config import OnStoreFailure
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

# ---- deciding on a claim ----------------------------------------------------------------------------------------


class Forward(msgspec.Struct, frozen=True):
    """Send the request upstream under this lease."""

    lease: Lease
    attempt: int
    took_over: TookOver | None


class ForwardUnprotected(msgspec.Struct, frozen=True):
    """Send the request upstream without an acknowledged lease: the policy says so, and the answer is marked."""


class Replay(msgspec.Struct, frozen=True):
    """Answer with the stored reply."""

    completed: Completed


class ClaimAgain(msgspec.Struct, frozen=True):
    """Compute the fingerprint by the recipe of `stored`, or take `stored` if that recipe is not known; claim again."""

    stored: Fingerprint


class Refuse(msgspec.Struct, frozen=True):
    """Answer with a problem; the upstream is not called. `again_in_ms` is None where waiting does not help."""

    code: Literal["outstanding", "in-doubt", "key-reused", "reply-not-stored", "store-unavailable"]
    again_in_ms: int | None = None
    first_seen_unix: float | None = None
    original_status: int | None = None


Action = Forward | ForwardUnprotected | Replay | ClaimAgain | Refuse


def decide(outcome: ClaimOutcome, on_store_failure: OnStoreFailure) -> Action:
    """Return what a claim's outcome asks for."""
    match outcome:
        case Acquired(lease, attempt, took_over):
            return Forward(lease, attempt, took_over)
        case Completed(reply_on=None):
            return Refuse("reply-not-stored", first_seen_unix=outcome.first_seen_unix, original_status=outcome.status)
        case Completed():
            return Replay(outcome)
        case Held(remaining_ms, first_seen_unix):
            return Refuse("outstanding", remaining_ms, first_seen_unix)
        case InDoubt(again_in_ms, first_seen_unix):
            return Refuse("in-doubt", again_in_ms, first_seen_unix)
        case Mismatch(first_seen_unix, original_status):
            return Refuse("key-reused", None, first_seen_unix, original_status)
        case OtherRecipe(fingerprint):
            return ClaimAgain(fingerprint)
        case Conflict():
            return Refuse("store-unavailable")
        case Unavailable():
            return ForwardUnprotected() if on_store_failure is OnStoreFailure.FORWARD else Refuse("store-unavailable")
        case _:
            assert_never(outcome)


# ---- settling what the upstream did -----------------------------------------------------------------------------


class Answered(msgspec.Struct, frozen=True, gc=False):
    """A final head came, and with `whole` its complete body within the limit; otherwise it is relayed as a stream."""

    status: int
    whole: bool


UpstreamOutcome = Answered | NeverSent | NoReply


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """How to settle. `keep`: with the reply's body; a completion without is a tombstone.

    `forwarded` and `binds` are those of `model.SettleRequest`; `reason` is the label of `settlements_total`.
    """

    settlement: Settlement
    keep: bool
    forwarded: bool
    binds: bool
    reason: Literal["status", "never_sent", "timeout", "reset", "reset_on_reused_connection", "too_large", "shutdown"]


_NEVER_SENT = Verdict(Settlement.RELEASE, keep=False, forwarded=False, binds=False, reason="never_sent")
_TIMEOUTS = frozenset({"http_response_timeout", "connection_read_timeout"})


def settle(outcome: UpstreamOutcome, settlement_of: Callable[[int], Settlement]) -> Verdict:
    """Return the settlement of an upstream outcome; `settlement_of` is the policy's table by status.

    Never sent is released. Sent without a complete answer is in doubt, whatever the policy's statuses say:
    the status that the gateway answers then is its own.
    """
    match outcome:
        case Answered(status, whole):
            settlement = settlement_of(status)
            if settlement is Settlement.COMPLETE:
                return Verdict(settlement, whole, forwarded=True, binds=True, reason="status" if whole else "too_large")
            refused = settlement is Settlement.RELEASE and 400 <= status < 500
            return Verdict(settlement, keep=False, forwarded=True, binds=not refused, reason="status")
        case NeverSent():
            return _NEVER_SENT
        case NoReply(cause, reused):
            reason: Literal["timeout", "reset", "reset_on_reused_connection"]
            reason = "timeout" if cause in _TIMEOUTS else "reset_on_reused_connection" if reused else "reset"
            return Verdict(Settlement.HOLD, keep=False, forwarded=True, binds=True, reason=reason)
        case _:
            assert_never(outcome)


# ---- how long a client should wait ------------------------------------------------------------------------------


def retry_after_seconds(durations: Sequence[float], elapsed: float, remaining: float, jitter: float) -> int:
    """Return `Retry-After` for an outstanding request, whole seconds from 1 to 10.

    The 90th percentile of the route's recent `durations` less what has `elapsed`, both in seconds, at most what
    `remaining` of the lease; spread by `jitter` in [0, 1) so that waiting clients do not come back together.
    """
    expected = sorted(durations)[int(len(durations) * 0.9)] - elapsed if durations else 1.0
    longest = max(1.0, min(10.0, remaining))
    return round(max(1.0, min(longest, expected * (1.0 + 0.25 * jitter))))


# ---- the state machine ------------------------------------------------------------------------------------------


class Transition(msgspec.Struct, frozen=True):
    """One step of a record. None as state: no record."""

    source: State | None
    event: str
    target: State | None
    condition: str


TRANSITIONS: tuple[Transition, ...] = (
    Transition(None, "claim", State.IN_PROGRESS, "no record, or a forgotten one"),
    Transition(None, "abandon", State.RELEASED, "no record: a mark that closes it to this claim id alone"),
    Transition(State.IN_PROGRESS, "claim", State.IN_PROGRESS, "same claim id: its answer was lost, or trust was"),
    Transition(State.IN_PROGRESS, "renew", State.IN_PROGRESS, "same claim id"),
    Transition(State.IN_PROGRESS, "complete", State.COMPLETED, "same claim id; with a reply, or as a tombstone"),
    Transition(State.IN_PROGRESS, "release", State.RELEASED, "same claim id; nothing happened, or the policy says so"),
    Transition(State.IN_PROGRESS, "release", State.IN_DOUBT, "same claim id, not forwarded, an older doubt is open"),
    Transition(State.IN_PROGRESS, "hold", State.IN_DOUBT, "same claim id; sent, no complete answer"),
    Transition(State.IN_PROGRESS, "abandon", State.RELEASED, "same claim id, never forwarded"),
    Transition(State.IN_PROGRESS, "abandon", State.IN_DOUBT, "same claim id, never forwarded, an older doubt is open"),
    Transition(State.IN_PROGRESS, "takeover", State.IN_PROGRESS, "lease over, run_again, effect deadline passed"),
    Transition(State.IN_PROGRESS, "expire", None, "its retention is over, run_again, lease and effect deadline passed"),
    Transition(State.IN_DOUBT, "takeover", State.IN_PROGRESS, "run_again, effect deadline passed"),
    Transition(State.IN_DOUBT, "complete", State.COMPLETED, "same claim id: the late answer of its last holder"),
    Transition(State.IN_DOUBT, "release", State.RELEASED, "same claim id: the late answer of its last holder"),
    Transition(State.IN_DOUBT, "expire", None, "its retention is over, run_again, effect deadline passed"),
    Transition(State.RELEASED, "claim", State.IN_PROGRESS, "at once; another request only if no execution binds it"),
    Transition(State.RELEASED, "abandon", State.RELEASED, "the mark of another claim id"),
    Transition(State.RELEASED, "expire", None, "its retention is over"),
    Transition(State.COMPLETED, "expire", None, "its retention is over"),
)


def state_diagram() -> str:
    """Return TRANSITIONS as a Mermaid state diagram with a table, for docs/state-machine.md."""

    def name(state: State | None) -> str:
        return "[*]" if state is None else state.value

    arrows = "\n".join(f"    {name(t.source)} --> {name(t.target)}: {t.event}" for t in TRANSITIONS)
    rows = "\n".join(f"| {name(t.source)} | {t.event} | {name(t.target)} | {t.condition} |" for t in TRANSITIONS)
    return (
        "# States of a record\n\n"
        "Generated from `TRANSITIONS` in `gateway/decision.py`; a test keeps it current.\n\n"
        f"```mermaid\nstateDiagram-v2\n{arrows}\n```\n\n"
        f"| from | event | to | when |\n|---|---|---|---|\n{rows}\n"
    )


__all__ = [
    "TRANSITIONS",
    "Action",
    "Answered",
    "ClaimAgain",
    "Forward",
    "ForwardUnprotected",
    "Refuse",
    "Replay",
    "Transition",
    "UpstreamOutcome",
    "Verdict",
    "decide",
    "retry_after_seconds",
    "settle",
    "state_diagram",
]
