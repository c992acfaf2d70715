"""Buffered requests that get an answer: bytes out, bytes in."""

import asyncio

import pytest

from gateway.model import NoReply, NotTrusted, ReplyHead
from tests.support import RawUpstream, chunked, early, play, reply, then, wait_for
from tests.support.raw_upstream import Turn
from tests.upstream.conftest import HEAD, LIMIT, Connect, Failures, Waiting, ask


async def test_a_request_goes_out_byte_for_byte_with_one_framing_header(connect: Connect) -> None:
    head = b"POST /f%2fg?q=%7e&bare? HTTP/1.1\r\nhost: UP.test\r\nX-A:  two  spaces\r\nx-a: caf\xe9\r\n"
    async with RawUpstream(reply(201)) as up:
        await ask(connect(up), head, b"\x00\xff body")
        assert up.requests[0].head == head + b"Content-Length: 7\r\n\r\n"
        assert up.requests[0].body == b"\x00\xff body"


@pytest.mark.parametrize("size", [0, 1, 64 * 1024, 64 * 1024 + 1, 3_000_000])
async def test_a_body_of_any_size_arrives_whole(connect: Connect, size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    async with RawUpstream(reply(201, b"made")) as up:
        head, answer = await ask(connect(up), body=body[:size])
        assert up.requests[0].body == body[:size]
        assert (head.status, answer) == (201, b"made")


async def test_an_answer_comes_back_as_received(connect: Connect) -> None:
    raw = (
        b"HTTP/1.1 207 D\xe9j\xe0 vu\r\nX-Empty:\r\nSet-Cookie: a=1\r\nset-COOKIE: b=2\r\nX-Obs: \xff\xe9\r\n"
        b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\nnot gzip!"
    )
    async with RawUpstream(play(raw)) as up:
        head, body = await ask(connect(up))
    assert head == ReplyHead(
        207,
        b"D\xe9j\xe0 vu",
        [
            (b"X-Empty", b""), (b"Set-Cookie", b"a=1"), (b"set-COOKIE", b"b=2"), (b"X-Obs", b"\xff\xe9"),
            (b"Content-Encoding", b"gzip"), (b"Content-Length", b"9"),
        ],
    )  # fmt: skip
    assert body == b"not gzip!"


async def test_an_answer_may_come_byte_by_byte(connect: Connect) -> None:
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Made it\r\nX-A: b\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw += b"2\r\nok\r\n0\r\n\r\n"

    async def drip(turn: Turn) -> None:
        for index in range(len(raw)):
            await turn.send(raw[index : index + 1])
            await asyncio.sleep(0)

    async with RawUpstream(drip) as up:
        upstream = connect(up)
        assert await ask(upstream) == (
            ReplyHead(201, b"Made it", [(b"X-A", b"b"), (b"Transfer-Encoding", b"chunked")]),
            b"ok",
        )
        assert upstream.idle == 1


async def test_an_answer_without_a_reason_phrase_is_an_answer(connect: Connect) -> None:
    async with RawUpstream(play(b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n")) as up:
        assert await ask(connect(up)) == (ReplyHead(200, b"", [(b"Content-Length", b"0")]), b"")


async def test_old_spellings_are_understood(connect: Connect) -> None:
    """Folded lines, bare LF: refusing them would leave the record in doubt after the effect."""
    raw = b"HTTP/1.1 200 OK\nX-Folded: a\r\n  b\r\nContent-Length: 2\n\nok"
    async with RawUpstream(play(raw)) as up:
        head, body = await ask(connect(up))
        assert (head.headers[0], body) == ((b"X-Folded", b"a  b"), b"ok")


async def test_interim_answers_are_skipped(connect: Connect) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 199 Odd\r\n\r\n"
    async with RawUpstream(then(play(interim), reply(201, b"made"))) as up:
        upstream = connect(up)
        head, body = await ask(upstream)
        assert (head.status, head.headers, body) == (201, [(b"Content-Length", b"4")], b"made")
        assert (await ask(upstream))[0].status == 201
        assert up.connections == 1


@pytest.mark.parametrize("status", [204, 304])
async def test_statuses_without_a_body_end_with_their_head(connect: Connect, status: int) -> None:
    answers = [play(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\nETag: 1\r\n\r\n" % status), reply(200, b"next")]
    async with RawUpstream(answers) as up:
        upstream = connect(up)
        assert (await ask(upstream))[0].status == status
        assert (await ask(upstream))[1] == b"next"
        assert up.connections == 1


async def test_a_204_that_announces_a_body_does_not_spoil_the_next_answer(connect: Connect) -> None:
    answers = [play(b"HTTP/1.1 204 X\r\nContent-Length: 5\r\n\r\n"), reply(200, b"next")]
    async with RawUpstream(answers) as up:
        upstream = connect(up)
        assert (await ask(upstream))[0].status == 204
        assert (await ask(upstream))[1] == b"next"
        assert up.connections == 2


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n"]
)
async def test_an_answer_to_head_has_no_body_whatever_it_announces(connect: Connect, framing: bytes) -> None:
    answers = [play(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n"), reply(200, b"next"), reply(200, b"third")]
    async with RawUpstream(answers) as up:
        upstream = connect(up)
        head, body = await ask(upstream, b"HEAD / HTTP/1.1\r\n")
        assert (head.status, body) == (200, b"")
        assert (await ask(upstream))[1] == b"next"
        assert (await ask(upstream))[1] == b"third"
        assert up.connections == 1


async def test_an_answer_to_head_with_a_body_never_desynchronises(connect: Connect) -> None:
    answers = [reply(200, b"HTTP/1.1 666 Smuggled\r\nContent-Length: 0\r\n\r\n"), reply(200, b"next")]
    async with RawUpstream(answers) as up:
        upstream = connect(up)
        assert isinstance(await ask(upstream, b"HEAD / HTTP/1.1\r\n"), NoReply)
        assert (await ask(upstream))[1] == b"next"
        assert up.connections == 2


async def test_a_body_without_a_length_ends_with_the_connection(connect: Connect, failures: Failures) -> None:
    async with RawUpstream(
        then(play(b"HTTP/1.1 200 OK\r\n\r\nuntil"), play(b" the end"), lambda turn: asyncio.sleep(0, turn.close()))
    ) as up:
        upstream = connect(up)
        assert (await ask(upstream))[1] == b"until the end"
        assert (upstream.idle, upstream.active, failures) == (0, 0, [])


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nConnection: x, Close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    ],
)
async def test_an_upstream_that_wants_to_close_is_not_asked_again_on_that_connection(
    connect: Connect, raw: bytes
) -> None:
    async with RawUpstream(play(raw)) as up:
        upstream = connect(up)
        assert (await ask(upstream))[1] == b"ok"
        assert upstream.idle == 0
        assert (await ask(upstream))[1] == b"ok"
        assert up.connections == 2


async def test_an_old_upstream_that_keeps_alive_is_asked_again(connect: Connect) -> None:
    async with RawUpstream(play(b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok")) as up:
        upstream = connect(up)
        await ask(upstream)
        assert (await ask(upstream))[1] == b"ok"
        assert up.connections == 1


async def test_trailers_are_dropped_and_do_not_reach_the_next_answer(connect: Connect) -> None:
    end = b"0\r\nX-Trailer: 1\r\nY: 2\r\n\r\n"
    async with RawUpstream(chunked([b"a", b"b"], end=end)) as up:
        upstream = connect(up)
        for _ in range(2):
            head, body = await ask(upstream)
            assert (head.headers, body) == ([(b"Transfer-Encoding", b"chunked")], b"ab")
        assert up.connections == 1


async def test_an_empty_line_after_an_answer_is_harmless(connect: Connect) -> None:
    async with RawUpstream(then(reply(200, b"ok"), play(b"\r\n"))) as up:
        upstream = connect(up)
        assert (await ask(upstream))[1] == b"ok"
        assert (await ask(upstream))[1] == b"ok"


async def test_an_answer_before_the_request_was_read_counts_and_the_connection_is_closed(
    connect: Connect, failures: Failures
) -> None:
    async with RawUpstream([early(reply(413, b"too large")), reply(200, b"next")]) as up:
        upstream = connect(up)
        head, body = await ask(upstream, body=b"x" * 8_000_000)
        assert (head.status, body, upstream.idle) == (413, b"too large", 0)
        assert (await ask(upstream))[1] == b"next"
        assert (up.connections, failures) == (2, [])
        assert list(up.executions.values()) == [1]


async def test_c36_a_refusal_followed_by_a_close_or_a_reset_is_still_seen(connect: Connect) -> None:
    """Unread request bytes make the upstream's close a reset, which overtakes nothing that was received."""
    async with RawUpstream(early(reply(413, b"too large", close_after=True))) as up:
        upstream = connect(up)
        for _ in range(5):
            head, body = await ask(upstream, body=b"x" * 2_000_000)
            assert (head.status, body) == (413, b"too large")


async def test_c34_big_heads_below_the_limit_are_answers(connect: Connect) -> None:
    headers = [("X-Big", "b" * 9000)] + [(f"X-{index}", "y") for index in range(150)]
    async with RawUpstream(reply(201, b"made", headers)) as up:
        head, body = await ask(connect(up))
        assert (head.status, len(head.headers), body) == (201, 152, b"made")


async def test_a_head_up_to_the_limit_with_a_body_behind_it_is_an_answer(connect: Connect) -> None:
    async with RawUpstream(reply(201, b"b" * 50_000, [("X-Big", "b" * 900)])) as up:
        assert len((await ask(connect(up, head_limit_bytes=1000)))[1]) == 50_000


async def test_permission_is_asked_once_and_right_before_the_first_write(connect: Connect) -> None:
    async with RawUpstream(reply(200)) as up:
        upstream = connect(up)
        receiver = Waiting()
        sending = upstream.send(HEAD, b"", LIMIT, receiver)
        assert (receiver.asked, sending.sent) == (0, False)  # still connecting
        await receiver.outcome()
        assert (receiver.asked, sending.sent) == (1, True)


async def test_without_trust_nothing_is_sent_and_the_connection_stays_good(
    connect: Connect, failures: Failures
) -> None:
    async with RawUpstream(reply(200)) as up:
        upstream = connect(up)
        for _ in range(2):  # on a new connection, then on the pooled one
            receiver = Waiting(trusts=False)
            sending = upstream.send(HEAD, b"", LIMIT, receiver)
            assert not receiver.done.done()  # no callback before send has returned
            assert await receiver.outcome() == NotTrusted()
            assert (receiver.asked, sending.sent, upstream.idle) == (1, False, 1)
        assert (await ask(upstream))[0].status == 200
        assert (len(up.requests), up.connections, failures) == (1, 1, [])


async def test_requests_at_once_go_out_on_connections_of_their_own(connect: Connect) -> None:
    gate = asyncio.Event()
    async with RawUpstream(then(wait_for(gate), reply(200, b"ok"))) as up:
        upstream = connect(up)
        receivers = [Waiting() for _ in range(5)]
        for receiver in receivers:
            upstream.send(HEAD, b"", LIMIT, receiver)
        await up.wait_for_requests(5)
        assert (up.connections, upstream.active, upstream.waiting) == (5, 5, 0)
        gate.set()
        assert [(await receiver.outcome())[1] for receiver in receivers] == [b"ok"] * 5
        assert (upstream.idle, upstream.active) == (5, 0)
