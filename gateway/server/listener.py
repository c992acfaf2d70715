"""The listening side over aiohttp's low-level server: a small inbound value, and answers written as bytes.

aiohttp parses heads and frames bodies; nothing of its request and response classes is used, because each costs more
than the whole of a replay. What a request means is `handler`'s business.
"""

import asyncio
import ipaddress
import select
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.http_writer import StreamWriter
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler, RequestPayloadError

from gateway.wire import Peer

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

AT_ONCE_BYTES = 64 * 1024
"""What is written before looking whether the client takes it."""

_AHEAD_REQUESTS = 4
"""Requests that are read while an earlier one of the same connection is handled; aiohttp's own bound is 32."""

_AHEAD_BYTES = 64 * 1024
"""What of a body is read before somebody takes it: reading stops at twice as much."""

_PROBE_SECONDS = 10
"""How long a half-closed connection is quiet before its client is asked whether it is still there."""


class Inbound:
    """A request as it came in; what aiohttp's `RequestHandler` expects of one, and no more."""

    __slots__ = ("_task", "connection", "message", "on_gone", "payload", "writer")

    def __init__(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        connection: "Connection",
        writer: StreamWriter,
        task: "asyncio.Task[None]",
    ) -> None:
        self.message = message
        self.payload = payload
        self.connection = connection
        self.writer = writer
        self.on_gone: Callable[[], object] | None = None
        self._task: asyncio.Task[None] | None = task  # aiohttp clears it
        connection.begin(self)

    async def write(self, data: bytes) -> None:
        """Write as fast as the client takes it, also what small answers to pipelined requests add up to.

        Raises `ConnectionError` when it has left, or has taken nothing for too long.
        """
        writer, connection = self.writer, self.connection
        transport = connection.transport
        if len(data) <= AT_ONCE_BYTES and transport is not None and not transport.is_closing():
            writer.output_size += len(data)
            transport.write(data)  # what the writer does, without its question how bodies are framed
            if connection.writing_paused:
                await connection.wait_until_taken(writer)
            return
        whole = data if len(data) <= AT_ONCE_BYTES else memoryview(data)
        for at in range(0, len(data), AT_ONCE_BYTES):
            await writer.write(whole[at : at + AT_ONCE_BYTES], drain=False)
            if connection.writing_paused:
                await connection.wait_until_taken(writer)

    def break_off(self, cause: BaseException) -> None:
        """The body will not be complete: tell whoever reads it. One that is complete already stays readable."""
        if not self.payload.is_eof():
            self.payload.set_exception(cause)

    def _finish(self) -> None:
        """Called by aiohttp before the last of an answer is written."""
        self.connection.end(self)

    def _cancel(self, cause: BaseException) -> None:
        """Called by aiohttp when the client's connection is lost while the handler runs."""
        self.break_off(cause)
        if self.on_gone is not None:
            self.on_gone()


class Ready:
    """An answer as bytes, in the shape that aiohttp finishes a request with."""

    __slots__ = ("data", "keep_alive")

    def __init__(self, data: bytes, *, keep_alive: bool) -> None:
        self.data = data
        self.keep_alive = keep_alive

    async def prepare(self, inbound: Inbound) -> None:
        """Write head and body."""
        if self.data:
            await inbound.write(self.data)

    async def write_eof(self) -> None:
        """Nothing is left to write."""


class Gone:
    """No answer: the client left, or what was begun cannot be ended properly. The connection is closed."""

    __slots__ = ()
    keep_alive = False

    async def prepare(self, inbound: Inbound) -> None:
        """Break the connection off, so that no client takes the part it has for the whole."""
        inbound.connection.force_close()
        raise ConnectionResetError

    async def write_eof(self) -> None:
        """Never reached."""


Answerable = Ready | Gone
Handler = Callable[[Inbound], Awaitable[Answerable]]


