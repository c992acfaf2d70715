"""Upkeep of a store: partitions opened ahead and closed behind, forgotten records deleted. Owns the port it needs.

Here is *what* is kept up and in which order; how, is the adapter's. No SQL, no driver, no log. Any number of
janitors may look after one store: one works at a time, the others find it busy and go on waiting.

Open outcomes under `probe` and `block` are never deleted: "never again" must not end with a DELETE
(docs/guarantees.md).
"""

import asyncio
import datetime as dt
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import NoReturn, Protocol, TypeVar

import msgspec

from gateway.errors import StoreError

T = TypeVar("T")

_HOUR_MS = 3_600_000  # a day closes only when it ended more than a lease and an hour ago (rule 36)
_BATCHES = 100  # deleted in one run at most: a run stays bounded, and another janitor may go on
_SWEEP_RUNS = 60  # every so many runs the deletion starts from the oldest expiry again, for what was skipped
_CATCH_UP_SECONDS = 1.0  # pause after a run that left forgotten records behind
_JITTER = 0.2  # of a pause, both ways: gateways that start together must not stay together


class Closed(msgspec.Struct, frozen=True):
    """Partitions dropped, and those that are due but had to wait for a reader and stay for the next run."""

    dropped: int
    postponed: int


class Deleted(msgspec.Struct, frozen=True):
    """One batch of deleted records. `reached` is the expiry of the last one, None if there was none."""

    count: int
    reached: dt.datetime | None


class Counts(msgspec.Struct, frozen=True):
    """What one run did. `busy`: another janitor is at work, so this one did nothing.

    `more`: the bound of one run was reached and forgotten records remain. `faults`: a sentence for each step that
    failed; the other steps were done all the same.
    """

    opened: int = 0
    dropped: int = 0
    postponed: int = 0
    deleted: int = 0
    more: bool = False
    busy: bool = False
    faults: tuple[str, ...] = ()


class Work(Protocol):
    """The upkeep itself. Every method is bounded in time and raises `StoreError` when it cannot be done.

    `t` stands for the present; None is the store's own clock.
    """

    async def open_partitions(self, horizon_ms: int, t: dt.datetime | None) -> int:
        """Open the partitions for replies that expire up to `horizon_ms` from now, and two days more; how many."""

    async def partition_headroom_seconds(self, horizon_ms: int, t: dt.datetime | None) -> float:
        """Say how long replies that are kept for `horizon_ms` still find a partition if none is opened any more."""

    async def close_partitions(self, grace_ms: int, t: dt.datetime | None) -> Closed:
        """Drop the partitions whose last day ended more than `grace_ms` ago. Traffic does not wait for it."""

    async def delete_forgotten(self, limit: int, after: dt.datetime | None, t: dt.datetime | None) -> Deleted:
        """Delete up to `limit` forgotten records that expired at `after` or later, oldest first."""

    async def oldest_forgotten_seconds(self, after: dt.datetime | None, t: dt.datetime | None) -> float:
        """Say how long ago the oldest forgotten record that is still there expired; 0.0 if there is none."""


class Upkeep(Protocol):
    """A store that can be looked after."""

    def alone(self) -> AbstractAsyncContextManager[Work | None]:
        """Enter as the only janitor of this store. None: another one is at work. Raises `StoreError`."""


class Observer(Protocol):
    """What the janitor tells, for metrics and the log. Calls are cheap and never raise."""

    def removed(self, records: int) -> None:
        """So many forgotten records were deleted."""

    def partition_headroom(self, seconds: float) -> None:
        """`partition_headroom_seconds` as measured now; it shrinks by itself until the next call."""

    def oldest_expired_record(self, seconds: float) -> None:
        """`oldest_expired_record_seconds` as measured now."""

    def succeeded(self) -> None:
        """A run ended now, every step of it done."""

    def failed(self, fault: str) -> None:
        """A step failed; `fault` is one sentence. The janitor goes on."""


