"""A client's connection, from its first byte to its last. What a request means is `handler`'s business, how its bytes
are read `inbound`'s, who may connect `listener`'s.

Requests of a connection are handled one after the other, in their order. There is no task and no timer for one: an
answer that is at hand is written in the call that read the request, one that comes later by the callback that brings
it. Only what has to wait in the middle (a body or an answer that is streamed) is a task. `sweep` ends what has run out
of time.
"""

import asyncio
import select
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

from gateway.server.inbound import HeadFault, Inbound, RequestReader
from gateway.wire import Peer

AT_ONCE_BYTES = 64 * 1024
"""What is written before looking whether the client takes it."""

_AHEAD_REQUESTS = 4
"""Requests that are read while an earlier one of the same connection is handled."""

_AHEAD_BYTES = 128 * 1024
"""What of bodies is read before somebody takes it."""

_PARSED_BYTES = 16 * 1024
"""What is parsed before looking whether it is too much already: one read may bring thousands of small requests."""

# Not options: nobody has asked for others.
_IDLE_SECONDS = 75
_HEAD_SECONDS = 10
_LINGER_SECONDS = 2
_PROBE_SECONDS = 10
"""How long a half-closed connection is quiet before its client is asked whether it is still there."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Ready:
    """An answer as bytes; with none, it has been written already."""

    __slots__ = ("data", "keep_alive")

    def __init__(self, data: bytes, *, keep_alive: bool) -> None:
        self.data = data
        self.keep_alive = keep_alive


class Gone:
    """No answer: the client left, or what was begun cannot be ended properly. The connection is closed."""

    __slots__ = ()


class Later:
    """An answer that `make` makes of what `future` brings."""

    __slots__ = ("future", "make")

    def __init__(self, future: "asyncio.Future[Any]", make: "Callable[[Any], Answerable]") -> None:
        self.future = future
        self.make = make


Answerable = Ready | Gone | Later | Coroutine[Any, Any, "Answerable"]
"""What a request comes to. A coroutine is run as a task, which is cancelled by nobody but `Inbound.on_gone`."""


class Handler(Protocol):
    """Who answers."""

    def __call__(self, inbound: Inbound) -> Answerable:
        """Answer a request, or begin to."""

    def refuse(self, fault: HeadFault) -> bytes:
        """Return the answer to a head that is no request. The connection is closed after it."""

    def fault(self, error: BaseException) -> bytes:
        """Return the answer to a request on which the gateway itself failed."""


class Owner(Protocol):
    """What a connection needs of its listener. `active`: requests that are being answered."""

    handler: Handler
    active: int
    connections: "set[Connection]"

    def lost(self, connection: "Connection") -> None:
        """Forget a connection; it is closed."""

    def trusts(self, address: str) -> bool:
        """Return whether a peer is one of `trusted_proxies`."""


class Connection(asyncio.Protocol):
    """A client's connection. One that closes its sending half still gets the answers to what it asked before."""

    def __init__(self, listener: Owner, head_limit_bytes: int) -> None:
        self.peer = Peer(b"", trusted=False)
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(self, head_limit_bytes)
        self._transport: asyncio.Transport | None = None
        self._current: Inbound | None = None  # the request that is being answered
        self._make: Callable[[Any], Answerable] | None = None  # makes its answer of what is waited for
        self._task: asyncio.Task[Answerable] | None = None  # held, or it might be collected
        self._rest = memoryview(b"")  # read and not parsed
        self._reading_paused = False
        self._writing_paused = False
        self._writable: asyncio.Future[None] | None = None
        self._closing = False
        self._last = False  # the current request is the last one
        self._other_half: select.poll | None = None  # of a client that has closed one: whether it is still there
        self._since = self._loop.time()  # it is idle, or is being closed
        self._head_since = 0.0  # a head that is not complete was seen
        self._stuck_since = 0.0  # what is written is not taken
        self._asked_since = 0.0  # more of a body is waited for
        self._left_bytes = 0  # to be written before it is closed

    # ---- what the loop calls ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note who is there."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one, but not by its base class
        self._listener.connections.add(self)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            address = str(name[0])
            self.peer = Peer(address.encode("ascii"), trusted=self._listener.trusts(address))

    def data_received(self, data: bytes) -> None:
        """Parse on, and begin with what is complete."""
        reader = self._reader
        if self._closing or reader.ended:
            return
        if len(data) > _PARSED_BYTES:
            self._rest = memoryview(data)
            self._flow()
            return
        reader.feed(data)
        if self._current is None:
            self._go_on()
        current = self._current
        if reader.ready or (current is not None and not current.is_read):
            self._flow()

    def eof_received(self) -> bool:
        """Keep the connection for the answers that are owed (RFC 9112, section 9.6), not for anything else."""
        if self._closing or (self._current is None and not self._reader.ready):
            return False
        self._reader.break_off(ConnectionResetError("The client closed within a body."))
        self._watch()
        return True

    def pause_writing(self) -> None:
        """Note that the client does not take what is written."""
        self._writing_paused = True
        self._stuck_since = self._loop.time()

    def resume_writing(self) -> None:
        """Go on: the client has taken most of what was written."""
        self._writing_paused = False
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)
        if self._current is None and not self._closing:
            self._go_on()
            self._flow()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Let go of everything, and tell who works on a request."""
        self._transport = None
        self._closing = True
        self._listener.lost(self)
        self._reader.break_off(ConnectionResetError("The client left."))
        self._reader.close()
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_exception(ConnectionResetError("The client left."))
        inbound = self._current
        if inbound is not None:
            inbound.break_off(ConnectionResetError("The client left."))
            if inbound.on_gone is not None:
                inbound.on_gone()

    # ---- one request after the other ----------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begin the next request, and the ones after it as long as answers are at hand."""
        reader = self._reader
        ready = reader.ready
        while ready and not self._writing_paused and not self._closing:
            inbound = self._current = ready.popleft()
            if self._last or (self._other_half is not None and not ready):
                inbound.keep_alive = False
            self._listener.active += 1
            try:
                outcome = self._listener.handler(inbound)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the client gets an answer
                outcome = self._failed(inbound, error)
            self._act(inbound, outcome)
            if self._current is not None:
                return
        if reader.ended and not ready and not self._closing:
            if reader.fault is not None and self._transport is not None:
                self._transport.write(self._listener.handler.refuse(reader.fault))
            self._close()

    def _act(self, inbound: Inbound, outcome: Answerable) -> None:
        """Answer, or see to it that what comes later is the answer."""
        if isinstance(outcome, _AT_HAND):
            self._finish(inbound, outcome)
        elif isinstance(outcome, Later):
            self._make = outcome.make
            outcome.future.add_done_callback(self._came)
        else:
            self._make = _as_it_is
            self._task = self._loop.create_task(outcome)
            self._task.add_done_callback(self._came)

    def _came(self, future: "asyncio.Future[Any]") -> None:
        """Make the answer of what was waited for: also when the client has left, for it is counted and logged."""
        inbound, make = self._current, self._make
        if inbound is None or make is None:
            return
        outcome: Answerable
        try:
            outcome = make(future.result())
        except asyncio.CancelledError:
            outcome = Gone()
        except Exception as error:  # noqa: BLE001 -- see above
            outcome = self._failed(inbound, error)
        self._act(inbound, outcome)
        if self._current is None and (self._reader.ready or self._reader.ended or self._rest or self._reading_paused):
            self._go_on()
            self._flow()

    def _failed(self, inbound: Inbound, error: Exception) -> Ready | Gone:
        data = self._listener.handler.fault(error)
        return Gone() if inbound.begun else Ready(data, keep_alive=False)

    def _finish(self, inbound: Inbound, answer: Ready | Gone) -> None:
        """Write an answer, if there is one, and be done with its request."""
        self._current = self._make = self._task = None
        self._listener.active -= 1
        transport = self._transport
        if transport is None or transport.is_closing():
            self._closing = True  # what was asked behind it is not begun with
            return
        if isinstance(answer, Gone):
            self._closing = True
            transport.close()  # what answers earlier requests is still written
            return
        if answer.data:
            transport.write(answer.data)
        if not answer.keep_alive or not inbound.is_read or self._last:
            self._close(unread=not inbound.is_read)
            return
        self._since = self._loop.time()

    def _close(self, *, unread: bool = False) -> None:
        """End the connection. A client that may be sending is heard out for a while (RFC 9112, section 9.6): closing at
        once would reset it, and it might lose the answer.
        """
        reader, transport = self._reader, self._transport
        more = unread or reader.ended or reader.begun or bool(reader.ready or self._rest)
        reader.ready.clear()
        self._closing = True
        self._since = self._loop.time()
        if transport is None or transport.is_closing():
            return
        if more and self._other_half is None:
            transport.write_eof()
            if self._reading_paused:
                transport.resume_reading()
        else:
            transport.close()

    # ---- reading ahead ------------------------------------------------------------------------------------------

    def _flow(self) -> None:
        """Parse what was read, and read on, unless too much waits already. Called where that may have changed."""
        reader = self._reader
        while True:
            full = len(reader.ready) >= _AHEAD_REQUESTS or self._held_bytes() > _AHEAD_BYTES
            if full or not self._rest or self._closing or reader.ended:
                break
            piece, self._rest = self._rest[:_PARSED_BYTES], self._rest[_PARSED_BYTES:]
            reader.feed(piece)
            if self._current is None:
                self._go_on()
        transport = self._transport
        if full is self._reading_paused or self._closing or transport is None or transport.is_closing():
            return
        self._reading_paused = full
        if full:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def _held_bytes(self) -> int:
        """Return how much of bodies waits to be taken."""
        held = self._current.size if self._current is not None else 0
        for inbound in self._reader.ready:
            held += inbound.size
        return held

    def taken(self) -> None:
        """Take note that a part of a body is not held here any more."""
        if self._reading_paused:
            self._loop.call_soon(self._flow)

    # ---- for whoever answers ------------------------------------------------------------------------------------

    @property
    def is_gone(self) -> bool:
        """Whether the client's connection was lost."""
        return self._transport is None

    def proceed(self) -> None:
        """Write `100 Continue`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_CONTINUE)

    def wait(self) -> "asyncio.Future[None]":
        """Return the future of the next piece of a body, or of its end."""
        self._asked_since = self._loop.time()
        return self._loop.create_future()

    async def write(self, data: bytes) -> None:
        """Write as fast as the client takes it. Raises `ConnectionError` when it has left, or takes nothing."""
        whole = data if len(data) <= AT_ONCE_BYTES else memoryview(data)
        for at in range(0, len(data), AT_ONCE_BYTES):
            transport = self._transport
            if transport is None or transport.is_closing():
                raise ConnectionResetError("The client left.")
            transport.write(whole[at : at + AT_ONCE_BYTES])
            if self._writing_paused:
                self._writable = self._loop.create_future()
                await self._writable

    # ---- for the listener ---------------------------------------------------------------------------------------

    def sweep(self, now: float, stall_seconds: float) -> None:
        """End what has run out of time. `now` is of the loop's clock."""
        transport, inbound = self._transport, self._current
        if transport is None:
            return
        if self._other_half is not None and self._other_half.poll(0):
            transport.abort()
        elif self._closing:
            left = transport.get_write_buffer_size()
            if left != self._left_bytes:
                self._left_bytes, self._since = left, now
            elif now - self._since > (stall_seconds if left else _LINGER_SECONDS):
                transport.abort()
        elif self._writing_paused and now - self._stuck_since > stall_seconds:
            transport.abort()  # closing would wait for what is written
        elif inbound is None and self._reader.begun:
            if self._head_since < self._since:
                self._head_since = now  # seen for the first time after the last answer
            elif now - self._head_since > _HEAD_SECONDS:
                self._close()
        elif inbound is None:
            if now - self._since > _IDLE_SECONDS:
                self._close()
        elif inbound.is_awaited and now - self._asked_since > stall_seconds:
            inbound.break_off(TimeoutError("The rest of the body does not come."))

    def shut_down(self) -> None:
        """Close the connection: now if no request is being answered, otherwise after the answer."""
        if self._current is None and not self._closing:
            self._close()
        self._last = True

    def abort(self) -> None:
        """Close it at once."""
        if self._transport is not None:
            self._transport.abort()

    def _watch(self) -> None:
        """See to it that a client which closed one half and then leaves is noticed: the event loop reads no more.

        A reset is seen at the next `sweep`. A client that left quietly is asked by keep-alive probes.
        """
        if self._transport is None:
            return
        handle = self._transport.get_extra_info("socket")
        self._other_half = select.poll()
        self._other_half.register(handle.fileno(), 0)  # errors and the end of both halves are always told
        for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            if hasattr(socket, option):
                handle.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), _PROBE_SECONDS)


_AT_HAND = (Ready, Gone)


def _as_it_is(outcome: Answerable) -> Answerable:
    return outcome
