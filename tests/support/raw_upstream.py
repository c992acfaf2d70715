"""An upstream that logs exact bytes and plays exact bytes.

    async with RawUpstream(reply(201, b"made")) as up:               # the same for every request
        ...
        assert up.executions[("/orders", "k1")] == 1                 # assert on this first
        assert up.requests[0].head == b"POST /orders HTTP/1.1\r\n..."

    RawUpstream([play(b"HTTP/1.1 201 Created\r\nContent-L"), reply(200)])    # in order, the last for the rest
    RawUpstream({"/slow": then(wait_for(event), reply(200)), "*": reply(404)})   # by path
    RawUpstream(script)                                              # async def script(turn: Turn) -> None

Actions: `reply`, `chunked`, `play` (canned bytes), `close`, `reset`, `hang`, `wait_for(event)`, `endless`, and
`then(a, b)` to run them in order. A request *executes* when it has been read to its end, before its action runs;
`early(action)` runs its action on the head alone, without executing anything. After its actions the connection is
kept alive, unless one of them closed it or the request said `Connection: close`.
"""

import asyncio
import contextlib
import socket
import ssl as ssl_module
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

PATIENCE_SECONDS = 10.0  # a test that waits longer fails
_LIMIT_BYTES = 1 << 20


@dataclass(slots=True)
class Request:
    """One request as it came. `head` ends with the empty line; `raw_body` has the chunks' framing, `body` has not.

    Both are set when the request is complete, unless the upstream was told to `keep_bodies=False`; `body_bytes` always.
    """

    head: bytes
    connection: int  # 1, 2, ... in the order of accepting
    raw_body: bytes = b""
    body: bytes = b""
    body_bytes: int = 0
    complete: bool = False

    @property
    def line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    @property
    def method(self) -> str:
        return self.line.split(b" ", 1)[0].decode("latin-1")

    @property
    def target(self) -> bytes:
        return self.line.split(b" ", 1)[1].rsplit(b" ", 1)[0]

    @property
    def path(self) -> str:
        return self.target.split(b"?", 1)[0].decode("latin-1")

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.split(b"\r\n")[1:-2]
        return [(name, value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in lines)]

    def values(self, name: str) -> list[bytes]:
        """All values of a header, by its name in any case."""
        return [value for key, value in self.headers if key.decode("latin-1").lower() == name.lower()]

    @property
    def key(self) -> str:
        return b",".join(self.values("Idempotency-Key")).decode("latin-1")


