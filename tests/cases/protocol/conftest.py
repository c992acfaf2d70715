"""Two replicas on one schema, a service and a ledger behind them, shared by all tests below."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.store import migrate
from tests.support.processes import Ledger, free_port

from .stage import Asking, Gate, Rows, Service, clean, drop_schema, make_gate


@pytest.fixture(scope="session")
def service_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def ledger_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def protocol_schema(dsn: str) -> Iterator[str]:
    name = "p_" + secrets.token_hex(6)
    yield name
    asyncio.run(drop_schema(dsn, name))


@pytest.fixture(scope="session")
def started(
    dsn: str, protocol_schema: str, service_port: int, ledger_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Gate]]:
    folder = tmp_path_factory.mktemp("protocol")
    gates = [
        make_gate(folder, dsn, protocol_schema, port=service_port, ledger_port=ledger_port) for _ in ("one", "two")
    ]

    async def start() -> None:
        await migrate(dsn, protocol_schema)
        await asyncio.gather(*(gate.start() for gate in gates))

    async def stop() -> list[int]:
        return await asyncio.gather(*(gate.stop() for gate in gates))

    asyncio.run(start())
    yield gates
    assert asyncio.run(stop()) == [0] * len(gates)
    for gate in gates:
        clean(gate)


@pytest.fixture
async def gates(started: list[Gate]) -> AsyncIterator[list[Gate]]:
    """The two replicas; what a test killed is running again."""
    for gate in started:
        if not gate.alive:
            await gate.start()
    yield started
    for gate in started:
        if gate.alive:
            await gate.at_rest()


@pytest.fixture
def one(gates: list[Gate]) -> Gate:
    return gates[0]


@pytest.fixture
def two(gates: list[Gate]) -> Gate:
    return gates[1]


@pytest.fixture
async def service(service_port: int) -> AsyncIterator[Service]:
    """The service behind the gateways; no key is ever executed twice at once."""
    service = Service()
    service.up.port = service_port
    async with service.up:
        yield service
    assert service.overlapped == set()


@pytest.fixture(scope="session")
def ledger_process(
    dsn: str, ledger_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ledger, str]]:
    schema = "l_" + secrets.token_hex(6)
    ledger = Ledger(tmp_path_factory.mktemp("ledger"), dsn, schema, port=ledger_port)
    asyncio.run(ledger.start())
    yield ledger, schema
    asyncio.run(ledger.stop())
    asyncio.run(drop_schema(dsn, schema))


@pytest.fixture
async def rows(dsn: str, ledger_process: tuple[Ledger, str]) -> Rows:
    ledger, schema = ledger_process
    rows = Rows(ledger, dsn, schema)
    await rows.running_again()
    return rows


@pytest.fixture
async def asking() -> AsyncIterator[Asking]:
    asking = Asking()
    yield asking
    await asking.ended()


@pytest.fixture
def key() -> str:
    return secrets.token_hex(12)
