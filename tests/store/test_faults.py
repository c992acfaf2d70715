"""What happens to claims and settlements when the way to PostgreSQL, or PostgreSQL itself, fails."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import msgspec
import pytest

from gateway.errors import SchemaError
from gateway.model import (
    Acquired,
    Completed,
    Held,
    Settlement,
    SettleOutcome,
    StoredReply,
    Unavailable,
)
from gateway.store import PostgresStore, migrate, writes
from gateway.store.session import Session

from .conftest import Asking, MakeStore, Watch, claim_request, identity, settle_request
from .relay import Relay

SHORT_MS = 400


async def until_up(asking: Asking) -> None:
    await asking.watch.until(lambda: asking.store.state.up)


async def until_down(asking: Asking) -> None:
    await asking.watch.until(lambda: not asking.store.state.up)


async def waits_on_lock(connection: asyncpg.Connection) -> None:
    """Wait until some statement of a store waits for a lock."""
    waiting = """SELECT count(*) FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND application_name = 'idempotency-gateway'"""
    async with asyncio.timeout(10):
        while not await connection.fetchval(waiting):
            await asyncio.sleep(0)


# ---- answers that are lost -----------------------------------------------------------------------------------------


async def test_c54_a_claim_whose_answer_is_lost_finds_its_own_lease(make_store: MakeStore, relay: Relay) -> None:
    asking = await make_store(relay.dsn)
    request = claim_request()
    relay.lose_answer_about = request.identity.record_id
    found = await asking.claim(request)
    assert relay.lost == 1
    assert isinstance(found, Acquired)
    assert found.attempt == 1
    assert isinstance(await asking.claim(claim_request()), Held)


async def test_c54_a_settlement_whose_answer_is_lost_is_repeated_and_already_so(
    make_store: MakeStore, relay: Relay, database: asyncpg.Connection
) -> None:
    asking = await make_store(relay.dsn)
    await asking.settle(settle_request(claim_request()))  # now its connection is there
    for n, settlement in enumerate(Settlement):
        request = claim_request(f"k{n}")
        await asking.claim(request)
        relay.lose_answer_about = settlement.value.encode()
        assert await asking.settle(settle_request(request, settlement)) is SettleOutcome.ALREADY
        assert relay.lost == n + 1
    assert await database.fetchval("SELECT count(*) FROM idempotency_response") == 1
    assert asking.store.leases_held == 0


async def test_c54_an_abandoned_claim_whose_answer_is_lost_is_given_up_all_the_same(
    make_store: MakeStore, relay: Relay, database: asyncpg.Connection
) -> None:
    asking = await make_store(relay.dsn)
    request = claim_request()
    await asking.claim(request)
    relay.lose_answer_about = request.identity.record_id
    asking.store.abandon(request)
    assert await asking.store.drain(5)
    assert relay.lost == 1
    assert await database.fetchrow("SELECT state::text, attempt FROM idempotency_record") == ("released", 0)


async def test_a_warning_on_a_write_is_an_unknown_outcome_and_asked_again(
    dsn: str, schema: str, make_store: MakeStore
) -> None:
    await migrate(dsn, schema)
    connection = await asyncpg.connect(dsn, server_settings={"search_path": schema})
    await connection.execute("""
        CREATE SEQUENCE written;
        CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
          IF nextval(TG_TABLE_SCHEMA || '.written') = 1 THEN RAISE WARNING 'canceling wait for the standby'; END IF;
          RETURN NEW; END $$;
        CREATE TRIGGER warn BEFORE INSERT ON idempotency_record FOR EACH ROW EXECUTE FUNCTION warn();
    """)
    asking = await make_store(schema=schema)
    found = await asking.claim(claim_request())
    assert isinstance(found, Acquired)
    assert found.attempt == 1
    assert ("claim", "warning") in asking.watch.errors
    await connection.close()


@pytest.mark.parametrize(
    "error",
    [asyncpg.DeadlockDetectedError("x"), asyncpg.InternalClientError("x"), asyncpg.ConnectionDoesNotExistError("x")],
    ids=lambda error: type(error).__name__,
)
async def test_a_failure_that_says_nothing_definite_is_followed_by_the_same_claim_and_settlement(
    asking: Asking, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fetch = Session.fetch
    failing = {"claim", "settle"}

    async def fails_after_writing_once(self: Session, name: str, *given: Any) -> Any:
        rows = await fetch(self, name, *given)
        if name in failing:
            failing.discard(name)
            raise error
        return rows

    monkeypatch.setattr(Session, "fetch", fails_after_writing_once)
    request = claim_request()
    found = await asking.claim(request)
    assert isinstance(found, Acquired)
    assert found.attempt == 1
    assert await asking.settle(settle_request(request)) is SettleOutcome.ALREADY


# ---- a store that is gone ------------------------------------------------------------------------------------------


async def test_c20_a_store_that_is_down_refuses_claims_at_once_and_is_back_by_itself(
    make_store: MakeStore, relay: Relay
) -> None:
    asking = await make_store(relay.dsn)
    await relay.close()
    await until_down(asking)
    began = time.monotonic()
    found = await asking.claim(claim_request())
    assert isinstance(found, Unavailable)
    assert time.monotonic() - began < 0.2
    assert asking.store.state.cause == found.cause
    assert asking.store.state.schema_usable
    await relay.open()
    await until_up(asking)
    assert isinstance(await asking.claim(claim_request()), Acquired)
    assert asking.watch.ups == [True, False, True]


async def test_c20_a_known_answer_is_completed_when_the_store_returns(make_store: MakeStore, relay: Relay) -> None:
    asking = await make_store(relay.dsn)
    request = claim_request()
    await asking.claim(request)
    await relay.close()
    await until_down(asking)
    settling = asyncio.ensure_future(asking.settle(settle_request(request)))
    await asyncio.sleep(0)
    assert asking.store.pending_completions == 1
    assert not await asking.store.drain(0.05)
    await relay.open()
    assert await settling is SettleOutcome.DONE
    assert isinstance(await asking.claim(claim_request()), Completed)


async def test_replies_that_wait_are_bounded_by_keeping_only_their_heads(
    make_store: MakeStore, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = await make_store(relay.dsn)
    requests = [claim_request(f"k{n}") for n in range(3)]
    for request in requests:
        await asking.claim(request)
    await relay.close()
    await until_down(asking)
    monkeypatch.setattr(writes, "MAX_PENDING_BYTES", 1000)
    settling = asyncio.gather(*(asking.settle(settle_request(request, body=b"x" * 450)) for request in requests))
    await asyncio.sleep(0)
    await relay.open()
    assert await settling == [SettleOutcome.DONE] * 3
    bodies = []
    for request in requests:
        found = await asking.claim(claim_request(request.identity.key))
        assert isinstance(found, Completed)
        reply = await asking.reply(request.identity.record_id, found)
        assert isinstance(reply, StoredReply)
        bodies.append(reply.body)
    assert bodies == [b"x" * 450, b"x" * 450, None]
    assert ("settle", "pending_memory") in asking.watch.errors


async def test_a_gateway_starts_with_the_store_down(make_store: MakeStore, relay: Relay) -> None:
    await relay.close()
    asking = await make_store(relay.dsn)
    assert isinstance(await asking.claim(claim_request()), Unavailable)
    assert asking.store.state.schema_usable is None
    await relay.open()
    await until_up(asking)
    assert isinstance(await asking.claim(claim_request()), Acquired)


async def test_c48_a_network_that_went_silent_is_bounded_by_the_timeout(make_store: MakeStore, relay: Relay) -> None:
    asking = await make_store(relay.dsn, timeout_ms=SHORT_MS)
    relay.silent = True
    began = time.monotonic()
    first, second = claim_request(), claim_request("other")
    outcomes = await asyncio.gather(asking.claim(first), asking.claim(second))
    assert outcomes == [Unavailable("timeout")] * 2
    assert SHORT_MS / 1000 <= time.monotonic() - began < 2 * SHORT_MS / 1000
    for request in (first, second):
        asking.store.abandon(request)
    await until_down(asking)
    relay.silent = False
    await until_up(asking)
    assert await asking.store.drain(5)
    free = await asking.claim(claim_request(body=b"another"))
    assert isinstance(free, Acquired)
    assert free.attempt == 1


async def test_a_claim_that_was_never_sent_needs_no_statement_to_be_abandoned(
    make_store: MakeStore, relay: Relay
) -> None:
    asking = await make_store(relay.dsn)
    await relay.close()
    await until_down(asking)
    for n in range(1000):
        request = claim_request(f"k{n}")
        asking.store.claim(request, lambda _: None)
        await asyncio.sleep(0)
        asking.store.abandon(request)
    assert asking.store._writes.quiet


async def test_c48_killed_backends_cost_nobody_an_execution(asking: Asking, database: asyncpg.Connection) -> None:
    requests = [claim_request(f"k{n}") for n in range(200)]

    async def whole(request: Any) -> SettleOutcome | None:
        found = await asking.claim(request)
        return await asking.settle(settle_request(request)) if isinstance(found, Acquired) else None

    running = asyncio.gather(*(whole(request) for request in requests))
    for _ in range(5):
        await database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'idempotency-gateway'"
        )
        await asyncio.sleep(0.01)
    outcomes = await running
    completed = await database.fetchval("SELECT count(*) FROM idempotency_record WHERE state = 'completed'")
    assert completed == sum(outcome is not None for outcome in outcomes)
    assert all(outcome in (SettleOutcome.DONE, SettleOutcome.ALREADY, None) for outcome in outcomes)
    await until_up(asking)


@pytest.fixture
async def plain_role(dsn: str, tables: str) -> AsyncIterator[tuple[str, asyncpg.Connection]]:
    """A DSN for a role with no more rights than the gateway needs, and a superuser's connection."""
    name = "gw_" + secrets.token_hex(4)
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"""
        CREATE ROLE {name} LOGIN;
        GRANT USAGE ON SCHEMA {tables} TO {name};
        GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {tables} TO {name};
    """)
    relay = Relay(dsn)
    relay._user = name
    await relay.open()
    yield relay.dsn, connection
    await relay.close()
    await connection.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")
    await connection.close()


