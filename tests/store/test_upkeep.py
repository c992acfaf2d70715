"""Upkeep on a real PostgreSQL: partitions opened and closed beside traffic and readers, forgotten records deleted."""

import asyncio
import contextlib
import datetime as dt
import itertools
import secrets
import uuid
from collections.abc import AsyncIterator

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import StoreError
from gateway.janitor import Closed, Counts, Deleted, Janitor
from gateway.model import ClaimRequest, Fingerprint, Identity, OnInDoubt, Settlement, SettleRequest
from gateway.store.migrate import migrate
from gateway.store.sql import query
from gateway.store.statements import claim_arguments, settle_arguments
from gateway.store.upkeep import PostgresUpkeep, Span, missing, open_partitions

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
LEASE_MS = 30_000
NEW_YEAR = dt.datetime(2027, 1, 1, tzinfo=dt.UTC)
SECOND = dt.timedelta(seconds=1)
DAY = dt.timedelta(days=1)


class Silent:
    """An observer that keeps the last gauges."""

    headroom: float | None = None
    oldest: float | None = None

    def __init__(self) -> None:
        self.faults: list[str] = []

    def removed(self, records):
        pass

    def partition_headroom(self, seconds):
        self.headroom = seconds

    def oldest_expired_record(self, seconds):
        self.oldest = seconds

    def succeeded(self):
        pass

    def failed(self, fault):
        self.faults.append(fault)


class Bench:
    """A schema with the tables and no partition, a connection to it, and a janitor that has not run."""

    def __init__(self, dsn: str, schema: str, connection: asyncpg.Connection) -> None:
        self.dsn = dsn
        self.schema = schema
        self.connection = connection
        self.observer = Silent()
        self.upkeep = PostgresUpkeep(lambda: dsn, schema, patience_seconds=30)
        self.janitor = self.another()

    def another(self, batch: int = 1000, retention_ms: int = DAY_MS, patience_seconds: float = 30) -> Janitor:
        upkeep = PostgresUpkeep(lambda: self.dsn, self.schema, patience_seconds=patience_seconds)
        return Janitor(upkeep, self.observer, horizon_ms=retention_ms, lease_ms=LEASE_MS, batch=batch)

    @property
    def replies(self) -> str:
        return f'"{self.schema}".idempotency_response'

    async def days(self, pending: bool = False) -> list[str]:
        """First days of the partitions, by their names; the pending ones too if asked."""
        await self.connection.execute("SET datestyle = 'ISO, YMD'")
        rows = await self.connection.fetch(query("partition_list", self.schema), self.schema)
        return sorted(row["name"][-8:] for row in rows if pending or not row["pending"])

    async def keep_reply(self, day: dt.date) -> bytes:
        record_id = secrets.token_bytes(32)
        await self.connection.execute(
            f"INSERT INTO {self.replies} VALUES ($1, $2, $3, 'head', 'body')", day, record_id, uuid.uuid4()
        )
        return record_id

    async def add_record(self, expires_at: dt.datetime, state: str = "released", **columns) -> bytes:
        row = {
            "id": secrets.token_bytes(32),
            "service": "ledger",
            "operation": "pay",
            "scope": "",
            "key": "k",
            "fingerprint": b"f",
            "recipe": 1,
            "bound": False,
            "state": state,
            "claim": uuid.uuid4(),
            "attempt": 1,
            "on_in_doubt": "run_again",
            "lease_ms": LEASE_MS,
            "effect_ms": 60_000,
            "locked_until": None,
            "doubt_since": None,
            "first_seen": expires_at - DAY,
            "expires_at": expires_at,
            "status": 201 if state == "completed" else None,
            **columns,
        }
        places = ", ".join(f"${number}" for number in range(1, len(row) + 1))
        await self.connection.execute(
            f'INSERT INTO "{self.schema}".idempotency_record ({", ".join(row)}) VALUES ({places})', *row.values()
        )
        return row["id"]

    async def ids(self) -> set[bytes]:
        return {row["id"] for row in await self.connection.fetch(f'SELECT id FROM "{self.schema}".idempotency_record')}

    @contextlib.asynccontextmanager
    async def other(self) -> AsyncIterator[asyncpg.Connection]:
        """One more connection."""
        connection = await asyncpg.connect(self.dsn)
        try:
            yield connection
        finally:
            await connection.close(timeout=5)

    @contextlib.asynccontextmanager
    async def reader(self) -> AsyncIterator[asyncpg.Connection]:
        """A transaction that has read the replies, and keeps its snapshot and its locks."""
        async with self.other() as connection:
            await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            await connection.fetch(f"SELECT id FROM {self.replies}")
            yield connection

    async def until(self, probe: str, *arguments: object) -> object:
        """Ask until the answer is neither false nor NULL, and return it; in vain for 30 s is an error."""
        async with asyncio.timeout(30):
            while not (answer := await self.connection.fetchval(probe, *arguments)):
                pass
        return answer

    async def waiting_backend(self) -> int:
        """Wait until the detach of a partition waits for a reader; its process id."""
        return await self.until(
            "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE $1",
            f"ALTER TABLE {self.schema}.idempotency_response DETACH%",
        )


