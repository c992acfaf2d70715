"""Leases, takeovers, crashes and timeouts, with processes that are killed, stopped and continued. N first."""

import asyncio
import signal
import time

import pytest

from tests.support import RawClient, RawUpstream, early, hang, reply, reset, then, wait_for
from tests.support.raw_upstream import close

from .stage import (
    EFFECT_SECONDS,
    LEASE_SECONDS,
    SHUTDOWN_SECONDS,
    Asking,
    Gate,
    Rows,
    Service,
    code,
    member,
    post,
    replayed,
    transfer,
)

# ---- C01: a crash ------------------------------------------------------------------------------------------------


async def test_c01_after_a_crash_the_key_waits_for_the_effect_deadline_and_then_runs_again(
    one: Gate, two: Gate, service: Service, key: str, asking: Asking
) -> None:
    service.plans[key] = [hang()]
    asking(one, post("/again", key))
    await service.begun(key)
    await one.kill()
    killed = time.monotonic()

    at_once = await two.ask(post("/again", key))
    assert service.executions[key] == 1
    assert (at_once.status, code(at_once)) == (409, "outstanding")
    assert 1 <= int(at_once.value("Retry-After") or 0) <= 10
    answer = await two.settled(post("/again", key))
    waited = time.monotonic() - killed
    assert service.executions[key] == 2
    assert (answer.status, answer.value("Idempotency-Status")) == (201, "executed")
    assert EFFECT_SECONDS <= waited < LEASE_SECONDS + EFFECT_SECONDS + 2
    await one.start()
    assert replayed(await one.ask(post("/again", key)))
    assert two.lines("ran_again") or await two.metric('takeovers_total{route="again",cause="expired"}')


async def test_c01_under_block_a_crash_leaves_the_key_in_doubt_and_never_runs_it_again(
    one: Gate, two: Gate, service: Service, key: str, asking: Asking
) -> None:
    service.plans[key] = [hang()]
    asking(one, post("/block", key))
    await service.begun(key)
    await one.kill()
    async with asyncio.timeout(10):
        while code(answer := await two.ask(post("/block", key))) == "outstanding":
            await asyncio.sleep(0.05)
    assert (answer.status, code(answer)) == (409, "in-doubt")
    assert answer.value("Retry-After") is None
    assert (member(answer, "effect"), member(answer, "next")) == ("unknown", "check_outcome")
    await asyncio.sleep(EFFECT_SECONDS)  # the deadline passes, and nothing changes
    await one.start()
    for gate in (one, two):
        assert code(await gate.ask(post("/block", key))) == "in-doubt"
    assert service.executions[key] == 1


async def test_c01_a_key_whose_lease_was_taken_and_not_used_waits_no_longer(
    one: Gate, two: Gate, service: Service, key: str, asking: Asking
) -> None:
    """The crash comes while the request waits for a connection to the service: nothing was sent, nobody knows it."""
    blocker = key + "-blocker"
    service.plans[blocker] = [hang()]
    asking(one, post("/again", blocker, host="narrow.test"))
    await service.begun(blocker)
    asking(one, post("/again", key, host="narrow.test"))
    await one.until_metric("leases_held", lambda held: held == 2)
    await one.kill()
    answer = await two.settled(post("/again", key, host="narrow.test"))
    assert service.executions[key] == 1
    assert answer.status == 201


# ---- C02: leases that are outlived ---------------------------------------------------------------------------------


async def test_c02_a_a_slow_request_never_loses_its_lease(
    one: Gate, two: Gate, service: Service, key: str, asking: Asking
) -> None:
    answered = asyncio.Event()
    service.plans[key] = [then(wait_for(answered), reply(201, b"first"))]
    first = asking(one, post("/patient", key))
    await service.begun(key)
    await asyncio.sleep(1.6 * LEASE_SECONDS)
    for gate in (one, two):
        meanwhile = await gate.ask(post("/patient", key))
        assert (meanwhile.status, code(meanwhile)) == (409, "outstanding")
    answered.set()
    assert (await first).body == b"first"
    for gate in (one, two):
        again = await gate.ask(post("/patient", key))
        assert (again.body, replayed(again)) == (b"first", True)
    assert service.executions[key] == 1


