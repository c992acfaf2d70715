"""Requests without an answer: whether a byte was sent, why there is none, and that nothing is ever sent again."""

import asyncio
import contextlib
import socket

import pytest

from gateway.model import NeverSent, NoReply
from gateway.upstream import pool
from tests.support import RawUpstream, chunked, close, early, endless, hang, play, reply, reset, then
from tests.support.raw_upstream import Turn
from tests.upstream.conftest import HEAD, LIMIT, Connect, Failures, Waiting, ask

METHODS = ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "POST", "PATCH", "PROPFIND"]


@pytest.mark.parametrize("end", [close(), reset()], ids=["close", "reset"])
@pytest.mark.parametrize("method", METHODS)
async def test_c23_no_method_is_sent_again_by_itself(connect: Connect, method: str, end: object) -> None:
    head = HEAD.replace(b"POST", method.encode())
    async with RawUpstream([end]) as up:
        assert await ask(connect(up), head) == NoReply("connection_terminated", reused=False)
        assert list(up.executions.values()) == [1]
    async with RawUpstream([reply(204), end]) as up:
        upstream = connect(up)
        await ask(upstream, head)
        assert await ask(upstream, head) == NoReply("connection_terminated", reused=True)
        assert list(up.executions.values()) == [2]
        assert up.connections == 1


async def test_a_reset_on_a_reused_connection_is_counted_apart(connect: Connect, failures: Failures) -> None:
    async with RawUpstream([reply(200), reset()]) as up:
        upstream = connect(up)
        await ask(upstream)
        await ask(upstream)
        assert failures == [("ledger", "connection_terminated", True, True)]
        assert (upstream.idle, upstream.active) == (0, 0)


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (b"", "connection_terminated"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "connection_terminated"),
        (b"HTT", "http_response_incomplete"),
        (b"HTTP/1.1 201 Created\r\nContent-Le", "http_response_incomplete"),
        (b"HTTP/1.1 201 Created\r\nContent-Length: 10\r\n\r\n", "http_response_incomplete"),
        (b"HTTP/1.1 201 Created\r\nContent-Length: 10\r\n\r\nshort", "http_response_incomplete"),
        (b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n", "http_response_incomplete"),
        (b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n", "http_response_incomplete"),
        (b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n0\r\n", "http_response_incomplete"),
        (b"HTTP/1.1 201 Created\r\nTransfer-Encoding: gzip, chunked\r\n\r\n5\r\nsho", "http_response_incomplete"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "http_protocol_error"),
        (b"HTTP/1.1 2000 Odd\r\nContent-Length: 0\r\n\r\n", "http_protocol_error"),
        (b"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n", "http_protocol_error"),
        (b"HTTP/1.1 200 OK\r\nNo colon here\r\n\r\n", "http_protocol_error"),
        (b"HTTP/1.1 200 OK\r\nA: b\x00c\r\nContent-Length: 0\r\n\r\n", "http_protocol_error"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc", "http_protocol_error"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nabc", "http_protocol_error"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "http_protocol_error"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "http_protocol_error"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokMORE", "http_protocol_error"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nokMORE", "http_protocol_error"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "http_protocol_error"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n", "http_upgrade_failed"),
        (b"HTTP/1.1 101 Switching\r\n\r\n", "http_upgrade_failed"),
    ],
)  # fmt: skip
async def test_what_is_no_complete_answer_is_no_reply(
    connect: Connect, failures: Failures, raw: bytes, cause: str
) -> None:
    async with RawUpstream(then(play(raw), close())) as up:
        upstream = connect(up)
        assert await ask(upstream) == NoReply(cause, reused=False)
        assert list(up.executions.values()) == [1]
        assert (upstream.idle, upstream.active) == (0, 0)
        assert failures == [("ledger", cause, True, False)]


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nX-Big: " + b"b" * 9000 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Big: " + b"b" * 9000,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 2000 + b"Content-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 " + b"r" * 9000,
    ],
    ids=["complete", "endless", "many lines", "reason"],
)
async def test_c34_a_head_over_the_limit_is_no_reply_and_no_status(connect: Connect, raw: bytes) -> None:
    async with RawUpstream(then(play(raw), hang())) as up:
        failure = await ask(connect(up, head_limit_bytes=8190))
        assert failure == NoReply("http_response_header_section_size", reused=False)
        await up.wait_until_closed()


@pytest.mark.parametrize(
    "raw", [b"HTTP/1.1 200 OK\r\n\r\nuntil the", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nuntil"]
)
async def test_a_reset_in_a_body_is_no_reply(connect: Connect, raw: bytes) -> None:
    """Only an orderly end completes a body that has no length."""
    async with RawUpstream(then(play(raw), reset_once_the_rest_arrived)) as up:
        failure = await ask(connect(up))
        assert isinstance(failure, NoReply)
        assert failure.cause in {"connection_terminated", "http_response_incomplete"}


async def reset_once_the_rest_arrived(turn: Turn) -> None:
    await asyncio.sleep(0.02)  # a reset overtakes what is still on its way, and nothing tells when it has come
    turn.reset()


@pytest.mark.parametrize(
    "start", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"]
)
async def test_heads_and_trailers_without_an_end_take_no_memory(connect: Connect, start: bytes) -> None:
    async with RawUpstream(endless(start, b"X-Y: z\r\n" * 1000)) as up:
        assert await ask(connect(up)) == NoReply("http_response_header_section_size", reused=False)


async def test_a_reset_while_a_large_body_is_written_is_no_reply(connect: Connect) -> None:
    async with RawUpstream(early(reset())) as up:
        failure = await ask(connect(up), body=b"x" * 8_000_000)
        assert failure == NoReply("connection_terminated", reused=False)
        assert not up.executions


# ---- never sent -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def refusing_port() -> object:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]  # bound, not listening


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_refused_connection_is_never_sent(connect: Connect, failures: Failures, host: str) -> None:
    with refusing_port() as port:
        upstream = connect(port, host=host)
        receiver = Waiting()
        sending = upstream.send(HEAD, b"", LIMIT, receiver)
        assert await receiver.outcome() == NeverSent("connection_refused")
        assert (sending.sent, receiver.asked, upstream.active, upstream.waiting) == (False, 0, 0, 0)
        assert failures == [("ledger", "connection_refused", False, False)]


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 70 + ".invalid"])
async def test_a_name_that_does_not_resolve_is_never_sent(connect: Connect, host: str) -> None:
    assert await ask(connect(80, host=host)) == NeverSent("dns_error")