@pytest.fixture
async def bench(dsn: str, schema: str) -> AsyncIterator[Bench]:
    await migrate(dsn, schema)
    connection = await asyncpg.connect(dsn)
    for row in await connection.fetch(query("partition_list", schema), schema):
        await connection.execute(f'DROP TABLE "{schema}"."{row["name"]}"')
    yield Bench(dsn, schema, connection)
    await connection.close()


# ---- which partitions ------------------------------------------------------------------------------------------


days_of_2026 = st.dates(dt.date(2026, 1, 1), dt.date(2026, 12, 31))
spans = st.lists(
    st.builds(lambda since, days: Span(since, since + dt.timedelta(days=days)), days_of_2026, st.integers(1, 40)),
    max_size=8,
)


@given(spans, days_of_2026, st.integers(0, 2000))
def test_every_day_has_one_partition_whatever_exists_already(existing, first, days):
    existing = [span for n, span in enumerate(existing) if not any(meets(span, other) for other in existing[:n])]
    opened = missing(existing, first, first + dt.timedelta(days=days))
    everything = sorted([*existing, *opened], key=lambda span: span.since)
    assert all(one.until <= next_.since for one, next_ in itertools.pairwise(everything))
    day = first
    for span in everything:
        day = span.until if span.since <= day < span.until else day
    assert day > first + dt.timedelta(days=days)
    assert len(opened) <= 66 + len(existing)
    assert missing(everything, first, first + dt.timedelta(days=days)) == []


def meets(one: Span, other: Span) -> bool:
    return one.since < other.until and other.since < one.until


async def test_c53_a_without_a_partition_the_insert_of_a_reply_fails_with_23514(bench):
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await bench.keep_reply(NEW_YEAR.date())
    assert caught.value.sqlstate == "23514"


async def test_c53_a_after_a_run_two_future_partitions_exist_and_headroom_of_two_days_is_told(bench):
    counts = await bench.janitor.run_once(NEW_YEAR - SECOND)
    assert counts == Counts(opened=4)
    assert await bench.days() == ["20261231", "20270101", "20270102", "20270103"]
    await bench.keep_reply(dt.date(2027, 1, 1))
    assert bench.observer.headroom == 2 * 86_400 + 1
    assert bench.observer.faults == []


async def test_c53_a_headroom_falls_and_turns_negative_when_nothing_opens_partitions_any_more(bench):
    await bench.janitor.run_once(NEW_YEAR)
    async with bench.upkeep.alone() as work:
        assert await work.partition_headroom_seconds(DAY_MS, NEW_YEAR) == 3 * 86_400
        assert await work.partition_headroom_seconds(DAY_MS, NEW_YEAR + 2 * DAY) == 86_400
        assert await work.partition_headroom_seconds(DAY_MS, NEW_YEAR + 5 * DAY) == -86_400