class Connection(RequestHandler):
    """A client's connection: knows its peer, answers what cannot be parsed with a problem, and a client that has closed
    its sending half with what it asked for before.
    """

    def __init__(self, listener: "Listener", **settings: Any) -> None:
        super().__init__(listener, **settings)
        self._max_msg_queue_size = _AHEAD_REQUESTS
        self._msg_queue_resume_size = _AHEAD_REQUESTS // 2
        self._listener = listener
        self._inbound: Inbound | None = None
        self._half_closed = False
        self.peer = Peer(b"", trusted=False)

    @property
    def is_gone(self) -> bool:
        """Whether the client's connection was lost."""
        return self.transport is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note who is there."""
        super().connection_made(transport)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            address = str(name[0])
            self.peer = Peer(address.encode("ascii"), trusted=self._listener.trusts(address))

    def begin(self, inbound: Inbound) -> None:
        """Note the request that is handled now; after half a close the last one ends the connection."""
        self._inbound = inbound
        if self._half_closed and not self._messages:
            self.close()

    def end(self, inbound: Inbound) -> None:
        """Note that a request is answered. A body that broke off has no rest that is worth waiting for."""
        self._inbound = None
        if inbound.payload.exception() is not None:
            inbound.payload.feed_eof()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Parse on after a pause. aiohttp asks after each piece of a body that was read, also where nothing paused."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    async def wait_until_taken(self, writer: StreamWriter) -> None:
        """Wait until the client has taken most of what was written; one that takes nothing for too long is cut off."""
        try:
            async with asyncio.timeout(self._listener.stall_seconds):
                await writer.drain()
        except TimeoutError:
            if self.transport is not None:
                self.transport.abort()  # closing would wait for what is written
            raise ConnectionResetError("The client takes nothing.") from None

    def data_received(self, data: bytes) -> None:
        """Parse on. aiohttp queues the refusal of what cannot be parsed, but leaves the body before it without end."""
        super().data_received(data)
        if self._messages and not isinstance(self._messages[-1][0], RawRequestMessage):
            self._break_off(RequestPayloadError("The framing is broken."))

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp never keeps it
        """Keep the connection for the answers that are owed (RFC 9112, section 9.6), not for anything else."""
        if self._inbound is None and not self._messages:
            return False
        self._half_closed = True
        self._break_off(ConnectionResetError("The client closed within a body."))
        if not self._messages:
            self.close()
        self._listener.watch(self)
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        """Let go of what was being handled; aiohttp tells it if it had begun."""
        super().connection_lost(exc)
        if self._inbound is not None:
            self._inbound.break_off(exc or ConnectionResetError("The client left."))
            self._inbound = None
        self._listener.forget(self)

    def _break_off(self, cause: BaseException) -> None:
        """Only the last body that came can be incomplete."""
        if self._inbound is not None:
            self._inbound.break_off(cause)
        for _, payload in self._messages:
            if not payload.is_eof():
                payload.set_exception(cause)

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> Any:
        """Answer a request that the parser refused (status 400), or on which the gateway failed (500)."""
        del message
        if request.writer.output_size > 0:
            raise ConnectionError
        return Ready(self._listener.refuse(status, exc), keep_alive=False)


class Listener(web.Server):
    """Makes a `Connection` for each client. `refuse(status, cause)` gives the bytes of an answer to a bad head;
    `stall_seconds`: how long a client may leave what is written for it.
    """

    def __init__(
        self,
        handler: Handler,
        refuse: Callable[[int, BaseException | None], bytes],
        trusted: Sequence[Network],
        head_limit_bytes: int,
        stall_seconds: float,
    ) -> None:
        super().__init__(handler, request_factory=Inbound)  # type: ignore[arg-type]
        self.stall_seconds = stall_seconds
        self.refuse = refuse
        self._trusted = trusted
        self._settings = {
            "access_log": None,
            "auto_decompress": False,
            "max_line_size": head_limit_bytes,
            "max_field_size": head_limit_bytes,
            "max_headers": 256,
            "read_bufsize": _AHEAD_BYTES,
            "lingering_time": 2.0,
        }

        self._half_closed: dict[Connection, select.poll] = {}

    def watch(self, connection: Connection) -> None:
        """See to it that a client which closed one half and then leaves is noticed: the event loop reads no more.

        A reset is seen at the next `sweep`. A client that left quietly is asked by keep-alive probes.
        """
        transport = connection.transport
        if transport is None:
            return
        handle = transport.get_extra_info("socket")
        poll = select.poll()
        poll.register(handle.fileno(), 0)  # errors and the end of both halves are always told
        self._half_closed[connection] = poll
        for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            if hasattr(socket, option):
                handle.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), _PROBE_SECONDS)

    def forget(self, connection: Connection) -> None:
        """Watch a connection no more; it is closed."""
        self._half_closed.pop(connection, None)

    def sweep(self) -> None:
        """Close what is left of clients that have gone. Called a few times a second."""
        for connection, poll in list(self._half_closed.items()):
            if poll.poll(0) and connection.transport is not None:
                connection.transport.abort()

    def trusts(self, address: str) -> bool:
        """Return whether a peer is one of `trusted_proxies`."""
        if not self._trusted:
            return False
        try:
            ip = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        return any(ip in network for network in self._trusted)

    def __call__(self) -> RequestHandler:
        """Make the protocol of a new connection."""
        return Connection(self, loop=self._loop, **self._settings)


__all__ = [
    "Answerable",
    "Connection",
    "Gone",
    "Handler",
    "Inbound",
    "LineTooLong",
    "Listener",
    "Ready",
    "RequestPayloadError",
]
