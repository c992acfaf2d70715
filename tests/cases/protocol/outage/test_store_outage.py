"""PostgreSQL stopped, killed, cut off, silent, read-only, locked, without partitions: with one of our own."""

import asyncio
import datetime as dt
import secrets
import signal
import time

import aiohttp
import asyncpg

from gateway.store.upkeep import open_partitions
from tests.cases.protocol.stage import (
    LEASE_SECONDS,
    SHUTDOWN_SECONDS,
    Asking,
    Gate,
    Service,
    code,
    member,
    post,
    replayed,
)
from tests.store.relay import Relay
from tests.support import RawAnswer, reply, then, wait_for
from tests.support.postgres import OwnPostgres

from .conftest import SCHEMA, STORE_SECONDS, again, stopped, until_down, until_up


def refused(answer: RawAnswer) -> None:
    """Assert that an answer says: the store is not there, and nothing was sent."""
    assert (answer.status, code(answer), member(answer, "effect")) == (503, "store-unavailable", "none")
    assert answer.value("Idempotency-Status") == "refused"
    assert answer.value("Retry-After") == "5"


# ---- C20, C43: the store is down -----------------------------------------------------------------------------------


async def test_c20_a_without_the_store_nothing_is_sent(
    one: Gate, two: Gate, service: Service, postgres: OwnPostgres, key: str
) -> None:
    await stopped(postgres)
    for number in range(4):
        began = time.monotonic()
        refused(await (one, two)[number % 2].ask(post("/again", key)))
        assert time.monotonic() - began < STORE_SECONDS + 0.5
    assert service.executions[key] == 0
    await again(postgres, one)
    assert (await one.ask(post("/again", key))).value("Idempotency-Status") == "executed"
    assert service.executions[key] == 1


async def test_c20_b_without_the_store_what_needs_no_record_goes_on(
    one: Gate, service: Service, postgres: OwnPostgres
) -> None:
    await stopped(postgres)
    answer = await one.ask(post("/optional", None))
    assert (answer.status, answer.value("Idempotency-Status")) == (201, "unprotected")
    assert (await one.ask(post("/elsewhere", None))).status == 201
    assert len(service.up.requests) == 2


async def test_c20_c_the_services_answer_is_delivered_and_kept_when_the_store_returns(
    one: Gate, two: Gate, service: Service, postgres: OwnPostgres, *, key: str, asking: Asking
) -> None:
    answered = asyncio.Event()
    service.plans[key] = [then(wait_for(answered), reply(201, b"made"))]
    first = asking(one, post("/patient", key))
    await service.begun(key)
    await stopped(postgres)
    answered.set()
    answer = await first
    assert (answer.status, answer.body) == (201, b"made")
    assert await one.metric("completions_pending") == 1
    # this process knows that it runs, the other knows nothing
    assert code(await one.ask(post("/patient", key))) == "outstanding"
    refused(await two.ask(post("/patient", key)))
    await again(postgres, two)
    kept = await two.settled(post("/patient", key))
    assert service.executions[key] == 1
    assert (kept.status, kept.body, replayed(kept)) == (201, b"made", True)


async def test_c20_d_a_route_that_goes_on_is_marked_counted_told_and_adopted(
    one: Gate, two: Gate, service: Service, postgres: OwnPostgres, key: str
) -> None:
    counted = 'requests_total{route="forward",outcome="unprotected",reason="store_failure"}'
    before = await one.metric(counted)
    await stopped(postgres)
    answer = await one.ask(post("/forward", key))
    assert (answer.status, answer.value("Idempotency-Status")) == (201, "unprotected")
    assert await one.metric(counted) == before + 1
    assert code(await one.ask(post("/forward", key))) == "outstanding"  # what is known here still counts
    assert service.executions[key] == 1
    await again(postgres, one, two)
    await one.until_metric("completions_pending", lambda count: count == 0)  # until then the other knows nothing
    kept = await two.settled(post("/forward", key))
    assert replayed(kept)
    assert service.executions[key] == 1
    assert [line["route"] for line in one.all_lines("ran_unprotected")][-1] == "forward"


async def test_c43_c_the_probes_stay_green_and_the_store_comes_back_by_itself(
    one: Gate, service: Service, postgres: OwnPostgres, key: str
) -> None:
    await stopped(postgres, signal.SIGQUIT)
    await until_down(one)
    async with aiohttp.ClientSession() as session:
        for path in ("healthz", "readyz"):
            async with session.get(f"http://127.0.0.1:{one.monitor_port}/{path}") as answer:
                assert answer.status == 200, path
    assert await one.metric("store_up") == 0
    await again(postgres, one)
    assert await one.metric("store_up") == 1
    assert (await one.ask(post("/again", key))).status == 201