async def test_headroom_counts_only_days_without_a_gap(bench):
    await bench.janitor.run_once(NEW_YEAR)
    await bench.connection.execute(f'DROP TABLE "{bench.schema}".idempotency_response_20270102')
    async with bench.upkeep.alone() as work:
        assert await work.partition_headroom_seconds(0, NEW_YEAR) == 86_400


async def test_by_default_the_present_is_the_databases(bench):
    await bench.janitor.run_once()
    today = await bench.connection.fetchval("SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYYMMDD')")
    assert (await bench.days())[0] == today


async def test_a_second_run_opens_nothing_and_the_next_day_one(bench):
    await bench.janitor.run_once(NEW_YEAR)
    assert (await bench.janitor.run_once(NEW_YEAR)).opened == 0
    assert (await bench.janitor.run_once(NEW_YEAR + DAY)).opened == 1


async def test_a_long_retention_gets_weeks_or_months_and_a_changed_one_never_overlaps(bench):
    assert (await bench.another(retention_ms=400 * DAY_MS).run_once(NEW_YEAR)).opened <= 66
    assert (await bench.another(retention_ms=90 * DAY_MS).run_once(NEW_YEAR)).opened == 0
    assert (await bench.another(retention_ms=450 * DAY_MS).run_once(NEW_YEAR)).opened > 0
    for ahead in range(452):
        await bench.keep_reply((NEW_YEAR + ahead * DAY).date())
    assert bench.observer.faults == []


async def test_days_that_were_opened_for_a_short_retention_are_kept_when_it_grows(bench):
    await bench.another(retention_ms=3 * DAY_MS).run_once(NEW_YEAR)
    await bench.another(retention_ms=90 * DAY_MS).run_once(NEW_YEAR)
    for ahead in range(92):
        await bench.keep_reply((NEW_YEAR + ahead * DAY).date())
    assert len(await bench.days()) < 24


async def test_many_gateways_open_partitions_at_once_and_none_fails_or_waits(bench):
    until = dt.date(2027, 1, 20)
    async with contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(bench.other()) for _ in range(8)]
        opened = await asyncio.gather(*(open_partitions(c, bench.schema, until, NEW_YEAR.date()) for c in connections))
    assert sum(opened) == 20
    assert len(await bench.days()) == 20


async def test_open_partitions_works_inside_a_migrations_transaction(bench):
    async with bench.connection.transaction():
        assert await open_partitions(bench.connection, bench.schema, NEW_YEAR.date(), NEW_YEAR.date()) == 1
    await bench.keep_reply(NEW_YEAR.date())


async def test_opening_waits_for_no_reader_and_no_writer_and_makes_none_wait(bench):
    await bench.janitor.run_once(NEW_YEAR)
    async with bench.reader():
        writer = bench.connection.transaction()
        await writer.start()
        await bench.keep_reply(NEW_YEAR.date())
        assert (await bench.janitor.run_once(NEW_YEAR + DAY)).opened == 1
        await writer.commit()


async def test_a_partition_has_the_tables_key_storage_and_bounds(bench):
    await bench.janitor.run_once(NEW_YEAR)
    storage = await bench.connection.fetchval(
        "SELECT attstorage FROM pg_attribute WHERE attrelid = $1::text::regclass AND attname = 'body'",
        f'"{bench.schema}".idempotency_response_20270101',
    )
    assert storage == b"e"
    record_id, claim = secrets.token_bytes(32), uuid.uuid4()
    statement = f"INSERT INTO {bench.replies} VALUES ('2027-01-01', $1, $2, '', '')"
    await bench.connection.execute(statement, record_id, claim)
    with pytest.raises(asyncpg.UniqueViolationError):
        await bench.connection.execute(statement, record_id, claim)


