"""The lease protocol, rule by rule, on the statements themselves. Time is an argument; nothing here waits."""

import hashlib
import secrets

import asyncpg
import pytest

from gateway.model import (
    Acquired,
    Completed,
    Conflict,
    Fingerprint,
    Held,
    InDoubt,
    Mismatch,
    OnInDoubt,
    OtherRecipe,
    Settlement,
    SettleOutcome,
    TookOver,
    Unavailable,
)
from gateway.store.sql import query
from gateway.store.statements import claim_arguments

from .conftest import Bench, claim_request, identity, settle_request

LEASE, EFFECT, KEEP = 30, 60, 24 * 3600  # seconds, as claim_request has them
RUN_AGAIN, PROBE, BLOCK = OnInDoubt.RUN_AGAIN, OnInDoubt.PROBE, OnInDoubt.BLOCK


# ---- the lease and its end: rules 3, 4, 5, 12, 15 ------------------------------------------------------------------


async def test_rule_3_a_crashed_lease_runs_again_only_after_the_effect_deadline_counted_from_its_end(
    bench: Bench,
) -> None:
    await bench.claim(claim_request())
    held = await bench.claim(claim_request(), at=LEASE - 1)
    assert held == Held(1000, held.first_seen_unix)
    doubt = await bench.claim(claim_request(), at=LEASE)
    assert isinstance(doubt, InDoubt)
    assert doubt.again_in_ms == EFFECT * 1000
    doubt = await bench.claim(claim_request(), at=LEASE + EFFECT - 1)
    assert isinstance(doubt, InDoubt)
    assert doubt.again_in_ms == 1000
    taken = await bench.claim(claim_request(), at=LEASE + EFFECT)
    assert isinstance(taken, Acquired)
    assert (taken.attempt, taken.took_over) == (2, TookOver.EXPIRED)


