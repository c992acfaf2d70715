"""Gateways with short leases and deadlines in front of a service that does, for each key, what a test tells it.

The gateways are killed, stopped and started again; what they must never do (a 500 of their own, a fault in the log,
something left held) is asserted for all.
"""

import asyncio
import contextlib
import json
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg

from tests.support import RawAnswer, RawClient, RawUpstream, Turn, reply, request
from tests.support.processes import Gateway, Ledger
from tests.support.raw_upstream import Action

ROUTES = """
again: {match: POST /again}
block: {match: POST /block, on_in_doubt: block}
patient: {match: "POST|PUT|PATCH|DELETE /patient", upstream_timeout: 10s, effect_deadline: 10s}
held: {match: POST /held, upstream_timeout: 10s, effect_deadline: 10s, outcomes: {hold: [500, 502, 504]}}
soon: {match: POST /soon, upstream_timeout: 10s, effect_deadline: 10s, respond_within: 300ms}
forward: {match: POST /forward, on_store_failure: forward}
optional: {match: POST /optional, on_missing_key: forward}
large: {match: POST /large, max_response_body: 8MiB, upstream_timeout: 10s, effect_deadline: 10s}
nowhere: {match: POST nowhere.test/again}
transfers: {match: POST ledger.test/transfers}
transfers-block: {match: POST ledger-block.test/transfers, on_in_doubt: block}
transfers-slow: {match: POST ledger-slow.test/transfers, upstream_timeout: 1500ms, effect_deadline: 2s}
transfers-slow-block:
  {match: POST ledger-slow-block.test/transfers, upstream_timeout: 1500ms, effect_deadline: 2s, on_in_doubt: block}
slow: {match: POST /slow, upstream_timeout: 2s, effect_deadline: 2s}
narrow: {match: POST narrow.test/again}
"""
DEFAULTS = """
lease_ttl: 1s
upstream_timeout: 1s
effect_deadline: 1s
"""
HELD = {f"idempotency_gateway_{name}" for name in ("in_flight", "leases_held", "buffer_bytes", "completions_pending")}
LEASE_SECONDS = 1.0
EFFECT_SECONDS = 1.0
SHUTDOWN_SECONDS = 2


class Gate(Gateway):
    """A gateway process with short ways to ask it, each on a connection of its own."""

    logs: list[Path]

    async def start(self, *, ready: bool = True) -> "Gate":
        """Start it (again), with a log of its own for each life."""
        self.logs = [*getattr(self, "logs", []), self.file.with_suffix(f".{secrets.token_hex(2)}.log")]
        self.log = self.logs[-1]
        await super().start(ready=ready)
        return self

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.process.poll() is None

    async def ask(self, data: bytes) -> RawAnswer:
        """Ask; an answer of 500 must be the service's."""
        async with RawClient(self.port) as client:
            answer = await client.ask(data)
        assert answer.status != 500 or answer.value("Idempotency-Status") is not None, answer.head
        return answer

    async def settled(self, data: bytes, *, within: float = 10) -> RawAnswer:
        """Repeat a request as long as it is told to wait or that nothing was sent, and return what it gets then."""
        async with asyncio.timeout(within):
            while True:
                answer = await self.ask(data)
                if answer.status != 503 and answer.value("Idempotency-Status") not in {"outstanding", "in-doubt"}:
                    return answer
                await asyncio.sleep(0.05)

    async def metric(self, name: str) -> float:
        """Return a series, by its text without prefix and `service`; series that differ in other labels are added."""
        metrics = await self.metrics()
        wanted = name.rstrip("}").partition("{")
        labels = [label for label in wanted[2].split(",") if label]
        return sum(
            value
            for series, value in metrics.items()
            if series.partition("{")[0] == "idempotency_gateway_" + wanted[0] and all(text in series for text in labels)
        )

    async def until_metric(self, name: str, condition: Callable[[float], bool]) -> None:
        """Wait until a series is as asked for."""
        async with asyncio.timeout(10):
            while not condition(await self.metric(name)):
                await asyncio.sleep(0.02)

    async def at_rest(self) -> None:
        """Wait until it holds nothing: no exchange, no lease, no body, nothing that the store still has to hear."""
        async with asyncio.timeout(10):
            while held := [
                series for series, value in (await self.metrics()).items() if value and series.partition("{")[0] in HELD
            ]:
                await asyncio.sleep(0.02)
        assert held == []

    def all_lines(self, event: str) -> list[dict[str, Any]]:
        """Return one event's lines of all its lives."""
        found = []
        for log in self.logs:
            lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
            found += [line for line in lines if line["event"] == event]
        return found