@pytest.mark.parametrize(
    "setting", ["datestyle=German", "default_transaction_isolation=serializable", "timezone=Asia/Tokyo"]
)
async def test_a_roles_odd_settings_change_nothing(bench, setting):
    joint = "&" if "?" in bench.dsn else "?"
    upkeep = PostgresUpkeep(lambda: f"{bench.dsn}{joint}{setting}", bench.schema)
    janitor = Janitor(upkeep, bench.observer, horizon_ms=DAY_MS, lease_ms=LEASE_MS)
    await bench.add_record(NEW_YEAR - DAY)
    await janitor.run_once(NEW_YEAR)
    assert await bench.days() == ["20270101", "20270102", "20270103", "20270104"]
    await janitor.run_once(NEW_YEAR + 2 * DAY)
    assert await bench.days() == ["20270102", "20270103", "20270104", "20270105", "20270106"]
    assert bench.observer.faults == []


# ---- one works -------------------------------------------------------------------------------------------------


async def test_one_janitor_works_at_a_time_and_the_lock_ends_with_its_run(bench):
    async with bench.upkeep.alone() as work:
        assert work is not None
        assert await bench.another().run_once(NEW_YEAR) == Counts(busy=True)
    assert (await bench.another().run_once(NEW_YEAR)).opened == 4


async def test_the_lock_is_held_without_a_snapshot_that_others_would_wait_for_and_past_every_timeout(bench):
    joint = "&" if "?" in bench.dsn else "?"
    upkeep = PostgresUpkeep(
        lambda: (
            f"{bench.dsn}{joint}default_transaction_isolation=serializable&idle_in_transaction_session_timeout=50ms"
            "&application_name=holder"
        ),
        bench.schema,
    )
    async with upkeep.alone():
        await bench.until(
            "SELECT state_change < clock_timestamp() - interval '100 ms' FROM pg_stat_activity"
            " WHERE application_name = 'holder'"
        )
        rows = await bench.connection.fetch(
            "SELECT state, backend_xmin, backend_xid FROM pg_stat_activity WHERE application_name = 'holder'"
        )
    assert [tuple(row) for row in rows] == [("idle in transaction", None, None)]


async def test_an_unreachable_store_is_one_clear_fault(bench):
    upkeep = PostgresUpkeep(lambda: "postgresql://nobody@127.0.0.1:1/none", bench.schema)
    counts = await Janitor(upkeep, bench.observer, horizon_ms=DAY_MS, lease_ms=LEASE_MS).run_once()
    assert [fault.startswith("PostgreSQL cannot be reached for the upkeep: ") for fault in counts.faults] == [True]


async def test_a_missing_schema_fails_each_step_in_a_sentence(bench):
    upkeep = PostgresUpkeep(lambda: bench.dsn, "nowhere")
    counts = await Janitor(upkeep, bench.observer, horizon_ms=DAY_MS, lease_ms=LEASE_MS).run_once()
    assert counts.faults
    assert all(fault.startswith("PostgreSQL refused the upkeep: ") for fault in counts.faults)


async def test_a_step_whose_connection_is_killed_fails_alone(bench):
    async with bench.upkeep.alone() as work:
        await work.open_partitions(DAY_MS, NEW_YEAR)
        await bench.connection.fetch(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            " AND datname = current_database() AND backend_type = 'client backend' AND state = 'idle'"
        )
        with pytest.raises(StoreError):
            await work.partition_headroom_seconds(DAY_MS, NEW_YEAR)
        assert await work.partition_headroom_seconds(DAY_MS, NEW_YEAR) == 3 * 86_400


# ---- closing ---------------------------------------------------------------------------------------------------


async def test_a_partition_closes_a_lease_and_an_hour_after_its_last_day_and_not_before(bench):
    await bench.janitor.run_once(NEW_YEAR - SECOND)
    await bench.keep_reply(dt.date(2026, 12, 31))
    due = NEW_YEAR + dt.timedelta(milliseconds=HOUR_MS + LEASE_MS)
    assert (await bench.janitor.run_once(due - SECOND)).dropped == 0
    assert "20261231" in await bench.days()
    assert (await bench.janitor.run_once(due)).dropped == 1
    assert "20261231" not in await bench.days()
    assert not await bench.connection.fetchval(
        "SELECT EXISTS (SELECT FROM pg_class WHERE relname ~ '20261231' AND relnamespace = $1::text::regnamespace)",
        f'"{bench.schema}"',
    )


