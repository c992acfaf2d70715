"""Many requests with one key at the same moment, over one gateway and over two: one execution, and no answer but those
that are promised. GATEWAY_TEST_ROUNDS=200 (`make acceptance`) runs the rounds at their full number.
"""

import asyncio
import os
from collections import Counter

import pytest

from tests.support import RawAnswer, Turn, reply, then

from .stage import Gate, Rows, Service, code, post, replayed, together, transfer

ROUNDS = int(os.environ.get("GATEWAY_TEST_ROUNDS", "40"))
AT_ONCE = 50


async def a_while(_: Turn) -> None:
    """Work, as a service does: the others have to come while it does."""
    await asyncio.sleep(0.1)


def judged(answers: list[RawAnswer]) -> Counter[str]:
    """Name each answer; anything that is not promised fails."""
    names: Counter[str] = Counter()
    for answer in answers:
        if answer.status == 201:
            names["replay" if replayed(answer) else "executed"] += 1
        else:
            assert (answer.status, code(answer)) == (409, "outstanding"), (answer.head, answer.body)
            assert 1 <= int(answer.value("Retry-After") or 0) <= 10
            names["outstanding"] += 1
    return names


@pytest.mark.parametrize("replicas", [1, 2])
async def test_twenty_parallel_transfers_with_one_key_make_one_row(
    gates: list[Gate], rows: Rows, key: str, replicas: int
) -> None:
    answers = await together(transfer(key, fault="sleep-after=100ms"), gates[:replicas], 20)
    assert await rows.count(key) == 1
    names = judged(answers)
    assert names["executed"] == 1
    bodies = {answer.body for answer in answers if answer.status == 201}
    assert len(bodies) == 1
    again = await together(transfer(key), gates[:replicas], 4)
    assert judged(again) == {"replay": 4}
    assert {answer.body for answer in again} == bodies
    assert await rows.count(key) == 1


async def test_c17_of_fifty_first_requests_over_two_replicas_one_runs(
    gates: list[Gate], service: Service, key: str
) -> None:
    service.default = then(a_while, reply(201, b"made", [("Location", "/made/1")]))
    for number in range(ROUNDS):
        each = f"{key}-{number}"
        answers = await together(post("/again", each), gates, AT_ONCE)
        assert service.executions[each] == 1
        assert judged(answers)["executed"] == 1
    assert sum(service.executions.values()) == ROUNDS


async def test_c17_with_two_bodies_under_one_key_one_runs_and_the_others_are_told_apart(
    gates: list[Gate], service: Service, key: str
) -> None:
    service.default = then(a_while, reply(201, b"made"))
    for number in range(max(3, ROUNDS // 10)):
        each = f"{key}-{number}"
        bodies = [b'{"amount":1}', b'{"amount":2}']
        answers = await asyncio.gather(
            *(
                together(post("/again", each, body), gates[::order], AT_ONCE // 2)
                for body, order in zip(bodies, (1, -1), strict=True)
            )
        )
        assert service.executions[each] == 1
        ran = service.up.requests[-1].body
        same, other = answers if ran == bodies[0] else answers[::-1]
        assert judged(same)["executed"] == 1
        assert {(answer.status, code(answer)) for answer in other} == {(422, "key-reused")}


async def test_c17_when_the_first_is_released_one_of_the_waiting_runs_next(
    gates: list[Gate], service: Service, key: str
) -> None:
    """An error that is released, again and again: executions follow each other, and never overlap."""
    failures = 5
    service.plans[key] = [then(a_while, reply(500, b"failed")) for _ in range(failures)]
    done = asyncio.Event()

    async def client(number: int) -> None:
        while not done.is_set():
            answer = await gates[number % 2].ask(post("/again", key))
            if answer.status == 201:
                done.set()
            elif answer.status == 500:
                assert answer.value("Idempotency-Status") == "released"
            else:
                assert (answer.status, code(answer)) == (409, "outstanding")
                await asyncio.sleep(0.02)

    async with asyncio.timeout(20):
        await asyncio.gather(*(client(number) for number in range(10)))
    assert service.executions[key] == failures + 1
