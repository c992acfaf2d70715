"""Gateways as processes in front of a raw upstream, shared by all cases: a gateway takes a second to start.

`gate` and `twin` are two replicas on one schema, so that a replay can be asked of one that did not run it: what the
first answers from memory the second reads from the store. Each test starts its own upstream, at the port that the
gateways know, and draws fresh keys.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Self

import asyncpg
import pytest

from gateway.store.migrate import migrate
from tests.support import RawAnswer, RawClient, RawUpstream, request
from tests.support.processes import Gateway
from tests.support.raw_upstream import Script

ROUTES = """
orders: {match: POST /orders}
sub-orders: {match: ["POST /orders/{id}/cancel", "PATCH|DELETE|PUT /orders/{id}"]}
accounts: {match: "POST|PUT|PATCH|DELETE /accounts/{id}"}
files: {match: "POST /files/**"}
optional: {match: POST /optional, on_missing_key: forward}
hasty: {match: POST /hasty, on_missing_key: forward, upstream_timeout: 500ms, effect_deadline: 1s}
blocked: {match: POST /blocked, on_in_doubt: block}
impatient: {match: POST /impatient, upstream_timeout: 500ms, effect_deadline: 1s}
large: {match: POST /large, max_request_body: 10MiB, max_response_body: 8MiB}
by-customer: {match: POST /by-customer, scope: {customer: {header: X-Customer-Id}}}
by-both: {match: POST /by-both, scope: {tenant: {header: X-Tenant}, customer: {header: X-Customer-Id}}}
by-token: {match: POST /by-token, scope: {caller: {authorization: digest}}}
by-proxy: {match: POST /by-proxy, scope: {tenant: {header: X-Tenant, set_by: trusted_proxies}}}
by-language: {match: POST /by-language, fingerprint: {headers: [X-Language]}}
by-bytes: {match: POST /by-bytes, fingerprint: {body: raw}}
stripped: {match: POST /stripped, forward_key: strip}
"""
TRUSTED = "127.0.0.2"
TOP = f"""
trusted_proxies: [{TRUSTED}/32]
limits: {{body_timeout: 2s, buffer_memory: 64MiB}}
"""

Start = Callable[[Script], Awaitable[RawUpstream]]


class Client(RawClient):
    """A client that may come from another loopback address: `source` is 127.0.0.2 for the trusted proxy."""

    source = "127.0.0.1"

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(
            self.host, self.port, limit=1 << 20, local_addr=(self.source, 0)
        )
        return self


class Gate(Gateway):
    """A gateway with short ways to ask it, each on a connection of its own. `upstream_port`: where its upstream is."""

    upstream_port = 0

    def client(self, source: str = "127.0.0.1") -> Client:
        client = Client(self.port)
        client.source = source
        return client

    async def ask(self, data: bytes, source: str = "127.0.0.1") -> RawAnswer:
        async with self.client(source) as client:
            return await client.ask(data)

    async def settled(self, data: bytes) -> RawAnswer:
        """Repeat a request while the first one is outstanding, and return what it gets then."""
        async with asyncio.timeout(10):
            while True:
                answer = await self.ask(data)
                if answer.value("Idempotency-Status") != "outstanding":
                    return answer
                await asyncio.sleep(0.05)

    def memory(self, field: str = "VmRSS") -> int:
        """Return a figure of /proc/PID/status in bytes."""
        assert self.child is not None
        for line in Path(f"/proc/{self.child.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise AssertionError(field)

    def forget_peak(self) -> int:
        """Begin a new measurement of the peak (`VmHWM`), and return the memory in use."""
        assert self.child is not None
        Path(f"/proc/{self.child.pid}/clear_refs").write_text("5")
        return self.memory()


def post(
    path: str = "/orders",
    key: str | bytes | None = None,
    body: bytes | None = b'{"amount":1}',
    *headers: tuple[str, str | bytes],
    method: str = "POST",
    content_type: str | None = "application/json",
    host: str | None = "gateway.test",
    chunks: list[bytes] | None = None,
) -> bytes:
    """Return the bytes of a request with a key."""
    lines: list[tuple[bytes | str, bytes | str]] = []
    if key is not None:
        lines.append(("Idempotency-Key", key))
    if content_type is not None:
        lines.append(("Content-Type", content_type))
    return request(method, path, [*lines, *headers], None if chunks is not None else body, host=host, chunks=chunks)


def end_to_end(answer: RawAnswer) -> list[tuple[bytes, bytes]]:
    """Return the header lines that a replay must repeat: all but framing, `Date` and the gateway's own."""
    own = (b"idempoten", b"connection", b"date", b"content-length", b"transfer-encoding", b"x-request-id")
    return [(name, value) for name, value in answer.headers if not name.lower().startswith(own)]


def new_schema(dsn: str) -> Iterator[str]:
    """A migrated schema for long-lived processes; dropped when they have ended."""
    name = "c_" + secrets.token_hex(6)
    asyncio.run(migrate(dsn, name))
    yield name

    async def drop() -> None:
        connection = await asyncpg.connect(dsn)
        try:
            await connection.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')
        finally:
            await connection.close()

    asyncio.run(drop())


@pytest.fixture(scope="session")
def cases_schema(dsn: str) -> Iterator[str]:
    yield from new_schema(dsn)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port on which nobody listens now, and that no other process is given before one of ours listens on it."""
    with socket.socket() as placeholder:
        placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a listener with the same option may join
        placeholder.bind(("127.0.0.1", 0))
        yield placeholder.getsockname()[1]


@pytest.fixture(scope="session")
def upstream_port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@pytest.fixture(scope="session")
def plain_port() -> Iterator[int]:
    """Where the upstream listens that has no protected routes."""
    with reserved_port() as port:
        yield port


@pytest.fixture(scope="session")
def replicas(
    dsn: str, cases_schema: str, upstream_port: int, plain_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Gate, Gate]]:
    folder = tmp_path_factory.mktemp("cases")
    gates: list[Gate] = []
    for _ in range(2):
        gate = Gate(
            folder,
            dsn=dsn,
            schema=cases_schema,
            upstream=f"localhost:{upstream_port}",
            routes=ROUTES,
            top=TOP,
            upstreams=f'plain: {{serves: [/plain], url: "http://localhost:{plain_port}"}}',
            up="serves: [/]",
        )
        gate.upstream_port = upstream_port
        gates.append(gate)

    async def start() -> None:
        await asyncio.gather(*(gate.start() for gate in gates))

    async def stop() -> None:
        assert await asyncio.gather(*(gate.stop() for gate in gates)) == [0, 0]

    asyncio.run(start())
    yield gates[0], gates[1]
    asyncio.run(stop())
    for gate in gates:
        assert gate.lines("fault") == []
        assert "Traceback" not in gate.log.read_text()


@pytest.fixture
def gate(replicas: tuple[Gate, Gate]) -> Gate:
    return replicas[0]


@pytest.fixture
def twin(replicas: tuple[Gate, Gate]) -> Gate:
    return replicas[1]


@pytest.fixture
async def upstream(upstream_port: int) -> AsyncIterator[Start]:
    """Start the upstream with a script; ended with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(script: Script) -> RawUpstream:
            return await stack.enter_async_context(RawUpstream(script, host="localhost", port=upstream_port))

        yield start


@pytest.fixture
async def plain(plain_port: int) -> AsyncIterator[Start]:
    """Start the upstream without protected routes, reached below /plain."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(script: Script) -> RawUpstream:
            return await stack.enter_async_context(RawUpstream(script, host="localhost", port=plain_port))

        yield start


@pytest.fixture
def key() -> str:
    return secrets.token_hex(12)