async def test_c02_b_who_was_paused_too_long_cannot_complete_over_its_successor(
    one: Gate, two: Gate, service: Service, key: str, asking: Asking
) -> None:
    answered = asyncio.Event()
    service.plans[key] = [then(wait_for(answered), reply(201, b"first")), reply(201, b"second")]
    late = await one.metric("late_replies_total")
    first = asking(one, post("/again", key))
    await service.begun(key)
    one.signal(signal.SIGSTOP)
    assert (await two.settled(post("/again", key))).body == b"second"
    answered.set()
    one.signal(signal.SIGCONT)
    assert (await first).body == b"second"  # all attempts see one answer
    await one.until_metric("late_replies_total", lambda count: count == late + 1)
    for gate in (one, two, one):
        again = await gate.ask(post("/again", key))
        assert (again.body, replayed(again)) == (b"second", True)
    assert service.executions[key] == 2
    service.overlapped.discard(key)  # the first outlived its effect deadline: what the promise excludes


async def test_c02_c_a_late_release_does_not_free_the_successors_lease(
    one: Gate, two: Gate, service: Service, key: str, asking: Asking
) -> None:
    answered, second_may_end = asyncio.Event(), asyncio.Event()
    service.plans[key] = [
        then(wait_for(answered), reply(500, b"late")),
        then(wait_for(second_may_end), reply(201, b"second")),
    ]
    first = asking(one, post("/slow", key))
    await service.begun(key)
    one.signal(signal.SIGSTOP)
    second = asyncio.create_task(two.settled(post("/slow", key)))
    await service.begun(key, 2)
    answered.set()
    one.signal(signal.SIGCONT)
    assert (await first).status in {500, 502, 504}
    for gate in (one, two):
        third = await gate.ask(post("/slow", key))
        assert (third.status, code(third)) == (409, "outstanding")
    assert service.executions[key] == 2
    second_may_end.set()
    assert (await second).body == b"second"
    assert replayed(await one.ask(post("/slow", key)))
    assert service.executions[key] == 2
    service.overlapped.discard(key)


async def test_c02_a_paused_holder_that_has_sent_nothing_claims_again_instead_of_sending(
    one: Gate, two: Gate, service: Service, key: str, asking: Asking
) -> None:
    blocker, freed = key + "-blocker", asyncio.Event()
    service.plans[blocker] = [then(wait_for(freed), reply(201))]
    asking(one, post("/again", blocker, host="narrow.test"))
    await service.begun(blocker)
    waiting = asking(one, post("/again", key, host="narrow.test"))
    await one.until_metric("leases_held", lambda held: held == 2)
    one.signal(signal.SIGSTOP)
    assert (await two.settled(post("/again", key, host="narrow.test"))).status == 201
    freed.set()
    one.signal(signal.SIGCONT)
    answer = await waiting
    assert service.executions[key] == 1
    assert (answer.status, replayed(answer)) == (201, True)


async def test_an_answer_that_came_while_the_gateway_was_paused_is_not_thrown_away(
    one: Gate, service: Service, key: str, asking: Asking
) -> None:
    """A pause is no timeout: under `block` the record would be in doubt until somebody looks."""
    answered = asyncio.Event()
    service.plans[key] = [then(wait_for(answered), reply(201, b"came"))]
    first = asking(one, post("/block", key))
    await service.begun(key)
    one.signal(signal.SIGSTOP)
    answered.set()
    await asyncio.sleep(2)  # longer than upstream_timeout, and than the lease
    one.signal(signal.SIGCONT)
    answer = await first
    assert (answer.status, answer.value("Idempotency-Status"), answer.body) == (201, "executed", b"came")
    assert replayed(await one.ask(post("/block", key)))
    assert service.executions[key] == 1