class Janitor:
    """Looks after one store. `horizon_ms` and `lease_ms` may be changed at any time; the next run uses them.

    `horizon_ms`: the longest `upstream_timeout` + `retention` of any route. `lease_ms`: the longest lease.
    `batch`: records deleted by one statement.
    """

    def __init__(
        self, upkeep: Upkeep, observer: Observer, *, horizon_ms: int, lease_ms: int, batch: int = 1000
    ) -> None:
        self.horizon_ms = horizon_ms
        self.lease_ms = lease_ms
        self._upkeep = upkeep
        self._observer = observer
        self._batch = batch
        self._reached: dt.datetime | None = None  # dead index entries before it need not be walked again
        self._runs = 0

    async def run_once(self, t: dt.datetime | None = None) -> Counts:
        """Do everything that is due once. Faults of the store are reported and counted, never raised."""
        faults: list[str] = []
        try:
            async with self._upkeep.alone() as work:
                if work is None:
                    return Counts(busy=True)
                counts = await self._work(work, faults, t)
        except StoreError as error:
            self._fault(faults, error)
            return Counts(faults=tuple(faults))
        if not faults:
            self._observer.succeeded()
        return counts

    async def run(self, interval_seconds: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> NoReturn:
        """Run for ever, at once and then about every `interval_seconds`; sooner while forgotten records remain."""
        while True:
            pause = interval_seconds
            try:
                counts = await self.run_once()
                if counts.more:
                    pause = min(pause, _CATCH_UP_SECONDS)
            except Exception as error:  # noqa: BLE001 -- upkeep that died unseen fills a disk weeks later
                self._observer.failed(f"A run of the janitor broke off: {error!r}; it is repeated.")
            await sleep(pause * random.uniform(1 - _JITTER, 1 + _JITTER))  # noqa: S311 -- no secret

    async def _work(self, work: Work, faults: list[str], t: dt.datetime | None) -> Counts:
        """Do the steps; a failed one does not stop the next. Closing comes last: it may have to wait."""
        opened = await self._step(faults, work.open_partitions(self.horizon_ms, t))
        headroom = await self._step(faults, work.partition_headroom_seconds(self.horizon_ms, t))
        if headroom is not None:
            self._observer.partition_headroom(headroom)
        deleted, more = await self._delete(work, faults, t)
        oldest = await self._step(faults, work.oldest_forgotten_seconds(self._reached, t))
        if oldest is not None:
            self._observer.oldest_expired_record(oldest)
        closed = await self._step(faults, work.close_partitions(self.lease_ms + _HOUR_MS, t)) or Closed(0, 0)
        return Counts(
            opened=opened or 0,
            dropped=closed.dropped,
            postponed=closed.postponed,
            deleted=deleted,
            more=more,
            faults=tuple(faults),
        )

    async def _delete(self, work: Work, faults: list[str], t: dt.datetime | None) -> tuple[int, bool]:
        """Delete batch after batch, each from the expiry that the last one reached. Return how many, and if more."""
        after = None if self._runs % _SWEEP_RUNS == 0 else self._reached
        self._runs += 1  # before the work: a sweep that fails must not be all that is ever tried again
        total = 0
        for _ in range(_BATCHES):
            batch = await self._step(faults, work.delete_forgotten(self._batch, after, t))
            if batch is None:
                return total, False
            if batch.count:
                total += batch.count
                after = batch.reached
                self._observer.removed(batch.count)
            if batch.count < self._batch:
                self._reached = max(filter(None, (self._reached, after)), default=None)
                return total, False
        self._reached = after
        return total, True

    async def _step(self, faults: list[str], step: Awaitable[T]) -> T | None:
        """Return what `step` returns; None if the store failed it, which is reported."""
        try:
            return await step
        except StoreError as error:
            self._fault(faults, error)
            return None

    def _fault(self, faults: list[str], error: StoreError) -> None:
        faults.append(str(error))
        self._observer.failed(str(error))
