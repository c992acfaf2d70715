"""A hostile client: it tries to double an effect, to read another's reply, to smuggle, to fill memory, to hang."""

import asyncio
import contextlib
import random
import socket

import pytest

from tests.support import RawAnswer, Turn, hang, reply, request, then, wait_for

from .conftest import Client, Gate, Start, post

MIB = 1024 * 1024


def code(answer: RawAnswer) -> str:
    return answer.body.decode().partition('"code":"')[2].partition('"')[0]


class SmallWindow(Client):
    """A client with a small receive buffer, so that what it does not read stays in the gateway."""

    async def __aenter__(self) -> "SmallWindow":  # noqa: PYI034
        handle = socket.socket()
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        handle.setblocking(False)
        await asyncio.get_running_loop().sock_connect(handle, (self.host, self.port))
        self.reader, self.writer = await asyncio.open_connection(sock=handle, limit=4096)
        return self


async def test_replies_that_nobody_reads_do_not_fill_the_memory_and_do_not_stay(
    gate: Gate, upstream: Start, key: str
) -> None:
    body = b"0123456789abcdef" * (MIB // 2)
    up = await upstream(reply(201, body))
    asked = post("/large", key)
    assert (await gate.ask(asked)).body == body
    before = gate.forget_peak()
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(SmallWindow(gate.port)) for _ in range(40)]
        for client in clients:
            await client.send(asked)
        heads = [await client.read_head() for client in clients]
        assert up.executions["/large", key] == 1
        statuses = [head.status for head in heads]
        assert set(statuses) == {201, 503}, statuses
        assert 4 <= statuses.count(201) <= 9, "limits.buffer_memory is 64 MiB"
        assert gate.memory("VmHWM") - before < 100 * MIB
        stalled = clients[statuses.index(201)]
        async with asyncio.timeout(10):
            while (await gate.metrics())["idempotency_gateway_buffer_bytes"]:
                await asyncio.sleep(0.1)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await stalled.reader.readexactly(len(body))
    answer = await gate.ask(asked)
    assert up.executions["/large", key] == 1
    assert (answer.status, answer.body == body) == (201, True)


@pytest.mark.parametrize("path", ["/orders", "/open"])
async def test_an_answer_that_is_read_slowly_arrives_whole(gate: Gate, upstream: Start, key: str, path: str) -> None:
    body = b"0123456789abcdef" * (MIB // 2)
    await upstream(reply(201, body))
    async with SmallWindow(gate.port) as client:
        await client.send(post(path, key))
        head = await client.read_head()
        assert head.status == 201
        read = 0
        while read < len(body):
            read += len(await client.reader.read(1 << 20))
            if read % 64 == 0:
                await asyncio.sleep(0.0005)
        assert read == len(body)


async def test_small_answers_to_pipelined_requests_that_nobody_reads_do_not_pile_up(
    gate: Gate, upstream: Start, key: str
) -> None:
    body = b"x" * 60_000
    up = await upstream(reply(201, body))
    for path in ("/orders", "/open"):
        assert (await gate.ask(post(path, key))).body == body
    for path in ("/orders", "/open"):
        before = gate.forget_peak()
        async with SmallWindow(gate.port) as client:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await client.send(post(path, key) * 5000)
            assert gate.memory("VmHWM") - before < 16 * MIB
    assert up.executions["/orders", key] == 1


async def test_bodies_without_their_end_do_not_fill_the_memory(gate: Gate, upstream: Start, key: str) -> None:
    up = await upstream(reply(201))
    before = gate.forget_peak()
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(gate.client()) for _ in range(300)]
        for number, client in enumerate(clients):
            with contextlib.suppress(ConnectionError):
                await client.send(post(key=f"{key}-{number}", body=b"x" * 1_000_000)[:-1])
        answers = await asyncio.gather(*(client.read_answer() for client in clients))
        assert not up.requests
        codes = {code(answer) for answer in answers}
        assert codes == {"over-capacity", "request-timeout"}, "limits.buffer_memory is 64 MiB"
        assert gate.memory("VmHWM") - before < 170 * MIB, "with what is read ahead on each connection"
    assert (await gate.ask(post(key=key))).status == 201


@pytest.mark.parametrize("path", ["/orders", "/open"])
async def test_pipelined_bodies_are_not_read_far_ahead(gate: Gate, upstream: Start, key: str, path: str) -> None:
    go_on = asyncio.Event()
    up = await upstream(then(wait_for(go_on), reply(201, b"made")))
    before = gate.forget_peak()
    body = b"x" * 400_000
    async with gate.client() as client:

        async def push() -> None:
            for number in range(60):
                await client.send(post(path, f"{key}-{number}", body))

        pushing = asyncio.create_task(push())
        await up.wait_for_requests(1)
        await asyncio.sleep(0.5)  # time to read ahead in
        assert gate.memory("VmHWM") - before < 8 * MIB
        go_on.set()
        answers = [await client.read_answer() for _ in range(60)]
        await pushing
    assert sum(up.executions.values()) == 60
    assert {(answer.status, answer.body) for answer in answers} == {(201, b"made")}


