"""Which connection carries which request; what happens to the pool when a request is aborted at any stage."""

import asyncio
import os
import socket

import pytest

from tests.support import RawUpstream, hang, play, reply, then, wait_for
from tests.support.raw_upstream import Turn
from tests.upstream.conftest import HEAD, LIMIT, Connect, Failures, Waiting, ask, read_all


async def test_a_connection_is_kept_and_used_again(connect: Connect) -> None:
    async with RawUpstream(reply(200)) as up:
        upstream = connect(up)
        for count in range(5):
            receiver = Waiting()
            sending = upstream.send(HEAD, b"", LIMIT, receiver)
            await receiver.outcome()
            assert sending.reused is (count > 0)
        assert (up.connections, upstream.idle, upstream.active) == (1, 1, 0)


async def test_an_idle_connection_that_the_upstream_closed_is_not_used(connect: Connect, failures: Failures) -> None:
    async with RawUpstream(reply(200, b"ok")) as up:
        upstream = connect(up)
        await ask(upstream)
        await up.close_connections()
        assert (await ask(upstream))[1] == b"ok"
        assert (list(up.executions.values()), up.connections, failures) == ([2], 2, [])


async def test_an_end_that_only_the_kernel_has_seen_is_seen(connect: Connect, failures: Failures) -> None:
    """The loop had no chance yet to deliver the end of the stream: no await between the close and the request."""
    async with RawUpstream(reply(200, b"ok")) as up:
        upstream = connect(up)
        await ask(upstream)
        for writer in up._writers:
            with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as theirs:
                theirs.shutdown(socket.SHUT_RDWR)
        receiver = Waiting()
        upstream.send(HEAD, b"", LIMIT, receiver)
        assert (await receiver.outcome())[1] == b"ok"
        assert (up.connections, failures) == (2, [])


async def test_an_idle_connection_on_which_bytes_came_is_not_used(connect: Connect) -> None:
    stray = asyncio.Event()

    async def unasked(turn: Turn) -> None:
        await reply(200, b"ok")(turn)
        await stray.wait()
        await turn.send(b"HTTP/1.1 666 Smuggled\r\nContent-Length: 0\r\n\r\n")

    async with RawUpstream([unasked, reply(200, b"next")]) as up:
        upstream = connect(up)
        await ask(upstream)
        stray.set()
        await up.wait_until_closed()
        assert upstream.idle == 0
        assert (await ask(upstream))[1] == b"next"


async def test_idle_connections_are_closed_in_time_the_oldest_first(connect: Connect) -> None:
    gate = asyncio.Event()
    async with RawUpstream(then(wait_for(gate), reply(200))) as up:
        upstream = connect(up, idle_timeout_ms=60)
        receivers = [Waiting() for _ in range(3)]
        for receiver in receivers:
            upstream.send(HEAD, b"", LIMIT, receiver)
        await up.wait_for_requests(3)
        gate.set()
        for receiver in receivers:
            await receiver.outcome()
        assert upstream.idle == 3
        await up.wait_until_closed()
        assert (upstream.idle, upstream.active) == (0, 0)


async def test_the_connection_used_last_is_used_next(connect: Connect) -> None:
    gate = asyncio.Event()
    async with RawUpstream([then(wait_for(gate), reply(200)), reply(200)]) as up:
        upstream = connect(up)
        slow = Waiting()
        upstream.send(HEAD, b"", LIMIT, slow)
        await up.wait_for_requests(1)
        await ask(upstream)
        gate.set()
        await slow.outcome()
        await ask(upstream)
        assert [request.connection for request in up.requests] == [1, 2, 1]


async def test_without_keep_alive_each_request_has_its_connection_and_says_so(connect: Connect) -> None:
    async with RawUpstream(reply(200)) as up:
        upstream = connect(up, keep_alive=False)
        await ask(upstream)
        await ask(upstream)
        assert (up.connections, upstream.idle) == (2, 0)
        assert up.requests[0].head == HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\n"


async def test_who_waits_gets_the_next_free_connection_in_order(connect: Connect) -> None:
    gate = asyncio.Event()
    async with RawUpstream(then(wait_for(gate), reply(200))) as up:
        upstream = connect(up, max_connections=1)
        receivers = [Waiting() for _ in range(4)]
        for number, receiver in enumerate(receivers):
            upstream.send(b"POST /%d HTTP/1.1\r\n" % number, b"", LIMIT, receiver)
        await up.wait_for_requests(1)
        assert (upstream.active, upstream.waiting) == (1, 3)
        gate.set()
        for receiver in receivers:
            await receiver.outcome()
        assert [request.target for request in up.requests] == [b"/0", b"/1", b"/2", b"/3"]
        assert (up.connections, upstream.idle, upstream.waiting) == (1, 1, 0)


