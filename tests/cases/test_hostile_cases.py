"""A hostile client: it tries to double an effect, to read another's reply, to smuggle, to fill memory, to hang."""

import asyncio
import contextlib
import socket

import pytest

from tests.support import RawAnswer, reply

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