class Service:
    """What is behind the gateways. `plans[key]`: the actions of its executions in turn, then `default`.

    Assert on `executions` first. `overlapped`: keys of which two executions ran at once.
    """

    def __init__(self) -> None:
        self.plans: dict[str, list[Action]] = {}
        self.default: Action = reply(201, b"made", [("Location", "/made/1")])
        self.executions: Counter[str] = Counter()
        self.overlapped: set[str] = set()
        self.up: RawUpstream = RawUpstream(self)
        self._running: Counter[str] = Counter()
        self._begun: defaultdict[str, asyncio.Condition] = defaultdict(asyncio.Condition)

    async def __call__(self, turn: Turn) -> None:
        key = turn.request.key
        self.executions[key] += 1
        self._running[key] += 1
        if self._running[key] > 1:
            self.overlapped.add(key)
        async with self._begun[key]:
            self._begun[key].notify_all()
        plan = self.plans.get(key)
        try:
            await (plan.pop(0) if plan else self.default)(turn)
        finally:
            self._running[key] -= 1

    async def begun(self, key: str, count: int = 1) -> None:
        """Wait until so many executions of a key have begun."""
        async with asyncio.timeout(10), self._begun[key]:
            await self._begun[key].wait_for(lambda: self.executions[key] >= count)


class Asking:
    """Requests that run beside the test; whatever became of them is collected at its end."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[RawAnswer]] = []

    def __call__(self, gate: Gate, data: bytes) -> asyncio.Task[RawAnswer]:
        self._tasks.append(asyncio.create_task(gate.ask(data)))
        return self._tasks[-1]

    async def ended(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def post(path: str, key: str | None, body: bytes = b'{"amount":1}', *, host: str = "gateway.test") -> bytes:
    """Return the bytes of a JSON request with a key."""
    lines: list[tuple[bytes | str, bytes | str]] = [("Content-Type", "application/json")]
    if key is not None:
        lines.append(("Idempotency-Key", key))
    return request("POST", path, lines, body, host=host)


def transfer(key: str, *, fault: str = "", amount: int = 1250, ref: str | None = None, host: str = "ledger") -> bytes:
    """Return the bytes of a transfer; its reference in the ledger is `ref`, or the key."""
    lines: list[tuple[bytes | str, bytes | str]] = [("Content-Type", "application/json"), ("Idempotency-Key", key)]
    if fault:
        lines.append(("X-Ledger-Fault", fault))
    body = json.dumps({"account": "C-4711", "amount": amount, "client_ref": ref or key}).encode()
    return request("POST", "/transfers", lines, body, host=f"{host}.test")


def code(answer: RawAnswer) -> str:
    """Return a problem's code."""
    found: str = json.loads(answer.body)["code"]
    return found


def member(answer: RawAnswer, name: str) -> Any:
    """Return a member of a problem."""
    return json.loads(answer.body).get(name)


def replayed(answer: RawAnswer) -> bool:
    return answer.value("Idempotent-Replayed") == "true"


def make_gate(folder: Path, dsn: str, schema: str, *, port: int, ledger_port: int, **more: Any) -> Gate:
    """Return a gateway, not started."""
    return Gate(
        folder,
        dsn=dsn,
        schema=schema,
        upstream=f"127.0.0.1:{port}",
        up="serves: [/], connect_timeout: 500ms",
        upstreams=upstreams(port, ledger_port),
        defaults=DEFAULTS,
        routes=ROUTES,
        shutdown=f"{SHUTDOWN_SECONDS}s",
        **more,
    )


def upstreams(port: int, ledger_port: int) -> str:
    """The upstreams beside the service: the ledger, a host that does not exist, and the service by one connection."""
    hosts = ", ".join(f"ledger{kind}.test/" for kind in ("", "-block", "-slow", "-slow-block"))
    return f"""
ledger: {{serves: [{hosts}], url: "http://127.0.0.1:{ledger_port}"}}
nowhere: {{serves: [nowhere.test/], url: "http://nowhere.invalid", connect_timeout: 500ms}}
narrow: {{serves: [narrow.test/], url: "http://127.0.0.1:{port}", max_connections: 1, connect_timeout: 30s}}
"""


async def drop_schema(dsn: str, name: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')
    finally:
        await connection.close()


def clean(gate: Gate) -> None:
    """Assert what holds for every life of a gateway."""
    assert gate.all_lines("fault") == []
    for log in gate.logs:
        assert "Traceback" not in log.read_text(), log.read_text()


class Rows:
    """The ledger's table."""

    def __init__(self, ledger: Ledger, dsn: str, schema: str) -> None:
        self.ledger = ledger
        self._dsn = dsn
        self._schema = schema

    async def count(self, ref: str) -> int:
        """Return how many transfers bear a reference."""
        connection = await asyncpg.connect(self._dsn)
        try:
            return int(
                await connection.fetchval(f'SELECT count(*) FROM "{self._schema}".transfer WHERE client_ref = $1', ref)
            )
        finally:
            await connection.close()

    async def until(self, ref: str, count: int) -> None:
        """Wait until there are so many."""
        async with asyncio.timeout(10):
            while await self.count(ref) < count:
                await asyncio.sleep(0.02)

    async def running_again(self) -> None:
        """Start the ledger if it died."""
        child = self.ledger.child
        if child is None or child.process.poll() is not None:
            await self.ledger.start()


async def together(data: bytes, gates: list[Gate], count: int) -> list[RawAnswer]:
    """Send one request so many times at the same moment, over the gateways in turn, connections made before."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(RawClient(gates[number % len(gates)].port)) for number in range(count)
        ]
        return await asyncio.gather(*(client.ask(data) for client in clients))