async def test_who_waits_gets_a_new_connection_when_the_busy_one_ends(connect: Connect) -> None:
    async with RawUpstream(reply(200, close_after=True)) as up:
        upstream = connect(up, max_connections=1)
        receivers = [Waiting() for _ in range(3)]
        for receiver in receivers:
            upstream.send(HEAD, b"", LIMIT, receiver)
        for receiver in receivers:
            assert (await receiver.outcome())[0].status == 200
        assert up.connections == 3


async def test_many_that_wait_without_trust_are_all_refused(connect: Connect) -> None:
    gate = asyncio.Event()
    async with RawUpstream(then(wait_for(gate), reply(200))) as up:
        upstream = connect(up, max_connections=1)
        first, last = Waiting(), Waiting()
        upstream.send(HEAD, b"", LIMIT, first)
        await up.wait_for_requests(1)
        refused = [Waiting(trusts=False) for _ in range(2000)]
        for receiver in refused:
            upstream.send(HEAD, b"", LIMIT, receiver)
        upstream.send(HEAD, b"", LIMIT, last)
        gate.set()
        assert (await last.outcome())[0].status == 200
        for receiver in refused:
            await receiver.outcome()
        assert (len(up.requests), upstream.idle, upstream.waiting) == (2, 1, 0)


# ---- aborted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "script"),
    [
        ("request sent", hang()),
        ("in the head", then(play(b"HTTP/1.1 200 OK\r\nX-A"), hang())),
        ("in the body", then(play(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart"), hang())),
    ],
)
async def test_a_request_under_way_is_aborted_by_closing_its_connection(
    connect: Connect, failures: Failures, stage: str, script: object
) -> None:
    async with RawUpstream([script, reply(200, b"next")]) as up:
        upstream = connect(up)
        receiver = Waiting()
        sending = upstream.send(HEAD, b"", LIMIT, receiver)
        await up.wait_for_requests(1)
        sending.abort()
        sending.abort()
        await up.wait_until_closed()
        assert (upstream.idle, upstream.active, upstream.waiting) == (0, 0, 0)
        assert (await ask(upstream))[1] == b"next"
        assert (receiver.done.done(), failures) == (False, [])


async def test_a_request_that_waits_is_aborted_by_leaving_the_queue(connect: Connect) -> None:
    gate = asyncio.Event()
    async with RawUpstream(then(wait_for(gate), reply(200))) as up:
        upstream = connect(up, max_connections=1)
        first, second, third = Waiting(), Waiting(), Waiting()
        upstream.send(HEAD, b"", LIMIT, first)
        await up.wait_for_requests(1)
        waits = upstream.send(HEAD, b"", LIMIT, second)
        upstream.send(HEAD, b"", LIMIT, third)
        waits.abort()
        assert upstream.waiting == 1
        gate.set()
        await third.outcome()
        assert (second.done.done(), second.asked, len(up.requests), waits.sent) == (False, 0, 2, False)


async def test_a_request_aborted_while_connecting_leaves_a_free_connection(connect: Connect) -> None:
    async with RawUpstream(reply(200)) as up:
        upstream = connect(up)
        receiver = Waiting()
        upstream.send(HEAD, b"", LIMIT, receiver).abort()
        assert upstream.waiting == 0
        await up.until(lambda: up.connections == 1)
        await ask(upstream)
        assert (len(up.requests), receiver.asked, receiver.done.done()) == (1, 0, False)
        assert upstream.active == 0


async def test_a_refusal_that_was_not_told_yet_is_not_told_after_an_abort(connect: Connect) -> None:
    async with RawUpstream(reply(200)) as up:
        upstream = connect(up)
        await ask(upstream)
        receiver = Waiting(trusts=False)
        upstream.send(HEAD, b"", LIMIT, receiver).abort()
        await ask(upstream)
        assert (receiver.asked, receiver.done.done()) == (1, False)


async def test_an_abort_after_the_answer_does_nothing(connect: Connect) -> None:
    async with RawUpstream(reply(200)) as up:
        upstream = connect(up)
        receiver = Waiting()
        sending = upstream.send(HEAD, b"", LIMIT, receiver)
        await receiver.outcome()
        sending.abort()
        assert upstream.idle == 1
        await ask(upstream)
        assert up.connections == 1


async def test_an_abort_while_streaming_breaks_the_stream(connect: Connect) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    async with RawUpstream(then(play(head), hang())) as up:
        upstream = connect(up)
        receiver = Waiting()
        sending = upstream.send(HEAD, b"", LIMIT, receiver)
        _, stream = await receiver.outcome()
        sending.abort()
        with pytest.raises(ConnectionError):
            await read_all(stream)
        await up.wait_until_closed()
        assert (upstream.idle, upstream.active) == (0, 0)
