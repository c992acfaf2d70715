"""A process of our own, for the demo, the benchmark and the tests: started, waited for until ready, always ended.

Its output goes to a file, so that nobody has to drain a pipe and the last words of a dead process can be shown.
"""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

_Found = TypeVar("_Found")


class ChildFailedError(Exception):
    """A process ended, or said nothing in time, before it was ready. Its text ends with what the process said."""


class Child:
    """A running process, in a session of its own: a Ctrl-C at the terminal reaches its parent only, which ends it."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self.process = subprocess.Popen(  # noqa: S603 -- our own command line
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def output(self) -> str:
        """Return what it has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, says: str, within_seconds: float = 30.0) -> re.Match[str]:
        """Wait until its output matches the pattern `says`. Raises ChildFailedError if it ends or time runs out."""
        return self._wait(lambda: re.search(says, self.output()), within_seconds)

    def wait_until_listening(self, host: str, port: int, within_seconds: float = 30.0) -> None:
        """Wait until it accepts connections. Raises ChildFailedError if it ends or time runs out."""

        def accepts() -> bool | None:
            try:
                socket.create_connection((host, port), timeout=1).close()
            except OSError:
                return None
            return True

        self._wait(accepts, within_seconds)

    def check(self, *, late: bool = False) -> None:
        """Raise ChildFailedError if it has ended, or if the caller says that it is `late`."""
        if self.process.poll() is None and not late:
            return
        why = "was not ready in time" if late else f"ended by itself (exit code {self.process.returncode})"
        last_words = "\n".join(self.output().splitlines()[-8:])
        raise ChildFailedError(f"The {self.name} {why}. Its last words, in {self.log}:\n{last_words}".rstrip())

    def _wait(self, ready: Callable[[], _Found | None], within_seconds: float) -> _Found:
        deadline = time.monotonic() + within_seconds
        while True:
            ended = self.process.poll() is not None
            if (found := ready()) is not None:
                return found
            if ended or time.monotonic() > deadline:
                self.check(late=not ended)
            time.sleep(0.02)

    def stop(self, within_seconds: float = 10.0) -> int:
        """End it with SIGTERM, or SIGKILL when that takes too long. Returns its exit code; harmless when ended."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(within_seconds)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End it with SIGKILL, as a crash would. Returns its exit code; harmless when ended."""
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
