"""Requests as they are read from a connection, with llhttp (RFC 9112). No clock, no socket.

llhttp is strict, and decides nothing alone: `wire.look` looks at every head again. Trailers are dropped. Reading never
stops by itself: `connection` looks at what waits, and reads no further while it is too much.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from gateway.model import Headers
from gateway.wire import Peer

HeadFault = Literal["malformed", "too-large"]

_UNCOUNTED_BYTES = 64
"""Method, version and line ends: `wire.look`, which has the last word on a head's size, counts the rest of it."""

_MOST_LINES = 256

_OPTIONAL_SPACE = b" \t"

_FRAMING = (b"content-length", b"transfer-encoding")


class BodyBroken(Exception):  # noqa: N818 -- a fact about the client, told by raising
    """The framing of a request's body is broken: where it ends will never be known."""


class Owner(Protocol):
    """What a request needs of the connection that it came on."""

    peer: Peer

    @property
    def is_gone(self) -> bool:
        """Whether the client's connection was lost."""

    def proceed(self) -> None:
        """Write `100 Continue`."""

    def wait(self) -> "asyncio.Future[None]":
        """Return the future of the next piece of a body, or of its end."""

    def taken(self) -> None:
        """Take note that a part of a body is not held here any more."""

    async def write(self, data: bytes) -> None:
        """Write as fast as the client takes it."""