async def test_c48_connections_to_a_server_that_became_read_only_are_replaced(
    plain_role: tuple[str, asyncpg.Connection], make_store: MakeStore
) -> None:
    at, connection = plain_role
    role = at.split("//")[1].split("@")[0]
    asking = await make_store(at)
    await connection.execute(f"ALTER ROLE {role} SET default_transaction_read_only = on")
    await connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", role)
    await until_down(asking)
    await asking.watch.until(lambda: ("connect", "read_only") in asking.watch.errors)
    assert await asking.claim(claim_request()) == Unavailable("read_only")
    await connection.execute(f"ALTER ROLE {role} RESET default_transaction_read_only")
    await asking.watch.until(lambda: asking.store.state.up, seconds=5)
    assert isinstance(await asking.claim(claim_request()), Acquired)


# ---- locks ---------------------------------------------------------------------------------------------------------


async def test_c47_a_locked_table_costs_one_timeout_and_leaves_nothing_behind(
    make_store: MakeStore, database: asyncpg.Connection
) -> None:
    asking = await make_store(timeout_ms=SHORT_MS)
    request = claim_request()
    async with database.transaction():
        await database.execute("LOCK TABLE idempotency_record IN ACCESS EXCLUSIVE MODE")
        began = time.monotonic()
        assert isinstance(await asking.claim(request), Unavailable)
        assert time.monotonic() - began < 2 * SHORT_MS / 1000
        asking.store.abandon(request)
    assert await asking.store.drain(5)
    await until_up(asking)
    found = await asking.claim(claim_request(body=b"another"))
    assert isinstance(found, Acquired)
    assert found.attempt == 1


