"""Pass-through: bodies streamed in both directions over the same connections, with the same words for failures."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.errors import UpstreamFailed
from gateway.model import NeverSent, NoReply
from gateway.upstream import HttpUpstream
from tests.support import RawUpstream, chunked, close, early, hang, play, reply, reset, then, wait_for
from tests.support.raw_upstream import Turn
from tests.upstream.conftest import PATIENCE_SECONDS, Connect, Failures, ask, read_all

TARGETS = [
    b"/f%2Fg%7Eh%28i%29/%41/x%20y+z?q=a%2Bb%20c+d&x=%2F&y=%3A&k=2&k=1&e=&f",
    b"/caf%e9?x=%ff", b"/p;v=1", b"/a|b", b"/%", b"/a%00b", b"/x?", b"/q?" + b"a" * 7000, b"*", b"//a//b", b"/a/../b",
    b"/raw\xe9?\xff",
]  # fmt: skip


def get(target: bytes = b"/file", method: bytes = b"GET") -> bytes:
    return method + b" " + target + b" HTTP/1.1\r\nHost: up.test\r\n"


async def pieces(*given: bytes) -> AsyncIterator[bytes]:
    for piece in given:
        yield piece


async def fetch(
    upstream: HttpUpstream, head: bytes, body: AsyncIterator[bytes] | None = None, length: int | None = None
):
    answer, stream = await asyncio.wait_for(upstream.open(head, body, length), PATIENCE_SECONDS)
    return answer, await read_all(stream)


@pytest.mark.parametrize("target", TARGETS)
async def test_c26_targets_arrive_as_they_were(connect: Connect, target: bytes) -> None:
    async with RawUpstream(reply(200, b"ok")) as up:
        upstream = connect(up)
        await fetch(upstream, get(target))
        await ask(upstream, get(target, b"POST"))
        assert [request.target for request in up.requests] == [target, target]


@pytest.mark.parametrize(
    ("body", "length", "framing", "raw_body"),
    [
        (None, None, b"", b""),
        (None, 0, b"Content-Length: 0\r\n", b""),
        ([], 0, b"Content-Length: 0\r\n", b""),
        ([b"ab", b"", b"c"], 3, b"Content-Length: 3\r\n", b"abc"),
        ([b"ab", b"", b"c"], None, b"Transfer-Encoding: chunked\r\n", b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"),
        ([], None, b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
    ],
)
async def test_a_body_is_framed_once(
    connect: Connect, body: object, length: int, framing: bytes, raw_body: bytes
) -> None:
    async with RawUpstream(reply(200, b"ok")) as up:
        upstream = connect(up)
        for _ in range(2):
            stream = None if body is None else pieces(*body)
            assert (await fetch(upstream, get(method=b"POST"), stream, length))[1] == b"ok"
        assert up.requests[0].head == get(method=b"POST") + framing + b"\r\n"
        assert up.requests[1].raw_body == raw_body
        assert (up.connections, upstream.idle) == (1, 1)


async def test_every_answer_is_streamed_also_an_empty_one(connect: Connect) -> None:
    async with RawUpstream(
        [reply(204), reply(200), chunked([b"a", b"b"]), then(play(b"HTTP/1.0 200 OK\r\n\r\nz"), close())]
    ) as up:
        upstream = connect(up)
        assert [(await fetch(upstream, get()))[1] for _ in range(4)] == [b"", b"", b"ab", b"z"]


async def test_head_has_no_body(connect: Connect) -> None:
    async with RawUpstream(play(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")) as up:
        upstream = connect(up)
        for _ in range(2):
            answer, body = await fetch(upstream, get(method=b"HEAD"))
            assert (answer.headers, body) == ([(b"Content-Length", b"500")], b"")
        assert up.connections == 1


async def test_a_large_upload_is_written_as_the_upstream_reads_it(connect: Connect) -> None:
    """The body's source is not asked for more while the upstream does not read."""
    gate = asyncio.Event()
    given = 0

    async def source() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(1000):
            given += 65536
            yield b"u" * 65536

    async def read_later(turn: Turn) -> None:
        await gate.wait()
        await turn.read_body()
        await reply(201, b"%d" % turn.request.body_bytes)(turn)

    async with RawUpstream(early(read_later), keep_bodies=False) as up:
        opening = asyncio.ensure_future(connect(up).open(get(method=b"PUT"), source(), None))
        before = -1
        while before != given:
            before = given
            await asyncio.sleep(0.03)
        assert given < 20_000_000
        gate.set()
        _, stream = await asyncio.wait_for(opening, PATIENCE_SECONDS)
        assert await read_all(stream) == b"65536000"
        assert given == 65536000


async def endless_body(ended: asyncio.Event) -> AsyncIterator[bytes]:
    try:
        while True:
            yield b"u" * 16384
            await asyncio.sleep(0)
    finally:
        ended.set()


@pytest.mark.parametrize("length", [None, 200 * 1024 * 1024])
@pytest.mark.parametrize("then_closes", [True, False])
async def test_c36_a_refusal_while_uploading_is_seen_at_once(
    connect: Connect, failures: Failures, length: int | None, then_closes: bool
) -> None:
    async def refuse(turn: Turn) -> None:
        await turn.reader.readexactly(64 * 1024)
        await reply(413, b"too large", close_after=then_closes)(turn)
        if not then_closes:
            await hang()(turn)

    async with RawUpstream(early(refuse)) as up:
        upstream = connect(up)
        ended = asyncio.Event()
        answer, body = await fetch(upstream, get(method=b"POST"), endless_body(ended), length)
        assert (answer.status, body) == (413, b"too large")
        await asyncio.wait_for(ended.wait(), PATIENCE_SECONDS)
        await up.wait_until_closed()
        assert (upstream.idle, upstream.active, failures, dict(up.executions)) == (0, 0, [], {})


