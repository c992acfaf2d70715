"""TLS to the upstream: before the handshake is finished nothing was sent, afterwards everything is as without it."""

import asyncio
import ssl
from pathlib import Path

import pytest

from gateway.model import NeverSent, NoReply
from gateway.upstream.dial import cause_of
from tests.support import RawUpstream, close, early, hang, play, reply, reset, then
from tests.upstream.conftest import Connect, Waiting, ask, read_all

TLS = Path(__file__).parent.parent / "support" / "tls"  # self-signed for up.test and localhost; protects nothing


def serving() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    return context


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=TLS / "server.pem")


async def test_requests_and_answers_pass_and_connections_are_kept(connect: Connect) -> None:
    async with RawUpstream(reply(201, b"m" * 200_000), ssl=serving()) as up:
        upstream = connect(up, host="localhost", ssl=trusting())
        for _ in range(3):
            head, body = await ask(upstream, body=b"x" * 300_000, limit=300_000)
            assert (head.status, len(body)) == (201, 200_000)
        assert (up.connections, upstream.idle, len(up.requests[2].body)) == (1, 1, 300_000)


async def test_the_name_that_is_verified_can_be_told(connect: Connect) -> None:
    async with RawUpstream(reply(200), ssl=serving()) as up:
        head, _ = await ask(connect(up, ssl=trusting(), server_name="up.test"))
        assert head.status == 200


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"ssl": ssl.create_default_context(), "server_name": "up.test"}, "tls_certificate_error"),
        ({"ssl": trusting(), "server_name": "other.test"}, "tls_certificate_error"),
        ({"ssl": trusting(), "server_name": None}, "tls_certificate_error"),  # 127.0.0.1 is not in the certificate
    ],
)
async def test_a_certificate_that_is_not_trusted_means_never_sent(connect: Connect, settings: dict, cause: str) -> None:
    async with RawUpstream(reply(200), ssl=serving()) as up:
        upstream = connect(up, **settings)
        assert await ask(upstream) == NeverSent(cause)
        assert not up.requests
        assert (upstream.idle, upstream.active) == (0, 0)


async def test_a_version_that_is_refused_means_never_sent(connect: Connect) -> None:
    theirs, ours = serving(), trusting()
    theirs.minimum_version = ssl.TLSVersion.TLSv1_3
    ours.maximum_version = ssl.TLSVersion.TLSv1_2
    async with RawUpstream(reply(200), ssl=theirs) as up:
        assert await ask(connect(up, ssl=ours, server_name="up.test")) == NeverSent("connection_terminated")
        assert not up.requests  # asyncio's server sends no alert


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("TLSV1_ALERT_PROTOCOL_VERSION", "tls_alert_received"),
        ("WRONG_VERSION_NUMBER", "tls_protocol_error"),
        (None, "tls_protocol_error"),
    ],
)
def test_an_alert_is_told_from_other_faults(reason: str | None, cause: str) -> None:
    error = ssl.SSLError(1, "text")
    error.reason = reason
    assert cause_of(error, "other") == cause


@pytest.mark.parametrize(
    ("greeting", "cause"),
    [(play(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "tls_protocol_error"), (reset(), "connection_terminated")],
)
async def test_an_upstream_that_speaks_no_tls_means_never_sent(connect: Connect, greeting: object, cause: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from tests.support.raw_upstream import Request, Turn

        await reader.read(1)
        await greeting(Turn(up, Request(b"", 0), reader, writer))
        writer.close()

    up = RawUpstream(reply(200))
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        upstream = connect(server.sockets[0].getsockname()[1], ssl=trusting(), server_name="up.test")
        assert await ask(upstream) == NeverSent(cause)


async def test_a_handshake_that_hangs_means_never_sent(connect: Connect) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        upstream = connect(
            server.sockets[0].getsockname()[1], ssl=trusting(), server_name="up.test", connect_timeout_ms=80
        )
        assert await ask(upstream) == NeverSent("connection_timeout")
        assert upstream.active == 0


async def test_a_close_after_sending_is_no_reply(connect: Connect) -> None:
    async with RawUpstream(
        [reply(200), close(), then(play(b"HTTP/1.1 200 OK\r\n\r\nto the end"), close())], ssl=serving()
    ) as up:
        upstream = connect(up, host="localhost", ssl=trusting())
        await ask(upstream)
        assert await ask(upstream) == NoReply("connection_terminated", reused=True)
        assert (await ask(upstream))[1] == b"to the end"


async def test_a_stale_connection_is_not_used(connect: Connect) -> None:
    async with RawUpstream(reply(200, b"ok"), ssl=serving()) as up:
        upstream = connect(up, host="localhost", ssl=trusting())
        await ask(upstream)
        await up.close_connections()
        assert (await ask(upstream))[1] == b"ok"
        assert up.connections == 2


async def test_streams_pass_and_can_be_aborted(connect: Connect) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    async with RawUpstream([then(play(head + b"data"), close()), then(play(head), hang())], ssl=serving()) as up:
        upstream = connect(up, host="localhost", ssl=trusting())
        _, stream = await ask(upstream)
        assert await read_all(stream) == b"data"
        _, stream = await ask(upstream)
        stream.abort()
        await up.wait_until_closed()


async def test_an_abort_closes_the_connection_at_once(connect: Connect) -> None:
    async with RawUpstream(early(hang()), ssl=serving()) as up:
        upstream = connect(up, host="localhost", ssl=trusting())
        receiver = Waiting()
        sending = upstream.send(b"POST / HTTP/1.1\r\n", b"x" * 1_000_000, 1000, receiver)
        await up.until(lambda: bool(up.requests))
        sending.abort()
        await up.wait_until_closed()
        assert (upstream.active, receiver.done.done()) == (0, False)
