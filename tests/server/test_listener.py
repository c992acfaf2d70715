"""The listener alone, with a scripted handler and raw sockets."""

import asyncio
import contextlib
import gc
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gateway.server import connection as module
from gateway.server.connection import Answerable, Gone, Later, Ready
from gateway.server.inbound import BodyBroken, Inbound
from gateway.server.listener import Listener
from tests.support import RawClient, request

LIMIT = 8 * 1024
Answer = Callable[[Inbound], Answerable]


def answer(body: bytes = b"", status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def ready(inbound: Inbound, body: bytes = b"") -> Ready:
    return Ready(answer(body), keep_alive=inbound.keep_alive and inbound.is_read)


def echo(inbound: Inbound) -> Answerable:
    return ready(inbound, inbound.target + b" " + inbound.take())


class Scripted:
    """Answers as it is told, and notes what it was asked."""

    def __init__(self) -> None:
        self.answer: Answer = echo
        self.asked: list[Inbound] = []
        self.errors: list[BaseException] = []

    def __call__(self, inbound: Inbound) -> Answerable:
        self.asked.append(inbound)
        return self.answer(inbound)

    def refuse(self, fault: str) -> bytes:
        return answer(fault.encode(), 431 if fault == "too-large" else 400)

    def fault(self, error: BaseException) -> bytes:
        self.errors.append(error)
        return answer(str(error).encode(), 500)


class Site:
    """A listener that listens."""

    def __init__(self, listener: Listener, handler: Scripted, port: int) -> None:
        self.listener = listener
        self.handler = handler
        self.port = port

    def client(self) -> RawClient:
        return RawClient(self.port)

    @property
    def connection(self) -> module.Connection:
        (connection,) = self.listener.connections
        return connection

    async def swept_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.01)
                self.listener.sweep()

    async def sweeping(self, waiting: Awaitable[Any]) -> Any:
        """Wait for something that a sweep brings about."""
        task = asyncio.ensure_future(waiting)
        await self.swept_until(task.done)
        return await task


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    handler = Scripted()
    listener = Listener(handler, trusted=(), head_limit_bytes=LIMIT, stall_seconds=0.2)
    server = await asyncio.get_running_loop().create_server(listener, "127.0.0.1", 0)
    yield Site(listener, handler, server.sockets[0].getsockname()[1])
    server.close()
    await listener.shutdown(0.2)
    await until(lambda: not listener.connections)
    assert listener.active == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def promise() -> "asyncio.Future[bytes]":
    return asyncio.get_running_loop().create_future()


# ---- heads ------------------------------------------------------------------------------------------------------

HEAD = (
    b"PUT /a%20b?x=%ff HTTP/1.1\r\nHost: g\r\nX-Two:  a b \t\r\nx-two:\r\nX-High: \x80\xff\r\nContent-Length: 3\r\n\r\n"
)


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_a_request_reads_the_same_in_one_piece_and_in_many(site: Site, step: int) -> None:
    async def whole(inbound: Inbound) -> Answerable:
        body = b""
        while piece := await inbound.read():
            body += piece
        return ready(inbound, inbound.target + b" " + body)

    site.handler.answer = whole
    data = (HEAD + b"abc") * 2
    async with site.client() as client:
        for at in range(0, len(data), step):
            await client.send(data[at : at + step])
            await asyncio.sleep(0)
        answers = [await client.read_answer() for _ in range(2)]
    assert [one.body for one in answers] == [b"/a%20b?x=%ff abc"] * 2
    for asked in site.handler.asked:
        assert (asked.method, asked.target, asked.http11, asked.keep_alive) == (b"PUT", b"/a%20b?x=%ff", True, True)
        assert asked.headers == [
            (b"Host", b"g"), (b"X-Two", b"a b"), (b"x-two", b""), (b"X-High", b"\x80\xff"), (b"Content-Length", b"3"),
        ]  # fmt: skip


