"""Upkeep of the schema on PostgreSQL: partitions of the reply table, deletion of forgotten records.

Uses connections of its own, opened for one run and closed after it; never the pool of the request path, and no
session state, so that a pooler does no harm. What is due and in which order is `gateway.janitor`'s business.

Closing a partition is `DETACH ... CONCURRENTLY`, which waits for every transaction that still uses the reply table
but makes nobody wait. One that was interrupted stays pending and is finished by a later run. A table that was
detached by hand is dropped as well once all its replies have expired: rename it to keep it.
"""

import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias

import asyncpg
import msgspec
from asyncpg.connect_utils import SessionAttribute

from gateway.errors import StoreError
from gateway.janitor import Closed, Deleted, Work
from gateway.store.sql import query

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

_AHEAD_DAYS = 2  # opened beyond the longest retention: the time to notice that nothing is opened any more
_STEPS = (1, 7, 28, 364)  # days in a partition: the first that needs no more than _MOST partitions
_MOST = 64  # more partitions make planning and locking of whole-table statements dear
_CONNECT_SECONDS = 5.0
_COMMAND_SECONDS = 40.0  # above the server's own statement_timeout (janitor_limits): for a network that went silent
_CLOSE_SECONDS = 2.0


class Span(msgspec.Struct, frozen=True):
    """The days of one partition: from `since` to the day before `until`."""

    since: dt.date
    until: dt.date


class _Partition(Span, frozen=True):
    name: str
    pending: bool
    detach: str