async def test_a_gateway_that_starts_without_the_store_takes_part_when_it_comes(
    one: Gate, service: Service, postgres: OwnPostgres, key: str
) -> None:
    await one.stop()
    await stopped(postgres)
    await one.start()
    refused(await one.ask(post("/again", key)))
    assert (await one.ask(post("/elsewhere", None))).status == 201
    await again(postgres, one)
    assert (await one.ask(post("/again", key))).status == 201
    assert service.executions[key] == 1


async def test_a_stop_without_the_store_ends_in_time_and_the_record_is_not_lost(
    one: Gate, two: Gate, service: Service, postgres: OwnPostgres, *, key: str, asking: Asking
) -> None:
    answered = asyncio.Event()
    service.plans[key] = [then(wait_for(answered), reply(201, b"made"))]
    first = asking(one, post("/slow", key))
    await service.begun(key)
    await stopped(postgres, signal.SIGQUIT)
    answered.set()
    assert (await first).status == 201
    began = time.monotonic()
    assert await one.stop() == 0
    assert time.monotonic() - began < SHUTDOWN_SECONDS + 1.5
    await again(postgres, two)
    at_once = await two.ask(post("/slow", key))
    assert at_once.status == 409  # nobody could write that it ended: as after a crash
    assert service.executions[key] == 1
    assert (await two.settled(post("/slow", key))).status == 201


async def test_a_database_restart_while_a_request_runs_gives_its_lease_to_nobody(
    one: Gate, two: Gate, service: Service, postgres: OwnPostgres, *, key: str, asking: Asking
) -> None:
    """Down for longer than lease and effect deadline: the holder gets one lease to renew before anybody takes over."""
    answered = asyncio.Event()
    service.plans[key] = [then(wait_for(answered), reply(201, b"made"))]
    first = asking(one, post("/patient", key))
    await service.begun(key)
    await stopped(postgres, signal.SIGQUIT)
    await asyncio.sleep(LEASE_SECONDS + 0.5)
    await again(postgres, one, two)
    for _ in range(30):
        assert code(await two.ask(post("/patient", key))) == "outstanding"
        await asyncio.sleep(0.05)
    answered.set()
    assert (await first).value("Idempotency-Status") == "executed"
    assert replayed(await two.ask(post("/patient", key)))
    assert service.executions[key] == 1


# ---- C47: waiting for the store has an end, and nothing is held meanwhile --------------------------------------------


async def test_c47_a_a_locked_table_is_a_503_in_time_and_all_is_well_afterwards(
    one: Gate, two: Gate, service: Service, postgres: OwnPostgres, key: str
) -> None:
    locker = await asyncpg.connect(postgres.dsn)
    try:
        async with locker.transaction():
            await locker.execute(f"LOCK TABLE {SCHEMA}.idempotency_record IN ACCESS EXCLUSIVE MODE")
            began = time.monotonic()
            answers = await asyncio.gather(
                *(gate.ask(post("/block", f"{key}-{number}")) for gate in (one, two) for number in range(10))
            )
            assert time.monotonic() - began < STORE_SECONDS + 0.5
            for answer in answers:
                refused(answer)
            assert service.executions.total() == 0
            assert await one.metric("in_flight") == 0
    finally:
        await locker.close()
    await one.until_metric("store_up", lambda up: up == 1)
    answers = await asyncio.gather(*(one.ask(post("/block", f"{key}-{number}")) for number in range(10)))
    assert [answer.value("Idempotency-Status") for answer in answers] == ["executed"] * 10
    assert service.executions.total() == 10


async def test_c47_b_while_the_service_works_no_connection_and_no_transaction_is_held(
    one: Gate, service: Service, postgres: OwnPostgres, key: str, asking: Asking
) -> None:
    answered = asyncio.Event()
    service.default = then(wait_for(answered), reply(201))
    keys = [f"{key}-{number}" for number in range(50)]
    under_way = [asking(one, post("/patient", each)) for each in keys]
    for each in keys:
        await service.begun(each)
    busy = """SELECT state FROM pg_stat_activity WHERE application_name = 'idempotency-gateway'
        AND (state LIKE 'idle in transaction%'
          OR state = 'active' AND query_start < clock_timestamp() - interval '1 s')"""
    for _ in range(10):
        assert await postgres.execute(busy) == []
    answered.set()
    answers = await asyncio.gather(*under_way)
    assert [answer.status for answer in answers] == [201] * 50
    assert all(service.executions[each] == 1 for each in keys)