async def test_an_answer_at_hand_needs_no_task(site: Site) -> None:
    seen: list[int] = []

    def count(inbound: Inbound) -> Answerable:
        seen.append(len(asyncio.all_tasks()))
        return ready(inbound)

    site.handler.answer = count
    async with site.client() as client:
        tasks = len(asyncio.all_tasks())
        assert (await client.ask(request("POST", "/", [], b"{}"))).status == 200
    assert seen == [tasks]


@pytest.mark.parametrize(
    ("version", "line", "kept"),
    [("1.1", "", True), ("1.1", "close", False), ("1.0", "", False), ("1.0", "keep-alive", True)],
)
async def test_a_connection_is_kept_as_the_client_wishes(site: Site, version: str, line: str, *, kept: bool) -> None:
    head = f"GET / HTTP/{version}\r\nHost: g\r\n" + (f"Connection: {line}\r\n" if line else "")
    async with site.client() as client:
        assert (await client.ask(head.encode() + b"\r\n")).status == 200
        assert site.handler.asked[0].keep_alive is kept
        if kept:
            assert (await client.ask(head.encode() + b"\r\n")).status == 200
        else:
            assert await client.is_closed()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/2.0\r\nHost: g\r\n\r\n", 400),
        (b"GET / HTTP/0.9\r\n\r\n", 400),
        (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 257 + b"\r\n", 431),
        (b"GET /" + b"a" * 4 * LIMIT, 431),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 4 * LIMIT, 431),
        (b"GET / HTTP/1.1\r\n" + b"A" * 4 * LIMIT, 431),
    ],
)
@pytest.mark.parametrize("step", [1000, 100_000])
async def test_what_is_no_request_is_refused_after_the_answers_before_it(
    site: Site, data: bytes, status: int, step: int
) -> None:
    first = promise()
    site.handler.answer = lambda inbound: Later(first, lambda body: ready(inbound, body))
    async with site.client() as client:
        await client.send(request("GET", "/"))
        for at in range(0, len(data), step):
            await client.send(data[at : at + step])
        await client.send(request("GET", "/smuggled"))
        await until(lambda: len(site.handler.asked) == 1)
        first.set_result(b"first")
        assert (await client.read_answer()).body == b"first"
        assert (await client.read_answer()).status == status
        assert await client.is_closed()
    assert len(site.handler.asked) == 1


# ---- one after the other ----------------------------------------------------------------------------------------


async def test_pipelined_requests_are_read_a_few_ahead_and_answered_in_order(site: Site) -> None:
    waits = [promise() for _ in range(3000)]

    def later(inbound: Inbound) -> Answerable:
        number = int(inbound.target[1:])
        if number % 3:
            return echo(inbound)
        return Later(waits[number], lambda _: echo(inbound))

    site.handler.answer = later
    async with site.client() as client:
        sending = asyncio.create_task(client.send(b"".join(request("GET", f"/{n}") for n in range(3000))))
        await until(lambda: len(site.handler.asked) == 1)
        await asyncio.sleep(0.05)  # time to read ahead in
        assert len(site.connection._reader.ready) < 16 * 1024 / len(request("GET", "/1"))
        assert len(site.handler.asked) == 1
        for wait in waits:
            wait.set_result(b"")
        answers = [await client.read_answer() for _ in waits]
        await sending
    assert [int(one.body[1:]) for one in answers] == list(range(3000))


async def test_small_answers_that_nobody_takes_stop_the_next_request_and_end_the_connection(site: Site) -> None:
    site.handler.answer = lambda inbound: ready(inbound, b"x" * 60_000)
    async with site.client() as client:
        sending = asyncio.create_task(client.send(request("GET", "/") * 5000))
        client.writer.transport.pause_reading()  # type: ignore[union-attr]
        await site.swept_until(lambda: not site.listener.connections)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert len(site.handler.asked) < 500


# ---- bodies -----------------------------------------------------------------------------------------------------


