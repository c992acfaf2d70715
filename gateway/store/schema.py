"""Which schema this code can use. No SQL beyond asking for the schema's own row."""

import re
from functools import cache
from hashlib import sha256
from importlib.resources import files

import asyncpg
import msgspec

from gateway.errors import SchemaError, StoreError
from gateway.store.sql import query


class Migration(msgspec.Struct, frozen=True):
    """One forward-only file: `version` is the number in its name, `checksum` SHA-256 of its text in hex."""

    version: int
    name: str
    text: str
    checksum: str


@cache
def migrations() -> tuple[Migration, ...]:
    """Return the migrations that this code knows, oldest first."""
    found = []
    for file in files("gateway.store").joinpath("migrations").iterdir():
        if match := re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name):
            text = file.read_text(encoding="utf-8")
            found.append(Migration(int(match[1]), match[2], text, sha256(text.encode()).hexdigest()))
    return tuple(sorted(found, key=lambda migration: migration.version))


def known_version() -> int:
    """Return the version of the schema that this code was written for."""
    return migrations()[-1].version


async def check(connection: asyncpg.Connection, schema: str) -> int:
    """Return the schema's epoch if this code may use it.

    A schema newer than this code is fine as long as it says so by `compatible_since`: many processes share a database
    and upgrade in their own time. Raises `SchemaError`, whose text says which command mends it.
    """
    try:
        row = await connection.fetchrow(query("schema", schema))
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        raise SchemaError(
            f"The database has no schema {schema!r} of the gateway: "
            f"run `idempotency-gateway migrate --schema {schema}`."
        ) from None
    except asyncpg.InsufficientPrivilegeError:
        raise SchemaError(
            f"The store's role may not read the schema {schema!r}: grant it USAGE on the schema and SELECT, INSERT, "
            "UPDATE, DELETE on its tables."
        ) from None
    if row is None:
        raise SchemaError(
            f"The table idempotency_schema in {schema!r} is empty: run `idempotency-gateway migrate --schema {schema}`."
        )
    known = known_version()
    if row["version"] < known:
        raise SchemaError(
            f"The schema {schema!r} is at version {row['version']} and this gateway needs {known}: "
            f"run `idempotency-gateway migrate --schema {schema}`."
        )
    if row["compatible_since"] > known:
        raise SchemaError(
            f"The schema {schema!r} is at version {row['version']}, which a gateway that knows only {known} may not "
            "use: upgrade this gateway."
        )
    return int(row["epoch"])


__all__ = ["Migration", "SchemaError", "StoreError", "check", "known_version", "migrations"]