# ---- C48: connections to a server that is no more, or no longer the right one ----------------------------------------


async def load(gates: list[Gate], service: Service, prefix: str, until: asyncio.Event) -> list[tuple[str, RawAnswer]]:
    """Send requests with fresh keys until told to stop, and return the answers."""
    answers: list[tuple[str, RawAnswer]] = []

    async def client(number: int) -> None:
        count = 0
        while not until.is_set():
            count += 1
            each = f"{prefix}-{number}-{count}"
            answers.append((each, await gates[number % 2].ask(post("/again", each))))

    await asyncio.gather(*(client(number) for number in range(8)))
    return answers


TERMINATE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'idempotency-gateway'"


async def test_c48_a_a_read_only_server_is_left_and_found_again(
    one: Gate, service: Service, postgres: OwnPostgres, key: str
) -> None:
    """As after a failover: first the sessions stay and their writes fail, then new ones meet a standby."""
    try:
        await postgres.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await postgres.execute("SELECT pg_reload_conf()")
        async with asyncio.timeout(10):
            while (answer := await one.ask(post("/again", f"{key}-{secrets.token_hex(4)}"))).status == 201:
                await asyncio.sleep(0.01)
        refused(answer)
        await until_down(one)
        refused(await one.ask(post("/again", key)))
        assert service.executions[key] == 0
    finally:
        await postgres.execute("ALTER SYSTEM RESET default_transaction_read_only")
        await postgres.execute("SELECT pg_reload_conf()")
    began = time.monotonic()
    await until_up(one)
    assert (await one.ask(post("/again", key))).status == 201
    assert time.monotonic() - began < 5
    assert service.executions[key] == 1


async def test_c48_b_ended_sessions_are_replaced_and_no_answer_is_a_500(
    gates: list[Gate], service: Service, postgres: OwnPostgres, key: str
) -> None:
    enough = asyncio.Event()
    running = asyncio.create_task(load(gates, service, key, enough))
    sessions = 0
    for count in (20, 60, 100):
        async with asyncio.timeout(10):
            while service.executions.total() < count:
                await asyncio.sleep(0.01)
        sessions += len(await postgres.execute(TERMINATE))
    enough.set()
    answers = await running
    assert all(count == 1 for count in service.executions.values())
    failed = [each for each, answer in answers if answer.status != 201]
    assert len(failed) <= sessions
    for each, answer in answers:
        if answer.status != 201:
            refused(answer)
            assert service.executions[each] == 0
    for each in failed:
        assert (await gates[0].settled(post("/again", each))).status == 201


async def test_c48_c_after_a_restart_under_load_every_key_ran_once_and_has_its_reply(
    gates: list[Gate], service: Service, postgres: OwnPostgres, key: str
) -> None:
    enough = asyncio.Event()
    running = asyncio.create_task(load(gates, service, key, enough))
    async with asyncio.timeout(10):
        while service.executions.total() < 20:
            await asyncio.sleep(0.01)
    await stopped(postgres, signal.SIGQUIT)
    await again(postgres, *gates)
    enough.set()
    for each, answer in await running:
        if answer.status == 201:
            assert service.executions[each] == 1
        else:
            refused(answer)
            assert service.executions[each] == 0
        kept = await gates[0].settled(post("/again", each)) if answer.status == 201 else None
        assert kept is None or replayed(kept)
    assert all(count == 1 for count in service.executions.values())


async def test_c48_d_a_silent_database_costs_its_timeout_and_no_more(
    one: Gate, service: Service, relay: Relay, key: str, asking: Asking
) -> None:
    answered = asyncio.Event()
    service.plans[key] = [then(wait_for(answered), reply(201, b"made"))]
    first = asking(one, post("/patient", key))
    await service.begun(key)
    relay.silent = True
    began = time.monotonic()
    refused(await one.ask(post("/again", key + "-other")))
    assert time.monotonic() - began < STORE_SECONDS + 0.5
    answered.set()
    began = time.monotonic()
    assert (await first).body == b"made"
    assert time.monotonic() - began < STORE_SECONDS + 0.5
    relay.silent = False
    relay.cut()
    kept = await one.settled(post("/patient", key))
    assert replayed(kept)
    assert (await one.settled(post("/again", key + "-other"))).status == 201
    assert service.executions[key] == service.executions[key + "-other"] == 1