async def test_a_partition_that_was_detached_and_not_dropped_is_dropped_by_the_next_run(bench):
    await bench.janitor.run_once(NEW_YEAR)
    await bench.keep_reply(NEW_YEAR.date())
    await bench.connection.execute(
        f'ALTER TABLE {bench.replies} DETACH PARTITION "{bench.schema}".idempotency_response_20270101 CONCURRENTLY'
    )
    assert (await bench.janitor.run_once(NEW_YEAR)).dropped == 0  # it holds a reply that has not expired
    assert (await bench.janitor.run_once(NEW_YEAR + 2 * DAY)).dropped == 1


async def test_two_closings_at_once_end_without_harm(bench):
    await bench.another(retention_ms=0).run_once(NEW_YEAR)
    async with bench.upkeep.alone() as one:
        other = type(one)(bench.dsn, bench.schema, 5.0)
        later = NEW_YEAR + 10 * DAY
        outcomes = await asyncio.gather(
            one.close_partitions(0, later), other.close_partitions(0, later), return_exceptions=True
        )
        assert all(isinstance(outcome, Closed | StoreError) for outcome in outcomes)
        await one.close_partitions(0, later)
        await other.close()
    assert await bench.days(pending=True) == []


async def test_c53_c_a_long_reader_only_postpones_closing_and_traffic_does_not_wait(bench):
    await bench.janitor.run_once(NEW_YEAR)
    old = await bench.keep_reply(NEW_YEAR.date())
    later = NEW_YEAR + 2 * DAY
    async with bench.reader() as reader:
        async with bench.upkeep.alone() as work:
            await work.open_partitions(DAY_MS, later)
            closing = asyncio.create_task(work.close_partitions(HOUR_MS, later))
            await bench.waiting_backend()
            await traffic(bench, later.date())
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
        async with asyncio.timeout(5):  # DETACH was interrupted: now FINALIZE waits, for a moment, and gives up
            assert (await bench.another(patience_seconds=0.3).run_once(later)).postponed == 1
        await traffic(bench, later.date())
        async with bench.upkeep.alone() as work:
            finalising = asyncio.create_task(work.close_partitions(HOUR_MS, later))
            await bench.waiting_backend()
            await traffic(bench, later.date())
            finalising.cancel()
            with pytest.raises(asyncio.CancelledError):
                await finalising
        assert [row["id"] for row in await reader.fetch(f"SELECT id FROM {bench.replies}")] == [old]
    counts = await bench.janitor.run_once(later)
    assert (counts.dropped, counts.postponed, counts.faults) == (1, 0, ())
    assert bench.observer.faults == []


async def traffic(bench: Bench, day: dt.date) -> None:
    """Store and read a reply; fails if it would have to wait half a second for a lock."""
    async with bench.connection.transaction():
        await bench.connection.execute("SET LOCAL lock_timeout = '500ms'")
        record_id = await bench.keep_reply(day)
        found = await bench.connection.fetchval(
            f"SELECT count(*) FROM {bench.replies} WHERE expires_on = $1 AND id = $2", day, record_id
        )
    assert found == 1
    await bench.connection.execute(f"DELETE FROM {bench.replies} WHERE id = $1", record_id)


async def test_c53_c_a_worker_killed_during_a_detach_leaves_it_pending_and_the_next_run_finalises_it(bench):
    await bench.janitor.run_once(NEW_YEAR)
    later = NEW_YEAR + 2 * DAY
    async with bench.reader():
        async with bench.upkeep.alone() as work:
            closing = asyncio.create_task(work.close_partitions(HOUR_MS, later))
            pid = await bench.waiting_backend()
            await bench.connection.fetchval("SELECT pg_terminate_backend($1, 5000)", pid)
            with pytest.raises(StoreError):
                await closing
        assert "20270101" in await bench.days(pending=True)
        assert "20270101" not in await bench.days()
    counts = await bench.janitor.run_once(later)
    assert (counts.dropped, counts.postponed, counts.faults) == (1, 0, ())
    assert "20270101" not in await bench.days(pending=True)