# ---- doubling an effect -----------------------------------------------------------------------------------------


async def test_a_crowd_with_one_key_that_comes_and_goes_runs_it_once(
    gate: Gate, twin: Gate, upstream: Start, key: str
) -> None:
    go_on = asyncio.Event()
    up = await upstream(then(wait_for(go_on), reply(201, b"made")))
    chance = random.Random(key)

    async def one(number: int) -> RawAnswer | None:
        whole = post(key=key, chunks=[b'{"amount"', b":1}"]) if number % 2 else post(key=key)
        client = chance.choice((gate, twin)).client()
        await client.__aenter__()
        try:
            cut = chance.choice((len(whole), len(whole), chance.randrange(len(whole))))
            await client.send(whole[:cut])
            await asyncio.sleep(chance.random() * 0.2)
            if cut == len(whole) and chance.random() < 0.5:
                return await client.read_answer()
            await chance.choice((client.reset, client.hang_up))()
        finally:
            await client.hang_up()
        return None

    asking = [asyncio.create_task(one(number)) for number in range(60)]
    await up.wait_for_requests(1)
    await asyncio.sleep(0.2)  # time for the crowd to act in: nothing it does may be seen
    go_on.set()
    answers = [answer for answer in await asyncio.gather(*asking) if answer is not None]
    assert up.executions["/orders", key] == 1
    assert {(answer.status, answer.value("Idempotency-Status")) for answer in answers} <= {
        (201, "executed"), (201, "replayed"), (409, "outstanding"),
    }  # fmt: skip
    for one_of in (gate, twin):
        assert (await one_of.settled(post(key=key))).body == b"made"
    assert up.executions["/orders", key] == 1


# ---- reading another's reply ------------------------------------------------------------------------------------


