"""What the cases do not name: crashes in streams, poison, migrations under traffic, locked rows, resources used up."""

import asyncio
import contextlib
import resource
import signal
import time
from pathlib import Path

import asyncpg
import pytest

from gateway.store import migrate
from tests.cases.protocol.stage import LEASE_SECONDS, Asking, Gate, Service, code, member, post, replayed
from tests.store.relay import Relay
from tests.support import RawClient, endless, hang, reply, reset, then, wait_for
from tests.support.postgres import OwnPostgres

from .conftest import SCHEMA, STORE_SECONDS, again, stopped, until_up


async def test_a_crash_in_the_middle_of_a_stream_does_not_run_it_again(
    one: Gate, two: Gate, service: Service, key: str
) -> None:
    head = b"HTTP/1.1 201 Created\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    service.plans[key] = [endless(head, b"data: x\n\n" * 100)]
    async with RawClient(one.port) as client:
        await client.send(post("/again", key))
        assert (await client.read_head()).status == 201
        assert await client.reader.read(1000)
        await one.kill()
    answer = await two.ask(post("/again", key))
    assert service.executions[key] == 1
    assert (answer.status, code(answer), member(answer, "effect")) == (409, "reply-not-stored", "happened")


async def test_a_request_that_never_gets_an_answer_is_run_five_times_and_then_blocks(
    one: Gate, two: Gate, service: Service, key: str
) -> None:
    service.plans[key] = [reset()] * 9
    async with asyncio.timeout(15):
        while True:
            answer = await (one, two)[service.executions[key] % 2].ask(post("/again", key))
            assert code(answer) in {"outcome-unknown", "in-doubt"}
            if code(answer) == "in-doubt" and answer.value("Retry-After") is None:
                break
            await asyncio.sleep(0.05)
    assert service.executions[key] == 5
    assert member(answer, "next") == "check_outcome"


async def test_who_waits_as_long_as_the_answer_says_is_not_told_to_wait_again(
    one: Gate, two: Gate, service: Service, key: str
) -> None:
    service.plans[key] = [reset()]
    answer = await one.ask(post("/again", key))
    assert code(answer) == "outcome-unknown"
    await asyncio.sleep(int(answer.value("Retry-After") or 0))
    assert (await one.ask(post("/again", key))).status == 201

    crashed = key + "-crashed"
    service.plans[crashed] = [reset()]
    await one.ask(post("/again", crashed))
    answer = await two.ask(post("/again", crashed))
    assert code(answer) == "in-doubt"
    await asyncio.sleep(int(answer.value("Retry-After") or 0))
    assert (await two.ask(post("/again", crashed))).status == 201


async def test_a_row_that_a_person_has_locked_holds_up_that_key_only(
    one: Gate, two: Gate, service: Service, postgres: OwnPostgres, *, key: str, asking: Asking
) -> None:
    answered, lost = asyncio.Event(), await one.metric("leases_lost_total")
    service.plans[key] = [then(wait_for(answered), reply(201, b"made"))]
    first = asking(one, post("/patient", key))
    await service.begun(key)
    person = await asyncpg.connect(postgres.dsn)
    try:
        async with person.transaction():
            await person.execute(f"SELECT FROM {SCHEMA}.idempotency_record WHERE key = $1 FOR UPDATE", key)
            await asyncio.sleep(LEASE_SECONDS + 0.2)  # the lease runs out in the row, and nobody can renew it
            for number in range(5):
                began = time.monotonic()
                assert (await one.ask(post("/again", f"{key}-{number}"))).status == 201
                assert time.monotonic() - began < STORE_SECONDS
            answered.set()
            assert (await first).body == b"made"
            assert (await one.ask(post("/again", key + "-more"))).status == 201
    finally:
        await person.close()
    kept = await two.settled(post("/patient", key))
    assert (replayed(kept), service.executions[key]) == (True, 1)
    assert await one.metric("leases_lost_total") == lost