class Reading:
    """Reads a body piece by piece when it may, and says how it went."""

    def __init__(self, site: Site) -> None:
        self.go_on = asyncio.Event()
        self.body = b""  # of the last request
        self.error: Exception | None = None
        self.gone = 0
        site.handler.answer = self.read

    async def read(self, inbound: Inbound) -> Answerable:
        self.body = b""
        inbound.on_gone = self.on_gone
        try:
            await self.go_on.wait()
            while piece := await inbound.read():
                self.body += piece
        except (ConnectionError, BodyBroken, TimeoutError) as error:
            self.error = error
            return Gone() if isinstance(error, ConnectionError) else Ready(answer(b"", 408), keep_alive=False)
        return ready(inbound, b"%d" % len(self.body))

    def on_gone(self) -> None:
        self.gone += 1


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_nobody_takes_is_held_by_the_client(site: Site, *, chunked: bool) -> None:
    reading = Reading(site)
    body = b"0123456789abcdef" * 400_000
    data = request("POST", "/", [], None if chunked else body, chunks=[body[:-9], body[-9:]] if chunked else None)
    async with site.client() as client:
        sending = asyncio.create_task(client.send(data + request("POST", "/", [], b"2")))
        await until(lambda: bool(site.handler.asked))
        await asyncio.sleep(0.05)  # time to read ahead in
        assert 0 < site.handler.asked[0].size < 160 * 1024
        reading.go_on.set()
        assert (await client.read_answer()).body == b"%d" % len(body)
        await sending
        assert (await client.read_answer()).body == b"1"


@pytest.mark.parametrize("rest", [b"zz\r\n", b"1\r\nxx\r\n", b"0\r\nA: \0\r\n\r\n", b"2;" + b"e" * 9 * LIMIT])
async def test_a_body_whose_framing_breaks_is_told_to_its_reader_at_once(site: Site, rest: bytes) -> None:
    reading = Reading(site)
    reading.go_on.set()
    async with site.client() as client:
        await client.send(request("POST", "/", [("Transfer-Encoding", "chunked")]) + b"2\r\n{}\r\n")
        await until(lambda: reading.body == b"{}")
        await client.send(rest + request("GET", "/smuggled"))
        assert (await client.read_answer()).status == 408
        assert await client.is_closed()
    assert isinstance(reading.error, BodyBroken)
    assert len(site.handler.asked) == 1


@pytest.mark.parametrize("how", ["reset", "hang_up", "half_close"])
async def test_a_client_that_leaves_within_a_body_is_told_to_its_reader(site: Site, how: str) -> None:
    reading = Reading(site)
    reading.go_on.set()
    async with site.client() as client:
        await client.send(request("POST", "/", [("Content-Length", "3")]) + b"{}")
        await until(lambda: reading.body == b"{}")
        left = getattr(client, how)()
        if left is not None:
            await left
        await until(lambda: reading.error is not None)
    assert isinstance(reading.error, ConnectionError)
    await until(lambda: not site.listener.connections)


async def test_a_client_that_leaves_is_told_to_who_answers(site: Site) -> None:
    reading = Reading(site)
    async with site.client() as client:
        await client.send(request("GET", "/"))
        await until(lambda: bool(site.handler.asked))
        await asyncio.sleep(0)  # let it begin
        await client.reset()
    await until(lambda: reading.gone == 1)
    assert site.listener.active == 1
    reading.go_on.set()


async def test_a_body_that_stalls_is_told_to_its_reader(site: Site) -> None:
    reading = Reading(site)
    reading.go_on.set()
    async with site.client() as client:
        await client.send(request("POST", "/", [("Content-Length", "3")]) + b"{}")
        stalled = await site.sweeping(client.read_answer())
        assert (stalled.status, stalled.body) == (408, b"")
        assert await client.is_closed()
    assert isinstance(reading.error, TimeoutError)