async def test_rule_3_a_renewal_moves_the_effect_deadline_with_the_lease(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    assert await bench.renew(request, at=20) == ["renewed"]
    assert isinstance(await bench.claim(claim_request(), at=LEASE + EFFECT), InDoubt)
    assert isinstance(await bench.claim(claim_request(), at=20 + LEASE + EFFECT), Acquired)


async def test_rule_3_a_doubt_of_a_holder_that_forwarded_counts_from_its_settlement(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    assert await bench.settle(settle_request(request, Settlement.HOLD), at=10) is SettleOutcome.DONE
    doubt = await bench.claim(claim_request(), at=11)
    assert isinstance(doubt, InDoubt)
    assert doubt.again_in_ms == (EFFECT - 1) * 1000
    assert isinstance(await bench.claim(claim_request(), at=10 + EFFECT), Acquired)


async def test_rule_3_the_effect_deadline_is_the_records_own_not_the_askers(bench: Bench) -> None:
    await bench.claim(claim_request())
    assert isinstance(await bench.claim(claim_request(effect_ms=0), at=LEASE + EFFECT - 1), InDoubt)


async def test_rule_3_probe_may_claim_when_the_lease_is_over_and_block_never(bench: Bench) -> None:
    await bench.claim(claim_request("p", on_in_doubt=PROBE))
    assert isinstance(await bench.claim(claim_request("p", on_in_doubt=PROBE), at=LEASE - 1), Held)
    assert isinstance(await bench.claim(claim_request("p", on_in_doubt=PROBE), at=LEASE), Acquired)
    await bench.claim(claim_request("b", on_in_doubt=BLOCK))
    for later in (LEASE, LEASE + EFFECT, 10 * KEEP):
        doubt = await bench.claim(claim_request("b", on_in_doubt=BLOCK), at=later)
        assert isinstance(doubt, InDoubt)
        assert doubt.again_in_ms is None


async def test_rule_4_after_a_restart_every_holder_has_one_lease_to_renew(bench: Bench) -> None:
    started = await bench.connection.fetchval("SELECT pg_postmaster_start_time()")
    bench.zero = started
    await bench.claim(claim_request(on_in_doubt=PROBE), at=-100)  # ran out long before the database came back
    held = await bench.claim(claim_request(on_in_doubt=PROBE), at=LEASE - 1)
    assert isinstance(held, Held)
    assert held.remaining_ms == 1000
    assert isinstance(await bench.claim(claim_request(on_in_doubt=PROBE), at=LEASE), Acquired)


async def test_rule_5_after_trouble_with_the_store_nothing_is_taken_over_for_one_lease(bench: Bench) -> None:
    await bench.claim(claim_request())
    late = LEASE + EFFECT + 5
    doubt = await bench.claim(claim_request(), at=late, calm_ms=LEASE * 1000 - 1)
    assert isinstance(doubt, InDoubt)
    assert doubt.again_in_ms == 1
    assert isinstance(await bench.claim(claim_request(), at=late, calm_ms=LEASE * 1000), Acquired)


async def test_rule_5_a_released_record_is_free_even_then(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    await bench.settle(settle_request(request, Settlement.RELEASE))
    assert isinstance(await bench.claim(claim_request(), calm_ms=0), Acquired)


@pytest.mark.parametrize(("stored", "asked"), [(BLOCK, RUN_AGAIN), (RUN_AGAIN, BLOCK)])
async def test_rule_12_the_stricter_of_record_and_request_counts(
    bench: Bench, stored: OnInDoubt, asked: OnInDoubt
) -> None:
    await bench.claim(claim_request(on_in_doubt=stored))
    assert isinstance(await bench.claim(claim_request(on_in_doubt=asked), at=10 * LEASE), InDoubt)


async def test_rule_12_a_takeover_only_ever_tightens_the_record(bench: Bench) -> None:
    first = claim_request(on_in_doubt=BLOCK)
    await bench.claim(first)
    await bench.settle(settle_request(first, Settlement.RELEASE))
    await bench.claim(claim_request(on_in_doubt=RUN_AGAIN))
    assert (await bench.record(first))["on_in_doubt"] == "block"


async def test_rule_15_a_request_that_kills_its_gateways_blocks_after_max_attempts(bench: Bench) -> None:
    step = LEASE + EFFECT
    for n in range(3):
        assert isinstance(await bench.claim(claim_request(), at=n * step, max_attempts=3), Acquired)
    doubt = await bench.claim(claim_request(), at=3 * step, max_attempts=3)
    assert isinstance(doubt, InDoubt)
    assert doubt.again_in_ms is None


async def test_rule_15_answers_of_5xx_never_block_a_key(bench: Bench) -> None:
    for n in range(12):
        request = claim_request()
        taken = await bench.claim(request, at=n, max_attempts=3)
        assert isinstance(taken, Acquired)
        assert taken.attempt == n + 1
        await bench.settle(settle_request(request, Settlement.RELEASE), at=n)


async def test_rule_15_a_known_outcome_starts_the_count_anew(bench: Bench) -> None:
    step = LEASE + EFFECT
    await bench.claim(claim_request(), at=0)
    second = claim_request()
    await bench.claim(second, at=step)
    assert (await bench.record(second))["reruns"] == 1
    await bench.settle(settle_request(second, Settlement.RELEASE), at=step)
    assert (await bench.record(second))["reruns"] == 0


# ---- fence and abandon: rules 7 to 10 ------------------------------------------------------------------------------


async def test_rule_7_the_late_first_holder_changes_nothing_of_the_second_nor_of_the_third(bench: Bench) -> None:
    first, second = claim_request(), claim_request()
    await bench.claim(first)
    await bench.claim(second, at=LEASE + EFFECT)
    for settlement in Settlement:
        assert await bench.settle(settle_request(first, settlement), at=LEASE + EFFECT + 1) is SettleOutcome.LOST
    assert await bench.renew(first, at=LEASE + EFFECT + 1) == ["lost"]
    await bench.abandon(first, at=LEASE + EFFECT + 1)
    assert isinstance(await bench.claim(claim_request(), at=LEASE + EFFECT + 2), Held)
    assert await bench.settle(settle_request(second), at=LEASE + EFFECT + 3) is SettleOutcome.DONE
    assert await bench.settle(settle_request(first), at=LEASE + EFFECT + 4) is SettleOutcome.LOST
    found = await bench.claim(claim_request(), at=LEASE + EFFECT + 5)
    assert isinstance(found, Completed)
    assert found.claim_id == second.claim_id


async def test_rule_8_the_same_claim_again_has_its_own_lease_prolonged(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    again = await bench.claim(request, at=10)
    assert isinstance(again, Acquired)
    assert (again.attempt, again.took_over) == (1, None)
    assert (await bench.record(request))["locked_until"] == bench.at(10 + LEASE)
    await bench.claim(request, at=5)  # an older one, arriving late, shortens nothing
    assert (await bench.record(request))["locked_until"] == bench.at(10 + LEASE)


async def test_rule_8_the_repeated_claim_of_a_takeover_is_the_same_takeover(bench: Bench) -> None:
    await bench.claim(claim_request())
    taker = claim_request()
    once = await bench.claim(taker, at=LEASE + EFFECT)
    twice = await bench.claim(taker, at=LEASE + EFFECT + 1)
    assert isinstance(once, Acquired)
    assert isinstance(twice, Acquired)
    assert (once.attempt, once.took_over) == (twice.attempt, twice.took_over) == (2, TookOver.EXPIRED)
    assert (await bench.record(taker))["reruns"] == 1


async def test_rule_9_an_abandoned_claim_that_arrives_late_is_blocked(bench: Bench) -> None:
    request = claim_request()
    await bench.abandon(request)
    assert await bench.claim(request) == Unavailable("claim_ended")
    other = await bench.claim(claim_request(body=b"other"))
    assert isinstance(other, Acquired)
    assert (other.attempt, other.took_over) == (1, None)


async def test_rule_9_it_is_blocked_on_a_record_that_another_had_released(bench: Bench) -> None:
    first, late = claim_request(), claim_request()
    await bench.claim(first)
    await bench.settle(settle_request(first, Settlement.RELEASE))
    await bench.abandon(late)
    assert await bench.claim(late) == Unavailable("claim_ended")
    third = await bench.claim(claim_request())
    assert isinstance(third, Acquired)
    assert (third.attempt, third.took_over) == (2, TookOver.RELEASED)


async def test_rule_9_abandoning_what_was_never_forwarded_gives_the_attempt_back(bench: Bench) -> None:
    request = claim_request(on_in_doubt=BLOCK)
    await bench.claim(request)
    await bench.abandon(request)
    await bench.abandon(request)  # repeated until answered
    record = await bench.record(request)
    assert (record["state"], record["attempt"]) == ("released", 0)
    assert isinstance(await bench.claim(claim_request(body=b"other")), Acquired)


async def test_rule_9_abandoning_never_touches_a_completed_record(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    await bench.settle(settle_request(request))
    await bench.abandon(request, claim_request())
    assert isinstance(await bench.claim(claim_request()), Completed)


async def test_rule_10_a_repeated_settlement_is_already_so(bench: Bench) -> None:
    for n, settlement in enumerate(Settlement):
        request = claim_request(f"k{n}")
        await bench.claim(request)
        assert await bench.settle(settle_request(request, settlement)) is SettleOutcome.DONE
        assert await bench.settle(settle_request(request, settlement)) is SettleOutcome.ALREADY
    assert await bench.connection.fetchval("SELECT count(*) FROM idempotency_response") == 1


async def test_rule_10_a_completed_record_never_changes(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    await bench.settle(settle_request(request))
    before = await bench.record(request)
    assert await bench.settle(settle_request(request, Settlement.RELEASE)) is SettleOutcome.REFUSED
    assert await bench.settle(settle_request(request, Settlement.HOLD)) is SettleOutcome.REFUSED
    assert await bench.settle(settle_request(claim_request())) is SettleOutcome.LOST
    assert await bench.record(request) == before


async def test_rule_6_a_late_answer_completes_what_its_own_holder_had_put_in_doubt(bench: Bench) -> None:
    request = claim_request(on_in_doubt=BLOCK)
    await bench.claim(request)
    await bench.settle(settle_request(request, Settlement.HOLD), at=1)
    assert await bench.settle(settle_request(request), at=2 * KEEP) is SettleOutcome.DONE
    assert isinstance(await bench.claim(claim_request(), at=2 * KEEP + 1), Completed)


# ---- doubt and release: rule 13 ------------------------------------------------------------------------------------


async def test_rule_13_a_takeover_that_forwarded_nothing_leaves_the_record_in_doubt_as_it_was(bench: Bench) -> None:
    first, taker = claim_request(), claim_request()
    await bench.claim(first)
    await bench.settle(settle_request(first, Settlement.HOLD), at=1)
    await bench.claim(taker, at=1 + EFFECT)
    release = settle_request(taker, Settlement.RELEASE, forwarded=False, binds=False)
    assert await bench.settle(release, at=2 + EFFECT) is SettleOutcome.DONE
    assert await bench.settle(release, at=2 + EFFECT) is SettleOutcome.ALREADY
    record = await bench.record(taker)
    assert (record["state"], record["doubt_since"], record["reruns"]) == ("in_doubt", bench.at(1), 0)
    assert isinstance(await bench.claim(claim_request(body=b"other"), at=3 + EFFECT), Mismatch)
    third = await bench.claim(claim_request(), at=3 + EFFECT)
    assert isinstance(third, Acquired)
    assert third.took_over is TookOver.EXPIRED


async def test_rule_13_an_abandoned_takeover_leaves_it_in_doubt_too(bench: Bench) -> None:
    taker = claim_request()
    await bench.claim(claim_request())
    await bench.claim(taker, at=LEASE + EFFECT)
    await bench.abandon(taker, at=LEASE + EFFECT + 1)
    record = await bench.record(taker)
    assert (record["state"], record["doubt_since"], record["attempt"]) == ("in_doubt", bench.at(LEASE), 1)
    assert (record["reruns"], record["locked_until"]) == (0, None)
    assert isinstance(await bench.claim(taker, at=LEASE + EFFECT + 2), InDoubt)  # its own, late: closed to it
    assert isinstance(await bench.claim(claim_request(), at=LEASE + EFFECT + 2), Acquired)


async def test_rule_13_a_takeover_with_a_shorter_effect_deadline_does_not_shorten_the_first_ones(bench: Bench) -> None:
    taker = claim_request(on_in_doubt=PROBE, effect_ms=0)
    await bench.claim(claim_request(on_in_doubt=PROBE))
    await bench.claim(taker, at=LEASE)
    await bench.settle(settle_request(taker, Settlement.RELEASE, forwarded=False, binds=False), at=LEASE)
    assert (await bench.record(taker))["effect_ms"] == EFFECT * 1000


async def test_rule_13_an_answer_to_an_execution_begun_later_clears_the_doubt(bench: Bench) -> None:
    taker = claim_request()
    await bench.claim(claim_request())
    await bench.claim(taker, at=LEASE + EFFECT)
    await bench.settle(settle_request(taker, Settlement.RELEASE), at=LEASE + EFFECT + 1)
    record = await bench.record(taker)
    assert (record["state"], record["doubt_since"]) == ("released", None)
    again = await bench.claim(claim_request(), at=LEASE + EFFECT + 2)
    assert isinstance(again, Acquired)
    assert again.took_over is TookOver.RELEASED


# ---- expiry and mismatch: rules 17 to 19, 34 -----------------------------------------------------------------------


async def test_rule_17_completing_normally_leaves_the_expiry_alone_and_keeps_the_greater(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    await bench.settle(settle_request(request, keep_ms=(KEEP - 100) * 1000), at=100)
    assert (await bench.record(request))["expires_at"] == bench.at(KEEP)
    later = claim_request("later")
    await bench.claim(later)
    await bench.settle(settle_request(later, keep_ms=KEEP * 1000), at=100)
    record = await bench.record(later)
    assert record["expires_at"] == bench.at(KEEP + 100)
    assert record["reply_on"] == bench.at(KEEP + 100).date()


@pytest.mark.parametrize("settlement", [Settlement.COMPLETE, Settlement.RELEASE])
async def test_rule_18_a_forgotten_record_is_free_for_any_fingerprint_and_starts_at_attempt_one(
    bench: Bench, settlement: Settlement
) -> None:
    request = claim_request(on_in_doubt=BLOCK)
    await bench.claim(request)
    await bench.settle(settle_request(request, settlement, head=None, body=None, keep_ms=0))
    assert not isinstance(await bench.claim(claim_request(body=b"new"), at=KEEP - 1), Acquired)
    taken = await bench.claim(claim_request(body=b"new"), at=KEEP)
    assert isinstance(taken, Acquired)
    assert (taken.attempt, taken.took_over) == (1, None)
    record = await bench.record(request)
    assert (record["on_in_doubt"], record["bound"], record["reruns"]) == ("run_again", False, 0)
    assert record["first_seen"] == bench.at(KEEP)


@pytest.mark.parametrize("on_in_doubt", [PROBE, BLOCK])
async def test_rule_18_an_open_outcome_outlives_the_retention(bench: Bench, on_in_doubt: OnInDoubt) -> None:
    await bench.claim(claim_request(on_in_doubt=on_in_doubt))
    assert isinstance(await bench.claim(claim_request(body=b"new"), at=2 * KEEP), Mismatch)


async def test_rule_18_an_open_outcome_under_run_again_is_forgotten_once_everything_is_over(bench: Bench) -> None:
    await bench.claim(claim_request(keep_ms=1000))
    assert isinstance(await bench.claim(claim_request(body=b"new"), at=LEASE + EFFECT - 1), Mismatch)
    assert isinstance(await bench.claim(claim_request(body=b"new"), at=LEASE + EFFECT), Acquired)


async def test_rule_19_mismatch_comes_before_state(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    found = await bench.claim(claim_request(body=b"other"))
    assert found == Mismatch(bench.zero.timestamp(), None)
    await bench.settle(settle_request(request, Settlement.HOLD))
    assert isinstance(await bench.claim(claim_request(body=b"other")), Mismatch)


async def test_a_refused_request_may_be_corrected_under_its_key(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    await bench.settle(settle_request(request, Settlement.RELEASE, binds=False))
    corrected = claim_request(body=b"corrected")
    assert isinstance(await bench.claim(corrected), Acquired)
    assert isinstance(await bench.claim(claim_request()), Mismatch)


async def test_a_released_execution_that_may_have_had_an_effect_binds_its_fingerprint(bench: Bench) -> None:
    request, again = claim_request(), claim_request()
    await bench.claim(request)
    await bench.settle(settle_request(request, Settlement.RELEASE))
    assert isinstance(await bench.claim(claim_request(body=b"other")), Mismatch)
    await bench.claim(again)
    await bench.settle(settle_request(again, Settlement.RELEASE, binds=False))  # stays bound
    assert isinstance(await bench.claim(claim_request(body=b"other")), Mismatch)


async def test_a_takeover_of_an_open_outcome_binds(bench: Bench) -> None:
    taker = claim_request()
    await bench.claim(claim_request())
    await bench.claim(taker, at=LEASE + EFFECT)
    await bench.settle(settle_request(taker, Settlement.RELEASE, binds=False), at=LEASE + EFFECT)
    assert isinstance(await bench.claim(claim_request(body=b"other"), at=LEASE + EFFECT), Mismatch)


async def test_rule_34_another_recipe_is_never_a_mismatch(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    other = Fingerprint(2, hashlib.sha256(b"x").digest())
    assert await bench.claim(claim_request(fingerprint=other)) == OtherRecipe(request.fingerprint)
    await bench.settle(settle_request(request))
    assert await bench.claim(claim_request(fingerprint=other)) == OtherRecipe(request.fingerprint)
    assert isinstance(await bench.claim(claim_request(fingerprint=request.fingerprint)), Completed)


async def test_rule_31_an_identity_that_differs_behind_one_digest_is_a_fault_and_never_runs(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    await bench.settle(settle_request(request, Settlement.RELEASE))
    mine = identity()
    renamed = claim_request(identity=type(mine)(mine.record_id, "shop", "create-order", "customer=2", "k"))
    assert await bench.claim(renamed) == Conflict()


# ---- replies: rules 20, 21 -----------------------------------------------------------------------------------------


async def test_rule_20_a_reply_belongs_to_its_claim_and_a_completion_without_one_is_a_tombstone(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    await bench.settle(settle_request(request, head=None, body=None))
    found = await bench.claim(claim_request())
    assert isinstance(found, Completed)
    assert (found.status, found.reply_on) == (201, None)


async def test_rule_20_a_tombstone_may_keep_its_head(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    await bench.settle(settle_request(request, body=None))
    row = await bench.connection.fetchrow("SELECT head, body FROM idempotency_response")
    assert (row["head"], row["body"]) == (b"HTTP/1.1 201 Created\r\n", None)


# ---- batches and locks: rules 25 to 32 -----------------------------------------------------------------------------


async def test_rule_26_a_record_in_the_way_is_neither_locked_nor_written(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    before = await bench.connection.fetchrow("SELECT xmin, xmax, ctid FROM idempotency_record")
    for other in (claim_request(), claim_request(body=b"other")):
        await bench.claim(other)
    assert await bench.connection.fetchrow("SELECT xmin, xmax, ctid FROM idempotency_record") == before


async def test_rule_27_one_record_under_two_claims_is_settled_by_claim_not_by_position(bench: Bench) -> None:
    first, second = claim_request(), claim_request()
    await bench.claim(first)
    await bench.claim(second, at=LEASE + EFFECT)
    outcomes = await bench.settles(
        [settle_request(first), settle_request(second, body=b"second"), settle_request(first, Settlement.RELEASE)],
        at=LEASE + EFFECT + 1,
    )
    assert outcomes == [SettleOutcome.LOST, SettleOutcome.DONE, SettleOutcome.LOST]
    assert await bench.connection.fetch("SELECT body FROM idempotency_response") == [(b"second",)]
    assert await bench.renew(first, second, at=LEASE + EFFECT + 2) == ["lost", "lost"]


async def test_rule_31_a_completion_is_a_hot_update(bench: Bench) -> None:
    requests = [claim_request(f"hot{n}") for n in range(200)]
    count = """SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables
        WHERE schemaname = $1 AND relname = 'idempotency_record'"""
    async with bench.connection.transaction():
        for start in range(0, 200, 20):
            batch = requests[start : start + 20]
            await bench.claims(batch)
            await bench.settles([settle_request(request) for request in batch])
        updated, hot = await bench.connection.fetchrow(count, bench.schema)
    assert (updated, hot) == (200, 200)


async def test_rule_32_the_writes_raise_synchronous_commit_for_themselves_only(bench: Bench) -> None:
    await bench.connection.execute("SET synchronous_commit = off")
    text = query("claim", bench.schema).rstrip()
    watched = text.replace(
        "SELECT i.n::int AS n,", "SELECT current_setting('synchronous_commit') AS sync, i.n::int AS n,"
    )
    row = await bench.connection.fetchrow(watched, *claim_arguments([claim_request()], None))
    assert row["sync"] == "on"
    assert await bench.connection.fetchval("SHOW synchronous_commit") == "off"
    assert await bench.connection.fetchval("SHOW lock_timeout") == "0"


async def test_a_batch_answers_each_of_its_claims(bench: Bench) -> None:
    held, done = claim_request("held"), claim_request("done")
    await bench.claims([held, done])
    await bench.settle(settle_request(done))
    found = await bench.claims(
        [
            claim_request("new"),
            claim_request("held"),
            claim_request("done"),
            claim_request("held2", claim_id=secrets.token_bytes(16)),
        ]
    )
    assert [type(outcome) for outcome in found] == [Acquired, Held, Completed, Acquired]


async def test_claims_and_settlements_of_one_batch_keep_each_its_own_terms(bench: Bench) -> None:
    claims = [
        claim_request("a", lease_ms=5_000, effect_ms=1, on_in_doubt=BLOCK),
        claim_request("ü", lease_ms=6_000, effect_ms=2, on_in_doubt=PROBE, identity=identity("ü", "kunde=Jörg")),
        claim_request("c", lease_ms=5_000, effect_ms=1, on_in_doubt=BLOCK, identity=identity("c", "")),
    ]
    await bench.claims(claims)
    records = [await bench.record(claim) for claim in claims]
    assert [record["lease_ms"] for record in records] == [5_000, 6_000, 5_000]
    assert [record["on_in_doubt"] for record in records] == ["block", "probe", "block"]
    assert [(record["key"], record["scope"]) for record in records] == [
        ("a", "customer=1"),
        ("ü", "kunde=Jörg"),
        ("c", ""),
    ]
    assert [record["claim"] for record in records] == [claim.claim_id for claim in claims]
    await bench.settles(
        [
            settle_request(claims[0], status=200),
            settle_request(claims[1], Settlement.RELEASE),
            settle_request(claims[2], status=404, head=None, body=None),
        ]
    )
    records = [await bench.record(claim) for claim in claims]
    assert [(record["state"], record["status"]) for record in records] == [
        ("completed", 200),
        ("released", None),
        ("completed", 404),
    ]
    assert [record["reply_on"] is not None for record in records] == [True, False, False]


async def test_the_constraints_refuse_states_that_make_no_sense(bench: Bench) -> None:
    request = claim_request()
    await bench.claim(request)
    for change in (
        "state = 'completed'",
        "locked_until = NULL",
        "state = 'in_doubt'",
        "attempt = -1",
        "bound = true, attempt = 0",
    ):
        with pytest.raises(asyncpg.CheckViolationError):
            await bench.connection.execute(f"UPDATE idempotency_record SET {change}")


@pytest.mark.parametrize("on_in_doubt", OnInDoubt)
@pytest.mark.parametrize("settlement", Settlement)
async def test_a_duplicate_is_answered_in_every_state_under_every_policy(
    bench: Bench, on_in_doubt: OnInDoubt, settlement: Settlement
) -> None:
    request = claim_request(on_in_doubt=on_in_doubt)
    await bench.claim(request)
    await bench.settle(settle_request(request, settlement))
    found = await bench.claim(claim_request(on_in_doubt=on_in_doubt))
    if settlement is Settlement.HOLD and on_in_doubt is not PROBE:
        assert isinstance(found, InDoubt)
    else:
        assert isinstance(found, Completed if settlement is Settlement.COMPLETE else Acquired)