async def test_a_name_service_that_hangs_is_never_sent(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("gateway.upstream.dial._look_up", hangs)
    assert await ask(connect(80, host="slow.invalid", connect_timeout_ms=50)) == NeverSent("dns_timeout")


async def test_a_connection_that_is_not_accepted_in_time_is_never_sent(connect: Connect) -> None:
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        for _ in range(3):  # a full backlog drops further SYNs
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(address)
        upstream = connect(address[1], connect_timeout_ms=80)
        assert await ask(upstream) == NeverSent("connection_timeout")
        assert (upstream.active, upstream.waiting) == (0, 0)


async def test_a_name_with_a_dead_and_a_living_address_is_reached(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def two(*_: object, **__: object) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]

    monkeypatch.setattr("gateway.upstream.dial._look_up", two)
    async with RawUpstream(reply(200, b"ok")) as up:
        assert (await ask(connect(up, host="two.invalid")))[1] == b"ok"


async def test_without_a_free_connection_in_time_nothing_is_sent(connect: Connect, failures: Failures) -> None:
    async with RawUpstream(hang()) as up:
        upstream = connect(up, max_connections=1, connect_timeout_ms=60)
        first, second, third = Waiting(), Waiting(), Waiting()
        sending = upstream.send(HEAD, b"", LIMIT, first)
        await up.wait_for_requests(1)
        upstream.send(HEAD, b"", LIMIT, second)
        upstream.send(HEAD, b"", LIMIT, third)
        assert (upstream.active, upstream.waiting) == (1, 2)
        assert await second.outcome() == NeverSent("connection_limit_reached")
        assert await third.outcome() == NeverSent("connection_limit_reached")
        assert not first.done.done()
        assert (up.connections, len(up.requests), upstream.waiting) == (1, 1, 0)
        assert failures == [("ledger", "connection_limit_reached", False, False)] * 2
        sending.abort()


async def test_after_closing_nothing_is_sent(connect: Connect) -> None:
    async with RawUpstream(reply(200)) as up:
        upstream = connect(up)
        await upstream.close()
        receiver = Waiting()
        upstream.send(HEAD, b"", LIMIT, receiver)
        assert not receiver.done.done()
        assert await receiver.outcome() == NeverSent("destination_unavailable")


async def test_closing_ends_what_waits_and_what_is_under_way(connect: Connect) -> None:
    async with RawUpstream(hang()) as up:
        upstream = connect(up, max_connections=1)
        under_way, waits = Waiting(), Waiting()
        upstream.send(HEAD, b"", LIMIT, under_way)
        await up.wait_for_requests(1)
        upstream.send(HEAD, b"", LIMIT, waits)
        await upstream.close()
        assert await under_way.outcome() == NoReply("connection_terminated", reused=False)
        assert await waits.outcome() == NeverSent("destination_unavailable")
        await up.wait_until_closed()


async def test_an_unfinished_chunked_answer_is_no_reply_after_the_upstream_dies(connect: Connect) -> None:
    async with RawUpstream(then(chunked([b"a"] * 100, end=b""), close())) as up:
        assert await ask(connect(up)) == NoReply("http_response_incomplete", reused=False)


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 503 Full\r\nContent-Length: 0\r\n\r\n"])
async def test_an_upstream_that_closes_when_it_accepts_leaves_nobody_waiting(connect: Connect, greeting: bytes) -> None:
    """Whether the close is seen before or after the request was written depends on the moment; an outcome comes."""

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        upstream = connect(server.sockets[0].getsockname()[1], max_connections=2)
        receivers = [Waiting() for _ in range(30)]
        for receiver in receivers:
            upstream.send(HEAD, b"", LIMIT, receiver)
        for receiver in receivers:
            outcome = await receiver.outcome()
            if isinstance(outcome, NeverSent):
                assert receiver.asked == 0
            elif isinstance(outcome, NoReply):
                assert outcome.cause == "connection_terminated"
            else:
                assert outcome[0].status == 503
        assert (upstream.idle, upstream.active, upstream.waiting) == (0, 0, 0)


async def test_a_connection_closed_before_it_is_used_means_never_sent(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RawUpstream(reply(200)) as up:
        upstream = connect(up)
        original = pool.dial

        async def dial_and_wait_for_the_end(*args: object, **named: object) -> object:
            connection = await original(*args, **named)
            await up.until(lambda: up.connections == 1)
            await up.close_connections()
            while not connection._transport.is_closing():
                await asyncio.sleep(0)
            return connection

        monkeypatch.setattr(pool, "dial", dial_and_wait_for_the_end)
        assert await ask(upstream) == NeverSent("connection_terminated")
        assert (upstream.idle, upstream.active, len(up.requests)) == (0, 0, 0)