class Turn:
    """One request and the connection to answer it on: what an action gets."""

    def __init__(
        self, upstream: "RawUpstream", request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.upstream = upstream
        self.request = request
        self.reader = reader
        self.writer = writer
        self.open = True

    async def send(self, data: bytes) -> None:
        """Write; blocks while the other side does not read."""
        self.writer.write(data)
        self.upstream.bytes_written += len(data)
        await self.writer.drain()

    def close(self) -> None:
        """Close after what was written (FIN)."""
        self.open = False
        self.writer.close()

    def reset(self) -> None:
        """Close with RST."""
        self.open = False
        linger_zero(self.writer)
        self.writer.transport.abort()

    async def read_body(self) -> None:
        """Read the request to its end, which executes it."""
        await self.upstream._read_body(self)


Action = Callable[[Turn], Awaitable[None]]
Script = Action | Sequence[Action] | Mapping[str, Action]


def linger_zero(writer: asyncio.StreamWriter) -> None:
    """Make the next close a reset."""
    handle = writer.get_extra_info("socket")
    handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# ---- actions ----------------------------------------------------------------------------------------------------


def play(data: bytes) -> Action:
    """Write these bytes and nothing else."""

    async def action(turn: Turn) -> None:
        await turn.send(data)

    return action


def reply(
    status: int = 200,
    body: bytes = b"",
    headers: Sequence[tuple[bytes | str, bytes | str]] = (),
    *,
    reason: bytes = b"Some Reason",
    close_after: bool = False,
) -> Action:
    """Write an answer with Content-Length (no body and no length on 204 and 304)."""
    lines = [b"HTTP/1.1 %d %b" % (status, reason)]
    lines += [_bytes(name) + b": " + _bytes(value) for name, value in headers]
    if status not in (204, 304):
        lines.append(b"Content-Length: %d" % len(body))
    if close_after:
        lines.append(b"Connection: close")
    answer = play(b"\r\n".join(lines) + b"\r\n\r\n" + body)
    return then(answer, close()) if close_after else answer


def chunked(
    pieces: Sequence[bytes],
    status: int = 200,
    headers: Sequence[tuple[bytes | str, bytes | str]] = (),
    *,
    end: bytes = b"0\r\n\r\n",
) -> Action:
    """Write an answer in chunks, each with a write of its own; `end=b""` leaves it unfinished."""

    async def action(turn: Turn) -> None:
        lines = [b"HTTP/1.1 %d Some Reason" % status, b"Transfer-Encoding: chunked"]
        lines += [_bytes(name) + b": " + _bytes(value) for name, value in headers]
        await turn.send(b"\r\n".join(lines) + b"\r\n\r\n")
        for piece in pieces:
            await turn.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        if end:
            await turn.send(end)

    return action


def endless(head: bytes, piece: bytes) -> Action:
    """Write a head, then the same piece until the other side goes away; blocks while it does not read."""

    async def action(turn: Turn) -> None:
        await turn.send(head)
        while turn.open and not turn.writer.is_closing():
            await turn.send(piece)

    return action


def close() -> Action:
    async def action(turn: Turn) -> None:
        turn.close()

    return action


def reset() -> Action:
    async def action(turn: Turn) -> None:
        turn.reset()

    return action


def hang() -> Action:
    """Answer nothing until the other side closes the connection."""

    async def action(turn: Turn) -> None:
        while await turn.reader.read(65536):
            pass
        turn.close()

    return action


def wait_for(event: asyncio.Event) -> Action:
    """Do nothing until the test sets the event."""

    async def action(turn: Turn) -> None:
        await event.wait()

    return action


def then(*actions: Action) -> Action:
    """One after the other, while the connection is open."""

    async def action(turn: Turn) -> None:
        for step in actions:
            if turn.open:
                await step(turn)

    return action


class early:  # noqa: N801 -- reads as the other actions do
    """Run an action as soon as the head has come; it may call `turn.read_body()` itself."""

    def __init__(self, action: Action) -> None:
        self.action = action

    async def __call__(self, turn: Turn) -> None:
        await self.action(turn)


def _bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1")


# ---- the server -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RawUpstream:
    """See the module. `connections` counts the accepted, `open_connections` those that live; everything waits on
    `changed`, so that tests wait for conditions (`until`) and never sleep.
    """

    script: Script
    host: str = "127.0.0.1"
    port: int = 0
    ssl: ssl_module.SSLContext | None = None
    keep_bodies: bool = True  # False: count them only, for uploads of hundreds of megabytes
    requests: list[Request] = field(default_factory=list)
    executions: Counter[tuple[str, str]] = field(default_factory=Counter)
    connections: int = 0
    open_connections: int = 0
    bytes_written: int = 0
    received: dict[int, bytearray] = field(default_factory=dict)  # by connection, also of requests that broke off
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self.host, self.port, limit=_LIMIT_BYTES, ssl=self.ssl)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_listening()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    async def stop_listening(self) -> None:
        """Refuse new connections from now on; those that are open stay."""
        if self._server is not None:
            self._server.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on this upstream's attributes holds."""
        async with asyncio.timeout(PATIENCE_SECONDS), self._changed:
            await self._changed.wait_for(condition)

    async def wait_for_requests(self, count: int) -> None:
        """Wait until so many requests have been read to their end."""
        await self.until(lambda: sum(request.complete for request in self.requests) >= count)

    async def wait_until_closed(self) -> None:
        """Wait until no connection is open."""
        await self.until(lambda: self.open_connections == 0)

    async def close_connections(self) -> None:
        """Close all open connections from this side, and wait until each has been closed here."""
        for writer in list(self._writers):
            writer.close()
        await self.wait_until_closed()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        self.connections += 1
        self.open_connections += 1
        number = self.connections
        self.received[number] = bytearray()
        await self._notify()
        try:
            await self._serve(number, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ssl_module.SSLError):
            pass  # the other side went away, or the test is over
        finally:
            writer.close()
            self._writers.discard(writer)
            self.open_connections -= 1
            with contextlib.suppress(asyncio.CancelledError):
                await self._notify()

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            self.received[number] += head
            request = Request(head, number)
            self.requests.append(request)
            await self._notify()
            turn = Turn(self, request, reader, writer)
            action = self._pick(request)
            if not isinstance(action, early):
                await self._read_body(turn)
            await action(turn)
            await self._notify()
            if not turn.open or request.values("Connection") == [b"close"] or not request.complete:
                return

    def _pick(self, request: Request) -> Action:
        script = self.script
        if isinstance(script, Mapping):
            return script.get(request.path) or script["*"]
        if isinstance(script, Sequence):
            return script[min(len(self.requests), len(script)) - 1]
        return script

    async def _read_body(self, turn: Turn) -> None:
        request, reader = turn.request, turn.reader
        received = self.received[request.connection]
        raw, body = bytearray(), bytearray()

        def keep(framing: bytes, data: bytes) -> None:
            request.body_bytes += len(data)
            if self.keep_bodies:
                body.extend(data)
                raw.extend(framing)
                raw.extend(data)
                received.extend(framing)
                received.extend(data)

        if request.values("Transfer-Encoding") == [b"chunked"]:
            size = -1
            while size:
                line = await reader.readuntil(b"\r\n")
                size = int(line, 16)
                keep(line, await reader.readexactly(size))
                keep(await reader.readexactly(2), b"")
        else:
            left = int((request.values("Content-Length") or [b"0"])[0])
            while left:
                piece = await reader.read(min(left, 1 << 18))
                if not piece:
                    raise asyncio.IncompleteReadError(b"", left)
                keep(b"", piece)
                left -= len(piece)
        request.raw_body, request.body = bytes(raw), bytes(body)
        request.complete = True
        self.executions[request.path, request.key] += 1
        await self._notify()