async def test_an_answer_that_begins_while_the_body_is_read_does_not_cut_the_body(connect: Connect) -> None:
    """A service may answer 200 and transform what it reads: both directions flow until one of them is complete."""
    gate = asyncio.Event()

    async def source() -> AsyncIterator[bytes]:
        yield b"first"
        await gate.wait()
        yield b"second"

    async def echo(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await turn.read_body()
        await turn.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(turn.request.body), turn.request.body))

    async with RawUpstream(early(echo)) as up:
        upstream = connect(up)
        _, stream = await asyncio.wait_for(upstream.open(get(method=b"POST"), source(), None), PATIENCE_SECONDS)
        gate.set()
        assert await read_all(stream) == b"firstsecond"
        assert upstream.idle == 1


async def test_a_client_that_vanishes_while_uploading_closes_the_connection(
    connect: Connect, failures: Failures
) -> None:
    async def vanishing() -> AsyncIterator[bytes]:
        yield b"half"
        raise ConnectionResetError("client")

    async with RawUpstream(hang()) as up:
        upstream = connect(up)
        with pytest.raises(ConnectionResetError, match="client"):
            await asyncio.wait_for(upstream.open(get(method=b"POST"), vanishing(), None), PATIENCE_SECONDS)
        await up.wait_until_closed()
        assert (upstream.idle, upstream.active, failures, dict(up.executions)) == (0, 0, [], {})


@pytest.mark.parametrize("given", [[b"too", b" much"], [b"few"]])
async def test_a_body_of_another_length_than_announced_is_never_completed(connect: Connect, given: list[bytes]) -> None:
    async with RawUpstream(reply(200)) as up:
        with pytest.raises(UpstreamFailed) as failed:
            await asyncio.wait_for(connect(up).open(get(method=b"POST"), pieces(*given), 5), PATIENCE_SECONDS)
        assert failed.value.failure == NoReply("http_request_error", reused=False)
        await up.wait_until_closed()
        assert not up.executions


@pytest.mark.parametrize("end", [close(), reset()], ids=["close", "reset"])
async def test_c23_an_upstream_that_hangs_up_gets_nothing_again(
    connect: Connect, failures: Failures, end: object
) -> None:
    for method in (b"GET", b"PUT", b"DELETE", b"POST"):
        async with RawUpstream([reply(200), end]) as up:
            upstream = connect(up)
            await fetch(upstream, get(method=method))
            with pytest.raises(UpstreamFailed) as failed:
                await fetch(upstream, get(method=method))
            assert failed.value.failure == NoReply("connection_terminated", reused=True)
            assert list(up.executions.values()) == [2]
    assert len(failures) == 4


async def test_a_failure_before_sending_says_so(connect: Connect) -> None:
    with pytest.raises(UpstreamFailed) as failed:
        await connect(80, host="no-such-host.invalid").open(get(), None, None)
    assert failed.value.failure == NeverSent("dns_error")


async def test_an_opening_that_is_cancelled_closes_its_connection(connect: Connect, failures: Failures) -> None:
    async with RawUpstream(hang()) as up:
        upstream = connect(up)
        ended = asyncio.Event()
        opening = asyncio.ensure_future(upstream.open(get(method=b"POST"), endless_body(ended), None))
        await up.until(lambda: bool(up.requests))
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()
        await asyncio.wait_for(ended.wait(), PATIENCE_SECONDS)
        await up.wait_until_closed()
        assert (upstream.idle, upstream.active, upstream.waiting, failures) == (0, 0, 0, [])


async def test_an_opening_cancelled_in_the_queue_leaves_it(connect: Connect) -> None:
    gate = asyncio.Event()
    async with RawUpstream(then(wait_for(gate), reply(200))) as up:
        upstream = connect(up, max_connections=1)
        first = asyncio.ensure_future(fetch(upstream, get()))
        await up.wait_for_requests(1)
        second = asyncio.ensure_future(upstream.open(get(), None, None))
        await asyncio.sleep(0)
        assert upstream.waiting == 1
        second.cancel()
        await asyncio.wait([second])
        assert upstream.waiting == 0
        gate.set()
        await first
        assert len(up.requests) == 1


async def test_a_download_is_read_no_faster_than_it_is_taken(connect: Connect) -> None:
    size = 100 * 1024 * 1024
    async with RawUpstream(play(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))) as up:
        answer, stream = await asyncio.wait_for(connect(up).open(get(), None, None), PATIENCE_SECONDS)
        assert answer.status == 200
        assert stream._size < 1_000_000
        largest = total = 0
        while piece := await asyncio.wait_for(stream.read(), PATIENCE_SECONDS):
            total += len(piece)
            largest = max(largest, len(piece))
        assert (total, largest < 1_000_000) == (size, True)


async def test_a_body_whose_last_byte_was_written_is_whole_though_its_source_has_not_ended(connect: Connect) -> None:
    async def unending() -> AsyncIterator[bytes]:
        yield b"whole"
        await asyncio.Event().wait()

    async with RawUpstream(reply(200, b"ok")) as up:
        upstream = connect(up)
        assert (await fetch(upstream, get(method=b"POST"), unending(), 5))[1] == b"ok"
        assert (upstream.idle, up.requests[0].body) == (1, b"whole")
