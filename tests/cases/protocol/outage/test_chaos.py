"""Everything at once: clients that retry and leave, a service that fails, gateways and a database that break.

What is asserted holds for any order of events: no two executions of a key at once; none after one that may have had an
effect under `block`; no problem that says "nothing was sent" about a request that the service got; one reply for each
key; nothing blocked when all is whole again; no 500. GATEWAY_TEST_CHAOS_SECONDS and _SEED choose another run.
"""

import asyncio
import contextlib
import os
import random
import secrets
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg
import pytest

from tests.cases.protocol.stage import Gate, code, member, replayed
from tests.store.relay import Relay
from tests.support import RawAnswer, RawClient, RawUpstream, Turn, chunked, reply, request, reset
from tests.support.postgres import OwnPostgres

from .conftest import SCHEMA, again, stopped, until_up

SECONDS = float(os.environ.get("GATEWAY_TEST_CHAOS_SECONDS", "4"))
SEED = int(os.environ.get("GATEWAY_TEST_CHAOS_SEED", "0")) or secrets.randbits(30)
CLIENTS = 10


class Execution:
    """What the service did with one request."""

    def __init__(self, attempt: str, kind: str) -> None:
        self.attempt = attempt
        self.kind = kind


class Unreliable:
    """A service that answers, fails, breaks off or is slow. It never works for as long as the effect deadline."""

    def __init__(self, chance: random.Random) -> None:
        self.executions: defaultdict[str, list[Execution]] = defaultdict(list)
        self.attempts: set[str] = set()
        self.overlapped: set[str] = set()
        self._chance = chance
        self._running: Counter[str] = Counter()

    async def __call__(self, turn: Turn) -> None:
        key = turn.request.key
        attempt = turn.request.values("X-Attempt")[0].decode()
        kind = self._chance.choices(["made", "error", "reset", "slow", "stream"], [8, 3, 1, 1, 1])[0]
        self.attempts.add(attempt)
        self.executions[key].append(Execution(attempt, kind))
        self._running[key] += 1
        if self._running[key] > 1:
            self.overlapped.add(key)
        await asyncio.sleep(0.7 if kind == "slow" else self._chance.random() * 0.1)
        self._running[key] -= 1
        number = len(self.executions[key])
        if kind == "reset":
            await reset()(turn)
        elif kind == "error":
            await reply(500, b"failed")(turn)
        elif kind == "stream":
            said = f"{key} {number}".encode()
            await chunked([said[:5], said[5:]], 201, [("Content-Type", "text/event-stream")])(turn)
        else:
            await reply(201, f"{key} {number}".encode())(turn)


class Clients:
    """Who sends requests, and what they were told."""

    def __init__(self, gates: list[Gate], service: Unreliable, chance: random.Random) -> None:
        self.gates = gates
        self.service = service
        self.executed: dict[str, int] = {}
        self.routes: dict[str, str] = {}
        self.said_nothing_sent: dict[str, bytes] = {}
        self.bodies: defaultdict[str, set[bytes]] = defaultdict(set)
        self.over = asyncio.Event()
        self._chance = chance
        self._number = 0

    async def ask(self, key: str, gate: Gate, patience: float) -> RawAnswer | None:
        """Ask once; None when nothing came back. What an answer claims is noted."""
        self._number += 1
        attempt = f"a{self._number}"
        lines: list[tuple[bytes | str, bytes | str]] = [("Idempotency-Key", key), ("X-Attempt", attempt)]
        try:
            async with asyncio.timeout(patience), RawClient(gate.port) as client:
                answer = await client.ask(request("POST", self.routes[key], lines, b"{}"))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return None
        status = answer.value("Idempotency-Status")
        assert status is not None, answer.head
        if answer.value("Content-Type") == "application/problem+json":
            if member(answer, "effect") == "none":
                self.said_nothing_sent[attempt] = answer.head + answer.body
            assert (answer.status == 503) <= (member(answer, "effect") == "none")
        elif answer.status == 201 and answer.value("Idempotency-Expires") is not None:
            # The store has it: from now on it is the answer, whatever happens, and nothing runs any more.
            self.bodies[key].add(answer.body)
            self.executed.setdefault(key, len(self.service.executions[key]))
        return answer

    async def run(self) -> None:
        """Send requests with fresh keys, each again and again until it is done or a few attempts failed."""
        while not self.over.is_set():
            key = secrets.token_hex(8)
            self.routes[key] = self._chance.choice(["/again", "/block"])
            for _ in range(self._chance.randint(1, 8)):
                impatient = self._chance.random() < 0.15
                gate = self._chance.choice(self.gates)
                twice = self._chance.random() < 0.2
                answers = await asyncio.gather(
                    *(
                        self.ask(key, gate, 0.05 if impatient else 20)
                        for gate in ([gate, *self.gates] if twice else [gate])
                    )
                )
                if any(answer is not None and answer.status == 201 for answer in answers):
                    break
                await asyncio.sleep(self._chance.random() * 0.3)


