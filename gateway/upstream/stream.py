"""The rest of an answer that is relayed as it comes. Bounded: what nobody reads is left to the upstream's sender."""

import asyncio
from typing import Protocol

HIGH_WATER_BYTES = 64 * 1024


class Source(Protocol):
    """Where the pieces come from."""

    def pause(self) -> None:
        """Stop reading; idempotent."""

    def resume(self) -> None:
        """Read on; idempotent."""

    def hang_up(self) -> None:
        """Close the connection."""


class ReplyStream:
    """An `exchange.BodyStream`. It starts paused, with what was read before; `read` lets the source go on."""

    __slots__ = ("_cause", "_ended", "_pieces", "_size", "_source", "_waiter")

    def __init__(self, source: Source, pieces: list[bytes]) -> None:
        self._source: Source | None = source
        self._pieces = pieces
        self._size = sum(map(len, pieces))
        self._ended = False
        self._cause = ""
        self._waiter: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """Return all that has come since the last call, waiting for it if need be; b"" at the complete end.

        Raises `ConnectionError`, its text a proxy error type of RFC 9209, when the upstream broke off or `abort` was
        called. One reader at a time.
        """
        while not self._pieces:
            if self._cause:
                raise ConnectionError(self._cause)
            if self._ended or self._source is None:
                return b""
            self._source.resume()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces = self._pieces
        self._pieces, self._size = [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def abort(self) -> None:
        """Close the upstream connection; idempotent."""
        if self._source is not None:
            self._source.hang_up()

    # ---- for the connection -----------------------------------------------------------------------------------

    def push(self, pieces: list[bytes]) -> None:
        """Add what has just been read."""
        if pieces:
            self._pieces += pieces
            self._size += sum(map(len, pieces))
            if self._size >= HIGH_WATER_BYTES and self._source is not None:
                self._source.pause()
            self._wake()

    def finish(self) -> None:
        """Nothing more will come, and nothing is missing."""
        self._ended = True
        self._source = None
        self._wake()

    def fail(self, cause: str) -> None:
        """Nothing more will come, and something is missing."""
        self._cause = cause
        self._source = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