@pytest.mark.parametrize("framing", ["none", "length", "chunked"])
@pytest.mark.parametrize("step", [1, 1000])
async def test_a_wish_to_upgrade_is_a_request_like_any_and_the_last_one(site: Site, framing: str, step: int) -> None:
    wish = [("Connection", "Upgrade"), ("Upgrade", "websocket")]
    body, chunks = {"none": (None, None), "length": (b"{}", None), "chunked": (None, [b"{", b"}"])}[framing]
    data = request("POST", "/", wish, body, chunks=chunks)
    go_on = promise()

    def answered(inbound: Inbound) -> Answerable:
        return Later(go_on, lambda _: echo(inbound))

    site.handler.answer = answered
    async with site.client() as client:
        for at in range(0, len(data), step):
            await client.send(data[at : at + step])
            await asyncio.sleep(0)
        await client.send(request("GET", "/smuggled") * 3)
        await until(lambda: bool(site.handler.asked) and site.handler.asked[0].is_read)
        await client.send(request("GET", "/smuggled") * 3)
        go_on.set_result(b"")
        assert (await client.read_answer()).body == (b"/ " if framing == "none" else b"/ {}")
        assert await client.is_closed()
    (asked,) = site.handler.asked
    assert not asked.keep_alive
    assert (b"Upgrade", b"websocket") in asked.headers


async def test_a_refusal_arrives_though_the_client_is_still_sending(site: Site) -> None:
    site.handler.answer = lambda inbound: Ready(answer(b"no", 413), keep_alive=False)
    async with site.client() as client:
        await client.send(request("POST", "/", [("Content-Length", "9000000")]))

        async def send() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    await client.send(b"x" * 100_000)

        sending = asyncio.create_task(send())
        assert (await client.read_answer()).body == b"no"
        assert await client.is_closed()
        sending.cancel()


# ---- ends -------------------------------------------------------------------------------------------------------


async def test_a_client_that_closes_its_sending_half_gets_all_answers(site: Site) -> None:
    go_on = promise()
    site.handler.answer = lambda inbound: Later(go_on, lambda _: echo(inbound))
    async with site.client() as client:
        await client.send(request("GET", "/1") + request("GET", "/2") + b"GET /")
        client.half_close()
        await until(lambda: bool(site.handler.asked))
        await asyncio.sleep(0.05)  # let the end arrive
        go_on.set_result(b"")
        assert [(await client.read_answer()).body for _ in range(2)] == [b"/1 ", b"/2 "]
        assert await client.is_closed()
    assert [asked.keep_alive for asked in site.handler.asked] == [True, False]


