"""A migrated schema, stores on it, and short ways to ask them."""

import asyncio
import datetime as dt
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import asyncpg
import pytest

from gateway.model import (
    ClaimOutcome,
    ClaimRequest,
    Fingerprint,
    Identity,
    Lease,
    OnInDoubt,
    Settlement,
    SettleOutcome,
    SettleRequest,
)
from gateway.store import PostgresStore, migrate
from gateway.store.sql import query
from gateway.store.statements import (
    MAX_ATTEMPTS,
    abandon_arguments,
    claim_arguments,
    claim_outcome,
    renew_arguments,
    settle_arguments,
)
from gateway.store.upkeep import open_partitions

from .relay import Relay

ZERO = dt.datetime(2040, 1, 1, tzinfo=dt.UTC)
"""When the tests that say the time begin: long after the server's start."""


class Watch:
    """A StoreObserver that remembers."""

    def __init__(self) -> None:
        self.statements: list[tuple[str, int]] = []
        self.errors: list[tuple[str, str]] = []
        self.lost: list[Lease] = []
        self.ups: list[bool] = []
        self._changed = asyncio.Event()

    def statement(self, name: str, rows: int, seconds: float) -> None:
        self.statements.append((name, rows))
        self._changed.set()

    def error(self, statement: str, cause: str) -> None:
        self.errors.append((statement, cause))
        self._changed.set()

    def lease_lost(self, lease: Lease) -> None:
        self.lost.append(lease)
        self._changed.set()

    def up(self, up: bool) -> None:
        self.ups.append(up)
        self._changed.set()

    async def until(self, condition: Callable[[], bool], seconds: float = 10) -> None:
        """Wait until something told makes `condition` true."""
        async with asyncio.timeout(seconds):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def identity(key: str = "k", scope: str = "customer=1") -> Identity:
    digest = hashlib.sha256(f"{scope}/{key}".encode()).digest()
    return Identity(digest, "shop", "create-order", scope, key)


def claim_request(key: str = "k", body: bytes = b"a", **changes: Any) -> ClaimRequest:
    given: dict[str, Any] = {
        "identity": identity(key),
        "fingerprint": Fingerprint(1, hashlib.sha256(body).digest()),
        "claim_id": secrets.token_bytes(16),
        "on_in_doubt": OnInDoubt.RUN_AGAIN,
        "lease_ms": 30_000,
        "effect_ms": 60_000,
        "keep_ms": 24 * 3600 * 1000,
    }
    given.update(changes)
    return ClaimRequest(**given)


def settle_request(claim: ClaimRequest, settlement: Settlement = Settlement.COMPLETE, **changes: Any) -> SettleRequest:
    complete = settlement is Settlement.COMPLETE
    given: dict[str, Any] = {
        "record_id": claim.identity.record_id,
        "claim_id": claim.claim_id,
        "settlement": settlement,
        "forwarded": True,
        "binds": True,
        "status": 201 if complete else None,
        "head": b"HTTP/1.1 201 Created\r\n" if complete else None,
        "body": b"hello" if complete else None,
        "keep_ms": 23 * 3600 * 1000,
    }
    given.update(changes)
    return SettleRequest(**given)


class Asking:
    """A store asked with awaits."""

    def __init__(self, store: PostgresStore, watch: Watch) -> None:
        self.store = store
        self.watch = watch

    def _future(self) -> tuple[asyncio.Future[Any], Callable[[Any], None]]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        return future, future.set_result  # a second callback would raise InvalidStateError

    async def claim(self, request: ClaimRequest) -> ClaimOutcome:
        future, done = self._future()
        self.store.claim(request, done)
        return await asyncio.wait_for(future, 20)

    async def settle(self, request: SettleRequest) -> SettleOutcome:
        future, done = self._future()
        self.store.settle(request, done)
        return await asyncio.wait_for(future, 20)

    async def adopt(self, request: ClaimRequest, settle: SettleRequest) -> SettleOutcome:
        future, done = self._future()
        self.store.adopt(request, settle, done)
        return await asyncio.wait_for(future, 20)

    async def reply(self, record_id: bytes, completed: Any) -> Any:
        future, done = self._future()
        self.store.reply(record_id, completed, done)
        return await asyncio.wait_for(future, 20)

    async def look(self, record_id: bytes) -> Any:
        future, done = self._future()
        self.store.look(record_id, done)
        return await asyncio.wait_for(future, 20)