async def test_several_days_behind_a_long_reader_are_closed_together_afterwards(bench):
    await bench.janitor.run_once(NEW_YEAR)
    later = NEW_YEAR + 10 * DAY
    async with bench.reader():
        assert (await bench.another(patience_seconds=0.3).run_once(later)).postponed == 4
    assert (await bench.janitor.run_once(later)).dropped == 4


# ---- deleting --------------------------------------------------------------------------------------------------

LONG_AGO = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)


async def test_forgotten_records_are_deleted_and_all_others_stay(bench):
    now = await bench.connection.fetchval("SELECT clock_timestamp()")
    later = now + DAY  # beyond the grace that every lease has after a start of the database
    past = later - SECOND
    gone = {
        await bench.add_record(later, "completed"),
        await bench.add_record(past, "released"),
        await bench.add_record(past, "in_progress", locked_until=later - dt.timedelta(seconds=60)),
        await bench.add_record(past, "in_doubt", doubt_since=later - dt.timedelta(seconds=60)),
    }
    stay = {
        await bench.add_record(later + SECOND, "completed"),
        await bench.add_record(later + SECOND, "released"),
        await bench.add_record(past, "in_progress", locked_until=later + SECOND),
        await bench.add_record(past, "in_progress", locked_until=later - dt.timedelta(seconds=59)),  # effect deadline
        await bench.add_record(past, "in_doubt", doubt_since=later - dt.timedelta(seconds=59)),
        *[
            await bench.add_record(LONG_AGO, state, on_in_doubt=on_in_doubt, **{column: LONG_AGO})
            for state, column in [("in_progress", "locked_until"), ("in_doubt", "doubt_since")]
            for on_in_doubt in ["probe", "block"]
        ],
    }
    assert gone <= await bench.ids()
    assert (await bench.janitor.run_once(later)).deleted == len(gone)
    assert await bench.ids() == stay
    assert bench.observer.oldest == 0.0


async def test_after_a_restart_of_the_database_an_old_lease_has_its_grace(bench):
    started = await bench.connection.fetchval("SELECT pg_postmaster_start_time()")
    kept = await bench.add_record(LONG_AGO, "in_progress", locked_until=LONG_AGO, effect_ms=0)
    grace_ends = started + dt.timedelta(milliseconds=LEASE_MS)
    assert (await bench.janitor.run_once(grace_ends - SECOND)).deleted == 0
    assert await bench.ids() == {kept}
    assert (await bench.janitor.run_once(grace_ends)).deleted == 1


async def test_c52_batches_are_bounded_oldest_first_and_one_run_takes_many(bench):
    ids = [await bench.add_record(NEW_YEAR + n * SECOND) for n in range(7)]
    async with bench.upkeep.alone() as work:
        first = await work.delete_forgotten(3, None, NEW_YEAR + DAY)
        assert first == Deleted(3, NEW_YEAR + 2 * SECOND)
        assert await bench.ids() == set(ids[3:])
        assert await work.oldest_forgotten_seconds(None, NEW_YEAR + DAY) == 86_400 - 3
    assert (await bench.another(batch=2).run_once(NEW_YEAR + DAY)).deleted == 4
    assert await bench.ids() == set()


async def test_c52_more_records_of_one_expiry_than_a_batch_holds_are_all_deleted(bench):
    for _ in range(9):
        await bench.add_record(NEW_YEAR)
    assert (await bench.another(batch=2).run_once(NEW_YEAR)).deleted == 9


