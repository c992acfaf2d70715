"""One connection to an upstream and the one request it carries. What is done with a free one is the pool's business.

A request is written once and never again. From the first write on, everything but a complete answer is `NoReply`.
"""

import asyncio
import os
import select
from typing import Protocol, cast

import msgspec

from gateway.exchange import Receiver
from gateway.model import NoReply, NotTrusted, UpstreamFailure
from gateway.upstream.answer import TERMINATED, AnswerReader
from gateway.upstream.dial import cause_of
from gateway.upstream.stream import ReplyStream

# Data, end of stream or an error: each of them makes an idle connection useless. POLLRDHUP is Linux's.
_ANYTHING = select.POLLIN | getattr(select, "POLLRDHUP", 0)
_RESCUE_BYTES = 64 * 1024
_RESCUE_READS = 16


class Owner(Protocol):
    """What a connection and a call need of their pool."""

    def release(self, connection: "Connection") -> None:
        """Take back a connection that may carry another request."""

    def discard(self, connection: "Connection") -> None:
        """Close a connection and forget it; idempotent."""

    def lost(self, connection: "Connection") -> None:
        """Take note that a connection's socket is closed."""

    def withdraw(self, call: "Call") -> None:
        """Let a call leave the queue."""

    def failed(self, cause: str, *, sent: bool, reused: bool) -> None:
        """Count a failure."""


class Call(msgspec.Struct, eq=False):
    """A request under way: an `exchange.Sending`. `receiver` is None once it was told, or the call aborted."""

    owner: Owner
    start: bytes  # the head with its framing, and a small body
    body: bytes  # a larger one
    limit_bytes: int  # -1: stream the answer, whatever it is
    receiver: Receiver | None
    head_only: bool
    connection: "Connection | None" = None
    reused: bool = False
    sent: bool = False
    stream: ReplyStream | None = None
    unwritten: bool = False  # a streamed request body has not been written to its end
    upload: asyncio.Task[None] | None = None  # what writes it
    dialled: bool = False  # a connection is being made because of it
    deadline: float = 0.0  # when it has waited too long for one

    def abort(self) -> None:
        """Close the connection or leave the queue. No callback comes afterwards; idempotent."""
        waiting = self.receiver is not None and not self.sent
        self.receiver = None
        if self.connection is not None:
            self.connection.hang_up()
        elif waiting:
            self.owner.withdraw(self)

    def fail(self, failure: UpstreamFailure) -> None:
        """Tell the receiver, unless the call was aborted meanwhile."""
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.on_failure(failure)

    def stop_upload(self) -> None:
        """Write no more of the body."""
        upload, self.upload = self.upload, None
        if upload is not None:
            upload.cancel()


