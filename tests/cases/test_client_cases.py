"""Clients that leave, stall, rush, or send more than they may: what runs runs once, and nothing hangs or grows."""

import asyncio
import contextlib
import time
from collections.abc import Iterator

import pytest

from tests.support import RawAnswer, Turn, close, early, endless, hang, reply, request, then, wait_for

from .conftest import Client, Gate, Start, post

MIB = 1024 * 1024
PATHS = pytest.mark.parametrize("path", ["/orders", "/open"])


def code(answer: RawAnswer) -> str:
    return answer.body.decode().partition('"code":"')[2].partition('"')[0]


# ---- C04 --------------------------------------------------------------------------------------------------------


async def leave(client: Client, how: str) -> None:
    await (client.reset() if how == "reset" else client.hang_up())


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_c04_a_client_that_leaves_before_the_answer_finds_it_afterwards(
    gate: Gate, upstream: Start, key: str, how: str
) -> None:
    done = asyncio.Event()
    body = bytes(range(256)) * 100
    up = await upstream(then(wait_for(done), reply(201, body)))
    client = gate.client()
    await client.__aenter__()
    await client.send(post(key=key))
    await up.wait_for_requests(1)
    await leave(client, how)
    outstanding = await gate.ask(post(key=key))
    assert up.executions["/orders", key] == 1
    assert (outstanding.status, code(outstanding)) == (409, "outstanding")
    done.set()
    answer = await gate.settled(post(key=key))
    assert up.executions["/orders", key] == 1
    assert (answer.status, answer.body, answer.value("Idempotent-Replayed")) == (201, body, "true")


