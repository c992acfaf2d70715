"""A receiver that remembers, an upstream with short times, and both event loops."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop

from gateway.model import ReplyHead
from gateway.upstream import HttpUpstream
from tests.support import RawUpstream

PATIENCE_SECONDS = 10
HEAD = b"POST /orders HTTP/1.1\r\nHost: up.test\r\nIdempotency-Key: k1\r\n"
LIMIT = 100_000


class Failures(list[tuple[str, str, bool, bool]]):
    """An `UpstreamObserver` that keeps what it is told."""

    def failure(self, upstream: str, cause: str, sent: bool, reused: bool) -> None:
        self.append((upstream, cause, sent, reused))


class Waiting:
    """An `exchange.Receiver`; `outcome()` waits for the one callback. A second callback is an error."""

    def __init__(self, trusts: bool = True) -> None:
        self.trusts = trusts
        self.asked = 0
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def may_send(self) -> bool:
        self.asked += 1
        return self.trusts

    def on_reply(self, head: ReplyHead, body: bytes) -> None:
        self.done.set_result((head, body))

    def on_stream(self, head: ReplyHead, stream: Any) -> None:
        self.done.set_result((head, stream))

    def on_failure(self, failure: Any) -> None:
        self.done.set_result(failure)

    async def outcome(self) -> Any:
        return await asyncio.wait_for(self.done, PATIENCE_SECONDS)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Production runs on uvloop; asyncio's own loop closes and reports errors in another order."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def failures() -> Failures:
    return Failures()


@pytest.fixture
async def connect(failures: Failures) -> AsyncIterator[Callable[..., HttpUpstream]]:
    """Make an `HttpUpstream` for a `RawUpstream` or a port; closed afterwards, and nothing may be left."""
    made: list[HttpUpstream] = []

    def make(to: RawUpstream | int, **settings: Any) -> HttpUpstream:
        values: dict[str, Any] = {
            "host": "127.0.0.1", "port": to if isinstance(to, int) else to.port, "ssl": None, "server_name": None,
            "connect_timeout_ms": 2000, "max_connections": 8, "keep_alive": True, "idle_timeout_ms": 10_000,
            "head_limit_bytes": 32 * 1024, "observer": failures,
        }  # fmt: skip
        made.append(HttpUpstream("ledger", **(values | settings)))
        return made[-1]

    yield make
    for upstream in made:
        await asyncio.wait_for(upstream.close(), PATIENCE_SECONDS)
        assert (upstream.idle, upstream.active, upstream.waiting) == (0, 0, 0)


async def ask(upstream: HttpUpstream, head: bytes = HEAD, body: bytes = b"", limit: int = LIMIT) -> Any:
    """Send one request and return its outcome."""
    receiver = Waiting()
    upstream.send(head, body, limit, receiver)
    return await receiver.outcome()


async def read_all(stream: Any) -> bytes:
    """Read a stream to its end."""
    whole = b""
    while piece := await asyncio.wait_for(stream.read(), PATIENCE_SECONDS):
        whole += piece
    return whole


Connect = Callable[..., HttpUpstream]
Ask = Callable[..., Awaitable[Any]]