async def test_c52_a_record_that_somebody_holds_locked_is_skipped_and_taken_by_a_later_sweep(bench):
    locked = await bench.add_record(NEW_YEAR)
    await bench.add_record(NEW_YEAR + SECOND)
    async with bench.other() as claimer:
        await claimer.execute("BEGIN")
        await claimer.execute(f'SELECT FROM "{bench.schema}".idempotency_record WHERE id = $1 FOR UPDATE', locked)
        assert (await bench.janitor.run_once(NEW_YEAR + DAY)).deleted == 1
        assert await bench.ids() == {locked}
    assert (await bench.another().run_once(NEW_YEAR + DAY)).deleted == 1


async def test_c52_a_record_extended_between_choosing_and_deleting_survives(bench):
    record_id = await bench.add_record(NEW_YEAR)
    # A gate stops the deletion when its snapshot is taken and the row is found, before the row is locked.
    await bench.connection.execute(
        f'CREATE FUNCTION "{bench.schema}".gate() RETURNS boolean LANGUAGE sql VOLATILE'
        " AS 'SELECT pg_advisory_xact_lock_shared(4711) IS NOT NULL'"
    )
    gated = query("janitor_delete", bench.schema).replace("WHERE", f'WHERE "{bench.schema}".gate() AND', 1)
    async with bench.other() as janitor, bench.other() as keeper:
        await keeper.execute("SELECT pg_advisory_lock(4711)")
        deleting = asyncio.create_task(janitor.fetchval(gated, 10, None, NEW_YEAR))
        await bench.until("SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)")
        await bench.connection.execute(
            f'UPDATE "{bench.schema}".idempotency_record SET expires_at = $2 WHERE id = $1', record_id, NEW_YEAR + DAY
        )
        await keeper.execute("SELECT pg_advisory_unlock(4711)")
        assert await deleting == 0
    assert await bench.ids() == {record_id}


async def test_two_deletions_at_once_skip_each_others_rows(bench):
    for n in range(40):
        await bench.add_record(NEW_YEAR + n * SECOND)
    async with bench.upkeep.alone() as one:
        other = type(one)(bench.dsn, bench.schema, 1.0)
        batches = await asyncio.gather(
            *(work.delete_forgotten(5, None, NEW_YEAR + DAY) for work in (one, other) for _ in range(1))
        )
        await other.close()
    assert len(await bench.ids()) == 40 - sum(batch.count for batch in batches)


async def test_c52_deleting_and_measuring_use_the_expiry_index(bench):
    await bench.connection.execute(
        f"""INSERT INTO "{bench.schema}".idempotency_record (id, service, operation, scope, key, fingerprint, recipe,
              bound, state, claim, attempt, on_in_doubt, lease_ms, effect_ms, first_seen, expires_at)
            SELECT sha256(n::text::bytea), 's', 'o', '', n::text, 'f', 1, false, 'released', gen_random_uuid(), 1,
              'run_again', 30000, 60000, $1, $1::timestamptz + n * interval '1 s' FROM generate_series(1, 5000) n""",
        NEW_YEAR,
    )
    await bench.connection.execute(f'ANALYZE "{bench.schema}".idempotency_record')
    t = NEW_YEAR + DAY
    for name, arguments in [("janitor_delete", (100, NEW_YEAR, t)), ("janitor_oldest", (NEW_YEAR, t))]:
        rows = await bench.connection.fetch(f"EXPLAIN {query(name, bench.schema)}", *arguments)
        plan = "\n".join(row[0] for row in rows)
        assert "Index Scan using idempotency_record_expiry" in plan
        conditions = [line for line in plan.splitlines() if "Index Cond: ((expires_at" in line]
        assert len(conditions) == 1
        assert "expires_at <= " in conditions[0]
        assert "expires_at >= " in conditions[0]
        assert "forgotten" not in plan  # the predicate was put into the statement
        assert "Sort" not in plan


# ---- around the edges of days, months, years and retentions ----------------------------------------------------