@pytest.fixture(scope="module")
def cancelling(
    dsn: str, cases_schema: str, upstream_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gate]:
    """A gateway that cancels what a request waits for when its client leaves, which it does not do by itself."""
    program = """if True:
        from gateway.cli import main
        from gateway.server.connection import Connection, Later

        act, lost = Connection._act, Connection.connection_lost

        def remember(self, inbound, outcome):
            self.waiting = outcome.future if isinstance(outcome, Later) else None
            act(self, inbound, outcome)

        def cancel(self, exc):
            lost(self, exc)
            if getattr(self, "waiting", None) is not None:
                self.waiting.cancel()

        Connection._act, Connection.connection_lost = remember, cancel
        main()
    """
    gate = Gate(
        tmp_path_factory.mktemp("cancelling"),
        dsn=dsn,
        schema=cases_schema,
        upstream=f"localhost:{upstream_port}",
        program=("-c", program),
    )
    asyncio.run(gate.start())
    yield gate
    assert asyncio.run(gate.stop()) == 0
    assert "Traceback" not in gate.log.read_text()


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_c04i_a_cancelled_handler_does_not_cancel_the_exchange(
    cancelling: Gate, upstream: Start, key: str, how: str
) -> None:
    done = asyncio.Event()
    up = await upstream(then(wait_for(done), reply(201, b"made")))
    client = cancelling.client()
    await client.__aenter__()
    await client.send(post(key=key))
    await up.wait_for_requests(1)
    await leave(client, how)
    assert (await cancelling.ask(post(key=key))).status == 409
    done.set()
    answer = await cancelling.settled(post(key=key))
    assert up.executions["/orders", key] == 1
    assert (answer.status, answer.value("Idempotent-Replayed")) == (201, "true")


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_c04iii_a_client_that_leaves_within_its_body_leaves_no_lease(
    gate: Gate, upstream: Start, key: str, *, how: str, chunked: bool
) -> None:
    up = await upstream(reply(201))
    whole = post(key=key, chunks=[b"{", b"}"]) if chunked else post(key=key, body=b"{}")
    client = gate.client()
    await client.__aenter__()
    await client.send(whole[:-6] if chunked else whole[:-1])
    await leave(client, how)
    answer = await gate.ask(whole)
    assert up.executions["/orders", key] == 1
    assert len(up.requests) == 1
    assert (answer.status, answer.value("Idempotency-Status")) == (201, "executed")


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_c04iv_a_client_that_leaves_within_the_answer_can_read_all_of_it_later(
    gate: Gate, twin: Gate, upstream: Start, key: str, how: str
) -> None:
    body = b"0123456789" * (MIB // 2)
    up = await upstream(reply(201, body))
    client = gate.client()
    await client.__aenter__()
    await client.send(post("/large", key))
    await client.read_head()
    await client.reader.readexactly(MIB)
    await leave(client, how)
    for one in (gate, twin):
        answer = await one.ask(post("/large", key))
        assert up.executions["/large", key] == 1
        assert (answer.status, answer.body == body, answer.value("Idempotent-Replayed")) == (201, True, "true")


# ---- clients that close one half --------------------------------------------------------------------------------


@PATHS
async def test_c04_a_client_that_closes_its_sending_half_gets_its_answer(
    gate: Gate, upstream: Start, key: str, path: str
) -> None:
    done = asyncio.Event()
    body = b"x" * 900_000
    up = await upstream(then(wait_for(done), reply(201, body)))
    async with gate.client() as client:
        await client.send(post(path, f"{key}-1") + post(path, f"{key}-2"))
        client.half_close()
        await up.wait_for_requests(1)
        await asyncio.sleep(0.1)  # let the end of the stream arrive: nothing tells when it has
        done.set()
        answers = [await client.read_answer(), await client.read_answer()]
        assert await client.is_closed()
    assert sum(up.executions.values()) == 2
    assert [(answer.status, answer.body == body) for answer in answers] == [(201, True)] * 2


@PATHS
@pytest.mark.parametrize("chunked", [False, True])
async def test_c04_a_half_closed_request_without_its_end_is_not_executed_and_not_waited_for(
    gate: Gate, upstream: Start, key: str, *, path: str, chunked: bool
) -> None:
    up = await upstream(reply(201))
    whole = post(path, key, chunks=[b"{", b"}"]) if chunked else post(path, key, b"{}")
    started = time.monotonic()
    async with gate.client() as client:
        await client.send(whole[:-6] if chunked else whole[:-1])
        client.half_close()
        rest = await client.read_to_end()
    assert sum(up.executions.values()) == 0
    assert rest == b"" or b" 400 " in rest.split(b"\r\n")[0]
    assert time.monotonic() - started < 1.5
    answer = await gate.ask(whole)
    assert up.executions[path, key] == 1
    assert answer.status == 201


async def test_c04_half_a_head_and_an_idle_connection_end_with_the_client(gate: Gate, upstream: Start) -> None:
    await upstream(reply(201))
    for data in (b"", b"POST /orders HTTP/1.1\r\nHost: g\r\n"):
        async with gate.client() as client:
            await client.send(data)
            client.half_close()
            assert await client.is_closed()


# ---- pass-through: the upstream is left when the client leaves --------------------------------------------------


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_c39_an_endless_stream_ends_at_the_upstream_when_the_client_leaves(
    gate: Gate, upstream: Start, how: str
) -> None:
    async def ticking(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        while True:
            await turn.send(b"data: tick\n\n")
            await asyncio.sleep(0.1)

    up = await upstream(ticking)
    client = gate.client()
    await client.__aenter__()
    await client.send(request("GET", "/events"))
    answer = await client.read_head()
    assert await client.read_chunk(answer)
    await leave(client, how)
    async with asyncio.timeout(2):
        await up.wait_until_closed()


async def test_c39_a_request_that_the_upstream_never_answers_ends_with_a_reset_client(
    gate: Gate, upstream: Start
) -> None:
    up = await upstream(hang())
    client = gate.client()
    await client.__aenter__()
    await client.send(request("GET", "/open"))
    await up.wait_for_requests(1)
    await client.reset()
    async with asyncio.timeout(2):
        await up.wait_until_closed()


async def test_c39_an_endless_download_to_a_slow_reader_is_held_by_the_upstream(gate: Gate, upstream: Start) -> None:
    up = await upstream(endless(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536))
    before = gate.forget_peak()
    async with gate.client() as client:
        await client.send(request("GET", "/download"))
        await client.read_head()
        written = -1
        while written != up.bytes_written:  # until it is blocked
            written = up.bytes_written
            await asyncio.sleep(0.2)
        assert gate.memory("VmHWM") - before < 20 * MIB
    async with asyncio.timeout(2):
        await up.wait_until_closed()


# ---- C33: Expect ------------------------------------------------------------------------------------------------


@PATHS
@pytest.mark.parametrize("expect", ["100-continue", "100-Continue"])
async def test_c33a_a_client_that_waits_for_100_gets_it_and_the_upstream_sees_no_expectation(
    gate: Gate, upstream: Start, key: str, *, path: str, expect: str
) -> None:
    up = await upstream(reply(201))
    body = b"x" * 900_000
    async with gate.client() as client:
        whole = post(path, key, body, ("Expect", expect))
        head = whole[: -len(body)]
        await client.send(head)
        interim = await client.reader.readuntil(b"\r\n\r\n")
        assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(body)
        answer = await client.read_answer()
        assert up.executions[path, key] == 1
        assert (answer.status, answer.interim) == (201, [])
        assert not up.requests[0].values("Expect")
        assert up.requests[0].body == body
        assert (await client.ask(post(path, f"{key}-2"))).status == 201


@pytest.mark.parametrize(
    ("path", "with_key", "length", "expected"),
    [
        ("/orders", False, 100, "key-missing"),
        ("/orders", True, 2 * MIB, "request-too-large"),
        ("/by-customer", True, 100, "scope-missing"),
        ("/orders/../orders", True, 100, "path-ambiguous"),
    ],
)
async def test_c33b_d_what_is_refused_anyway_is_refused_without_asking_for_the_body(
    gate: Gate, upstream: Start, key: str, *, path: str, with_key: bool, length: int, expected: str
) -> None:
    up = await upstream(reply(201))
    lines = [("Expect", "100-continue"), ("Content-Length", str(length))]
    if with_key:
        lines.append(("Idempotency-Key", key))
    async with gate.client() as client:
        answer = await client.ask(request("POST", path, lines))
        assert not up.requests
        assert answer.interim == []
        assert code(answer) == expected
        # What comes next is either the body or, from a client that skips it, another request: nobody can tell.
        assert answer.value("Connection") == "close"
        with contextlib.suppress(ConnectionError):
            await client.send(post("/orders", f"{key}-2"))
        assert await client.is_closed()
    assert not up.requests


async def test_c33e_a_refusal_before_the_body_is_relayed(gate: Gate, upstream: Start) -> None:
    up = await upstream(early(reply(401, b"who?", close_after=True)))
    async with gate.client() as client:
        answer = await client.ask(
            request("POST", "/open", [("Expect", "100-continue"), ("Content-Length", str(2 * MIB))])
        )
        assert sum(up.executions.values()) == 0
        assert (answer.status, answer.body) == (401, b"who?")
        assert answer.value("Connection") == "close"


@PATHS
@pytest.mark.parametrize("expect", ["something", "100-continue, other"])
async def test_c33f_another_expectation_is_417(
    gate: Gate, upstream: Start, key: str, *, path: str, expect: str
) -> None:
    up = await upstream(reply(201))
    answer = await gate.ask(post(path, key, b"{}", ("Expect", expect)))
    assert not up.requests
    assert answer.status == 417


# ---- C36 --------------------------------------------------------------------------------------------------------


class Swallow:
    """An upstream's action that reads a large body without keeping it, and answers with its size."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def __call__(self, turn: Turn) -> None:
        size = 0
        if turn.request.values("Transfer-Encoding"):
            while length := int(await turn.reader.readuntil(b"\r\n"), 16):
                await turn.reader.readexactly(length + 2)
                size += length
            await turn.reader.readexactly(2)
        else:
            left = int(turn.request.values("Content-Length")[0])
            while left:
                piece = await turn.reader.read(min(left, 1 << 20))
                assert piece
                left -= len(piece)
                size += len(piece)
        turn.request.complete = True
        self.sizes.append(size)
        await reply(201, b"%d" % size)(turn)


async def upload(client: Client, path: str, key: str, size: int, *, chunked: bool) -> RawAnswer:
    """Send a synthetic body, and read the answer whenever it comes."""
    piece = b"u" * (256 * 1024)
    framing = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(size))
    await client.send(request("POST", path, [("Idempotency-Key", key), framing]))

    async def send() -> None:
        with contextlib.suppress(ConnectionError):
            for _ in range(size // len(piece)):
                await client.send(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            if chunked:
                await client.send(b"0\r\n\r\n")

    sending = asyncio.create_task(send())
    try:
        return await client.read_answer()
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_c36a_a_protected_upload_is_taken_up_to_its_limit_and_refused_beyond(
    gate: Gate, upstream: Start, key: str, *, chunked: bool
) -> None:
    swallow = Swallow()
    up = await upstream(early(swallow))
    async with gate.client() as client:
        answer = await upload(client, "/large", f"{key}-1", 2 * MIB, chunked=chunked)
        assert swallow.sizes == [2 * MIB]
        assert answer.status == 201
    before = gate.forget_peak()
    async with gate.client() as client:
        answer = await upload(client, "/large", f"{key}-2", 200 * MIB, chunked=chunked)
        assert len(up.requests) == 1
        assert (answer.status, code(answer), answer.value("Connection")) == (413, "request-too-large", "close")
    assert gate.memory("VmHWM") - before < 30 * MIB
    async with gate.client() as client:
        answer = await upload(client, "/large", f"{key}-2", 2 * MIB, chunked=chunked)
        assert swallow.sizes == [2 * MIB] * 2, "no lease is left"
        assert answer.status == 201
    async with gate.client() as client:
        exactly = await upload(client, "/large", f"{key}-3", 10 * MIB, chunked=chunked)
        assert exactly.status == 201


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_c36b_a_large_upload_streams_through(gate: Gate, upstream: Start, key: str, *, chunked: bool) -> None:
    swallow = Swallow()
    await upstream(early(swallow))
    async with gate.client() as client:
        assert (await upload(client, "/open", key, 4 * MIB, chunked=chunked)).status == 201
        before = gate.forget_peak()
        answer = await upload(client, "/open", key, 200 * MIB, chunked=chunked)
    assert swallow.sizes == [4 * MIB, 200 * MIB]
    assert answer.status == 201
    assert gate.memory("VmHWM") - before < 20 * MIB


async def test_c36b_an_upload_that_the_upstream_does_not_read_is_held_by_the_client(
    gate: Gate, upstream: Start, key: str
) -> None:
    go_on = asyncio.Event()
    swallow = Swallow()
    await upstream(early(then(wait_for(go_on), swallow)))
    before = gate.forget_peak()
    async with gate.client() as client:
        sending = asyncio.create_task(upload(client, "/open", key, 64 * MIB, chunked=False))
        await asyncio.sleep(0.7)
        assert gate.memory("VmHWM") - before < 20 * MIB
        go_on.set()
        assert (await sending).status == 201


def says_that_it_may_have_been_sent(answer: RawAnswer) -> None:
    """Part of a passed-on request is at the service already: nobody may call that `refused`, or tell to repeat it."""
    assert answer.value("Idempotency-Status") == "in-doubt"
    assert answer.value("X-Should-Retry") == "false"
    assert answer.value("Retry-After") is None
    assert b'"effect":"unknown"' in answer.body


async def test_c23_a_passed_on_post_that_was_cut_off_is_not_to_be_repeated_blindly_and_a_get_is(
    gate: Gate, upstream: Start, key: str
) -> None:
    up = await upstream(close())
    answer = await gate.ask(post("/open", key))
    assert len(up.requests) == 1
    assert answer.status == 502
    says_that_it_may_have_been_sent(answer)
    assert (await gate.ask(request("GET", "/open"))).value("X-Should-Retry") == "true"


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_c36d_a_body_that_stalls_is_408_and_holds_no_lease_meanwhile(
    gate: Gate, upstream: Start, key: str, *, chunked: bool
) -> None:
    up = await upstream(reply(201))
    whole = post(key=key, chunks=[b"{", b"}"]) if chunked else post(key=key, body=b"{}")
    async with gate.client() as client:
        await client.send(whole[:-6] if chunked else whole[:-1])
        other = await gate.ask(whole)
        assert up.executions["/orders", key] == 1
        assert other.status == 201
        stalled = await client.read_answer()
        assert (stalled.status, code(stalled), stalled.value("Connection")) == (408, "request-timeout", "close")
    assert len(up.requests) == 1


async def test_c36d_a_passed_on_body_that_stalls_is_408_too_and_the_upstream_is_left(
    gate: Gate, upstream: Start, key: str
) -> None:
    up = await upstream(reply(201))
    async with gate.client() as client:
        await client.send(post("/open", key, b"{}")[:-1])
        stalled = await client.read_answer()
        assert sum(up.executions.values()) == 0
        assert (stalled.status, code(stalled), stalled.value("Connection")) == (408, "outcome-unknown", "close")
        says_that_it_may_have_been_sent(stalled)
        await up.wait_until_closed()


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_c36_a_client_that_leaves_within_a_passed_on_body_leaves_the_upstream_too(
    gate: Gate, upstream: Start, key: str, how: str
) -> None:
    up = await upstream(reply(201))
    client = gate.client()
    await client.__aenter__()
    await client.send(post("/open", key, b"{}")[:-1])
    await up.until(lambda: len(up.requests) == 1)
    await leave(client, how)
    await up.wait_until_closed()
    assert sum(up.executions.values()) == 0


# ---- broken in the middle ---------------------------------------------------------------------------------------


@PATHS
@pytest.mark.parametrize(
    "broken",
    [b"zz\r\n", b"-1\r\n", b"1\r\nxx\r\n", b"10000000000000000\r\n", b"2\r\n{}\r\n0\r\nbad\0trailer: x\r\n\r\n"],
)
async def test_c31_a_body_that_breaks_its_framing_later_is_refused_at_once(
    gate: Gate, upstream: Start, key: str, *, path: str, broken: bytes
) -> None:
    up = await upstream(reply(201))
    started = time.monotonic()
    async with gate.client() as client:
        await client.send(request("POST", path, [("Idempotency-Key", key), ("Transfer-Encoding", "chunked")]))
        await client.send(b"2\r\n{}\r\n")
        await asyncio.sleep(0.05)  # so that the head is being handled when the rest comes
        await client.send(broken + post("/orders", f"{key}-smuggled"))
        answer = await client.read_answer()
        assert sum(up.executions.values()) == 0
        passed_on = path == "/open"
        expected = (400, "outcome-unknown" if passed_on else "request-invalid", "close")
        assert (answer.status, code(answer), answer.value("Connection")) == expected
        if passed_on:
            says_that_it_may_have_been_sent(answer)
        assert await client.is_closed()
    assert sum(up.executions.values()) == 0
    assert time.monotonic() - started < 1.5
    again = await gate.ask(post(path, key))
    assert again.status == 201
