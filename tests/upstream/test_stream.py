"""Answers that are relayed as they come: which ones, how much memory they take, how they end."""

import asyncio

import pytest

from tests.support import RawUpstream, chunked, close, endless, hang, play, reply, then, wait_for
from tests.upstream.conftest import PATIENCE_SECONDS, Connect, Failures, ask, read_all

EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("status", [200, 201, 503])
@pytest.mark.parametrize("kind", ["text/event-stream", "Multipart/X-Mixed-Replace; boundary=x"])
async def test_event_streams_are_streams_whatever_their_status_and_size(
    connect: Connect, status: int, kind: str
) -> None:
    async with RawUpstream(reply(status, b"data: 1\n\n", [("Content-Type", kind)])) as up:
        upstream = connect(up)
        head, stream = await ask(upstream)
        assert (head.status, await read_all(stream)) == (status, b"data: 1\n\n")
        assert await stream.read() == b""
        assert (upstream.idle, upstream.active) == (1, 0)


async def test_the_head_of_a_stream_comes_before_its_first_event(connect: Connect) -> None:
    gate = asyncio.Event()
    async with RawUpstream(then(play(EVENTS), wait_for(gate), play(b"3\r\nabc\r\n"), play(b"0\r\n\r\n"))) as up:
        upstream = connect(up)
        _, stream = await ask(upstream)
        assert upstream.active == 1
        gate.set()
        assert await read_all(stream) == b"abc"
        assert (upstream.idle, upstream.active) == (1, 0)
        await ask(upstream)
        assert up.connections == 1


@pytest.mark.parametrize("size", [1000, 1001, 300_000])
async def test_an_answer_declared_or_grown_over_the_limit_is_streamed_whole(connect: Connect, size: int) -> None:
    body = bytes(range(250)) * (size // 250) + b"x" * (size % 250)
    pieces = [body[start : start + 7000] for start in range(0, size, 7000)]
    answers = [reply(201, body), chunked(pieces, 201), then(play(b"HTTP/1.1 201 C\r\n\r\n" + body), close())]
    async with RawUpstream(answers) as up:
        upstream = connect(up)
        for _ in answers:
            head, rest = await ask(upstream, limit=1000)
            assert head.status == 201
            assert isinstance(rest, bytes) is (size <= 1000)
            assert (rest if isinstance(rest, bytes) else await read_all(rest)) == body


async def test_nothing_is_read_ahead_of_a_reader_that_does_not_read(connect: Connect) -> None:
    """The upstream's writer blocks: memory is what the kernel holds, and one buffer of ours."""
    piece = b"4000\r\n" + b"e" * 0x4000 + b"\r\n"
    async with RawUpstream(endless(EVENTS, piece)) as up:
        upstream = connect(up)
        _, stream = await ask(upstream)
        for _ in range(3):
            before = -1
            while before != up.bytes_written:  # until the upstream makes no more progress
                before = up.bytes_written
                await asyncio.sleep(0.02)
            assert stream._size < 1_000_000
            assert up.bytes_written < 40_000_000
            taken = 0
            while taken < up.bytes_written / 2:
                taken += len(await asyncio.wait_for(stream.read(), PATIENCE_SECONDS))
        stream.abort()
        stream.abort()
        await up.wait_until_closed()
        assert (upstream.idle, upstream.active) == (0, 0)
        with pytest.raises(ConnectionError):
            await read_all(stream)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\npart",
        EVENTS + b"4\r\npart\r\n",
        EVENTS + b"4\r\npart\r\nzz\r\n",
    ],
)
async def test_a_stream_that_breaks_off_gives_what_came_and_then_fails(
    connect: Connect, failures: Failures, raw: bytes
) -> None:
    gate = asyncio.Event()
    head, _, rest = raw.partition(b"\r\n\r\n")
    async with RawUpstream(then(play(head + b"\r\n\r\n"), wait_for(gate), play(rest), close())) as up:
        upstream = connect(up)
        _, stream = await ask(upstream, limit=1000)
        gate.set()
        assert await stream.read() == b"part"
        with pytest.raises(ConnectionError, match="http_"):
            await stream.read()
        assert len(failures) == 1
        assert failures[0][2:] == (True, False)
        assert (upstream.idle, upstream.active) == (0, 0)


async def test_a_stream_aborted_while_somebody_reads_fails_for_the_reader(connect: Connect, failures: Failures) -> None:
    async with RawUpstream(then(play(EVENTS), hang())) as up:
        upstream = connect(up)
        _, stream = await ask(upstream)
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0)
        stream.abort()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(reading, PATIENCE_SECONDS)
        await up.wait_until_closed()
        assert failures == []


async def test_a_read_that_was_cancelled_loses_nothing(connect: Connect) -> None:
    gate = asyncio.Event()
    async with RawUpstream(then(play(EVENTS), wait_for(gate), play(b"3\r\nabc\r\n0\r\n\r\n"))) as up:
        _, stream = await ask(connect(up))
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        gate.set()
        assert await read_all(stream) == b"abc"


async def test_an_abort_after_the_end_spares_the_connection(connect: Connect) -> None:
    async with RawUpstream(reply(200, b"x" * 2000)) as up:
        upstream = connect(up)
        _, stream = await ask(upstream, limit=1000)
        await read_all(stream)
        stream.abort()
        assert upstream.idle == 1
        await ask(upstream)
        assert up.connections == 1
