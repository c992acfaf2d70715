"""Between values and rows: the arrays that a batch sends, and what its rows mean. No I/O, no clock.

Every builder takes `t`, the time that the statement shall take for now; None, as in service, is the database's clock.
"""

import datetime as dt
from collections.abc import Sequence
from typing import Any

import asyncpg

from gateway.model import (
    Acquired,
    ClaimOutcome,
    ClaimRequest,
    Completed,
    Fingerprint,
    Held,
    InDoubt,
    Lease,
    Mismatch,
    OtherRecipe,
    SettleRequest,
    StoredReply,
    TookOver,
    Unavailable,
)

MAX_ATTEMPTS = 5
"""Executions in a row of open outcome, beyond which a record blocks: a request may be what kills its gateways."""

Arguments = Sequence[Any]


def claim_arguments(
    requests: Sequence[ClaimRequest],
    calm_ms: int | None,
    max_attempts: int = MAX_ATTEMPTS,
    t: dt.datetime | None = None,
) -> Arguments:
    """Return the arguments of `claim`."""
    return (*_claim_arrays(requests), calm_ms, max_attempts, t)


def abandon_arguments(requests: Sequence[ClaimRequest], t: dt.datetime | None = None) -> Arguments:
    """Return the arguments of `abandon`."""
    return (*_claim_arrays(requests), t)


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
    return (
        [request.record_id for request in requests],
        [request.claim_id for request in requests],
        [request.settlement.value for request in requests],
        [request.forwarded for request in requests],
        [request.binds for request in requests],
        [request.status for request in requests],
        [request.keep_ms for request in requests],
        [request.head for request in requests],
        [request.body for request in requests],
        t,
    )


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
        return Unavailable("record_identity_conflict")
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


def _claim_arrays(requests: Sequence[ClaimRequest]) -> Arguments:
    identities = [request.identity for request in requests]
    fingerprints = [request.fingerprint for request in requests]
    return (
        [identity.record_id for identity in identities],
        [identity.service for identity in identities],
        [identity.operation for identity in identities],
        [identity.scope for identity in identities],
        [identity.key for identity in identities],
        [fingerprint.digest for fingerprint in fingerprints],
        [fingerprint.recipe for fingerprint in fingerprints],
        [request.claim_id for request in requests],
        [request.on_in_doubt.value for request in requests],
        [request.lease_ms for request in requests],
        [request.effect_ms for request in requests],
        [request.keep_ms for request in requests],
    )