async def test_no_answer_reaches_another_client_whoever_leaves_when(gate: Gate, upstream: Start, key: str) -> None:
    async def echo(turn: Turn) -> None:
        name = turn.request.values("X-Name")[0]
        size = int(turn.request.values("X-Size")[0])
        await reply(200, name * (size // len(name)), [("X-Name", name)])(turn)

    await upstream(echo)
    chance = random.Random(key)

    async def one(number: int) -> int:
        name = f"{number:08}"
        size = chance.choice((8, 800, 80_000, 2_400_000))
        path = chance.choice(("/orders", "/open", "/large"))
        async with gate.client() as client:
            for turn in range(3):
                await client.send(post(path, f"{key}-{number}-{turn}", b"{}", ("X-Name", name), ("X-Size", str(size))))
                if chance.random() < 0.3:
                    await asyncio.sleep(chance.random() * 0.01)
                    await chance.choice((client.reset, client.hang_up))()
                    return turn
                answer = await client.read_answer()
                assert (answer.status, answer.value("X-Name")) == (200, name)
                assert answer.body == name.encode() * (size // 8)
        return 3

    for batch in range(0, 90, 15):
        await asyncio.gather(*(one(number) for number in range(batch, batch + 15)))


# ---- smuggling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/orders", "/open"])
async def test_http_1_0_with_a_coding_is_refused(gate: Gate, upstream: Start, key: str, path: str) -> None:
    up = await upstream(reply(201))
    head = f"POST {path} HTTP/1.0\r\nIdempotency-Key: {key}\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n"
    answer = await gate.ask(head.encode() + b"\r\n2\r\n{}\r\n0\r\n\r\n")
    assert not up.requests
    assert (answer.status, code(answer), answer.value("Connection")) == (400, "request-invalid", "close")


@pytest.mark.parametrize("wish", ["websocket", "h2c", "TLS/1.0"])
async def test_a_wish_to_upgrade_changes_nothing_of_what_is_protected(
    gate: Gate, upstream: Start, key: str, wish: str
) -> None:
    up = await upstream(reply(201))
    wishing = [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", wish), ("HTTP2-Settings", "AAMAAABk")]
    async with gate.client() as client:
        whole = post("/orders", f"{key}-1", b"{}", *wishing)
        rest = post("/orders", f"{key}-2", post("/orders", f"{key}-smuggled"))
        await client.send(whole + rest[:200])
        await up.wait_for_requests(1)
        with contextlib.suppress(ConnectionError):
            await client.send(rest[200:])  # to be read as what it is, if at all
        answer = await client.read_answer()
        assert (answer.status, answer.value("Connection")) == (201, "close")
        assert await client.is_closed()
    assert up.executions == {("/orders", f"{key}-1"): 1}
    assert (await gate.ask(whole)).value("Idempotent-Replayed") == "true"
    assert not any(asked.values("Upgrade") or asked.values("HTTP2-Settings") for asked in up.requests)


@pytest.mark.parametrize(
    "start",
    [
        b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /orders HTTP/1.2\r\nHost: g\r\n\r\n",
        b"post /orders HTTP/1.1\r\nHost: g\r\n\r\n",
        b"POST /orders\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
async def test_what_is_no_request_of_http_1_1_ends_the_connection(
    gate: Gate, upstream: Start, key: str, start: bytes
) -> None:
    up = await upstream(reply(201))
    async with gate.client() as client:
        await client.send(start + post(key=key))
        answer = await client.read_answer()
        assert (answer.status, answer.value("Connection")) == (400, "close")
        assert await client.is_closed()
    assert not up.requests


async def test_random_bytes_neither_double_nor_smuggle_nor_hang(gate: Gate, upstream: Start, key: str) -> None:
    up = await upstream(reply(201))
    chance = random.Random(key)
    lines = [
        b"Connection: close", b"Connection: Upgrade", b"Upgrade: websocket", b"Expect: 100-continue", b"TE: trailers",
        b"Transfer-Encoding: chunked", b"Content-Length: 2", b"Content-Length: 02", b"X : y", b" folded", b"X: \x00",
        b"Connection: idempotency-key", b"Trailer: Idempotency-Key", b"Host: h",
    ]  # fmt: skip

    def attack(number: int) -> bytes:
        head = [
            b"Host: g",
            b"Idempotency-Key: %b-%d" % (key.encode(), number),
            *chance.sample(lines, chance.randrange(3)),
        ]
        body = chance.choice((b"{}", b"2\r\n{}\r\n0\r\n\r\n", b"0\r\n\r\n"))
        if chance.random() < 0.6:
            head.append(b"Content-Length: %d" % len(body))
        chance.shuffle(head)
        data = b"\r\n".join([b"POST /orders HTTP/1.1", *head, b"", body])
        if chance.random() < 0.2:
            at = chance.randrange(len(data))
            data = data[:at] + chance.randbytes(chance.randrange(3)) + data[at + chance.randrange(3) :]
        return data

    async def one(number: int) -> None:
        data = attack(number) + attack(number)
        async with gate.client() as client:
            with contextlib.suppress(ConnectionError):
                while data:
                    step = chance.choice((1, 7, 60, 4000))
                    await client.send(data[:step])
                    data = data[step:]
                with contextlib.suppress(OSError):  # it has closed already
                    client.half_close()
                await client.read_to_end()

    for batch in range(0, 300, 30):
        await asyncio.gather(*(one(number) for number in range(batch, batch + 30)))
    ran = [asked for asked in up.requests if (asked.method, asked.path) == ("POST", "/orders")]
    assert len({asked.key for asked in ran} - {""}) == len(ran) > 20, "each of them once"
    assert all(asked.complete for asked in ran)
    assert all(len(asked.values("Content-Length")) <= 1 for asked in up.requests)
    assert not any(asked.values("Transfer-Encoding") and asked.values("Content-Length") for asked in up.requests)


# ---- hanging ----------------------------------------------------------------------------------------------------


async def test_a_client_that_closes_one_half_and_is_reset_later_is_noticed(gate: Gate, upstream: Start) -> None:
    up = await upstream(hang())
    client = gate.client()
    await client.__aenter__()
    await client.send(request("GET", "/open"))
    client.half_close()
    await up.wait_for_requests(1)
    await asyncio.sleep(0.1)  # let the end of the stream arrive first
    await client.reset()
    async with asyncio.timeout(2):
        await up.wait_until_closed()


async def test_endless_chunk_extensions_and_trailers_end(gate: Gate, upstream: Start, key: str) -> None:
    up = await upstream(reply(201))
    head = request("POST", "/orders", [("Idempotency-Key", key), ("Transfer-Encoding", "chunked")])
    before = gate.forget_peak()
    for start, piece in ((b"2;", b"e" * 65536), (b"2\r\n{}\r\n0\r\n", b"A: b\r\n" * 9000)):
        async with gate.client() as client:
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(8):
                    await client.send(head + start)
                    while True:
                        await client.send(piece)
    assert not up.requests
    assert gate.memory("VmHWM") - before < 30 * MIB
    assert (await gate.ask(post(key=key))).status == 201