async def test_rule_29_one_locked_record_does_not_fail_the_others_of_its_batch(
    asking: Asking, database: asyncpg.Connection
) -> None:
    locked = claim_request("locked")
    await asking.claim(locked)
    await asking.settle(settle_request(locked, Settlement.RELEASE))
    asking.watch.statements.clear()
    async with database.transaction():
        await database.execute("SELECT FROM idempotency_record FOR UPDATE")
        others = [claim_request(f"k{n}") for n in range(5)]
        outcomes = await asyncio.gather(*(asking.claim(request) for request in [claim_request("locked"), *others]))
        assert outcomes[0] == Unavailable("locked")
        assert all(isinstance(outcome, Acquired) for outcome in outcomes[1:])
    assert isinstance(await asking.claim(claim_request("locked")), Acquired)


async def test_rule_29_a_locked_record_is_settled_when_it_can_be_and_the_others_at_once(
    asking: Asking, database: asyncpg.Connection
) -> None:
    locked, *others = (claim_request(f"k{n}") for n in range(6))
    for request in (locked, *others):
        assert isinstance(await asking.claim(request), Acquired)
    async with database.transaction():
        await database.execute("SELECT FROM idempotency_record WHERE id = $1 FOR UPDATE", locked.identity.record_id)
        stuck = asyncio.ensure_future(asking.settle(settle_request(locked)))
        outcomes = await asyncio.gather(*(asking.settle(settle_request(request)) for request in others))
        assert outcomes == [SettleOutcome.DONE] * 5
        await waits_on_lock(database)
        assert not stuck.done()
    assert await stuck is SettleOutcome.DONE


