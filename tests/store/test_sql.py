"""The SQL files: every one prepares, uses its index and has the predicates inlined. Migrations."""

import asyncio
import re
from importlib.resources import files

import asyncpg
import pytest

from gateway.errors import SchemaError, StoreError
from gateway.store import migrate, script, status
from gateway.store import schema as schemas
from gateway.store.session import Role, _settings, open_session
from gateway.store.sql import query
from gateway.store.statements import claim_arguments, settle_arguments

from .conftest import Bench, claim_request, settle_request

QUERIES = sorted(file.name[:-4] for file in files("gateway.store").joinpath("queries").iterdir())
FUNCTIONS = (
    "lease_end",
    "is_open",
    "open_since",
    "effect_end",
    "forgotten",
    "runs_again_at",
    "takeable",
    "same_identity",
)


@pytest.mark.parametrize("name", QUERIES)
async def test_every_statement_prepares_and_says_what_it_is_for(bench: Bench, name: str) -> None:
    text = query(name, bench.schema)
    assert text.startswith("-- ")
    assert re.search(r"(?i)locks", text)
    await bench.connection.prepare(text)


async def plan(bench: Bench, name: str, parameters: int) -> str:
    connection = await asyncpg.connect(
        **_where(bench.connection), server_settings={"search_path": bench.schema, **_settings(Role.CLAIM, 5000)}
    )
    try:
        prepared = await connection.prepare(query(name, bench.schema))
        nulls = ", ".join(["NULL"] * parameters)
        rows = await connection.fetch(f"EXPLAIN (VERBOSE) EXECUTE {prepared.get_name()} ({nulls})")
    finally:
        await connection.close()
    return "\n".join(row[0] for row in rows)


def _where(connection: asyncpg.Connection) -> dict[str, str]:
    host, port = (
        connection._addr if isinstance(connection._addr, tuple) else (connection._addr.rpartition("/")[0], "5432")
    )
    return {"host": host, "port": port, "user": connection._params.user, "database": connection._params.database}


@pytest.mark.parametrize(("name", "parameters"), [("claim", 5), ("settle", 4), ("renew", 4), ("abandon", 3)])
async def test_the_hot_statements_find_records_by_the_primary_key_and_call_no_function_of_ours(
    bench: Bench, name: str, parameters: int
) -> None:
    found = await plan(bench, name, parameters)
    assert "Seq Scan on " + bench.schema + ".idempotency_record" not in found.replace('"', "")
    if name != "abandon":
        assert "idempotency_record_pkey" in found
    for function in FUNCTIONS:
        assert f"{function}(" not in found


async def test_a_batch_is_not_joined_with_itself_row_by_row(bench: Bench) -> None:
    """Time would grow with the square of the batch."""
    for name, parameters in ("claim", 5), ("settle", 4), ("renew", 4):
        found = await plan(bench, name, parameters)
        nested = [line for line in found.splitlines() if "Join Filter" in line]
        assert not nested


async def test_rule_21_the_claim_never_mentions_the_reply_table() -> None:
    assert "idempotency_response" not in query("claim", "s")


async def test_a_replay_locks_one_partition_only(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    await bench.settle(settle_request(request))
    record = await bench.record(request)
    async with bench.connection.transaction():
        await bench.connection.execute("SET LOCAL plan_cache_mode = force_custom_plan")
        row = (await bench.fetch("reply", (record["reply_on"], request.identity.record_id, request.claim_id)))[0]
        locked = await bench.connection.fetchval(
            """SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
            WHERE l.pid = pg_backend_pid() AND c.relname ~ '^idempotency_response_[0-9]+$'"""
        )
    assert row["body"] == b"hello"
    assert locked == 1


async def test_a_session_that_waits_for_its_first_statement_holds_no_lock_of_its_preparing(
    dsn: str, tables: str, bench: Bench
) -> None:
    for role in Role:
        session = await open_session(dsn, tables, role, transaction_pooled=False, timeout_ms=5000)
        held = await bench.connection.fetchval(
            """SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
            WHERE a.application_name = 'idempotency-gateway' AND l.relation IS NOT NULL"""
        )
        await session.close()
        assert held == 0


async def test_only_one_unique_index_and_none_that_a_completion_changes(bench: Bench) -> None:
    rows = await bench.connection.fetch(
        """SELECT indexdef FROM pg_indexes WHERE schemaname = $1 AND tablename = 'idempotency_record'""", bench.schema
    )
    definitions = [row["indexdef"] for row in rows]
    assert sum("UNIQUE" in definition for definition in definitions) == 1
    for column in ("state", "claim", "locked_until", "doubt_since", "status", "reply_on", "bound", "WHERE"):
        assert not any(column in definition.split("USING")[1] for definition in definitions)


# ---- migrations ----------------------------------------------------------------------------------------------------


async def test_migrate_applies_once_and_says_what_it_did(dsn: str, schema: str) -> None:
    assert [row.applied_at for row in await status(dsn, schema)] == [None] * len(schemas.migrations())
    assert await migrate(dsn, schema) == ["0001_initial"]
    assert await migrate(dsn, schema) == []
    assert all(row.applied_at is not None for row in await status(dsn, schema))


async def test_c45_many_replicas_migrate_at_once_and_no_lock_stays(dsn: str, schema: str) -> None:
    applied = await asyncio.gather(*(migrate(dsn, schema) for _ in range(4)))
    assert sorted(map(len, applied)) == [0, 0, 0, 1]
    connection = await asyncpg.connect(dsn)
    assert await connection.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
    await connection.close()


async def test_after_migrate_replies_can_be_kept(dsn: str, schema: str) -> None:
    await migrate(dsn, schema)
    connection = await asyncpg.connect(dsn)
    bench = Bench(connection, schema)
    bench.zero = await connection.fetchval("SELECT clock_timestamp()")
    request = claim_request()
    await bench.fetch("claim", claim_arguments([request], None))
    rows = await bench.fetch("settle", settle_arguments([settle_request(request, keep_ms=3 * 24 * 3600 * 1000)]))
    assert rows[0]["outcome"] == "done"
    await connection.close()


async def test_the_script_makes_the_same_schema(dsn: str, schema: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(script(schema))
    tables = "SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = $1 ORDER BY 1"
    by_script = [row[0] for row in await connection.fetch(tables, schema)]
    assert await migrate(dsn, schema) == []
    await connection.execute(f'DROP SCHEMA "{schema}" CASCADE')
    await migrate(dsn, schema)
    assert [row[0] for row in await connection.fetch(tables, schema)] == by_script
    await connection.close()


async def test_a_migration_that_was_changed_after_it_was_applied_is_refused(dsn: str, schema: str) -> None:
    await migrate(dsn, schema)
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"UPDATE \"{schema}\".idempotency_migration SET checksum = 'other'")
    await connection.close()
    with pytest.raises(SchemaError, match="0001_initial"):
        await migrate(dsn, schema)


async def test_an_unreachable_database_is_a_sentence(schema: str) -> None:
    with pytest.raises(StoreError, match="cannot be reached"):
        await migrate("postgresql://nobody@127.0.0.1:1/none", schema)