class Connection(asyncio.Protocol):
    """One connection. `gone`: its socket is closed. `idle_until` is the pool's."""

    __slots__ = (
        "_answer",
        "_call",
        "_owner",
        "_paused",
        "_poll",
        "_transport",
        "_used",
        "_writable",
        "gone",
        "idle_until",
    )

    def __init__(self, owner: Owner, head_limit_bytes: int) -> None:
        self._owner = owner
        self._answer = AnswerReader(head_limit_bytes)
        self._call: Call | None = None
        self._transport: asyncio.Transport
        self._poll = select.poll()
        self._paused = False
        self._used = False
        self._writable: asyncio.Future[None] | None = None
        self.gone = False
        self.idle_until = 0.0

    # ---- for the pool -----------------------------------------------------------------------------------------

    def is_usable(self) -> bool:
        """Whether neither the loop nor the kernel has seen anything come in: no end, no error, no stray byte."""
        return not self._transport.is_closing() and not self._poll.poll(0)

    def is_fresh(self) -> bool:
        """As `is_usable`, for a connection just made: with TLS the other side has sent session tickets by now."""
        encrypted = self._transport.get_extra_info("ssl_object") is not None
        return not self._transport.is_closing() if encrypted else self.is_usable()

    def carry(self, call: Call) -> bool:
        """Ask whether to send, and hand the request to the transport, with nothing in between.

        False if the sender does not trust its lease any more: it is told soon, and the connection is still free.
        """
        receiver = call.receiver
        if receiver is None or not receiver.may_send():
            asyncio.get_running_loop().call_soon(call.fail, NotTrusted())
            return False
        self._answer.begin(head_only=call.head_only)
        self._call = call
        call.connection = self
        call.reused = self._used
        call.sent = True
        self._used = True
        self._transport.write(call.start)
        if call.body:
            self._transport.write(call.body)
        return True

    def close(self) -> None:
        """Close the socket without waiting for anything; a call that is under way has failed."""
        call = self._call
        self._transport.abort()
        if call is not None:
            self._fail(call, TERMINATED)

    # ---- for a call's stream and upload -----------------------------------------------------------------------

    def hang_up(self) -> None:
        """Close in the middle of a request, on its sender's wish: no failure, no callback."""
        call = self._call
        if call is not None:
            self._detach(call)
            if call.stream is not None:
                call.stream.fail(TERMINATED)
        self._owner.discard(self)

    def pause(self) -> None:
        """Stop reading; idempotent."""
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on; idempotent."""
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    async def write(self, pieces: tuple[bytes, ...]) -> None:
        """Write a part of a request body, then wait until the upstream has taken most of what was written."""
        self._transport.writelines(pieces)
        if self._writable is not None:
            await self._writable

    # ---- what the loop calls ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one, but not by its base class
        self._poll.register(transport.get_extra_info("socket").fileno(), _ANYTHING)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            self.close()  # nothing was asked
            self._owner.discard(self)
            return
        self._answer.feed(data)
        self._go_on(call)

    def eof_received(self) -> None:
        call = self._call
        if call is None:
            self._owner.discard(self)
            return
        self._answer.end()
        self._go_on(call)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._call is not None and exc is not None:
            self._rescue()
        call = self._call
        if call is not None:
            timed_out = isinstance(exc, TimeoutError)  # the kernel gave up on a peer that acknowledges nothing
            self._fail(call, "connection_read_timeout" if timed_out else cause_of(exc, TERMINATED))
        self.gone = True
        self._owner.discard(self)
        self._owner.lost(self)
        self.resume_writing()

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # ---- the answer -------------------------------------------------------------------------------------------

    def _go_on(self, call: Call) -> None:
        """Do what the answer allows by now."""
        answer = self._answer
        stream = call.stream
        if answer.cause is not None:
            self._fail(call, answer.cause)
        elif stream is not None:
            stream.push(answer.take())
            if answer.complete:
                self._free(call)
                stream.finish()
        elif answer.size > call.limit_bytes:
            self._start_stream(call)
        elif answer.complete:
            self._deliver(call)

    def _deliver(self, call: Call) -> None:
        answer = self._answer
        if answer.surplus and not answer.ends_with_head:
            # What follows makes it doubtful where the answer ends, and a stored reply is repeated for a day.
            self._fail(call, "http_protocol_error")
            return
        head, parts, receiver = answer.head, answer.parts, call.receiver
        call.receiver = None
        self._free(call)
        if receiver is not None and head is not None:
            receiver.on_reply(head, b"".join(parts))  # a single piece is not copied

    def _start_stream(self, call: Call) -> None:
        answer = self._answer
        head, receiver = answer.head, call.receiver
        call.receiver = None
        call.stream = stream = ReplyStream(self, answer.take())
        if answer.complete:
            self._free(call)
            stream.finish()
        else:
            self.pause()
        if receiver is not None and head is not None:
            receiver.on_stream(head, stream)

    def _free(self, call: Call) -> None:
        """The answer is complete: detach the call; the connection is the pool's again, or of no more use."""
        reusable = (
            self._answer.reusable
            and not call.unwritten
            and not self._transport.get_write_buffer_size()  # answered before the request was read to its end
        )
        self._detach(call)
        if reusable:
            if self._paused:
                self.resume()
            self._owner.release(self)
        else:
            self._owner.discard(self)

    def _fail(self, call: Call, cause: str) -> None:
        self._detach(call)
        self._owner.discard(self)
        self._owner.failed(cause, sent=True, reused=call.reused)
        if call.stream is not None:
            call.stream.push(self._answer.take())
            call.stream.fail(cause)
        call.fail(NoReply(cause, call.reused))

    def _detach(self, call: Call) -> None:
        self._call = None
        call.connection = None
        if call.upload is not None:
            call.stop_upload()

    def _rescue(self) -> None:
        """Read what lies in the kernel after an error of *writing*.

        A service that refuses an upload (413) and closes causes a reset; the loop gives up at the failed write,
        though the refusal has long arrived. Nothing can be read so from a TLS connection.
        """
        if self._transport.get_extra_info("ssl_object") is not None:
            return
        handle = self._transport.get_extra_info("socket").fileno()
        for _ in range(_RESCUE_READS if handle >= 0 else 0):
            try:
                data = os.read(handle, _RESCUE_BYTES)
            except OSError:
                return
            if not data:
                return  # after a reset this is no orderly end, so it completes nothing
            self.data_received(data)
            if self._call is None:
                return
