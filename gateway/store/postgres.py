"""The PostgreSQL adapter as the exchange sees it: it hands each call to the lane that does it."""

import asyncio
from collections.abc import Callable
from typing import Literal

from gateway.model import (
    ClaimOutcome,
    ClaimRequest,
    Completed,
    SettleOutcome,
    SettleRequest,
    StoredReply,
    Unavailable,
)
from gateway.store.claims import Claims
from gateway.store.heartbeat import Heartbeat
from gateway.store.link import Link, LinkSettings, StoreState
from gateway.store.observer import Silent, StoreObserver
from gateway.store.reads import Reads
from gateway.store.writes import Writes

_OTHER_LANES = 2


class PostgresStore:
    """`exchange.Store` over PostgreSQL.

    `dsn` is asked for every new connection. `pool_mode`: "transaction" behind a pooler in that mode. `pool_size`:
    connections for requests (one for settlements, one for reads, the rest and at least two for claims, opened when
    needed); the heartbeat has one more. `timeout_ms` bounds every statement, claim and read.
    """

    def __init__(
        self,
        dsn: Callable[[], str],
        *,
        schema: str = "idempotency",
        pool_mode: Literal["session", "transaction"] = "session",
        pool_size: int = 4,
        timeout_ms: int = 2000,
        observer: StoreObserver | None = None,
    ) -> None:
        settings = LinkSettings(dsn, schema, pool_mode == "transaction", timeout_ms)
        self._link = Link(settings, observer or Silent())
        self._heartbeat = Heartbeat(self._link)
        self._writes = Writes(self._link, self._heartbeat)
        self._claims = Claims(self._link, self._heartbeat, max(2, pool_size - _OTHER_LANES), self._writes.abandon)
        self._reads = Reads(self._link)

    # ---- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect and start. An unreachable database is no error: it keeps trying and `state` tells.

        Raises `SchemaError` when the database answers and its schema cannot be used by this code.
        """
        await self._link.start()
        self._claims.start()
        self._writes.start()
        self._heartbeat.start()
        self._reads.start()

    async def drain(self, timeout_seconds: float) -> bool:
        """Wait until every settlement and abandoned claim has its definite answer; False if time ran out."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._claims.abandoned()
                await self._writes.drained()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Close the connections. What is still pending stays unwritten, and leases run out: `drain` first."""
        await asyncio.gather(self._claims.stop(), self._reads.stop(), self._writes.stop(), self._heartbeat.stop())
        await self._link.close()

    # ---- the port ------------------------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest, done: Callable[[ClaimOutcome], None]) -> None:
        """See `exchange.Store.claim`."""
        self._claims.ask(request, done)

    def settle(self, request: SettleRequest, done: Callable[[SettleOutcome], None]) -> None:
        """See `exchange.Store.settle`."""
        self._writes.settle(request, done)

    def abandon(self, request: ClaimRequest) -> None:
        """See `exchange.Store.abandon`. A claim that never left this process needs no statement."""
        held = self._heartbeat.forget(request.claim_id)
        if self._claims.abandon(request.claim_id) or held:
            self._writes.abandon(request)

    def adopt(self, request: ClaimRequest, settle: SettleRequest, done: Callable[[SettleOutcome], None]) -> None:
        """See `exchange.Store.adopt`."""
        self._claims.abandon(request.claim_id)
        self._writes.adopt(request, settle, done)

    def reply(
        self, record_id: bytes, completed: Completed, done: Callable[[StoredReply | Unavailable | None], None]
    ) -> None:
        """See `exchange.Store.reply`."""
        self._reads.reply(record_id, completed, done)

    def look(self, record_id: bytes, done: Callable[[Completed | Unavailable | None], None]) -> None:
        """See `exchange.Store.look`."""
        self._reads.look(record_id, done)

    # ---- what it tells -------------------------------------------------------------------------------------------

    @property
    def state(self) -> StoreState:
        """Up or down with the cause, and whether the schema is usable."""
        return self._link.state

    @property
    def epoch(self) -> int:
        """The epoch of operators' changes as last seen. A new one empties whatever replies are cached."""
        return self._link.epoch

    @property
    def pending_completions(self) -> int:
        """Settlements that have no definite answer yet."""
        return self._writes.pending

    @property
    def connections(self) -> int:
        """Connections that are open."""
        lanes = (*self._claims.lanes, self._writes, self._heartbeat, self._reads)
        return sum(lane.session is not None for lane in lanes)

    @property
    def leases_held(self) -> int:
        """Leases that the heartbeat renews."""
        return len(self._heartbeat)
