"""A PostgreSQL of our own that tests stop, kill and cut off, with two replicas on it.

Gateway `one` reaches it through a relay, `two` by its socket.
"""

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.store import migrate
from tests.cases.protocol.stage import Gate, clean, make_gate
from tests.store.relay import Relay
from tests.support.postgres import OwnPostgres
from tests.support.processes import free_port

STORE_SECONDS = 1.0
SCHEMA = "outage"


@pytest.fixture(scope="session")
def postgres() -> Iterator[OwnPostgres]:
    # Not below pytest's own folder: another run of pytest closes that to PostgreSQL's user while this one goes on.
    with tempfile.TemporaryDirectory() as folder:
        postgres = OwnPostgres(Path(folder))
        yield postgres
        postgres.close()


@pytest.fixture(scope="session")
def relay_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def started(
    postgres: OwnPostgres,
    relay_port: int,
    service_port: int,
    ledger_port: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[Gate]]:
    folder = tmp_path_factory.mktemp("gateways")
    through = Relay(postgres.dsn)
    through.port = relay_port
    gates = [
        make_gate(folder, dsn, SCHEMA, port=service_port, ledger_port=ledger_port, store="timeout: 1s, pool_size: 2")
        for dsn in (through.dsn, postgres.dsn)
    ]

    async def start() -> None:
        await migrate(postgres.dsn, SCHEMA)
        await asyncio.gather(*(gate.start() for gate in gates))

    async def stop() -> list[int]:
        return await asyncio.gather(*(gate.stop() for gate in gates))

    asyncio.run(start())
    yield gates
    assert asyncio.run(stop()) == [0, 0]
    for gate in gates:
        clean(gate)


@pytest.fixture
async def relay(postgres: OwnPostgres, relay_port: int) -> AsyncIterator[Relay]:
    relay = Relay(postgres.dsn)
    relay.port = relay_port
    await relay.open()
    yield relay
    await relay.close()


@pytest.fixture
async def gates(started: list[Gate], relay: Relay, postgres: OwnPostgres) -> AsyncIterator[list[Gate]]:
    """Both replicas, their store up; what a test broke is whole again afterwards, and nothing is left held."""
    for gate in started:
        if not gate.alive:
            await gate.start()
        await until_up(gate)
    yield started
    relay.silent = False
    relay.lose_answer_about = b""
    await asyncio.to_thread(postgres.start)
    for gate in started:
        if gate.alive:
            await until_up(gate)
            await gate.at_rest()


async def until_up(gate: Gate) -> None:
    await gate.until(lambda status: status["store"] == "")


async def until_down(gate: Gate) -> None:
    await gate.until(lambda status: status["store"] != "")


async def stopped(postgres: OwnPostgres, how: signal.Signals = signal.SIGINT) -> None:
    await asyncio.to_thread(postgres.stop, how)


async def again(postgres: OwnPostgres, *gates: Gate) -> None:
    await asyncio.to_thread(postgres.start)
    for gate in gates:
        await until_up(gate)
