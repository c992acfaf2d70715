"""The sample ledger: what it writes, what it answers, and how it misbehaves when told to."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import asyncpg
import pytest

from gateway.demo.child import Child, ChildFailedError
from gateway.demo.ledger import DIED, Fault, parse_fault

BODY = {"account": "C-4711", "amount": 1250, "client_ref": "r1"}


@pytest.fixture
def start(dsn: str, schema: str, tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Start ledger processes on a free port and a schema of their own; all are ended afterwards."""
    running: list[Child] = []

    def one(*more: str) -> Child:
        command = [sys.executable, "-m", "gateway.demo.ledger", "--dsn", dsn, "--port", "0", "--schema", schema, *more]
        running.append(Child("ledger", command, tmp_path / f"ledger{len(running)}.log"))
        return running[-1]

    yield one
    for child in running:
        child.stop()


def url_of(child: Child) -> str:
    return child.wait_until(r"ledger listening on (http://\S+)")[1]


@pytest.fixture
async def client(start: Callable[..., Child]) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url_of(start())) as session:
        yield session


@pytest.fixture
async def rows(dsn: str, schema: str) -> AsyncIterator[Callable[[], object]]:
    """Count the rows in the ledger's table."""
    connection = await asyncpg.connect(dsn)
    yield lambda: connection.fetchval(f'SELECT count(*) FROM "{schema}".transfer')
    await connection.close()


async def post(client: aiohttp.ClientSession, fault: str = "", **body: object) -> aiohttp.ClientResponse:
    headers = {"X-Ledger-Fault": fault} if fault else {}
    async with client.post("/transfers", json={**BODY, **body}, headers=headers, allow_redirects=False) as reply:
        await reply.read()
        return reply


async def test_a_transfer_is_written_and_can_be_read_again(client, rows):
    reply = await post(client)
    assert await rows() == 1
    assert reply.status == 201
    made = await reply.json()
    assert {name: made[name] for name in BODY} == BODY
    assert reply.headers["Location"] == f"/transfers/{made['id']}"
    async with client.get(reply.headers["Location"]) as found:
        assert (found.status, await found.json()) == (200, made)
    async with client.get("/transfers/999999") as missing:
        assert missing.status == 404


async def test_the_same_transfer_sent_twice_is_two_rows_because_the_reference_is_not_unique(client, rows):
    await post(client)
    await post(client)
    await post(client, client_ref="other")
    assert await rows() == 3
    async with client.get("/transfers", params={"client_ref": "r1"}) as found:
        assert found.status == 200
        assert [one["client_ref"] for one in (await found.json())["transfers"]] == ["r1", "r1"]
    async with client.get("/transfers", params={"client_ref": "never"}) as missing:
        assert missing.status == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b'{"account": "a"}', 422), (b'{"account": "a", "amount": -1}', 422), (b"\xff", 400)],
)
async def test_a_body_it_cannot_use_is_refused_and_writes_nothing(client, rows, body, status):
    async with client.post("/transfers", data=body) as reply:
        assert await rows() == 0
        assert (reply.status, bool((await reply.json())["error"])) == (status, True)


@pytest.mark.parametrize(
    ("fault", "status", "written"),
    [
        ("status=422", 422, 0),
        ("status=500", 500, 0),
        ("status=500, commit", 500, 1),
        ("status=200", 200, 1),
        ("status=303", 303, 1),
        ("status=204", 204, 1),
        ("sleep-before=1ms, sleep-after=1ms", 201, 1),
    ],
)
async def test_told_a_status_it_answers_so_and_writes_unless_it_is_an_error(client, rows, fault, status, written):
    reply = await post(client, fault)
    assert await rows() == written
    assert reply.status == status
    assert ("Location" in reply.headers) == (status in {200, 201, 303})


async def test_a_fault_it_does_not_know_is_refused(client, rows):
    reply = await post(client, "explode")
    assert await rows() == 0
    assert reply.status == 400
    assert "'explode'" in (await reply.json())["error"]


async def test_it_can_close_the_connection_after_its_commit(client, rows):
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await post(client, "close-after-commit")
    assert await rows() == 1
    assert (await post(client)).status == 201


@pytest.mark.parametrize(("fault", "written"), [("die-before-commit", 0), ("die-after-commit", 1)])
async def test_it_can_die_on_either_side_of_its_commit(start, rows, fault, written):
    child = start()
    async with aiohttp.ClientSession(url_of(child)) as client:
        with pytest.raises(aiohttp.ClientError):
            await post(client, fault)
    assert child.process.wait(10) == DIED
    assert await rows() == written


async def test_a_slow_transfer_is_written_although_its_client_hung_up(client, rows):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await post(client, "sleep-before=300ms")
    async with asyncio.timeout(10):
        while await rows() != 1:
            await asyncio.sleep(0.02)


def test_several_start_at_once_on_an_empty_database_and_stop_clean(start):
    children = [start() for _ in range(4)]
    assert len({url_of(child) for child in children}) == 4
    assert [child.stop() for child in children] == [0, 0, 0, 0]


def test_a_busy_port_is_one_sentence(start):
    port = re.sub(r".*:", "", url_of(start()))
    second = start("--port", port)
    with pytest.raises(ChildFailedError):
        second.wait_until("never")
    assert second.output() == (
        f"ledger: cannot listen on 127.0.0.1:{port} (address already in use); free it or give another --port.\n"
    )


def test_a_database_out_of_reach_is_one_sentence_without_the_secret(start):
    child = start("--dsn", "postgresql://me:hunter2@127.0.0.1:1/none")
    with pytest.raises(ChildFailedError):
        child.wait_until("never")
    assert len(child.output().splitlines()) == 1
    assert "cannot reach its database" in child.output()
    assert "hunter2" not in child.output()


def test_faults_combine_and_a_wrong_one_is_named():
    assert parse_fault("") == Fault()
    assert parse_fault("sleep-before=2s, sleep-after=500ms,status=500,commit") == Fault(
        sleep_before=2, sleep_after=0.5, status=500, commit=True
    )
    assert parse_fault("die-after-commit") == Fault(die_after_commit=True)
    for wrong in ("sleep-before=2", "status=700", "commit=yes", "die", "sleep-before"):
        assert repr(wrong) in str(parse_fault(wrong))
