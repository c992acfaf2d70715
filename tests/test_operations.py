"""docs/operations.md: its statements do what it says, on a real record."""

import re
from pathlib import Path

import asyncpg
import pytest

from gateway.store import migrate

PAGE = (Path(__file__).parents[1] / "docs" / "operations.md").read_text(encoding="utf-8")
LOOK, NOT_HAPPENED, HAPPENED = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
RECORD = "07142020138a"


@pytest.fixture
async def database(dsn, schema):
    await migrate(dsn, schema)
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


async def in_doubt(database, schema, *, since):
    """One record in doubt under `block`, and its neighbours by id."""
    await database.execute(f"DELETE FROM {schema}.idempotency_record")
    for number in ("07142020138a", "071420201389", "07142020138b"):
        await database.execute(
            f"INSERT INTO {schema}.idempotency_record (id, service, operation, scope, key, fingerprint, recipe, bound,"
            " state, claim, attempt, on_in_doubt, lease_ms, effect_ms, doubt_since, first_seen, expires_at)"
            " VALUES ($1, 's', 'o', '', 'k', '', 1, true, 'in_doubt', gen_random_uuid(), 1, 'block', 1000, 60000,"
            " clock_timestamp() - $2 * interval '1 s', now(), now() + interval '1 day')",
            bytes.fromhex(number + "17" * 26),
            since,
        )


def statement(text, schema):
    return text.replace("idempotency.", f"{schema}.")


async def test_the_record_that_a_client_quotes_is_found(database, schema):
    await in_doubt(database, schema, since=5)
    found = await database.fetch(statement(LOOK, schema))
    assert [row["state"] for row in found] == ["in_doubt"]


async def test_not_happened_releases_it_but_only_after_the_effect_deadline(database, schema):
    await in_doubt(database, schema, since=5)
    assert await database.execute(statement(NOT_HAPPENED, schema)) == "UPDATE 0"
    await in_doubt(database, schema, since=61)
    assert await database.execute(statement(NOT_HAPPENED, schema)) == "UPDATE 1"
    states = await database.fetch(f"SELECT state::text FROM {schema}.idempotency_record ORDER BY id")
    assert [row["state"] for row in states] == ["in_doubt", "released", "in_doubt"]


async def test_happened_completes_it_without_a_reply(database, schema):
    await in_doubt(database, schema, since=5)
    assert await database.execute(statement(HAPPENED, schema)) == "UPDATE 1"
    row = await database.fetchrow(statement(LOOK, schema))
    assert (row["state"], row["status"]) == ("completed", 201)
