"""A client that sends exact bytes and reads answers exactly; curl and client libraries normalise too much.

    async with RawClient(port) as client:
        answer = await client.ask(request("POST", "/orders", [("Idempotency-Key", "k1")], b"{}"))
        assert (answer.status, answer.body) == (201, b"made")

Keep-alive is the normal case; for pipelining, `send` several requests, then `read_answer` as often. `hang_up`, `reset`
and `half_close` end the connection in three ways.
"""

import asyncio
import socket
import ssl as ssl_module
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

PATIENCE_SECONDS = 15.0
_LIMIT_BYTES = 1 << 20

Lines = Sequence[tuple[bytes | str, bytes | str]]


def request(
    method: str | bytes,
    target: str | bytes,
    headers: Lines = (),
    body: bytes | None = None,
    *,
    host: str | None = "gateway.test",
    chunks: Sequence[bytes] | None = None,
) -> bytes:
    """Return a request's bytes: a Host line unless `host` is None, then `headers` as given, then one framing header
    for `body` (Content-Length) or `chunks`.
    """
    lines = [_bytes(method) + b" " + _bytes(target) + b" HTTP/1.1"]
    if host is not None:
        lines.append(b"Host: " + host.encode())
    lines += [_bytes(name) + b": " + _bytes(value) for name, value in headers]
    if chunks is not None:
        lines.append(b"Transfer-Encoding: chunked")
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    elif body is not None:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + (body or b"")


@dataclass(slots=True)
class RawAnswer:
    """A final answer. `head` is as received, with the empty line; `raw_body` has the chunks' framing, `body` has not.

    `interim`: heads of 1xx answers before it. `framing`: how the body's end was told: none, length, chunked, close.
    """

    head: bytes
    body: bytes = b""
    raw_body: bytes = b""
    framing: str = "none"
    interim: list[bytes] = field(default_factory=list)

    @property
    def status_line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    @property
    def status(self) -> int:
        return int(self.status_line.split(b" ")[1])

    @property
    def lines(self) -> list[bytes]:
        """Header lines, exactly and in order."""
        return self.head.split(b"\r\n")[1:-2]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(name, value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in self.lines)]

    def values(self, name: str) -> list[bytes]:
        """All values of a header, by its name in any case."""
        return [value for key, value in self.headers if key.decode("latin-1").lower() == name.lower()]

    def value(self, name: str) -> str | None:
        """The value of a header that occurs at most once, as text."""
        values = self.values(name)
        assert len(values) <= 1, (name, values)
        return values[0].decode("latin-1") if values else None


class RawClient:
    """One connection. Every wait is bounded by `PATIENCE_SECONDS`."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __init__(self, port: int, host: str = "127.0.0.1", *, ssl: ssl_module.SSLContext | None = None) -> None:
        self.host = host
        self.port = port
        self.ssl = ssl

    async def __aenter__(self) -> Self:
        async with asyncio.timeout(PATIENCE_SECONDS):
            self.reader, self.writer = await asyncio.open_connection(
                self.host, self.port, ssl=self.ssl, limit=_LIMIT_BYTES
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.hang_up()

    async def send(self, data: bytes) -> None:
        """Write exactly these bytes."""
        self.writer.write(data)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.writer.drain()

    async def ask(self, data: bytes) -> RawAnswer:
        """Send, and read the final answer to it."""
        await self.send(data)
        return await self.read_answer(head_only=data.startswith(b"HEAD "))

    async def read_head(self) -> RawAnswer:
        """Read up to the end of the final head."""
        interim: list[bytes] = []
        while True:
            async with asyncio.timeout(PATIENCE_SECONDS):
                head = await self.reader.readuntil(b"\r\n\r\n")
            answer = RawAnswer(head, interim=interim)
            if answer.status >= 200 or answer.status == 101:
                return answer
            interim.append(head)

    async def read_answer(self, *, head_only: bool = False) -> RawAnswer:
        """Read a final answer to its end. Raises `asyncio.IncompleteReadError` when it is cut off."""
        answer = await self.read_head()
        if head_only or answer.status in (101, 204, 304):
            return answer
        if answer.values("Transfer-Encoding"):
            answer.framing = "chunked"
            while piece := await self.read_chunk(answer):
                answer.body += piece
        elif lengths := answer.values("Content-Length"):
            assert len(lengths) == 1, answer.head
            answer.framing = "length"
            async with asyncio.timeout(PATIENCE_SECONDS):
                answer.body = answer.raw_body = await self.reader.readexactly(int(lengths[0]))
        else:
            answer.framing = "close"
            async with asyncio.timeout(PATIENCE_SECONDS):
                answer.body = answer.raw_body = await self.reader.read(-1)
        return answer

    async def read_chunk(self, answer: RawAnswer) -> bytes:
        """Read one chunk of a streamed answer; b"" for the last one."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            line = await self.reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            data = await self.reader.readexactly(size)
            end = await self.reader.readuntil(b"\r\n")
            answer.raw_body += line + data + end
            while size == 0 and end != b"\r\n":  # trailers
                end = await self.reader.readuntil(b"\r\n")
                answer.raw_body += end
        return data

    async def read_to_end(self) -> bytes:
        """Read whatever comes until the other side closes."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.reader.read(-1)

    async def is_closed(self) -> bool:
        """Wait for the other side's close; False if a byte comes instead."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            try:
                return not await self.reader.read(1)
            except ConnectionError:
                return True

    def half_close(self) -> None:
        """Send FIN and go on reading."""
        self.writer.write_eof()

    async def hang_up(self) -> None:
        """Close (FIN); idempotent."""
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (ConnectionError, ssl_module.SSLError):
            return

    async def reset(self) -> None:
        """Close with RST."""
        handle = self.writer.get_extra_info("socket")
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
        await self.hang_up()


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1")