class Inbound:
    """A request whose head has come. `headers`: in their order, names as sent, values without the space around them.

    `keep_alive`: whether another request may follow it. `is_read`: whether all of its body has come. `size`: bytes of
    its body that have come and were not taken. `begun`: whether something of its answer was written. `on_gone` is
    called when the client's connection is lost before the answer's end.
    """

    # What most requests never change stands here once, and not in each of them.
    is_read = False
    size = 0
    begun = False
    on_gone: Callable[[], object] | None = None
    _error: Exception | None = None
    _waiting: "asyncio.Future[None] | None" = None

    def __init__(  # noqa: PLR0917 -- naming the arguments costs each request something
        self, connection: Owner, method: bytes, target: bytes, headers: Headers, http11: bool, keep_alive: bool
    ) -> None:
        self.connection = connection
        self.method = method
        self.target = target
        self.headers = headers
        self.http11 = http11
        self.keep_alive = keep_alive
        self._pieces: list[bytes] = []

    def take(self) -> bytes:
        """Return what has come of the body and was not taken yet."""
        pieces, self._pieces, self.size = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read(self) -> bytes:
        """Return what has come of the body, or wait for some of it; b"" at its end. One reader at a time.

        Raises `ConnectionError` when the client left, `BodyBroken`, and `TimeoutError` when nothing came for too long.
        """
        while not self._pieces:
            if self.is_read:
                return b""
            if self._error is not None:
                raise self._error
            self._waiting = self.connection.wait()
            await self._waiting
        data = self.take()
        self.connection.taken()
        return data

    async def write(self, data: bytes) -> None:
        """Write a part of the answer as fast as the client takes it.

        Raises `ConnectionError` when it has left, or has taken nothing for too long.
        """
        self.begun = True
        await self.connection.write(data)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for more of the body."""
        return self._waiting is not None

    def push(self, piece: bytes) -> None:
        """Take in a piece of the body."""
        self._pieces.append(piece)
        self.size += len(piece)
        if self._waiting is not None:
            self._wake()

    def finish(self) -> None:
        """Take note that the body is complete."""
        self.is_read = True
        if self._waiting is not None:
            self._wake()

    def break_off(self, error: Exception) -> None:
        """Tell whoever reads that the body will not be complete. One that is complete stays readable."""
        if not self.is_read and self._error is None:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class RequestReader:
    """Reads one request after another.

    `ready`: requests whose head has come and that nobody has begun with. `open`: the request whose body is not
    complete. `ended`: nothing more is read, because of `fault` (a head that is no request), a broken body, a client
    that has ended, or a wish to upgrade.
    """

    __slots__ = (
        "_connection",
        "_headers",
        "_limit",
        "_parser",
        "_stops",
        "_target",
        "_unclaimed",
        "ended",
        "fault",
        "open",
        "ready",
    )

    def __init__(self, connection: Owner, head_limit_bytes: int) -> None:
        self._connection = connection
        self._limit = head_limit_bytes + _UNCOUNTED_BYTES
        self._parser = HttpRequestParser(self)
        self._target = b""
        self._headers: Headers = []
        self._unclaimed = 0  # bytes since the last head or piece of a body: bounds heads, chunk extensions, trailers
        self._stops = False  # llhttp stops behind this head
        self.ready: deque[Inbound] = deque()
        self.open: Inbound | None = None
        self.fault: HeadFault | None = None
        self.ended = False

    @property
    def begun(self) -> bool:
        """Whether a head has begun that is not complete."""
        return self._unclaimed > 0 and self.open is None

    def feed(self, data: bytes | memoryview) -> None:
        """Read on."""
        self._unclaimed += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as stop:
            self._ignore_upgrade(memoryview(data)[stop.args[0] :])
        except HttpParserError:
            self._fail("malformed")
        else:
            if self._unclaimed > self._limit:
                self._fail("too-large")

    def break_off(self, error: Exception) -> None:
        """Read no more; a body that is not complete will not be."""
        self.ended = True
        if self.open is not None:
            self.open.break_off(error)

    def close(self) -> None:
        """Let go of what refers back to this reader, so that nothing is left for the garbage collector."""
        self.ready.clear()
        self.open = None
        del self._parser, self._connection

    def _ignore_upgrade(self, rest: memoryview) -> None:
        """Read the body of a request that wishes to upgrade. No upgrade is made, but llhttp takes what follows such a
        head for another protocol: a new parser is told how the body is framed. Nothing is read behind it.
        """
        headers = self.open.headers if self.open is not None else []
        framing = [b"%b: %b\r\n" % line for line in headers if line[0].lower() in _FRAMING]
        self._parser = HttpRequestParser(_LastBody(self))
        self.feed(b"POST / HTTP/1.1\r\nConnection: close\r\n%b\r\n" % b"".join(framing))
        if rest and not self.ended:
            self.feed(rest)

    def _fail(self, fault: HeadFault) -> None:
        if self.ended:
            return
        if self.open is not None:
            self.break_off(BodyBroken())
            return
        self.ended = True
        self.fault = self.fault or fault

    # ---- what llhttp calls ------------------------------------------------------------------------------------

    def on_url(self, part: bytes) -> None:
        self._target += part  # in pieces when it crosses the border of two reads

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value.rstrip(_OPTIONAL_SPACE)))

    def on_headers_complete(self) -> None:
        parser, headers, version = self._parser, self._headers, self._parser.get_http_version()
        method = parser.get_method()
        if len(headers) > _MOST_LINES:
            self.fault = "too-large"
        elif method == b"CONNECT" or version not in {"1.1", "1.0"}:
            self.fault = "malformed"
        if self.fault is not None:
            raise ValueError(self.fault)  # so that llhttp stops here
        self._stops = parser.should_upgrade()
        keep_alive = parser.should_keep_alive() and not self._stops
        self.open = inbound = Inbound(self._connection, method, self._target, headers, version == "1.1", keep_alive)
        self.ready.append(inbound)
        self._target = b""
        self._headers = []
        self._unclaimed = 0

    def on_body(self, piece: bytes) -> None:
        self._unclaimed = 0
        if self.open is not None:
            self.open.push(piece)

    def on_message_complete(self) -> None:
        self._unclaimed = 0
        if self._stops:
            self._stops = False
            return
        inbound, self.open = self.open, None
        if inbound is not None:
            inbound.finish()
        if self._headers:
            self._headers = []  # trailers


class _LastBody:
    """What llhttp calls for the body of a request behind which nothing is read."""

    def __init__(self, reader: RequestReader) -> None:
        self._reader = reader
        self.on_body = reader.on_body

    def on_message_complete(self) -> None:
        self._reader.on_message_complete()
        self._reader.ended = True