async def test_rule_29_a_locked_record_is_abandoned_when_it_can_be_and_delays_no_settlement(
    asking: Asking, database: asyncpg.Connection
) -> None:
    locked, other = claim_request("locked"), claim_request("other")
    await asking.claim(locked)
    await asking.claim(other)
    async with database.transaction():
        await database.execute("SELECT FROM idempotency_record WHERE id = $1 FOR UPDATE", locked.identity.record_id)
        asking.store.abandon(locked)
        await asking.watch.until(lambda: asking.watch.errors.count(("abandon", "locked")) >= 2)
        assert await asking.settle(settle_request(other)) is SettleOutcome.DONE
        assert not await asking.store.drain(0)
    assert await asking.store.drain(5)
    assert isinstance(await asking.claim(claim_request("locked", body=b"another")), Acquired)


async def test_rule_29_the_heartbeat_skips_a_locked_record_and_keeps_its_lease(
    asking: Asking, database: asyncpg.Connection
) -> None:
    request = claim_request(lease_ms=600)
    await asking.claim(request)
    async with database.transaction():
        await database.execute("SELECT FROM idempotency_record FOR UPDATE")
        asking.watch.statements.clear()
        await asking.watch.until(lambda: len(asking.watch.statements) >= 2)
        assert asking.store.leases_held == 1
    assert not asking.watch.lost


async def test_a_slow_batch_lets_a_second_lane_go_ahead(asking: Asking, database: asyncpg.Connection) -> None:
    locked = claim_request("locked")
    await asking.claim(locked)
    await asking.settle(settle_request(locked, Settlement.RELEASE))
    async with database.transaction():
        await database.execute("SELECT FROM idempotency_record FOR UPDATE")
        slow = asyncio.ensure_future(asking.claim(claim_request("locked")))
        await waits_on_lock(database)
        assert isinstance(await asking.claim(claim_request("quick")), Acquired)
        assert not slow.done()
    assert isinstance(await slow, Acquired)


# ---- rows that cannot be written -----------------------------------------------------------------------------------


