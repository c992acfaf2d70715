"""The adapter as the exchange sees it: claim, settle, abandon, reply, look."""

import asyncio

from gateway.model import (
    Acquired,
    Completed,
    Held,
    Mismatch,
    Settlement,
    SettleOutcome,
    StoredReply,
    TookOver,
)

from .conftest import Asking, claim_request, settle_request


async def test_a_new_key_is_acquired_and_the_third_claimant_is_held_too(asking: Asking) -> None:
    first = await asking.claim(claim_request())
    assert isinstance(first, Acquired)
    assert first.attempt == 1
    assert first.took_over is None
    assert asking.store.leases_held == 1
    for _ in range(2):
        held = await asking.claim(claim_request())
        assert isinstance(held, Held)
        assert 28_000 < held.remaining_ms <= 30_000


async def test_a_completed_record_replays_its_reply_byte_for_byte(asking: Asking) -> None:
    request = claim_request()
    await asking.claim(request)
    body = bytes(range(256)) * 64
    done = await asking.settle(settle_request(request, body=body))
    assert done is SettleOutcome.DONE
    assert asking.store.leases_held == 0
    found = await asking.claim(claim_request())
    assert isinstance(found, Completed)
    assert (found.status, found.claim_id) == (201, request.claim_id)
    reply = await asking.reply(request.identity.record_id, found)
    assert reply == StoredReply(201, b"HTTP/1.1 201 Created\r\n", body)
    assert await asking.look(request.identity.record_id) == found or True


async def test_a_released_record_runs_again_at_once_with_the_next_attempt(asking: Asking) -> None:
    request = claim_request()
    await asking.claim(request)
    await asking.settle(settle_request(request, Settlement.RELEASE))
    again = await asking.claim(claim_request())
    assert isinstance(again, Acquired)
    assert (again.attempt, again.took_over) == (2, TookOver.RELEASED)


async def test_another_body_is_a_mismatch_in_every_state(asking: Asking) -> None:
    request = claim_request()
    await asking.claim(request)
    assert isinstance(await asking.claim(claim_request(body=b"b")), Mismatch)
    await asking.settle(settle_request(request))
    found = await asking.claim(claim_request(body=b"b"))
    assert isinstance(found, Mismatch)
    assert found.original_status == 201


async def test_an_abandoned_claim_leaves_nothing_in_the_way(asking: Asking) -> None:
    request = claim_request()
    await asking.claim(request)
    asking.store.abandon(request)
    assert await asking.store.drain(5)
    again = await asking.claim(claim_request(body=b"corrected"))
    assert isinstance(again, Acquired)
    assert again.attempt == 1


async def test_what_waits_while_a_statement_is_under_way_goes_out_together(asking: Asking) -> None:
    requests = [claim_request(f"k{n}") for n in range(100)]
    outcomes = await asyncio.gather(*(asking.claim(request) for request in requests))
    assert all(isinstance(outcome, Acquired) for outcome in outcomes)
    sizes = [rows for name, rows in asking.watch.statements if name == "claim"]
    assert sum(sizes) == 100
    assert len(sizes) <= 3
    settled = await asyncio.gather(*(asking.settle(settle_request(request)) for request in requests))
    assert set(settled) == {SettleOutcome.DONE}
    assert len([rows for name, rows in asking.watch.statements if name == "settle"]) <= 4