@pytest.fixture(scope="session")
def shared_schema_name(dsn: str) -> Iterator[str]:
    name = "s_" + secrets.token_hex(6)
    yield name

    async def drop() -> None:
        connection = await asyncpg.connect(dsn)
        await connection.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')
        await connection.close()

    asyncio.run(drop())


@pytest.fixture
async def tables(dsn: str, shared_schema_name: str) -> str:
    """A migrated schema, shared by the tests of a run and emptied before each."""
    await migrate(dsn, shared_schema_name)
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(
            f'TRUNCATE "{shared_schema_name}".idempotency_record, "{shared_schema_name}".idempotency_response'
        )
        await open_partitions(connection, shared_schema_name, dt.date(2040, 1, 8), today=ZERO.date())
    finally:
        await connection.close()
    return shared_schema_name


@pytest.fixture
async def database(dsn: str, tables: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection of the test's own, which finds the tables without naming the schema."""
    connection = await asyncpg.connect(dsn, server_settings={"search_path": tables})
    yield connection
    await connection.close()


MakeStore = Callable[..., Any]


@pytest.fixture
async def make_store(dsn: str, tables: str) -> AsyncIterator[MakeStore]:
    """Starts stores, closed at the end of the test."""
    stores: list[PostgresStore] = []

    async def make(at: str = dsn, **changes: Any) -> Asking:
        watch = Watch()
        store = PostgresStore(lambda: at, **{"schema": tables, "observer": watch, **changes})
        stores.append(store)
        await store.start()
        return Asking(store, watch)

    yield make
    for store in stores:
        await store.close()


@pytest.fixture
async def asking(make_store: MakeStore) -> Asking:
    return await make_store()


class Bench:
    """The statements themselves, with the time as an argument: seconds after a moment long after the server's start."""

    def __init__(self, connection: asyncpg.Connection, schema: str) -> None:
        self.connection = connection
        self.schema = schema
        self.zero = ZERO

    def at(self, seconds: float) -> dt.datetime:
        return self.zero + dt.timedelta(seconds=seconds)

    async def fetch(self, name: str, arguments: Any) -> list[asyncpg.Record]:
        return await self.connection.fetch(query(name, self.schema), *arguments)

    async def claims(
        self, requests: list[ClaimRequest], at: float = 0, calm_ms: int | None = None, max_attempts: int = MAX_ATTEMPTS
    ) -> list[ClaimOutcome | None]:
        rows = await self.fetch("claim", claim_arguments(requests, calm_ms, max_attempts, self.at(at)))
        found: list[ClaimOutcome | None] = [None] * len(requests)
        for row in rows:
            found[row["n"] - 1] = claim_outcome(row, requests[row["n"] - 1], 1.0)
        return found

    async def claim(self, request: ClaimRequest, at: float = 0, **more: Any) -> ClaimOutcome | None:
        return (await self.claims([request], at, **more))[0]

    async def settles(self, requests: list[SettleRequest], at: float = 0) -> list[SettleOutcome]:
        rows = await self.fetch("settle", settle_arguments(requests, self.at(at)))
        found = {row["n"]: SettleOutcome(row["outcome"]) for row in rows}
        return [found[n + 1] for n in range(len(requests))]

    async def settle(self, request: SettleRequest, at: float = 0) -> SettleOutcome:
        return (await self.settles([request], at))[0]

    async def abandon(self, *requests: ClaimRequest, at: float = 0) -> None:
        await self.fetch("abandon", abandon_arguments(requests, self.at(at)))

    async def renew(self, *requests: ClaimRequest, at: float = 0) -> list[str]:
        leases = [Lease(request.identity.record_id, request.claim_id, request.lease_ms, 0.0) for request in requests]
        rows = await self.fetch("renew", renew_arguments(leases, self.at(at)))
        said = {row["n"]: "renewed" if row["renewed"] else "mine" if row["mine"] else "lost" for row in rows}
        return [said[n + 1] for n in range(len(requests))]

    async def record(self, request: ClaimRequest) -> Any:
        return await self.connection.fetchrow(
            "SELECT *, uuid_send(claim) AS claim, state::text AS state, on_in_doubt::text AS on_in_doubt"
            " FROM idempotency_record WHERE id = $1",
            request.identity.record_id,
        )


@pytest.fixture
async def bench(database: asyncpg.Connection, tables: str) -> Bench:
    return Bench(database, tables)


@pytest.fixture
async def relay(dsn: str) -> AsyncIterator[Relay]:
    relay = Relay(dsn)
    await relay.open()
    yield relay
    await relay.close()