class Chaos:
    """What breaks, and is mended again."""

    def __init__(self, gates: list[Gate], postgres: OwnPostgres, relay: Relay, chance: random.Random) -> None:
        self.gates = gates
        self.postgres = postgres
        self.relay = relay
        self.done: list[str] = []
        self._chance = chance

    async def kill(self) -> None:
        gate = self._chance.choice(self.gates)
        await gate.kill()
        await gate.start(ready=False)

    async def stop(self) -> None:
        gate = self._chance.choice(self.gates)
        assert await gate.stop() == 0
        await gate.start(ready=False)

    async def pause(self) -> None:
        gate = self._chance.choice(self.gates)
        gate.signal(signal.SIGSTOP)
        await self.a_while(2.5)
        gate.signal(signal.SIGCONT)

    async def crash_database(self) -> None:
        await stopped(self.postgres, signal.SIGQUIT)
        await self.a_while(1.5)
        await asyncio.to_thread(self.postgres.start)

    async def restart_database(self) -> None:
        await stopped(self.postgres, signal.SIGINT)
        await asyncio.to_thread(self.postgres.start)

    async def terminate(self) -> None:
        with contextlib.suppress(asyncpg.PostgresError, OSError):
            await self.postgres.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'idempotency-gateway'"
            )

    async def cut(self) -> None:
        self.relay.cut()

    async def silence(self) -> None:
        self.relay.silent = True
        await self.a_while(2.5)
        self.relay.silent = False

    async def lose(self) -> None:
        for _ in range(5):
            self.relay.lose_answer_about = b"_gateway" if self._chance.random() < 0.1 else b"\x00"
            await self.a_while(0.2)
        self.relay.lose_answer_about = b""

    async def lock(self) -> None:
        with contextlib.suppress(asyncpg.PostgresError, OSError):
            connection = await asyncpg.connect(self.postgres.dsn)
            try:
                async with connection.transaction():
                    await connection.execute(f"LOCK TABLE {SCHEMA}.idempotency_record IN ACCESS EXCLUSIVE MODE")
                    await self.a_while(1.5)
            finally:
                await connection.close()

    async def a_while(self, seconds: float) -> None:
        await asyncio.sleep(self._chance.random() * seconds)

    async def run(self, kinds: list[str], seconds: float) -> None:
        """Break things one after the other, with breath between."""
        acts: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {kind: getattr(self, kind) for kind in kinds}
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            kind = self._chance.choice(kinds)
            self.done.append(kind)
            await acts[kind]()
            await self.a_while(1.0)


PROCESSES = ["kill", "stop", "pause"]
DATABASE = ["crash_database", "restart_database", "terminate", "cut", "silence", "lose", "lock"]


@pytest.mark.parametrize("kinds", [[*DATABASE, "pause"], PROCESSES + DATABASE], ids=["gateways live", "anything"])
async def test_whatever_breaks_nothing_overlaps_nothing_lies_and_nothing_stays_blocked(
    gates: list[Gate], postgres: OwnPostgres, relay: Relay, service_port: int, kinds: list[str]
) -> None:
    chance = random.Random(SEED)
    service = Unreliable(chance)
    clients = Clients(gates, service, chance)
    chaos = Chaos(gates, postgres, relay, chance)
    async with RawUpstream(service, port=service_port):
        running = [asyncio.create_task(clients.run()) for _ in range(CLIENTS)]
        await chaos.run(kinds, SECONDS)
        clients.over.set()
        await asyncio.gather(*running)
        await again(postgres, *gates)
        print(f"seed {SEED}: {len(clients.routes)} keys, {len(service.attempts)} executions, {chaos.done}")
        await asyncio.gather(*(ends(clients, service, key, lives="kill" not in kinds) for key in clients.routes))
    told = {attempt: said for attempt, said in clients.said_nothing_sent.items() if attempt in service.attempts}
    assert told == {}
    assert service.overlapped == set()
    for key, executions in service.executions.items():
        if clients.routes[key] == "/block":
            assert {execution.kind for execution in executions[:-1]} <= {"error"}, key
    assert {key: bodies for key, bodies in clients.bodies.items() if len(bodies) > 1} == {}
    assert clients.executed == {key: len(service.executions[key]) for key in clients.executed}
    for gate in gates:
        await until_up(gate)


async def ends(clients: Clients, service: Unreliable, key: str, *, lives: bool) -> None:
    """Repeat a request until its record has its end, which comes within leases and deadlines, not retentions."""
    chance = random.Random(key)
    async with asyncio.timeout(30):
        while True:
            answer = await clients.ask(key, chance.choice(clients.gates), 20)
            if answer is None:
                continue
            if answer.status == 201 or (answer.status == 409 and code(answer) == "reply-not-stored"):
                return
            blocked = answer.status == 409 and code(answer) == "in-doubt" and answer.value("Retry-After") is None
            if blocked:
                # Blocked for good, which needs a reason: a crash, an execution without an answer, or five in a row.
                assert clients.routes[key] == "/block" or len(service.executions[key]) >= 5, key
                if lives:
                    assert service.executions[key], (key, answer.body)
                    assert replayed(answer) is False
                return
            await asyncio.sleep(0.2)
