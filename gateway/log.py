"""The log adapter: one JSON line for each protected request and each event, on standard output.

Lines are gathered and written together, by `flush`, a few times a second or when many wait. No key, scope, token or
body is ever in a line: callers have none to give.
"""

import sys
import time
from typing import BinaryIO, Literal

import msgspec

_FLUSH_AT_LINES = 64
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

Level = Literal["debug", "info", "warning", "error"]


class RequestLine(msgspec.Struct, frozen=True, gc=False):
    """One protected request, on the first run as on a replay. Times are milliseconds, sizes bytes."""

    ts: str
    level: str
    event: str
    service: str
    route: str
    record: str
    request_id: str
    outcome: str
    reason: str
    code: str
    status: int
    attempt: int
    took_over: str
    upstream: str
    upstream_ms: float
    overhead_ms: float
    wait_ms: float
    sent: bool
    bytes_in: int
    bytes_out: int
    client: str
    user_agent: str


class Log:
    """Writes lines to `out`, standard output unless given."""

    def __init__(self, service: str, level: str = "info", out: BinaryIO | None = None) -> None:
        self.service = service
        self._threshold = _LEVELS[level]
        self._out = out if out is not None else sys.stdout.buffer
        self._lines: list[bytes] = []
        self._encode = msgspec.json.Encoder().encode
        self._second = -1
        self._second_text = ""

    def timestamp(self, unix: float) -> str:
        """Return an instant as RFC 3339 with milliseconds, UTC."""
        second = int(unix)
        if second != self._second:
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime(second))
        return f"{self._second_text}{int((unix - second) * 1000):03d}Z"

    def request(self, line: RequestLine) -> None:
        """Write a request's line; never sampled."""
        self._add(self._encode(line))

    def event(self, name: str, level: Level = "info", **facts: object) -> None:
        """Write something rare and interesting."""
        if _LEVELS[level] >= self._threshold:
            now = self.timestamp(time.time())
            facts = {name: _unicode(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
            self._add(self._encode({"ts": now, "level": level, "event": name, "service": self.service, **facts}))

    def flush(self) -> None:
        """Write what waits. A reader that went away loses the lines, and nothing else."""
        if not self._lines:
            return
        text = b"\n".join(self._lines) + b"\n"
        self._lines.clear()
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):
            return

    def _add(self, line: bytes) -> None:
        self._lines.append(line)
        if len(self._lines) >= _FLUSH_AT_LINES:
            self.flush()


def _unicode(text: str) -> str:
    """An error's text may quote bytes from the wire that are no UTF-8; they must not stop the line."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