async def test_a_table_that_grows_a_column_under_traffic_disturbs_nobody(
    one: Gate, two: Gate, service: Service, postgres: OwnPostgres, *, key: str, asking: Asking
) -> None:
    """A newer gateway migrates the schema while older ones use it."""
    answered = asyncio.Event()
    service.plans[key] = [then(wait_for(answered), reply(201, b"made"))]
    first = asking(one, post("/patient", key))
    await service.begun(key)
    for statement in (
        f"ALTER TABLE {SCHEMA}.idempotency_record ADD COLUMN later int",
        f"ALTER TABLE {SCHEMA}.idempotency_record DROP COLUMN later",
        f"ALTER TABLE {SCHEMA}.idempotency_response ADD COLUMN later int",
        f"ALTER TABLE {SCHEMA}.idempotency_response DROP COLUMN later",
    ):
        await postgres.execute(statement)
        for number in range(3):
            each = f"{key}-{number}-{statement.split()[3]}"
            assert (await one.ask(post("/again", each))).status == 201
            assert replayed(await two.ask(post("/again", each)))
    answered.set()
    assert (await first).value("Idempotency-Status") == "executed"
    assert replayed(await two.ask(post("/patient", key)))


async def test_two_replicas_that_go_on_without_the_store_agree_on_one_answer_when_it_returns(
    one: Gate, two: Gate, service: Service, postgres: OwnPostgres, key: str
) -> None:
    """Each ran it: the file says that a duplicate is less bad than an outage. From then on there is one reply."""
    service.plans[key] = [reply(201, b"first"), reply(201, b"second")]
    await stopped(postgres)
    answers = [await gate.ask(post("/forward", key)) for gate in (one, two)]
    assert [answer.value("Idempotency-Status") for answer in answers] == ["unprotected"] * 2
    assert service.executions[key] == 2
    await again(postgres, one, two)
    kept = [await gate.settled(post("/forward", key)) for gate in (one, two, one)]
    assert all(replayed(answer) for answer in kept)
    assert len({answer.body for answer in kept}) == 1
    assert service.executions[key] == 2


async def test_a_silent_database_does_not_make_a_forwarding_route_run_twice(
    one: Gate, two: Gate, service: Service, relay: Relay, key: str
) -> None:
    """The claim may have been written or not; the execution that went ahead is recorded under the same claim id."""
    relay.silent = True
    answer = await one.ask(post("/forward", key))
    assert (answer.status, answer.value("Idempotency-Status")) == (201, "unprotected")
    relay.silent = False
    await until_up(one)
    await one.until_metric("completions_pending", lambda count: count == 0)
    kept = await two.settled(post("/forward", key))
    assert (replayed(kept), service.executions[key]) == (True, 1)


async def test_a_stop_while_the_claim_waits_for_the_store_sends_nothing_and_leaves_nothing(
    one: Gate, two: Gate, service: Service, postgres: OwnPostgres, *, key: str, asking: Asking
) -> None:
    person = await asyncpg.connect(postgres.dsn)
    try:
        async with person.transaction():
            await person.execute(f"LOCK TABLE {SCHEMA}.idempotency_record IN ACCESS EXCLUSIVE MODE")
            waiting = asking(one, post("/block", key))
            await one.until_metric("in_flight", lambda count: count == 1)
            one.signal(signal.SIGTERM)
            answer = await waiting
            assert (answer.status, member(answer, "effect")) == (503, "none")
    finally:
        await person.close()
    assert await one.ended() == 0
    assert (await two.settled(post("/block", key))).value("Idempotency-Status") == "executed"
    assert service.executions[key] == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_of_many_leases_of_a_gateway_that_ends_none_blocks_for_longer_than_the_deadline(
    one: Gate, two: Gate, service: Service, key: str, *, asking: Asking, how: signal.Signals
) -> None:
    keys = [f"{key}-{number}" for number in range(30)]
    for each in keys:
        service.plans[each] = [hang()]
        asking(one, post("/again", each))
    for each in keys:
        await service.begun(each)
    one.signal(how)
    await one.ended()
    answers = await asyncio.gather(*(two.settled(post("/again", each)) for each in keys))
    assert [answer.status for answer in answers] == [201] * 30
    assert all(service.executions[each] == 2 for each in keys)


async def test_without_free_file_descriptors_nothing_is_claimed_to_be_unsent_that_was_and_it_recovers(
    one: Gate, two: Gate, service: Service, key: str
) -> None:
    assert one.child is not None
    before = resource.prlimit(one.child.pid, resource.RLIMIT_NOFILE)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RawClient(one.port)) for _ in range(20)]
        for client in clients:  # accepted all
            assert (await client.ask(post("/elsewhere", None))).status == 201
        await service.up.close_connections()
        used = max(int(path.name) for path in (_proc(one) / "fd").iterdir()) + 1
        resource.prlimit(one.child.pid, resource.RLIMIT_NOFILE, (used, before[1]))
        try:
            answers = await asyncio.gather(
                *(client.ask(post("/block", f"{key}-{number}")) for number, client in enumerate(clients))
            )
        finally:
            resource.prlimit(one.child.pid, resource.RLIMIT_NOFILE, before)
    for number, answer in enumerate(answers):
        each = f"{key}-{number}"
        if answer.status != 201:
            assert (answer.status, member(answer, "effect")) == (503, "none")
            assert service.executions[each] == 0
            assert (await two.settled(post("/block", each))).status == 201
        assert service.executions[each] == 1