class Exchange:
    """One exchange's statements for one key, at chosen times: the upstream timeout is 30 s, the retention a day."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.record_id = secrets.token_bytes(32)

    async def claim(self, t: dt.datetime) -> tuple[asyncpg.Record, bytes]:
        request = ClaimRequest(
            identity=Identity(self.record_id, "ledger", "pay", "", "k"),
            fingerprint=Fingerprint(1, bytes(32)),
            claim_id=secrets.token_bytes(16),
            on_in_doubt=OnInDoubt.RUN_AGAIN,
            lease_ms=LEASE_MS,
            effect_ms=60_000,
            keep_ms=DAY_MS + 30_000,
        )
        row = await self.bench.connection.fetchrow(
            query("claim", self.bench.schema), *claim_arguments([request], None, t=t)
        )
        return row, request.claim_id

    async def complete(self, claim_id: bytes, t: dt.datetime) -> str:
        request = SettleRequest(
            self.record_id, claim_id, Settlement.COMPLETE, True, True, 201, b"head", b"body", DAY_MS
        )
        row = await self.bench.connection.fetchrow(query("settle", self.bench.schema), *settle_arguments([request], t))
        return row["outcome"]

    async def body(self, completed: asyncpg.Record) -> bytes | None:
        row = await self.bench.connection.fetchrow(
            query("reply", self.bench.schema), completed["reply_on"], self.record_id, completed["claim"]
        )
        return row["body"]


MIDNIGHTS = [dt.datetime(2026, 11, 30, tzinfo=dt.UTC), dt.datetime(2026, 12, 1, tzinfo=dt.UTC), NEW_YEAR]


@pytest.mark.parametrize("midnight", MIDNIGHTS, ids=["day", "month", "year"])
async def test_c53_b_a_key_claimed_before_midnight_and_retried_after_it_is_a_replay(bench, midnight):
    await bench.janitor.run_once(midnight - SECOND)
    exchange = Exchange(bench)
    first, claim_id = await exchange.claim(midnight - SECOND)
    assert first["acquired"]
    assert await exchange.complete(claim_id, midnight - SECOND / 2) == "done"
    await bench.janitor.run_once(midnight + SECOND)
    retry, _ = await exchange.claim(midnight + SECOND)
    assert not retry["acquired"]
    assert (retry["state"], await exchange.body(retry)) == ("completed", b"body")
    assert len(await bench.ids()) == 1


@pytest.mark.parametrize("shift_seconds", [-31, -30.5, -30, 0, 1, 3600])
async def test_c53_b_a_reply_is_there_until_its_record_is_forgotten_whatever_the_janitor_did(bench, shift_seconds):
    claimed = NEW_YEAR + dt.timedelta(seconds=shift_seconds)  # around: expires exactly at a partition's edge
    expires = claimed + dt.timedelta(milliseconds=DAY_MS + 30_000)
    await bench.janitor.run_once(claimed)
    exchange = Exchange(bench)
    _, claim_id = await exchange.claim(claimed)
    assert await exchange.complete(claim_id, claimed) == "done"
    await bench.janitor.run_once(expires - SECOND)
    before, _ = await exchange.claim(expires - SECOND)
    assert (before["state"], await exchange.body(before)) == ("completed", b"body")
    await bench.another().run_once(expires)
    assert await bench.ids() == set()
    after, _ = await exchange.claim(expires)
    assert (after["acquired"], after["attempt"]) == (True, 1)
    assert bench.observer.faults == []


async def test_c53_b_a_record_that_expired_but_was_not_deleted_yet_outlives_its_partition_without_harm(bench):
    await bench.janitor.run_once(NEW_YEAR)
    exchange = Exchange(bench)
    _, claim_id = await exchange.claim(NEW_YEAR)
    await exchange.complete(claim_id, NEW_YEAR)
    later = NEW_YEAR + 5 * DAY
    async with bench.upkeep.alone() as work:
        assert (await work.close_partitions(HOUR_MS, later)).dropped == 4
        await work.open_partitions(DAY_MS, later)
    assert len(await bench.ids()) == 1
    again, claim_id = await exchange.claim(later)
    assert (again["acquired"], again["attempt"]) == (True, 1)
    assert await exchange.complete(claim_id, later) == "done"