async def test_a_client_that_closes_one_half_and_is_reset_later_is_noticed(site: Site) -> None:
    reading = Reading(site)
    client = site.client()
    await client.__aenter__()
    await client.send(request("GET", "/"))
    client.half_close()
    await until(lambda: bool(site.handler.asked) and site.connection._other_half is not None)
    await client.reset()
    await site.swept_until(lambda: reading.gone == 1)
    reading.go_on.set()


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nHo"])
async def test_idle_connections_and_unfinished_heads_do_not_stay(
    site: Site, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HEAD_SECONDS" if data else "_IDLE_SECONDS", 0.1)
    async with site.client() as client:
        assert (await client.ask(request("GET", "/"))).status == 200
        await client.send(data)
        began = time.monotonic()
        assert await site.sweeping(client.is_closed())
        assert 0.05 < time.monotonic() - began < 2


async def test_a_connection_that_works_is_neither_idle_nor_unfinished(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.2)
    monkeypatch.setattr(module, "_HEAD_SECONDS", 0.2)
    data = request("GET", "/")
    async with site.client() as client:
        await client.send(data[:5])
        for _ in range(8):
            await asyncio.sleep(0.05)
            site.listener.sweep()
            await client.send(data[5:] + data[:5])
            assert (await client.read_answer()).status == 200


async def test_a_client_that_does_not_hang_up_is_not_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LINGER_SECONDS", 0.1)
    async with site.client() as client:
        await client.send(b"nonsense\r\n\r\n")
        assert (await client.read_answer()).status == 400
        assert site.listener.connections
        await site.swept_until(lambda: not site.listener.connections)


async def test_a_large_answer_that_nobody_takes_is_cut_off(site: Site) -> None:
    errors: list[Exception] = []

    async def pour(inbound: Inbound) -> Answerable:
        try:
            await inbound.write(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(20_000_000))
        except ConnectionError as error:
            errors.append(error)
            return Gone()
        return Ready(b"", keep_alive=False)

    site.handler.answer = pour
    async with site.client() as client:
        client.writer.transport.pause_reading()  # type: ignore[union-attr]
        await client.send(request("GET", "/"))
        await site.swept_until(lambda: not site.listener.connections)
    assert len(errors) == 1


async def test_a_large_answer_that_is_taken_arrives_whole(site: Site) -> None:
    body = bytes(range(256)) * 20_000

    async def pour(inbound: Inbound) -> Answerable:
        await inbound.write(answer(body))
        return Ready(b"", keep_alive=True)

    site.handler.answer = pour
    async with site.client() as client:
        for _ in range(2):
            assert (await client.ask(request("GET", "/"))).body == body


def boom(*_: object) -> Any:
    raise ValueError("boom")


async def boom_later(inbound: Inbound) -> Answerable:
    if inbound.target == b"/begun":
        await inbound.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n12")
    return boom()


@pytest.mark.parametrize("when", ["at once", "later", "in a task"])
async def test_a_fault_of_the_handler_is_an_answer_and_the_end(site: Site, when: str) -> None:
    done = promise()
    done.set_result(b"")
    site.handler.answer = {"at once": boom, "later": lambda _: Later(done, boom), "in a task": boom_later}[when]
    async with site.client() as client:
        failed = await client.ask(request("GET", "/"))
        assert (failed.status, failed.body) == (500, b"boom")
        assert await client.is_closed()
    assert [str(error) for error in site.handler.errors] == ["boom"]


async def test_an_answer_that_fails_after_it_began_is_broken_off(site: Site) -> None:
    site.handler.answer = boom_later
    async with site.client() as client:
        await client.send(request("GET", "/begun"))
        with pytest.raises(asyncio.IncompleteReadError):
            await client.read_answer()
    assert len(site.handler.errors) == 1


async def test_what_is_answered_after_the_client_left_is_still_made(site: Site) -> None:
    done, made = promise(), []

    def make(body: bytes) -> Answerable:
        made.append(body)
        return Ready(answer(body), keep_alive=True)

    site.handler.answer = lambda _: Later(done, make)
    async with site.client() as client:
        await client.send(request("GET", "/") * 2)
        await until(lambda: bool(site.handler.asked))
        await client.reset()
    await until(lambda: not site.listener.connections)
    done.set_result(b"late")
    await until(lambda: site.listener.active == 0)
    assert made == [b"late"]
    assert len(site.handler.asked) == 1


@pytest.mark.parametrize(
    "last", [b"", b"GET / HTTP/1.1\r\nA", request("POST", "/", [("Content-Length", "3"), ("Upgrade", "h2c")])]
)
async def test_a_connection_that_was_lost_leaves_nothing_for_the_garbage_collector(site: Site, last: bytes) -> None:
    gc.disable()
    try:
        async with site.client() as client:
            assert (await client.ask(request("POST", "/", [], b"{}"))).status == 200
            connection = weakref.ref(site.connection)
            await client.send(last)
            await client.reset()
        await until(lambda: not site.listener.connections)
        site.handler.asked.clear()
        await until(lambda: connection() is None)
    finally:
        gc.enable()


async def test_a_shutdown_closes_what_idles_lets_what_runs_end_and_cuts_off_the_rest(site: Site) -> None:
    waits = {b"/soon": promise(), b"/never": promise()}
    site.handler.answer = lambda inbound: (
        echo(inbound) if inbound.target == b"/" else Later(waits[inbound.target], lambda _: echo(inbound))
    )
    async with site.client() as idle, site.client() as soon, site.client() as never:
        assert (await idle.ask(request("GET", "/"))).status == 200
        await soon.send(request("GET", "/soon") * 2)
        await never.send(request("GET", "/never"))
        await until(lambda: len(site.handler.asked) == 3)
        stopping = asyncio.create_task(site.listener.shutdown(0.3))
        assert await idle.is_closed()
        waits[b"/soon"].set_result(b"")
        assert (await soon.read_answer()).body == b"/soon "
        assert await soon.is_closed()
        assert not stopping.done()
        await stopping
        with contextlib.suppress(ConnectionError):
            assert await never.is_closed()
    await until(lambda: not site.listener.connections)
    waits[b"/never"].set_result(b"")
    await until(lambda: site.listener.active == 0)
    assert len(site.handler.asked) == 3