async def test_rule_20_a_missing_partition_makes_a_tombstone_of_one_reply_and_keeps_the_others(asking: Asking) -> None:
    requests = [claim_request(f"k{n}") for n in range(7)]
    for request in requests:
        await asking.claim(request)
    century = 100 * 365 * 24 * 3600 * 1000
    settles = [settle_request(r, keep_ms=century if n == 3 else 1000) for n, r in enumerate(requests)]
    outcomes = await asyncio.gather(*(asking.settle(settle) for settle in settles))
    assert outcomes == [SettleOutcome.DONE] * 7
    assert ("settle", "no_partition") in asking.watch.errors
    kept = []
    for request in requests:
        found = await asking.claim(claim_request(request.identity.key))
        assert isinstance(found, Completed)
        kept.append(await asking.reply(request.identity.record_id, found) is not None)
    assert kept == [True, True, True, False, True, True, True]


async def test_a_row_that_cannot_be_written_fails_alone(asking: Asking) -> None:
    bad = claim_request(keep_ms=2**62)
    good = [claim_request(f"k{n}") for n in range(5)]
    outcomes = await asyncio.gather(*(asking.claim(request) for request in [*good, bad]))
    assert outcomes[-1] == Unavailable("invalid_row")
    assert all(isinstance(outcome, Acquired) for outcome in outcomes[:-1])


# ---- adopting ------------------------------------------------------------------------------------------------------


async def test_rule_35_an_execution_without_a_claim_is_recorded_when_the_store_returns(
    make_store: MakeStore, relay: Relay
) -> None:
    asking = await make_store(relay.dsn)
    await relay.close()
    await until_down(asking)
    request = claim_request()
    assert isinstance(await asking.claim(request), Unavailable)
    adopting = asyncio.ensure_future(asking.adopt(request, settle_request(request)))
    await asyncio.sleep(0)
    assert asking.store.pending_completions == 1
    await relay.open()
    assert await adopting is SettleOutcome.DONE
    found = await asking.claim(claim_request())
    assert isinstance(found, Completed)
    assert found.claim_id == request.claim_id
    assert asking.store.leases_held == 0


async def test_rule_35_it_is_lost_when_another_has_the_record_by_then(make_store: MakeStore) -> None:
    asking, other = await make_store(), await make_store()
    await other.claim(claim_request())
    request = claim_request()
    assert await asking.adopt(request, settle_request(request)) is SettleOutcome.LOST
    assert isinstance(await other.claim(claim_request()), Held)


# ---- the schema, the pooler, several hosts -------------------------------------------------------------------------


async def test_a_database_without_the_schema_is_told_with_the_command_that_makes_it(dsn: str, schema: str) -> None:
    store = PostgresStore(lambda: dsn, schema=schema)
    with pytest.raises(SchemaError, match="idempotency-gateway migrate"):
        await store.start()
    assert store.state.schema_usable is False
    await store.close()


@pytest.mark.parametrize(("version", "since", "usable"), [(0, 0, False), (1, 1, True), (7, 1, True), (7, 2, False)])
async def test_code_starts_on_any_schema_that_says_it_is_compatible(
    dsn: str, schema: str, version: int, since: int, usable: bool
) -> None:
    await migrate(dsn, schema)
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        f'UPDATE "{schema}".idempotency_schema SET version = {version}, compatible_since = {since}'
    )
    await connection.close()
    store = PostgresStore(lambda: dsn, schema=schema)
    try:
        if usable:
            await store.start()
        else:
            with pytest.raises(SchemaError):
                await store.start()
    finally:
        await store.close()