# ---- C04: clients that leave ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_c04_a_client_that_hangs_up_changes_nothing(
    one: Gate, two: Gate, service: Service, key: str, how: str
) -> None:
    answered = asyncio.Event()
    service.plans[key] = [then(wait_for(answered), reply(201, b"made" * 100))]
    async with RawClient(one.port) as client:
        await client.send(post("/again", key))
        await service.begun(key)
        await (client.hang_up() if how == "fin" else client.reset())
    answered.set()
    for gate in (two, one):
        answer = await gate.settled(post("/again", key))
        assert (answer.status, answer.body, replayed(answer)) == (201, b"made" * 100, True)
    assert service.executions[key] == 1


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_c04_iii_half_a_request_leaves_no_lease(one: Gate, service: Service, key: str, how: str) -> None:
    data = post("/again", key, b'{"amount": 1, "text": "' + b"x" * 100_000 + b'"}')
    async with RawClient(one.port) as client:
        await client.send(data[: len(data) // 2])
        await one.until_metric("buffer_bytes", lambda size: size > 0)
        await (client.hang_up() if how == "fin" else client.reset())
    await one.at_rest()
    assert service.executions[key] == 0
    answer = await one.ask(data)
    assert (answer.status, answer.value("Idempotency-Status")) == (201, "executed")
    assert service.executions[key] == 1


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_c04_iv_half_a_reply_is_replayed_whole(
    one: Gate, two: Gate, service: Service, key: str, how: str
) -> None:
    body = bytes(range(256)) * (5 * 1024 * 4)
    service.plans[key] = [reply(201, body)]
    async with RawClient(one.port) as client:
        await client.send(post("/large", key))
        assert (await client.read_head()).status == 201
        assert len(await client.reader.readexactly(100_000)) == 100_000
        await (client.hang_up() if how == "fin" else client.reset())
    for gate in (one, two):
        answer = await gate.settled(post("/large", key))
        assert (answer.status, replayed(answer), answer.body == body) == (201, True, True)
    assert service.executions[key] == 1


async def test_c04_a_client_that_left_before_a_graceful_stop_still_gets_its_replay(
    one: Gate, two: Gate, service: Service, key: str
) -> None:
    answered = asyncio.Event()
    service.plans[key] = [then(wait_for(answered), reply(201, b"kept"))]
    async with RawClient(one.port) as client:
        await client.send(post("/patient", key))
        await service.begun(key)
        await client.reset()
    one.signal(signal.SIGTERM)
    await one.until(lambda status: not status["ready"])
    answered.set()
    assert await one.ended() == 0
    answer = await two.ask(post("/patient", key))
    assert (answer.body, replayed(answer)) == (b"kept", True)
    assert service.executions[key] == 1


# ---- C21: answers that do not come ---------------------------------------------------------------------------------


async def test_c21_the_late_reply_is_kept_and_replayed(
    one: Gate, two: Gate, service: Service, key: str, asking: Asking
) -> None:
    answered = asyncio.Event()
    service.plans[key] = [then(wait_for(answered), reply(201, b"late"))]
    answer = await one.ask(post("/soon", key))
    assert (answer.status, code(answer), member(answer, "effect")) == (504, "still-running", "pending")
    for gate in (one, two):
        at_once = await gate.ask(post("/soon", key))
        assert (at_once.status, code(at_once)) == (409, "outstanding")
        assert at_once.value("Retry-After") is not None
    answered.set()
    again = await two.settled(post("/soon", key))
    assert (again.status, again.body, replayed(again)) == (201, b"late", True)
    assert service.executions[key] == 1


async def test_c21_a_timeout_is_outcome_unknown_and_runs_again_only_after_the_effect_deadline(
    one: Gate, two: Gate, service: Service, key: str
) -> None:
    committed = asyncio.Event()
    service.plans[key] = [then(wait_for(committed), reply(201, b"too late"))]
    answer = await one.ask(post("/again", key))
    timed_out = time.monotonic()
    assert (answer.status, code(answer), member(answer, "effect")) == (504, "outcome-unknown", "unknown")
    assert member(answer, "cause") == "http_response_timeout"
    for gate in (one, two):
        at_once = await gate.ask(post("/again", key))
        assert (at_once.status, code(at_once)) == (409, "in-doubt")
        assert int(at_once.value("Retry-After") or 0) >= 1
    assert service.executions[key] == 1
    committed.set()
    again = await two.settled(post("/again", key))
    assert time.monotonic() - timed_out > EFFECT_SECONDS - 0.3  # the client heard of it a moment after the store
    assert (again.status, again.value("Idempotency-Status")) == (201, "executed")
    assert service.executions[key] == 2


async def test_c21_b_a_refused_connection_was_never_sent_and_the_retry_runs_at_once(
    one: Gate, two: Gate, service_port: int, key: str
) -> None:
    for gate in (one, two):
        answer = await gate.ask(post("/block", key))
        assert (answer.status, code(answer), member(answer, "effect")) == (503, "upstream-unreachable", "none")
        assert answer.value("Idempotency-Status") == "released"
        assert answer.value("Retry-After") == "1"
    async with RawUpstream(reply(201, b"made"), port=service_port) as up:
        answer = await two.ask(post("/block", key))
        assert up.executions["/block", key] == 1
        assert (answer.status, answer.value("Idempotency-Status")) == (201, "executed")


async def test_c21_c_a_name_that_does_not_resolve_was_never_sent(one: Gate, key: str) -> None:
    for _ in range(2):
        answer = await one.ask(post("/again", key, host="nowhere.test"))
        assert (answer.status, code(answer), member(answer, "effect")) == (503, "upstream-unreachable", "none")


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("route", ["/again", "/block"])
async def test_c21_d_a_connection_that_breaks_after_the_head_is_outcome_unknown(
    one: Gate, two: Gate, service_port: int, key: str, *, route: str, how: str
) -> None:
    async with RawUpstream(early(reset() if how == "reset" else close()), port=service_port) as up:
        answer = await one.ask(post(route, key))
        assert (answer.status, code(answer), member(answer, "effect")) == (502, "outcome-unknown", "unknown")
        for gate in (one, two):
            at_once = await gate.ask(post(route, key))
            assert (at_once.status, code(at_once)) == (409, "in-doubt")
            assert (at_once.value("Retry-After") is None) == (route == "/block")
        assert len(up.requests) == 1


@pytest.mark.parametrize("status", [500, 503, 504])
async def test_c21_e_the_services_own_error_is_released_or_held_as_the_policy_says(
    one: Gate, two: Gate, service: Service, key: str, status: int
) -> None:
    service.plans[key] = [reply(status, b"theirs"), reply(201, b"made")]
    answer = await one.ask(post("/again", key))
    assert (answer.status, answer.body, answer.value("Idempotency-Status")) == (status, b"theirs", "released")
    assert (await two.ask(post("/again", key))).body == b"made"
    assert service.executions[key] == 2

    held = key + "-held"
    service.plans[held] = [reply(status, b"theirs"), reply(201, b"made")]
    answer = await one.ask(post("/held", held))
    assert (answer.status, answer.body) == (status, b"theirs")
    again = await two.ask(post("/held", held))
    if status == 503:
        assert (again.status, service.executions[held]) == (201, 2)
    else:
        assert answer.value("Idempotency-Status") == "in-doubt"
        assert (again.status, code(again), service.executions[held]) == (409, "in-doubt", 1)


# ---- C43: stopping -------------------------------------------------------------------------------------------------


async def test_c43_a_a_stop_lets_what_runs_finish_and_takes_nothing_new(
    one: Gate, two: Gate, service: Service, key: str, asking: Asking
) -> None:
    answered = asyncio.Event()
    keys = [f"{key}-{number}" for number in range(20)]
    for each in keys:
        service.plans[each] = [then(wait_for(answered), reply(201, each.encode()))]
    under_way = [asking(one, post("/patient", each)) for each in keys]
    async with RawClient(one.port) as idle:
        assert (await idle.ask(post("/again", key + "-before"))).status == 201
        for each in keys:
            await service.begun(each)
        one.signal(signal.SIGTERM)
        await one.until(lambda status: not status["ready"])
        refused = await idle.ask(post("/again", key + "-after"))
        assert (refused.status, code(refused), member(refused, "effect")) == (503, "draining", "none")
        assert await idle.is_closed()
        assert service.executions[key + "-after"] == 0
    with pytest.raises(OSError):  # noqa: PT011 -- refused or reset, by the moment
        async with RawClient(one.port):
            pass
    duplicate = await two.ask(post("/patient", keys[0]))
    assert (duplicate.status, code(duplicate)) == (409, "outstanding")
    answered.set()
    answers = await asyncio.gather(*under_way)
    assert [answer.status for answer in answers] == [201] * 20
    assert await one.ended() == 0
    for each in keys:
        again = await two.ask(post("/patient", each))
        assert (again.body, replayed(again)) == (each.encode(), True)
        assert service.executions[each] == 1


async def test_c43_b_what_cannot_finish_is_in_doubt_when_the_process_ends_in_time(
    one: Gate, two: Gate, service: Service, key: str, asking: Asking
) -> None:
    service.plans[key] = [hang()]
    waiting, queued = key + "-waiting", key + "-queued"
    service.plans[waiting] = [hang()]
    first = asking(one, post("/patient", key))
    asking(one, post("/again", waiting, host="narrow.test"))
    await service.begun(key)
    await service.begun(waiting)
    never_sent = asking(one, post("/again", queued, host="narrow.test"))
    await one.until_metric("in_flight", lambda count: count == 3)
    began = time.monotonic()
    one.signal(signal.SIGTERM)
    answer = await first
    assert (answer.status, code(answer), member(answer, "effect")) == (502, "outcome-unknown", "unknown")
    refused = await never_sent
    assert (refused.status, member(refused, "effect")) == (503, "none")
    assert await one.ended() == 0
    assert time.monotonic() - began < SHUTDOWN_SECONDS + 1.5
    in_doubt = await two.ask(post("/patient", key))
    assert (in_doubt.status, code(in_doubt)) == (409, "in-doubt")
    assert service.executions[key] == 1
    assert (await two.ask(post("/again", queued, host="narrow.test"))).value("Idempotency-Status") == "executed"
    assert service.executions[queued] == 1


# ---- the ledger: what issue 2 asks for, counted in rows --------------------------------------------------------------


async def test_another_body_a_missing_key_and_the_ledgers_own_refusals(
    one: Gate, two: Gate, rows: Rows, key: str
) -> None:
    first = await one.ask(transfer(key))
    other = await two.ask(transfer(key, amount=9))
    assert (other.status, code(other)) == (422, "key-reused")
    for gate in (one, two):
        again = await gate.ask(transfer(key))
        assert (again.status, again.body, replayed(again)) == (first.status, first.body, True)
        assert again.value("Location") == first.value("Location")
        assert again.value("Content-Type") == first.value("Content-Type")
    assert await rows.count(key) == 1
    missing = await one.ask(post("/transfers", None, host="ledger.test"))
    assert (missing.status, code(missing)) == (400, "key-missing")

    failing = key + "-500"
    answer = await one.ask(transfer(failing, fault="status=500"))
    assert (answer.status, answer.value("Idempotency-Status")) == (500, "released")
    assert (await two.ask(transfer(failing))).status == 201  # the fault is a header: the same request by fingerprint
    assert await rows.count(failing) == 1

    refused = key + "-422"
    answer = await one.ask(transfer(refused, fault="status=422"))
    assert (answer.status, answer.value("Idempotency-Status")) == (422, "executed")
    again = await two.ask(transfer(refused))
    assert (again.status, again.body, replayed(again)) == (422, answer.body, True)
    assert await rows.count(refused) == 0

    moved = key + "-303"
    answer = await one.ask(transfer(moved, fault="status=303"))
    again = await two.ask(transfer(moved))
    assert (answer.status, again.status, replayed(again)) == (303, 303, True)
    assert again.value("Location") == answer.value("Location") is not None
    assert await rows.count(moved) == 1


@pytest.mark.parametrize("host", ["ledger", "ledger-block"])
async def test_when_the_ledger_dies_after_its_commit_a_retry_waits_for_the_deadline_and_block_never_runs(
    one: Gate, two: Gate, rows: Rows, key: str, host: str
) -> None:
    answer = await one.ask(transfer(key, fault="die-after-commit", host=host))
    assert await rows.count(key) == 1
    assert (answer.status, code(answer)) == (502, "outcome-unknown")
    await rows.running_again()
    if host == "ledger":
        again = await two.settled(transfer(key, host=host))
        assert (again.status, again.value("Idempotency-Status")) == (201, "executed")
        assert await rows.count(key) == 2
        return
    await asyncio.sleep(EFFECT_SECONDS + 0.1)
    again = await two.ask(transfer(key, host=host))
    assert (again.status, code(again), again.value("Retry-After")) == (409, "in-doubt", None)
    assert await rows.count(key) == 1


@pytest.mark.parametrize("host", ["ledger-slow", "ledger-slow-block"])
async def test_a_gateway_killed_while_the_ledger_works_lets_nothing_overlap(
    one: Gate, two: Gate, rows: Rows, key: str, asking: Asking, *, host: str
) -> None:
    """The ledger commits after the lease ran out and before the effect deadline."""
    asking(one, transfer(key, fault="sleep-before=1500ms", host=host))
    await one.until_metric('upstream_connections{state="active"', lambda active: active == 1)
    await one.kill()
    while await rows.count(key) == 0:
        meanwhile = await two.ask(transfer(key, host=host))
        assert meanwhile.status == 409, meanwhile.body
        await asyncio.sleep(0.05)
    if host == "ledger-slow":
        assert (await two.settled(transfer(key, host=host))).status == 201
        assert await rows.count(key) == 2
        return
    await asyncio.sleep(1.6)  # the effect deadline is 2 s after the lease's end, and that was before the commit
    again = await two.ask(transfer(key, host=host))
    assert (again.status, code(again), again.value("Retry-After")) == (409, "in-doubt", None)
    assert await rows.count(key) == 1
