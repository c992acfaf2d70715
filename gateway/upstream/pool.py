"""`HttpUpstream`: which connection carries which request, who waits for one, when an idle one is closed.

The freest connection is the one used last: the others grow old and are closed. A request that finds none free dials,
up to `max_connections`, and takes whichever comes first, the new connection or one that is given back. There is one
timer for all that wait or idle, none per request.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from ssl import SSLContext
from typing import Protocol

from gateway.exchange import BodyStream, Receiver
from gateway.model import NeverSent, ReplyHead
from gateway.upstream.answer import TERMINATED
from gateway.upstream.connection import Call, Connection
from gateway.upstream.dial import DialError, dial
from gateway.upstream.uploading import Opening, framing

_JOIN_BYTES = 64 * 1024  # up to here copying the body is cheaper than a second write
_CLOSE = b"Connection: close\r\n"
_now = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Seconds of the boot-time clock, which goes on while the machine sleeps."""


class UpstreamObserver(Protocol):
    """Who counts. Calls are cheap and never raise."""

    def failure(self, upstream: str, cause: str, sent: bool, reused: bool) -> None:
        """A request failed: `cause` is of RFC 9209, `sent` whether a byte was, `reused` on a kept-alive connection."""


class HttpUpstream:
    """An `exchange.Upstream`, and `open` for requests that are streamed. Belongs to the running event loop."""

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        *,
        ssl: SSLContext | None,
        server_name: str | None,
        connect_timeout_ms: int,
        max_connections: int,
        keep_alive: bool,
        idle_timeout_ms: int,
        head_limit_bytes: int,
        observer: UpstreamObserver,
    ) -> None:
        self.name = name
        self._host = host
        self._port = port
        self._ssl = ssl
        self._server_name = server_name
        self._connect_timeout = connect_timeout_ms / 1000
        self._max_connections = max_connections
        self._keep_alive = keep_alive
        self._idle_timeout = idle_timeout_ms / 1000
        self._head_limit_bytes = head_limit_bytes
        self._observer = observer
        self._connections: set[Connection] = set()
        self._closing: set[Connection] = set()  # discarded, their sockets not closed yet
        self._idle: deque[Connection] = deque()  # the last one was used last
        self._waiting: deque[Call] = deque()
        self._dials: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._closed = False
        self._all_lost: asyncio.Future[None] | None = None

    # ---- counts -----------------------------------------------------------------------------------------------

    @property
    def idle(self) -> int:
        """Connections that are open and free."""
        return len(self._idle)

    @property
    def active(self) -> int:
        """Connections that carry a request, and those being made."""
        return len(self._connections) - len(self._idle) + len(self._dials)

    @property
    def waiting(self) -> int:
        """Requests without a connection."""
        return len(self._waiting)

    # ---- requests ---------------------------------------------------------------------------------------------

    def send(self, head: bytes, body: bytes, limit_bytes: int, receiver: Receiver) -> Call:
        """Send one buffered request; see `exchange.Upstream.send`.

        `may_send` may be asked before this has returned, the other callbacks never come before.
        """
        if not self._keep_alive:
            head += _CLOSE
        size = len(body)
        if size <= _JOIN_BYTES:
            start, body = b"%bContent-Length: %d\r\n\r\n%b" % (head, size, body), b""
        else:
            start = b"%bContent-Length: %d\r\n\r\n" % (head, size)
        call = Call(self, start, body, limit_bytes, receiver, head.startswith(b"HEAD "))
        self._submit(call)
        return call

    async def open(
        self, head: bytes, body: AsyncIterator[bytes] | None, length: int | None, head_only: bool = False
    ) -> tuple[ReplyHead, BodyStream]:
        """Send one request, its body streamed, and return the final head and the rest of the answer, streamed.

        `head` as in `send`. With a `length` the body goes out under `Content-Length`, without one in chunks; without
        a body there is no framing header, or `Content-Length: 0` if `length` is 0. A final answer is returned at once,
        also while the body is still being written; writing stops when the answer is a refusal (4xx, 5xx) or complete.
        Raises `UpstreamFailed`; what `body` raises, then the connection is closed. Cancelling closes it too.
        """
        opening = Opening(body, length)
        start = head + (b"" if self._keep_alive else _CLOSE) + framing(body is not None, length)
        opening.call = call = Call(self, start, b"", -1, opening, head_only or head.startswith(b"HEAD "))
        call.unwritten = body is not None
        self._submit(call)
        try:
            return await opening.result
        except asyncio.CancelledError:
            call.abort()
            raise

    async def close(self) -> None:
        """Close everything: requests that wait were never sent, those under way have no reply."""
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        for task in self._dials:
            task.cancel()
        await asyncio.gather(*self._dials, return_exceptions=True)
        while self._waiting:
            self._refuse(self._waiting.popleft(), "destination_unavailable")
        for connection in list(self._connections):
            self.discard(connection)
        if self._closing:
            self._all_lost = asyncio.get_running_loop().create_future()
            await self._all_lost

    # ---- handing out ------------------------------------------------------------------------------------------

    def _submit(self, call: Call) -> None:
        idle = self._idle
        while idle:
            connection = idle.pop()
            if _now() < connection.idle_until and connection.is_usable():
                if not connection.carry(call):
                    idle.append(connection)
                return
            self.discard(connection)
        if self._closed:
            asyncio.get_running_loop().call_soon(self._refuse, call, "destination_unavailable")
            return
        call.deadline = _now() + self._connect_timeout
        self._waiting.append(call)
        self._wake_at(call.deadline)
        self._dial_for_waiting()

    def release(self, connection: Connection) -> None:
        """Take back a connection whose answer is complete: the one that waits longest gets it."""
        if self._closed or not self._keep_alive:
            self.discard(connection)
        elif not self._waiting:
            connection.idle_until = until = _now() + self._idle_timeout
            self._idle.append(connection)
            if until < self._alarm_at:
                self._wake_at(until)
        elif connection.is_usable():
            self._give(connection)
        else:
            self.discard(connection)

    def _give(self, connection: Connection) -> None:
        """Let a free connection carry the first request that may still be sent."""
        while self._waiting:
            if connection.carry(self._waiting.popleft()):
                return
        connection.idle_until = until = _now() + self._idle_timeout
        self._idle.append(connection)
        self._wake_at(until)

    def discard(self, connection: Connection) -> None:
        """Close a connection and make room for another; idempotent."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if not connection.gone:
            self._closing.add(connection)
            connection.close()
        if self._waiting:
            self._dial_for_waiting()

    def lost(self, connection: Connection) -> None:
        """Take note that a connection's socket is closed."""
        self._closing.discard(connection)
        if self._all_lost is not None and not self._closing and not self._all_lost.done():
            self._all_lost.set_result(None)

    # ---- dialling ---------------------------------------------------------------------------------------------

    def _dial_for_waiting(self) -> None:
        room = self._max_connections - len(self._connections) - len(self._dials)
        for call in self._waiting:
            if room <= 0 or self._closed:
                return
            if not call.dialled:
                call.dialled = True
                room -= 1
                task = asyncio.get_running_loop().create_task(self._dial(call))
                self._dials.add(task)
                task.add_done_callback(self._dials.discard)

    async def _dial(self, call: Call) -> None:
        """Make a connection because of `call`, which may be served by another before this one is there."""

        def factory() -> Connection:
            return Connection(self, self._head_limit_bytes)

        seconds = max(call.deadline - _now(), 0)
        try:
            connection = await dial(
                factory, self._host, self._port, tls=self._ssl, server_name=self._server_name, seconds=seconds
            )
        except DialError as error:
            self._end_dial(call, error.cause)
            return
        self._connections.add(connection)
        if connection.is_fresh():
            self._end_dial(call, None)
            self._give(connection)
        else:
            self.discard(connection)
            self._end_dial(call, TERMINATED)  # an overloaded service accepts, and closes before anything was sent

    def _end_dial(self, call: Call, cause: str | None) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._dials.discard(task)
        if cause is not None:
            if call in self._waiting:
                self._waiting.remove(call)
                self._refuse(call, cause)
            self._dial_for_waiting()

    # ---- not sending ------------------------------------------------------------------------------------------

    def withdraw(self, call: Call) -> None:
        """Let an aborted call leave the queue."""
        if call in self._waiting:
            self._waiting.remove(call)

    def failed(self, cause: str, *, sent: bool, reused: bool) -> None:
        """Count a failure."""
        self._observer.failure(self.name, cause, sent, reused)

    def _refuse(self, call: Call, cause: str) -> None:
        if call.receiver is not None:
            self.failed(cause, sent=False, reused=False)
            call.fail(NeverSent(cause))

    # ---- time -------------------------------------------------------------------------------------------------

    def _wake_at(self, when: float) -> None:
        """See to it that `_sweep` runs at `when`, or earlier."""
        if when < self._alarm_at and not self._closed:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_at = when
            self._alarm = asyncio.get_running_loop().call_later(max(when - _now(), 0), self._sweep)

    def _sweep(self) -> None:
        """Close what idled too long; refuse what waited too long for a free connection."""
        self._alarm, self._alarm_at = None, math.inf
        now = _now()
        while self._idle and self._idle[0].idle_until <= now:
            self.discard(self._idle[0])
        for call in [call for call in self._waiting if not call.dialled and call.deadline <= now]:
            self._waiting.remove(call)
            self._refuse(call, "connection_limit_reached")
        if self._idle:
            self._wake_at(self._idle[0].idle_until)
        deadlines = [call.deadline for call in self._waiting if not call.dialled]
        if deadlines:
            self._wake_at(min(deadlines))