async def test_a_flood_of_keys_is_turned_away_before_anything_is_sent(
    one: Gate, service: Service, key: str, asking: Asking
) -> None:
    answered = asyncio.Event()
    service.default = then(wait_for(answered), reply(201))
    keys = [f"{key}-{number}" for number in range(400)]
    tasks = {each: asking(one, post("/patient", each)) for each in keys}
    await one.until_metric("in_flight", lambda count: count == 256)
    async with asyncio.timeout(10):
        while sum(task.done() for task in tasks.values()) < 400 - 256:
            await asyncio.sleep(0.02)
    refused = {each: task.result() for each, task in tasks.items() if task.done()}
    for each, answer in refused.items():
        assert (answer.status, code(answer), member(answer, "effect")) == (503, "over-capacity", "none")
        assert service.executions[each] == 0
    answered.set()
    for each, task in tasks.items():
        if each not in refused:
            assert (await task).status == 201
    assert service.executions.total() == 256


async def test_a_schema_that_was_dropped_and_made_again_is_used_again(
    one: Gate, two: Gate, service: Service, postgres: OwnPostgres, key: str
) -> None:
    assert (await one.ask(post("/again", key))).status == 201
    await postgres.execute(f"DROP SCHEMA {SCHEMA} CASCADE")
    answer = await one.ask(post("/again", key + "-gone"))
    assert (answer.status, code(answer)) == (503, "store-unavailable")
    await migrate(postgres.dsn, SCHEMA)
    for gate in (one, two):
        async with asyncio.timeout(5):
            while (await gate.ask(post("/again", key + "-back"))).status != 201:
                await asyncio.sleep(0.05)
    assert service.executions[key + "-gone"] == 0
    assert service.executions[key + "-back"] == 1


async def test_a_database_without_free_connections_keeps_the_leases_that_are_held(
    one: Gate, two: Gate, service: Service, postgres: OwnPostgres, *, key: str, asking: Asking
) -> None:
    answered = asyncio.Event()
    service.plans[key] = [then(wait_for(answered), reply(201, b"made"))]
    first = asking(one, post("/patient", key))
    await service.begun(key)
    hoard: list[asyncpg.Connection] = []
    try:
        with contextlib.suppress(asyncpg.TooManyConnectionsError):
            while True:
                hoard.append(await asyncpg.connect(postgres.dsn))
        await hoard[0].execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'idempotency-gateway' AND query NOT LIKE '%renew:%'"
        )
        with contextlib.suppress(asyncpg.TooManyConnectionsError):
            while True:
                hoard.append(await asyncpg.connect(postgres.dsn))
        await asyncio.sleep(1.2 * LEASE_SECONDS)
        answered.set()
        assert (await first).body == b"made"
    finally:
        for connection in hoard:
            await connection.close()
    kept = await two.settled(post("/patient", key))
    assert (replayed(kept), service.executions[key]) == (True, 1)


async def test_a_database_that_stands_still_delays_and_loses_nothing(
    one: Gate, two: Gate, service: Service, postgres: OwnPostgres, *, key: str, asking: Asking
) -> None:
    """All of its processes are stopped: connections are accepted and nothing is answered; then everything at once."""
    answered = asyncio.Event()
    service.plans[key] = [then(wait_for(answered), reply(201, b"made"))]
    first = asking(one, post("/patient", key))
    await service.begun(key)
    with postgres.standing_still():
        began = time.monotonic()
        refused = await asyncio.gather(*(gate.ask(post("/block", key + "-other")) for gate in (one, two)))
        assert [(answer.status, member(answer, "effect")) for answer in refused] == [(503, "none")] * 2
        answered.set()
        assert (await first).body == b"made"
        assert time.monotonic() - began < 2 * STORE_SECONDS + 1
    kept = await two.settled(post("/patient", key))
    assert (replayed(kept), service.executions[key]) == (True, 1)
    assert (await two.settled(post("/block", key + "-other"))).value("Idempotency-Status") == "executed"
    assert service.executions[key + "-other"] == 1


def _proc(gate: Gate) -> Path:
    assert gate.child is not None
    return Path(f"/proc/{gate.child.pid}")