async def test_c44_behind_a_pooler_nothing_is_prepared_and_nothing_of_a_session_is_set(make_store: MakeStore) -> None:
    asking = await make_store(pool_mode="transaction")
    request = claim_request()
    assert isinstance(await asking.claim(request), Acquired)
    assert await asking.settle(settle_request(request)) is SettleOutcome.DONE
    found = await asking.claim(claim_request())
    assert isinstance(found, Completed)
    assert isinstance(await asking.reply(request.identity.record_id, found), StoredReply)
    session = asking.store._claims._first.session
    prepared = await session._connection.fetchval("SELECT count(*) FROM pg_prepared_statements WHERE name <> ''")
    assert prepared == 0
    assert await session._connection.fetchval("SHOW plan_cache_mode") == "auto"
    assert await session._connection.fetchval("SHOW lock_timeout") == "0"


@pytest.mark.parametrize("pool_mode", ["session", "transaction"])
async def test_c44_the_timeout_is_in_force_on_the_server_too(
    dsn: str, schema: str, make_store: MakeStore, pool_mode: str
) -> None:
    await migrate(dsn, schema)
    connection = await asyncpg.connect(dsn, server_settings={"search_path": schema})
    await connection.execute("""
        CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(60); RETURN NEW; END';
        CREATE TRIGGER slow BEFORE INSERT ON idempotency_record FOR EACH ROW EXECUTE FUNCTION slow();
    """)
    asking = await make_store(schema=schema, pool_mode=pool_mode, timeout_ms=SHORT_MS)
    request = claim_request()
    assert isinstance(await asking.claim(request), Unavailable)
    sleeping = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    async with asyncio.timeout(3):
        while await connection.fetchval(sleeping):
            await asyncio.sleep(0.01)
    assert await connection.fetchval("SELECT count(*) FROM idempotency_record") == 0
    await connection.execute("DROP TRIGGER slow ON idempotency_record")
    asking.store.abandon(request)
    assert await asking.store.drain(5)
    await connection.close()


async def test_c44_a_role_with_the_least_rights_is_enough(
    plain_role: tuple[str, asyncpg.Connection], make_store: MakeStore
) -> None:
    asking = await make_store(plain_role[0])
    request = claim_request()
    assert isinstance(await asking.claim(request), Acquired)
    assert await asking.settle(settle_request(request)) is SettleOutcome.DONE


async def test_a_dsn_with_several_hosts_finds_the_primary(make_store: MakeStore, relay: Relay) -> None:
    dead = Relay(relay.dsn)
    await dead.open()
    await dead.close()
    both = relay.dsn.replace(f"127.0.0.1:{relay.port}", f"127.0.0.1:{dead.port},127.0.0.1:{relay.port}")
    asking = await make_store(f"{both}&target_session_attrs=primary")
    assert isinstance(await asking.claim(claim_request()), Acquired)


async def test_the_dsn_is_read_again_for_every_new_connection(tables: str, relay: Relay, dsn: str) -> None:
    given = [relay.dsn]
    watch = Watch()
    store = PostgresStore(lambda: given[0], schema=tables, observer=watch)
    await store.start()
    asking = Asking(store, watch)
    try:
        given[0] = dsn
        await relay.close()
        await asyncio.sleep(0)
        assert isinstance(await asking.claim(claim_request()), Acquired)
    finally:
        await store.close()


async def test_a_new_epoch_is_seen_with_the_next_statement(asking: Asking, database: asyncpg.Connection) -> None:
    before = asking.store.epoch
    await database.execute("UPDATE idempotency_schema SET epoch = epoch + 1")
    await asking.claim(claim_request())
    assert asking.store.epoch == before + 1


@pytest.mark.parametrize("scope", ["customer=\0", "customer=\ud800"])
async def test_a_claim_that_no_text_can_hold_fails_alone(asking: Asking, scope: str) -> None:
    good = [claim_request(f"k{n}") for n in range(3)]
    bad = claim_request("bad", identity=msgspec.structs.replace(identity("bad"), scope=scope))
    outcomes = await asyncio.gather(*(asking.claim(request) for request in [good[0], bad, *good[1:]]))
    assert outcomes.pop(1) == Unavailable("invalid_row")
    assert all(isinstance(outcome, Acquired) for outcome in outcomes)