# ---- C53: no partition ---------------------------------------------------------------------------------------------


async def test_c53_a_without_a_partition_a_reply_is_a_tombstone_and_traffic_goes_on(
    one: Gate, two: Gate, service: Service, postgres: OwnPostgres, key: str
) -> None:
    names = await postgres.execute(
        "SELECT inhrelid::regclass::text AS name FROM pg_inherits "
        f"WHERE inhparent = '{SCHEMA}.idempotency_response'::regclass"
    )
    assert len(names) >= 2  # tomorrow's replies have their place today
    try:
        for row in names:
            await postgres.execute(f"DROP TABLE {row['name']}")
        answers = await asyncio.gather(*(one.ask(post("/again", f"{key}-{number}")) for number in range(5)))
        assert [answer.status for answer in answers] == [201] * 5
        for number in range(5):
            retry = await two.ask(post("/again", f"{key}-{number}"))
            assert service.executions[f"{key}-{number}"] == 1
            assert (retry.status, code(retry)) == (409, "reply-not-stored")
            assert (member(retry, "effect"), member(retry, "original_status")) == ("happened", 201)
    finally:
        connection = await asyncpg.connect(postgres.dsn)
        try:
            await open_partitions(connection, SCHEMA, dt.datetime.now(dt.UTC).date() + dt.timedelta(days=8))
        finally:
            await connection.close()
    await one.ask(post("/again", key))
    assert replayed(await two.ask(post("/again", key)))


# ---- C54: the store's answer is lost ---------------------------------------------------------------------------------


async def record_id(postgres: OwnPostgres, key: str) -> bytes:
    rows = await postgres.execute(f"SELECT id FROM {SCHEMA}.idempotency_record WHERE key = $1", key)
    found: bytes = rows[0]["id"]
    return found


async def test_c54_a_claim_whose_answer_is_lost_is_recognised_as_its_own(
    one: Gate, two: Gate, service: Service, relay: Relay, key: str
) -> None:
    relay.lose_answer_about = key.encode()
    answer = await one.ask(post("/block", key))
    assert (relay.lost, service.executions[key]) == (1, 1)
    assert (answer.status, answer.value("Idempotency-Status")) == (201, "executed")
    assert replayed(await two.ask(post("/block", key)))


async def test_c54_a_completion_whose_answer_is_lost_is_repeated(
    one: Gate, two: Gate, service: Service, relay: Relay, key: str
) -> None:
    body = f"made {key[::-1]}".encode()
    service.plans[key] = [reply(201, body)]
    relay.lose_answer_about = body
    answer = await one.ask(post("/block", key))
    assert (relay.lost, service.executions[key]) == (1, 1)
    assert (answer.status, answer.value("Idempotency-Status")) == (201, "executed")
    for gate in (one, two):
        assert (await gate.ask(post("/block", key))).body == body


async def test_c54_a_release_whose_answer_is_lost_is_repeated(
    one: Gate, two: Gate, service: Service, relay: Relay, *, postgres: OwnPostgres, key: str, asking: Asking
) -> None:
    answered = asyncio.Event()
    service.plans[key] = [then(wait_for(answered), reply(500)), reply(201, b"made")]
    first = asking(one, post("/again", key))
    await service.begun(key)
    relay.lose_answer_about = await record_id(postgres, key)
    answered.set()
    assert (await first).value("Idempotency-Status") == "released"
    assert relay.lost == 1
    assert (await two.ask(post("/again", key))).body == b"made"
    assert service.executions[key] == 2


async def test_c54_a_claim_of_unknown_fate_is_given_back_when_the_store_returns(
    one: Gate, two: Gate, service: Service, relay: Relay, *, postgres: OwnPostgres, key: str, asking: Asking
) -> None:
    """The claim is written, its answer lost, and the store stays away: a 503, and even `block` does not block."""
    relay.lose_answer_about = key.encode()
    answer_to = asking(one, post("/block", key))
    async with asyncio.timeout(10):
        while not relay.lost:
            await asyncio.sleep(0)
    await relay.close()
    refused(await answer_to)
    assert service.executions[key] == 0
    held = await two.ask(post("/block", key))
    assert (held.status, service.executions[key]) == (409, 0)
    await relay.open()
    assert (await two.settled(post("/block", key))).value("Idempotency-Status") == "executed"
    assert service.executions[key] == 1
