"""The listening side over aiohttp's low-level server: a small inbound value, and answers written as bytes.

aiohttp parses heads and frames bodies; nothing of its request and response classes is used, because each costs more
than the whole of a replay. What a request means is `handler`'s business.
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from gateway.wire import Peer

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Inbound:
    """A request as it came in; what aiohttp's `RequestHandler` expects of one, and no more."""

    __slots__ = ("_task", "connection", "message", "on_gone", "payload", "writer")

    def __init__(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        connection: "Connection",
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> None:
        self.message = message
        self.payload = payload
        self.connection = connection
        self.writer = writer
        self.on_gone: Callable[[], object] | None = None
        self._task: asyncio.Task[None] | None = task  # aiohttp clears it

    def _finish(self) -> None:
        """Called by aiohttp before an answer is written."""

    def _cancel(self, cause: BaseException) -> None:
        """Called by aiohttp when the client's connection is lost while the handler runs."""
        self.payload.set_exception(cause)
        if self.on_gone is not None:
            self.on_gone()


class Ready:
    """An answer as bytes, in the shape that aiohttp finishes a request with."""

    __slots__ = ("data", "keep_alive")

    def __init__(self, data: bytes, *, keep_alive: bool) -> None:
        self.data = data
        self.keep_alive = keep_alive

    async def prepare(self, inbound: Inbound) -> None:
        """Write head and body at once."""
        if self.data:
            await inbound.writer.write(self.data)

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
    """A client's connection: knows its peer, and answers what cannot be parsed with a problem."""

    def __init__(self, listener: "Listener", **settings: Any) -> None:
        super().__init__(listener, **settings)
        self._listener = listener
        self.peer = Peer(b"", trusted=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note who is there."""
        super().connection_made(transport)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            address = str(name[0])
            self.peer = Peer(address.encode("ascii"), trusted=self._listener.trusts(address))

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> Any:
        """Answer a request that the parser refused (status 400), or on which the gateway failed (500)."""
        del message
        if request.writer.output_size > 0:
            raise ConnectionError
        return Ready(self._listener.refuse(status, exc), keep_alive=False)


class Listener(web.Server):
    """Makes a `Connection` for each client. `refuse(status, cause)` gives the bytes of an answer to a bad head."""

    def __init__(
        self,
        handler: Handler,
        refuse: Callable[[int, BaseException | None], bytes],
        trusted: Sequence[Network],
        head_limit_bytes: int,
    ) -> None:
        super().__init__(handler, request_factory=Inbound)  # type: ignore[arg-type]
        self.refuse = refuse
        self._trusted = trusted
        self._settings = {
            "access_log": None,
            "auto_decompress": False,
            "max_line_size": head_limit_bytes,
            "max_field_size": head_limit_bytes,
            "max_headers": 256,
            "lingering_time": 2.0,
        }

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


__all__ = ["Answerable", "Connection", "Gone", "Handler", "Inbound", "LineTooLong", "Listener", "Ready"]
