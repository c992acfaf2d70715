"""Brings the schema up to date: forward-only files, applied once, all in one transaction.

Works through a pooler in transaction mode, and when many replicas start at once: the lock is the transaction's own.
"""

import datetime as dt
from collections.abc import Iterator
from hashlib import sha256

import asyncpg
import msgspec

from gateway.errors import SchemaError, StoreError
from gateway.store.schema import Migration, migrations
from gateway.store.sql import query, quoted
from gateway.store.upkeep import open_partitions

_PARTITIONS_AHEAD = dt.timedelta(days=3)
"""Partitions for replies that exist after `migrate`, beyond today's. From then on the janitor opens them."""


class MigrationStatus(msgspec.Struct, frozen=True):
    """One migration as `migrate --status` prints it. `applied_at` is None while it is due."""

    version: int
    name: str
    applied_at: dt.datetime | None


async def migrate(dsn: str, schema: str, *, timeout_seconds: float = 60.0) -> list[str]:
    """Apply what is due and return the names applied, oldest first; an empty list when there was nothing to do.

    Safe to run at any time, from many places at once. Raises `SchemaError` when a file that was applied has been
    changed since, `StoreError` when the database cannot be reached or refuses.
    """
    connection = await _connect(dsn, timeout_seconds)
    try:
        async with connection.transaction(isolation="read_committed"):
            await connection.execute(f"SELECT pg_advisory_xact_lock({_lock_id(schema)})")
            applied = await _applied(connection, schema)
            due = [migration for migration in migrations() if migration.version not in applied]
            if not applied and not await _schema_exists(connection, schema):
                await connection.execute(f"CREATE SCHEMA {quoted(schema)}")
            for migration in due:
                await connection.execute(_statements(migration, schema))
            await open_partitions(connection, schema, dt.datetime.now(dt.UTC).date() + _PARTITIONS_AHEAD)
    except asyncpg.PostgresError as error:
        raise StoreError(f"PostgreSQL refused the migration of schema {schema!r}: {error}.") from error
    except (OSError, TimeoutError, asyncpg.InterfaceError) as error:
        raise StoreError(f"The connection to PostgreSQL broke during the migration: {error}.") from error
    finally:
        connection.terminate()
    return [f"{migration.version:04d}_{migration.name}" for migration in due]


async def status(dsn: str, schema: str, *, timeout_seconds: float = 10.0) -> list[MigrationStatus]:
    """Return every migration that this code knows or that was applied, oldest first. Raises `StoreError`."""
    connection = await _connect(dsn, timeout_seconds)
    try:
        applied = await _applied(connection, schema)
    except asyncpg.PostgresError as error:
        raise StoreError(f"PostgreSQL refused to tell the state of schema {schema!r}: {error}.") from error
    finally:
        connection.terminate()
    names = {migration.version: migration.name for migration in migrations()}
    names.update({version: name for version, (name, _) in applied.items()})
    return [
        MigrationStatus(version, names[version], applied[version][1] if version in applied else None)
        for version in sorted(names)
    ]


def script(schema: str) -> str:
    """Return all migrations as one SQL script, for who applies it by other means (`migrate --sql`)."""
    return "\n".join(
        [
            "BEGIN;",
            f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)};",
            *(_statements(migration, schema) for migration in migrations()),
            *_first_partitions(schema, dt.datetime.now(dt.UTC).date()),
            "COMMIT;",
            "",
        ]
    )


async def _connect(dsn: str, timeout_seconds: float) -> asyncpg.Connection:
    try:
        return await asyncpg.connect(dsn, timeout=timeout_seconds, statement_cache_size=0)
    except (OSError, TimeoutError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise StoreError(
            f"PostgreSQL cannot be reached ({error or type(error).__name__}): check `store.dsn` and that it runs."
        ) from error


def _lock_id(schema: str) -> int:
    """One lock for each schema: 63 bits of a digest, so that it meets nobody else's by accident."""
    return int.from_bytes(sha256(b"idempotency-gateway migrate " + schema.encode()).digest()[:8], "big") >> 1


async def _schema_exists(connection: asyncpg.Connection, schema: str) -> bool:
    """Asked first, because CREATE SCHEMA IF NOT EXISTS wants the right to create even when there is nothing to do."""
    return bool(await connection.fetchval("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)", schema))


async def _applied(connection: asyncpg.Connection, schema: str) -> dict[int, tuple[str, dt.datetime]]:
    table = f"{quoted(schema)}.idempotency_migration"
    if await connection.fetchval("SELECT to_regclass($1)::text", table) is None:
        return {}
    rows = await connection.fetch(f"SELECT version, name, checksum, applied_at FROM {table}")  # noqa: S608 -- quoted
    ours = {migration.version: migration for migration in migrations()}
    for row in rows:
        mine = ours.get(row["version"])
        if mine is not None and mine.checksum != row["checksum"]:
            raise SchemaError(
                f"Migration {mine.version:04d}_{mine.name} was applied to schema {schema!r} with other contents than "
                "this gateway has: a released migration never changes, so install the gateway's release unmodified, or "
                "use an empty schema."
            )
    return {row["version"]: (row["name"], row["applied_at"]) for row in rows}


def _statements(migration: Migration, schema: str) -> str:
    text = migration.text.replace(':"schema"', quoted(schema))
    record = (
        f"INSERT INTO {quoted(schema)}.idempotency_migration (version, name, checksum) "  # noqa: S608 -- our own names
        f"VALUES ({migration.version}, '{migration.name}', '{migration.checksum}');"
    )
    return f"{text}\n{record}"


def _first_partitions(schema: str, today: dt.date) -> Iterator[str]:
    """The same statements as the janitor's, made and run by the server, for a script without a program."""
    name = "'" + schema.replace("'", "''") + "'"
    for day in (today + dt.timedelta(days=n) for n in range(_PARTITIONS_AHEAD.days + 1)):
        made = query("partition_open", schema)
        for parameter, value in ("$1", name), ("$2", f"'{day}'"), ("$3", f"'{day + dt.timedelta(days=1)}'"):
            made = made.replace(parameter + "::", value + "::")
        yield f"DO $script$ BEGIN EXECUTE (\n{made}\n); END $script$;"
