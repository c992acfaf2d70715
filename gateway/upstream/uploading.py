"""A request whose body is streamed, and whose answer is too: the path of everything that is not protected."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from gateway.errors import UpstreamFailed
from gateway.exchange import BodyStream
from gateway.model import NoReply, NotTrusted, ReplyHead, UpstreamFailure
from gateway.upstream.connection import Call


def framing(has_body: bool, length: int | None) -> bytes:
    """Return the one framing header that fits, and the empty line."""
    if has_body and length is None:
        return b"Transfer-Encoding: chunked\r\n\r\n"
    if length is not None:
        return b"Content-Length: %d\r\n\r\n" % length
    return b"\r\n"


class Opening:
    """The `exchange.Receiver` of a streamed request: turns callbacks into one awaited `result`, and writes the body."""

    def __init__(self, body: AsyncIterator[bytes] | None, length: int | None) -> None:
        self.result: asyncio.Future[tuple[ReplyHead, BodyStream]] = asyncio.get_running_loop().create_future()
        self.call: Call
        self._body = body
        self._length = length

    def may_send(self) -> bool:
        """Nothing is leased. The head is written next, the body after it."""
        if self._body is not None:
            self.call.upload = asyncio.get_running_loop().create_task(self._upload(self._body))
        return True

    def on_reply(self, head: ReplyHead, body: bytes) -> None:
        """Not called: a call with the limit -1 streams every answer."""
        raise AssertionError(head, len(body))

    def on_stream(self, head: ReplyHead, stream: BodyStream) -> None:
        """The final head. A refusal ends the upload: what is still to be written would be written in vain."""
        if head.status >= 400:
            self.call.stop_upload()
        if self.result.done():
            stream.abort()
        else:
            self.result.set_result((head, stream))

    def on_failure(self, failure: UpstreamFailure) -> None:
        """There is no answer."""
        if not self.result.done() and not isinstance(failure, NotTrusted):
            self.result.set_exception(UpstreamFailed(failure))

    async def _upload(self, body: AsyncIterator[bytes]) -> None:
        """Write the body as fast as the upstream takes it. Cancelled when the call ends first."""
        call = self.call
        try:
            complete = await self._write_all(call, body)
        except Exception as error:  # noqa: BLE001 -- the client's side broke off; whoever awaits shall know why
            self._break_off(error)
        else:
            if not complete:
                # More or less than was announced: the request on the wire can be neither ended nor continued.
                self._break_off(UpstreamFailed(NoReply("http_request_error", call.reused)))
        finally:
            if isinstance(body, AsyncGenerator):
                await body.aclose()

    async def _write_all(self, call: Call, body: AsyncIterator[bytes]) -> bool:
        left = self._length
        async for piece in body:
            connection = call.connection
            if connection is None:
                return True
            if not piece:
                continue
            if left is None:
                await connection.write((b"%x\r\n" % len(piece), piece, b"\r\n"))
                continue
            left -= len(piece)
            if left < 0:
                return False
            call.unwritten = left > 0  # the answer may come before the source says that it has ended
            await connection.write((piece,))
        if left:
            return False
        if left is None and call.connection is not None:
            await call.connection.write((b"0\r\n\r\n",))
        call.unwritten = False
        return True

    def _break_off(self, error: Exception) -> None:
        self.call.upload = None  # not to be cancelled by what it does itself
        self.call.abort()
        if not self.result.done():
            self.result.set_exception(error)
