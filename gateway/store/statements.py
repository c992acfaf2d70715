"""Between values and rows: what a batch sends, and what its rows mean. No I/O, no clock.

A claim or settlement is one packed element of an array (asyncpg looks long at each element), whose layout its
statement says; what it has in common with others of the batch, its terms, is sent once for all of them.

Every builder takes `t`, the time that the statement shall take for now; None, as in service, is the database's clock.
"""

import datetime as dt
from collections.abc import Sequence
from typing import Any

import asyncpg
import msgspec

from gateway.model import (
    Acquired,
    ClaimOutcome,
    ClaimRequest,
    Completed,
    Conflict,
    Fingerprint,
    Held,
    InDoubt,
    Lease,
    Mismatch,
    OnInDoubt,
    OtherRecipe,
    Settlement,
    SettleOutcome,
    SettleRequest,
    StoredReply,
    TookOver,
    Unavailable,
)

MAX_ATTEMPTS = 5
"""Executions in a row of open outcome, beyond which a record blocks: a request may be what kills its gateways."""

_SETTLE_OUTCOMES = {outcome.word: outcome for outcome in SettleOutcome}

Arguments = Sequence[Any]


def claim_arguments(
    requests: Sequence[ClaimRequest],
    calm_ms: int | None,
    max_attempts: int = MAX_ATTEMPTS,
    t: dt.datetime | None = None,
) -> Arguments:
    """Return the arguments of `claim`."""
    return (*_claim_rows(requests), calm_ms, max_attempts, t)


def abandon_arguments(requests: Sequence[ClaimRequest], t: dt.datetime | None = None) -> Arguments:
    """Return the arguments of `abandon`."""
    return (*_claim_rows(requests), t)


def renew_arguments(leases: Sequence[Lease], t: dt.datetime | None = None) -> Arguments:
    """Return the arguments of `renew`."""
    return (
        [lease.record_id for lease in leases],
        [lease.claim_id for lease in leases],
        [lease.lease_ms for lease in leases],
        t,
    )


def settle_arguments(requests: Sequence[SettleRequest], t: dt.datetime | None = None) -> Arguments:
    """Return the arguments of `settle`."""
    known: dict[_SettleTerms, bytes] = {}
    rows = []
    for request in requests:
        terms = _SettleTerms(request.settlement, request.forwarded, request.binds, request.status, request.keep_ms)
        number = known.get(terms) or _number(known, terms)
        rows.append(request.record_id + request.claim_id + number + (request.head or b""))
    return rows, _json(known), [request.body for request in requests], t


def claim_outcome(row: asyncpg.Record, request: ClaimRequest, trusted_until: float) -> ClaimOutcome | None:
    """Return what a row of `claim` means; None: something changed in between, ask again.

    The order of judgement is the protocol's: forgotten (which the statement takes over), mismatch, state.
    """
    if row["acquired"]:
        lease = Lease(request.identity.record_id, request.claim_id, request.lease_ms, trusted_until)
        return Acquired(lease, row["attempt"], _took_over(row["attempt"], row["doubt"]))
    if row["again"]:
        return None
    if not row["identity"]:
        return Conflict()
    first_seen = row["first_seen"]
    stored = Fingerprint(row["recipe"], row["fingerprint"])
    if stored.recipe != request.fingerprint.recipe:
        return OtherRecipe(stored)
    if stored.digest != request.fingerprint.digest:
        return Mismatch(first_seen, row["status"])
    if row["state"] == "completed":
        return Completed(row["status"], row["claim"], row["reply_on"], max(0, row["keeps_ms"]), first_seen, stored)
    if row["state"] == "released":
        return Unavailable("claim_ended")  # abandoned or settled under this very claim id
    if row["open"]:
        again_in = row["again_in_ms"]
        return InDoubt(None if again_in is None else max(0, again_in), first_seen)
    return Held(max(0, row["remaining_ms"]), first_seen)


def settle_outcome(row: asyncpg.Record) -> SettleOutcome:
    """Return what a row of `settle` means."""
    return _SETTLE_OUTCOMES[row["outcome"]]


def looked(row: asyncpg.Record) -> Completed | None:
    """Return what the row of `look` means."""
    if row["status"] is None:
        return None
    stored = Fingerprint(row["recipe"], row["fingerprint"])
    return Completed(row["status"], row["claim"], row["reply_on"], max(0, row["keeps_ms"]), row["first_seen"], stored)


def stored_reply(row: asyncpg.Record, status: int) -> StoredReply | None:
    """Return what the row of `reply` means."""
    return None if row["head"] is None else StoredReply(status, row["head"], row["body"])


def _took_over(attempt: int, doubt: bool) -> TookOver | None:
    if doubt:
        return TookOver.EXPIRED
    return TookOver.RELEASED if attempt > 1 else None


class _ClaimTerms(msgspec.Struct, frozen=True, gc=False):
    service: str
    operation: str
    recipe: int
    on_in_doubt: OnInDoubt
    lease_ms: int
    effect_ms: int
    keep_ms: int


class _SettleTerms(msgspec.Struct, frozen=True, gc=False):
    settlement: Settlement
    forwarded: bool
    binds: bool
    status: int | None
    keep_ms: int


def _claim_rows(requests: Sequence[ClaimRequest]) -> tuple[list[bytes], str]:
    """Return rows and terms. A zero byte is the one that no text of PostgreSQL can hold, so it may end the key."""
    known: dict[_ClaimTerms, bytes] = {}
    rows = []
    for request in requests:
        identity, fingerprint = request.identity, request.fingerprint
        terms = _ClaimTerms(
            identity.service,
            identity.operation,
            fingerprint.recipe,
            request.on_in_doubt,
            request.lease_ms,
            request.effect_ms,
            request.keep_ms,
        )
        number = known.get(terms) or _number(known, terms)
        # What no text may hold must reach PostgreSQL, which refuses the row: raised here, it would sink the batch.
        text = f"{identity.key}\0{identity.scope}".encode("utf-8", "surrogatepass")
        rows.append(identity.record_id + fingerprint.digest + request.claim_id + number + text)
    return rows, _json(known)


def _number(known: dict[Any, bytes], terms: Any) -> bytes:
    """Return the position of terms that were not met before, as rows name it."""
    known[terms] = number = (len(known) + 1).to_bytes(2, "big")
    return number


def _json(known: dict[Any, bytes]) -> str:
    return msgspec.json.encode(list(known)).decode()