def missing(existing: Sequence[Span], first: dt.date, last: dt.date) -> list[Span]:
    """Return the partitions to open so that every day from `first` to `last` has one; none overlaps another.

    Days are grouped on a grid that every gateway shares; a group is cut where it would meet a partition that exists.
    """
    days = (last - first).days + 1
    step = next((step for step in _STEPS if days <= step * _MOST), _STEPS[-1])
    spans: list[Span] = []
    day = first
    while day <= last:
        covered = next((span.until for span in existing if span.since <= day < span.until), None)
        if covered is not None:
            day = covered
            continue
        end = dt.date.fromordinal((day.toordinal() // step + 1) * step)
        end = min([end, *(span.since for span in existing if span.since > day)])
        spans.append(Span(day, end))
        day = end
    return spans


async def open_partitions(connection: Connection, schema: str, until: dt.date, today: dt.date | None = None) -> int:
    """Open what is missing of the partitions from `today` to `until`, both included; return how many.

    Today is UTC by the database's clock unless given. Idempotent, and safe when many gateways do it at once: one
    works, the others return 0 without waiting. May be called inside a transaction; lock and statement timeouts
    then stay set to its end. Raises asyncpg's exceptions.
    """
    opened = 0
    async with connection.transaction():
        await connection.execute(query("janitor_limits", schema))
        if not await connection.fetchval(query("janitor_alone", schema), schema, "open"):
            return 0
        first = today or (await _clock(connection, schema, None)).date()
        for span in missing(await _partitions(connection, schema), first, until):
            statements = await connection.fetchval(query("partition_open", schema), schema, span.since, span.until)
            # Someone without our lock was faster, or a detached table still has the name: the head-room tells.
            with contextlib.suppress(asyncpg.DuplicateTableError, asyncpg.InvalidObjectDefinitionError):
                async with connection.transaction():
                    await connection.execute(statements)
                opened += 1
    return opened


class PostgresUpkeep:
    """The port `janitor.Upkeep` for one schema.

    `dsn` is asked for every run. `patience_seconds`: how long closing waits for readers, in one run.
    """

    def __init__(self, dsn: Callable[[], str], schema: str, *, patience_seconds: float = 5.0) -> None:
        self._dsn = dsn
        self._schema = schema
        self._patience = patience_seconds

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[Work | None]:
        """Hold the janitor's lock in a transaction of a connection that does nothing else: DETACH may not be in one.

        Should that connection be lost, another janitor may begin; every step bears that.
        """
        dsn = self._dsn()
        with _translated():
            holder = await connect(dsn)
        try:
            with _translated():
                # The idle holder must not keep a snapshot, which FINALIZE would wait for: hence read committed, and a
                # last statement by the simple protocol, which closes the portal (and snapshot) of the one before.
                await holder.transaction(isolation="read_committed").start()
                alone = await holder.fetchval(query("janitor_alone", self._schema), self._schema, "run")
                await holder.execute(query("janitor_idle", self._schema))
            if not alone:
                yield None
                return
            work = PostgresWork(dsn, self._schema, self._patience)
            try:
                yield work
            finally:
                await work.close()
        finally:
            await disconnect(holder)


class PostgresWork:
    """The port `janitor.Work`. Every method raises `StoreError`; a connection that met an error is not used again."""

    def __init__(self, dsn: str, schema: str, patience_seconds: float) -> None:
        self._dsn = dsn
        self._schema = schema
        self._patience = patience_seconds
        self._connection: Connection | None = None

    async def close(self) -> None:
        """Close the connection; the object may be used again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await disconnect(connection)

    async def open_partitions(self, horizon_ms: int, t: dt.datetime | None) -> int:
        """Open the partitions for replies that expire up to `horizon_ms` from now, and two days more; how many."""
        async with self._transaction() as connection:
            now = await _clock(connection, self._schema, t)
            until = (now + dt.timedelta(milliseconds=horizon_ms, days=_AHEAD_DAYS)).date()
            return await open_partitions(connection, self._schema, until, now.date())

    async def partition_headroom_seconds(self, horizon_ms: int, t: dt.datetime | None) -> float:
        """Say how long replies that are kept for `horizon_ms` still find a partition if none is opened any more.

        Negative: those with the longest retention become tombstones now.
        """
        async with self._transaction() as connection:
            now = await _clock(connection, self._schema, t)
            end = now.date()
            for span in sorted(await _partitions(connection, self._schema), key=lambda span: span.since):
                if span.since <= end < span.until:
                    end = span.until
        midnight = dt.datetime.combine(end, dt.time(), dt.UTC)
        return (midnight - now - dt.timedelta(milliseconds=horizon_ms)).total_seconds()

    async def close_partitions(self, grace_ms: int, t: dt.datetime | None) -> Closed:
        """Drop the partitions whose last day ended more than `grace_ms` ago. Traffic does not wait for it.

        At the first one that has to wait the rest is left for the next run, so one run waits for readers once.
        """
        async with self._transaction() as connection:
            now = await _clock(connection, self._schema, t)
            kept_from = (now - dt.timedelta(milliseconds=grace_ms)).date()
            partitions = await _partitions(connection, self._schema)
        due = [partition for partition in partitions if partition.pending or partition.until <= kept_from]
        detached = 0
        for partition in due:
            if not await self._alter(partition.detach):
                break
            detached += 1
        return Closed(dropped=await self._drop_detached(kept_from), postponed=len(due) - detached)

    async def delete_forgotten(self, limit: int, after: dt.datetime | None, t: dt.datetime | None) -> Deleted:
        """Delete up to `limit` forgotten records that expired at `after` or later, oldest first."""
        async with self._transaction() as connection:
            now = await _clock(connection, self._schema, t)
            row = await connection.fetchrow(query("janitor_delete", self._schema), limit, after, now)
        assert row is not None  # noqa: S101 -- an aggregate has one row
        return Deleted(row["deleted"], row["reached"])

    async def oldest_forgotten_seconds(self, after: dt.datetime | None, t: dt.datetime | None) -> float:
        """Say how long ago the oldest forgotten record that is still there expired; 0.0 if there is none."""
        async with self._transaction() as connection:
            now = await _clock(connection, self._schema, t)
            return float(await connection.fetchval(query("janitor_oldest", self._schema), after, now))

    async def _drop_detached(self, kept_from: dt.date) -> int:
        """Drop what was detached, by this run or by one that ended between the two; return how many."""
        async with self._transaction() as connection:
            tables = await connection.fetch(query("partition_detached", self._schema), self._schema)
            over = [table for table in tables if await connection.fetchval(table["over"], kept_from)]
        dropped = 0
        for table in over:
            dropped += await self._alter(table["remove"])
        return dropped

    async def _alter(self, statement: str) -> bool:
        """Run one statement outside a transaction, on a fresh connection, for as long as patience lasts.

        False: somebody uses what it needs; it was cancelled. A table that is gone was another janitor's: done.
        """
        with _translated():
            connection = await connect(self._dsn)
            try:
                await connection.execute(statement, timeout=self._patience)
            except asyncpg.UndefinedTableError:
                return True
            except (TimeoutError, asyncpg.LockNotAvailableError, asyncpg.QueryCanceledError):
                return False
            finally:
                await disconnect(connection)
        return True

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Connection]:
        """Lend the connection inside a transaction with bounded waits; after any error it is closed."""
        with _translated():
            if self._connection is None:
                self._connection = await connect(self._dsn)
            try:
                async with self._connection.transaction(isolation="read_committed"):
                    await self._connection.execute(query("janitor_limits", self._schema))
                    yield self._connection
            except BaseException:
                await self.close()
                raise


async def connect(dsn: str) -> Connection:
    """Open a connection for upkeep, to the primary, with nothing prepared by name (a pooler may be in between)."""
    return await asyncpg.connect(
        dsn,
        timeout=_CONNECT_SECONDS,
        command_timeout=_COMMAND_SECONDS,
        statement_cache_size=0,
        target_session_attrs=SessionAttribute.primary,
    )


async def disconnect(connection: Connection) -> None:
    """Close a connection, after the server has acknowledged the cancelling of a statement that still runs there."""
    try:
        await connection.close(timeout=_CLOSE_SECONDS)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError):
        connection.terminate()


async def _clock(connection: Connection, schema: str, t: dt.datetime | None) -> dt.datetime:
    now: dt.datetime = await connection.fetchval(query("janitor_clock", schema), t)
    return now.astimezone(dt.UTC)


async def _partitions(connection: Connection, schema: str) -> list[_Partition]:
    rows = await connection.fetch(query("partition_list", schema), schema)
    return [_Partition(row["since"], row["until"], row["name"], row["pending"], row["detach"]) for row in rows]


@contextmanager
def _translated() -> Iterator[None]:
    """Turn what the driver and the network raise into `StoreError`: the one place where this adapter does."""
    try:
        yield
    except asyncpg.PostgresError as error:
        raise StoreError(f"PostgreSQL refused the upkeep: {error} (SQLSTATE {error.sqlstate}).") from error
    except (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError) as error:
        raise StoreError(f"PostgreSQL cannot be reached for the upkeep: {error or type(error).__name__}.") from error
