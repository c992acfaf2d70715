"""The rules of the lease protocol that concern an exchange, by their numbers in the protocol's text.

Every test asserts first on what was sent to the upstream and written to the store, then on what the client got.
"""

import pytest

from gateway.model import (
    Completed,
    Held,
    InDoubt,
    Mismatch,
    OtherRecipe,
    Outcome,
    Settlement,
    SettleOutcome,
    StoredReply,
    TookOver,
    Unavailable,
)
from tests.exchange.scripted import FORWARD, TIMEOUT, Text, World, code, problem

KEPT = StoredReply(201, b"HTTP/1.1 201 Said\r\nX-Whose: other\r\n", b"the other's")
GOOD = (SettleOutcome.DONE, SettleOutcome.ALREADY)
BAD = (SettleOutcome.LOST, SettleOutcome.REFUSED)


# ---- time and trust -----------------------------------------------------------------------------------------------


async def test_rule_2_trust_is_asked_in_the_same_callback_as_the_first_write(world):
    world.wait()
    world.acquire(trusted=20)
    world.boot.now += 19.9
    assert world.sending.write()
    assert world.upstream.log == ["trust?", "write"]


async def test_rule_2_without_trust_nothing_is_sent_and_it_claims_again_with_the_same_claim_id(world):
    answer = world.wait()
    world.acquire(trusted=20)
    world.boot.now += 20
    assert not world.sending.write()
    assert world.upstream.written == 0
    first, again = world.store.claims
    assert again.what == first.what
    world.acquire(trusted=20)
    assert world.sending.write()
    assert world.upstream.written == 1
    world.sending.reply(201)
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert answer.result().outcome is Outcome.EXECUTED
    world.assert_nothing_is_left()


async def test_rule_2_a_lease_whose_trust_is_void_does_not_send(world):
    world.wait()
    lease = world.acquire()
    lease.trusted_until = 0.0
    assert not world.sending.write()
    assert len(world.store.claims) == 2


async def test_rule_2_claims_without_trust_are_bounded_and_end_in_a_503_that_gives_the_claim_back(world):
    answer = world.wait()
    for _ in range(4):
        world.acquire(trusted=0)
        world.sending.write()
    assert world.upstream.written == 0
    assert len(world.store.claims) == 4
    assert [request.claim_id for request in world.store.abandoned] == [world.store.claims[0].what.claim_id]
    assert (answer.result().status, code(answer.result())) == (503, "store-unavailable")
    world.assert_nothing_is_left()


async def test_rule_2_a_claim_again_may_find_that_another_has_the_record_by_now(world):
    answer = world.wait()
    world.acquire(trusted=0)
    world.sending.write()
    world.store.claims[1].tell(Held(5000, world.wall.now))
    assert world.upstream.written == 0
    assert world.store.settles == []
    assert code(answer.result()) == "outstanding"
    world.assert_nothing_is_left()


async def test_rule_6_a_known_answer_waits_for_the_stores_definite_word_however_late(world):
    answer = world.sent()
    world.sending.reply(201, b"made")
    for _ in range(10):
        world.move(3600)
    assert [(asked.what.settlement, asked.what.body) for asked in world.store.settles] == [
        (Settlement.COMPLETE, b"made")
    ]
    assert world.store.abandoned == []
    assert answer.result().body == b"made"
    assert code(world.at_once()) == "outstanding"
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert len(world.store.settles) == 1
    world.assert_nothing_is_left()


async def test_rule_8_a_settlement_that_was_already_so_is_as_good_as_done(world):
    answer = world.sent()
    world.sending.reply(201, b"made")
    world.store.settles[0].tell(SettleOutcome.ALREADY)
    assert world.store.looks == []
    assert (answer.result().outcome, answer.result().body) == (Outcome.EXECUTED, b"made")
    assert world.observer.count("settled", "complete", "status") == 1
    assert world.at_once().outcome is Outcome.REPLAYED


# ---- fence --------------------------------------------------------------------------------------------------------


async def test_rule_9_who_answered_503_gives_the_claim_back_and_never_forwards(world):
    answer = world.wait()
    world.store.claims[0].tell(Unavailable("timeout"))
    assert [request.claim_id for request in world.store.abandoned] == [world.store.claims[0].what.claim_id]
    assert (answer.result().status, code(answer.result())) == (503, "store-unavailable")
    world.assert_nothing_is_left()


async def test_rule_9_a_lease_that_comes_after_the_stop_is_not_used(world):
    answer = world.wait()
    world.exchanges.stop_unfinished()
    assert [request.claim_id for request in world.store.abandoned] == [world.store.claims[0].what.claim_id]
    world.acquire()
    assert world.upstream.sendings == []
    assert len(world.store.abandoned) == 1
    assert (answer.result().status, code(answer.result())) == (503, "draining")
    world.assert_nothing_is_left()


async def test_rule_9_a_request_that_waits_for_a_connection_at_the_stop_is_never_sent(world):
    answer = world.wait()
    world.acquire()
    world.exchanges.stop_unfinished()
    assert world.sending.aborted
    assert world.upstream.written == 0
    assert world.store.settles == []
    assert len(world.store.abandoned) == 1
    assert code(answer.result()) == "draining"
    world.assert_nothing_is_left()


async def test_rule_9_during_the_drain_a_lease_without_trust_is_given_back(world):
    answer = world.wait()
    world.acquire(trusted=0)
    world.context.draining = True
    world.sending.write()
    assert len(world.store.claims) == 1
    assert len(world.store.abandoned) == 1
    assert code(answer.result()) == "draining"
    world.assert_nothing_is_left()


@pytest.mark.parametrize("outcome", BAD)
async def test_rule_10_a_settlement_that_changed_nothing_is_counted_and_never_ignored(world, outcome):
    world.sent()
    world.sending.reply(201)
    world.store.settles[0].tell(outcome)
    world.store.looks[0].tell(None)
    assert world.observer.count("late_reply") == 1
    assert world.observer.count("event", "late_reply") == 1
    assert world.observer.count("settled") == 0
    world.assert_nothing_is_left()


@pytest.mark.parametrize("outcome", BAD)
async def test_rule_11_who_lost_its_lease_answers_with_the_reply_that_the_other_attempt_stored(world, outcome):
    answer = world.sent()
    world.sending.reply(201, b"mine")
    world.store.settles[0].tell(outcome)
    assert not answer.done()
    found = world.completed()
    world.store.looks[0].tell(found)
    assert not answer.done()
    assert world.store.reads[0].what == found
    world.store.reads[0].tell(KEPT)
    assert (answer.result().outcome, answer.result().body) == (Outcome.REPLAYED, b"the other's")
    world.assert_nothing_is_left()


async def test_rule_11_whose_answer_failed_gets_the_other_attempts_reply_too(world):
    answer = world.sent()
    world.sending.break_off()
    world.store.settles[0].tell(SettleOutcome.LOST)
    world.store.looks[0].tell(world.completed())
    world.store.reads[0].tell(KEPT)
    assert answer.result().body == b"the other's"


@pytest.mark.parametrize("found", [None, Unavailable("timeout"), "tombstone"])
async def test_rule_11_without_another_reply_it_relays_its_own_marked_in_doubt(world, found):
    answer = world.sent()
    world.sending.reply(201, b"mine")
    world.store.settles[0].tell(SettleOutcome.LOST)
    world.store.looks[0].tell(world.completed(reply=False) if found == "tombstone" else found)
    assert world.store.reads == []
    got = answer.result()
    assert (got.status, got.body, got.outcome, got.reason) == (201, b"mine", Outcome.IN_DOUBT, "lease_lost")
    assert b"Idempotency-Status: in-doubt\r\n" in got.head
    world.assert_nothing_is_left()


@pytest.mark.parametrize("read", [None, Unavailable("timeout"), StoredReply(201, KEPT.head, None)])
async def test_rule_11_a_reply_that_cannot_be_read_is_no_reason_to_say_that_nothing_was_sent(world, read):
    answer = world.sent()
    world.sending.reply(201, b"mine")
    world.store.settles[0].tell(SettleOutcome.LOST)
    world.store.looks[0].tell(world.completed())
    world.store.reads[0].tell(read)
    got = answer.result()
    assert (got.status, got.body, got.outcome, got.reason) == (201, b"mine", Outcome.IN_DOUBT, "lease_lost")
    world.assert_nothing_is_left()


async def test_rule_11_the_reply_to_another_request_under_the_same_key_is_nobodys_answer(world):
    answer = world.sent("pay 5")
    world.sending.reply(201, b"mine")
    world.store.settles[0].tell(SettleOutcome.LOST)
    world.store.looks[0].tell(world.completed("pay 500"))
    assert world.store.reads == []
    assert (answer.result().body, answer.result().reason) == (b"mine", "lease_lost")


@pytest.mark.parametrize("far", ["look", "read"])
async def test_rule_11_a_slow_look_ends_in_its_own_reply_and_still_says_that_the_lease_was_lost(world, far):
    answer = world.sent()
    world.sending.reply(201, b"mine")
    world.boot.now += TIMEOUT - 0.1
    world.store.settles[0].tell(SettleOutcome.LOST)
    if far == "read":
        world.store.looks[0].tell(world.completed())
    world.move(0.2)
    assert (answer.result().body, answer.result().reason) == (b"mine", "lease_lost")
    if far == "read":
        world.store.reads[0].tell(KEPT)
    else:
        world.store.looks[0].tell(world.completed())
        assert world.store.reads == []
    assert answer.result().body == b"mine"
    world.assert_nothing_is_left()


async def test_rule_11_a_stream_is_relayed_without_looking(world):
    answer = world.sent()
    stream = world.sending.stream(201)
    world.store.settles[0].tell(SettleOutcome.LOST)
    assert world.store.looks == []
    assert answer.result().stream is stream
    assert answer.result().reason == "lease_lost"
    assert not stream.aborted
    world.assert_nothing_is_left()


# ---- never sent, sent ---------------------------------------------------------------------------------------------


async def test_rule_13_what_was_never_sent_is_released_as_not_forwarded(world):
    answer = world.wait()
    world.acquire()
    world.sending.refuse("connection_refused")
    settle = world.store.settles[0].what
    assert (settle.settlement, settle.forwarded, settle.binds) == (Settlement.RELEASE, False, False)
    assert not answer.done()
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert (answer.result().status, code(answer.result())) == (503, "upstream-unreachable")
    assert not answer.result().sent
    world.assert_nothing_is_left()


async def test_rule_14_what_was_sent_without_a_complete_answer_is_in_doubt_and_written_once(world):
    answer = world.sent()
    world.sending.break_off("http_response_incomplete")
    settle = world.store.settles[0].what
    assert (settle.settlement, settle.forwarded, settle.head) == (Settlement.HOLD, True, None)
    world.store.settles[0].tell(SettleOutcome.DONE)
    world.move(100)
    assert len(world.store.settles) == 1
    assert (answer.result().status, code(answer.result())) == (502, "outcome-unknown")
    assert world.observer.count("settled", "hold", "reset") == 1
    world.assert_nothing_is_left()


async def test_rule_14_a_status_that_the_policy_holds_is_relayed_in_doubt_and_is_an_event(world):
    answer = world.sent()
    world.sending.reply(502, b"bad gateway")
    assert [(a.what.settlement, a.what.head) for a in world.store.settles] == [(Settlement.HOLD, None)]
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert (answer.result().status, answer.result().outcome) == (502, Outcome.IN_DOUBT)
    assert world.observer.count("event", "in_doubt") == 1
    assert world.observer.count("settled", "hold", "status") == 1


async def test_rule_14_at_respond_within_nothing_is_written_and_the_late_reply_is_kept(world):
    answer = world.sent(respond_within_ms=1000)
    world.move(1.0)
    assert world.store.settles == []
    assert not world.sending.aborted
    assert (answer.result().status, code(answer.result())) == (504, "still-running")
    world.move(20.0)
    world.sending.reply(201, b"late")
    assert world.store.settles[0].what.body == b"late"
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert world.at_once().body == b"late"
    world.assert_nothing_is_left()


async def test_rule_14_respond_within_that_is_not_shorter_than_the_upstreams_time_has_no_answer_of_its_own(world):
    answer = world.wait()
    world.boot.now += 1.5  # a slow claim: the client's time began earlier than the upstream's
    world.acquire()
    world.sending.write()
    world.move(29.9)
    assert not answer.done()
    world.move(0.1)
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert (answer.result().status, code(answer.result())) == (504, "outcome-unknown")


async def test_rule_14_at_respond_within_a_request_without_a_connection_is_given_up_as_never_sent(world):
    answer = world.wait(respond_within_ms=1000)
    world.acquire()
    world.move(1.0)
    assert world.sending.aborted
    assert [(a.what.settlement, a.what.forwarded) for a in world.store.settles] == [(Settlement.RELEASE, False)]
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert (answer.result().status, code(answer.result())) == (503, "upstream-unreachable")


async def test_rule_14_the_upstreams_time_runs_out_after_the_socket_is_closed(world):
    answer = world.sent()
    world.move(30.0)
    assert world.sending.aborted
    assert [a.what.settlement for a in world.store.settles] == [Settlement.HOLD]
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert (answer.result().status, code(answer.result())) == (504, "outcome-unknown")
    assert problem(answer.result())["retry_after"] == 60
    assert world.observer.count("settled", "hold", "timeout") == 1


async def test_rule_17_keeps_run_from_the_claim_and_from_the_completion(world):
    world.sent(retention_ms=5000, upstream_timeout_ms=7000)
    world.sending.reply(201)
    assert world.store.claims[0].what.keep_ms == 12_000
    assert world.store.settles[0].what.keep_ms == 5000


# ---- replies ------------------------------------------------------------------------------------------------------


async def test_rules_20_and_23_a_streams_tombstone_is_completed_before_the_client_gets_the_stream(world):
    answer = world.sent()
    stream = world.sending.stream(201, (b"Location", b"/made/1"), (b"Content-Length", b"99"))
    settle = world.store.settles[0].what
    assert (settle.settlement, settle.status, settle.body) == (Settlement.COMPLETE, 201, None)
    assert settle.head is not None
    assert b"Location: /made/1\r\n" in settle.head
    assert not answer.done()
    world.store.settles[0].tell(SettleOutcome.DONE)
    got = answer.result()
    assert (got.stream, got.length, got.outcome, got.reason) == (stream, b"99", Outcome.EXECUTED, "too_large")
    assert not stream.aborted
    assert world.observer.count("settled", "tombstone", "too_large") == 1
    world.assert_nothing_is_left()


async def test_rule_20_a_tombstone_refuses_a_retry_with_the_original_status_and_location_and_never_runs(world):
    answer = world.wait()
    world.store.claims[0].tell(world.completed())
    world.store.reads[0].tell(StoredReply(201, b"HTTP/1.1 201 Said\r\nLocation: /made/1\r\n", None))
    assert world.upstream.sendings == []
    got = answer.result()
    assert (got.status, got.outcome, code(got)) == (409, Outcome.REPLAYED, "reply-not-stored")
    assert (problem(got)["original_status"], problem(got)["location"]) == (201, "/made/1")
    world.assert_nothing_is_left()


@pytest.mark.parametrize("missing", ["no reply row", "no partition"])
async def test_rule_20_a_completed_record_without_its_reply_is_a_tombstone_and_never_an_execution(world, missing):
    answer = world.wait()
    world.store.claims[0].tell(world.completed(reply=missing == "no reply row"))
    if missing == "no reply row":
        world.store.reads[0].tell(None)
    assert world.upstream.sendings == []
    assert world.store.abandoned == []
    assert (answer.result().status, code(answer.result())) == (409, "reply-not-stored")
    world.assert_nothing_is_left()


async def test_rule_20_a_stored_reply_that_cannot_be_read_now_is_a_503_and_nothing_was_sent(world):
    answer = world.wait()
    world.store.claims[0].tell(world.completed())
    world.store.reads[0].tell(Unavailable("timeout"))
    assert world.upstream.sendings == []
    assert (answer.result().status, code(answer.result())) == (503, "store-unavailable")
    world.assert_nothing_is_left()


async def test_rule_23_a_stream_waits_for_its_tombstone_no_longer_than_the_stores_time(world):
    answer = world.sent()
    stream = world.sending.stream(201)
    world.move(TIMEOUT)
    assert answer.result().stream is stream
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert not stream.aborted
    world.assert_nothing_is_left()


@pytest.mark.parametrize("outcome", SettleOutcome)
async def test_rule_22_a_reply_is_kept_in_the_process_only_after_done_or_already(world, outcome):
    world.sent()
    world.sending.reply(201, b"made")
    assert world.context.replies.bytes == 0
    world.store.settles[0].tell(outcome)
    assert (world.context.replies.bytes > 0) == (outcome in GOOD)
    if outcome in GOOD:
        got = world.at_once()
        assert (got.status, got.body, got.source) == (201, b"made", "process")
        assert b"Idempotent-Replayed: true\r\n" in got.head
        assert b"Idempotency-Original-Request-Id: r1\r\n" in got.head
        assert world.observer.count("replayed", "process") == 1
        assert world.upstream.written == 1


@pytest.mark.parametrize("status", [500, 404, 502])
async def test_rule_22_a_reply_that_was_released_or_held_is_not_kept_in_the_process(world, status):
    world.sent()
    world.sending.reply(status)
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert world.context.replies.bytes == 0


async def test_rule_22_a_reply_is_kept_in_the_process_for_thirty_seconds(world):
    world.sent()
    world.sending.reply(201)
    world.store.settles[0].tell(SettleOutcome.DONE)
    world.move(29.9)
    assert world.at_once().outcome is Outcome.REPLAYED
    world.move(0.1)
    world.wait()


async def test_rule_22_and_never_longer_than_the_store_keeps_it(world):
    world.sent(retention_ms=1000)
    world.sending.reply(201)
    world.boot.now += 0.7  # a slow acknowledgement: the store began to count at some moment before
    world.store.settles[0].tell(SettleOutcome.DONE)
    world.move(0.2)
    assert world.at_once().outcome is Outcome.REPLAYED
    world.move(0.1)
    world.wait()


async def test_rule_22_a_reply_from_the_store_is_kept_no_longer_than_what_was_left_when_the_claim_was_sent(world):
    world.wait()
    world.boot.now += 0.5
    world.store.claims[0].tell(world.completed(keeps_ms=2000))
    world.boot.now += 0.5
    world.store.reads[0].tell(KEPT)
    world.move(0.9)
    assert world.at_once().body == KEPT.body
    world.move(0.1)
    world.wait()


async def test_rule_22_a_new_epoch_empties_the_cache(world):
    world.sent()
    world.sending.reply(201)
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert world.at_once().outcome is Outcome.REPLAYED
    world.store.epoch += 1
    world.wait()
    assert world.context.replies.bytes == 0


async def test_rule_22_the_cache_is_bounded_in_bytes_and_drops_what_was_used_least_recently():
    world = World(replay_cache_bytes=2600)
    for key in "abc":
        world.sent(key=key)
        world.sending.reply(201, b"x" * 100)
        world.store.settles[-1].tell(SettleOutcome.DONE)
        assert world.at_once(key="a").outcome is Outcome.REPLAYED
    assert world.context.replies.bytes <= 2600
    world.sent(key="d")
    world.sending.reply(201, b"x" * 100)
    world.store.settles[-1].tell(SettleOutcome.DONE)
    assert world.at_once(key="a").outcome is Outcome.REPLAYED
    world.wait(key="b")
    world.sent(key="huge")
    world.sending.reply(201, b"x" * 2600)
    world.store.settles[-1].tell(SettleOutcome.DONE)
    assert world.at_once(key="a").outcome is Outcome.REPLAYED
    world.wait(key="huge")


@pytest.mark.parametrize("status", [201, 303, 422, 404, 500, 502])
async def test_rule_24_the_client_gets_the_reply_after_the_settlement_is_acknowledged(world, status):
    answer = world.sent()
    world.sending.reply(status, b"said")
    world.move(TIMEOUT - 0.01)
    assert not answer.done()
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert (answer.result().status, answer.result().body) == (status, b"said")
    world.assert_nothing_is_left()


@pytest.mark.parametrize("status", [201, 303, 422, 404, 500, 502])
async def test_rule_24_but_no_later_than_the_stores_time(world, status):
    answer = world.sent()
    world.sending.reply(status, b"said")
    world.move(TIMEOUT)
    assert (answer.result().status, answer.result().body) == (status, b"said")
    assert code(world.at_once()) == "outstanding"
    world.store.settles[0].tell(SettleOutcome.DONE)
    world.assert_nothing_is_left()


@pytest.mark.parametrize("how", ["refuse", "break_off"])
async def test_rule_24_holds_for_failures_too(world, how):
    answer = world.wait()
    world.acquire()
    if how == "break_off":
        world.sending.write()
    getattr(world.sending, how)()
    assert not answer.done()
    world.move(TIMEOUT)
    assert answer.done()
    world.store.settles[0].tell(SettleOutcome.DONE)
    world.assert_nothing_is_left()


# ---- around it ----------------------------------------------------------------------------------------------------


async def test_rule_34_a_record_of_another_recipe_is_compared_by_that_recipe(world):
    world.wait("pay 5")
    world.store.claims[0].tell(OtherRecipe(Text("pay 5").by(2)))
    first, again = (asked.what for asked in world.store.claims)
    assert again.fingerprint == Text("pay 5").by(2)
    assert again.claim_id == first.claim_id
    world.store.claims[1].tell(world.completed("pay 5", recipe=2))
    world.store.reads[0].tell(KEPT)
    assert world.upstream.sendings == []


async def test_rule_34_a_recipe_that_is_not_known_counts_as_equal_and_never_as_a_mismatch(world):
    answer = world.wait("pay 5")
    unknown = Text("pay 5").by(77)
    world.store.claims[0].tell(OtherRecipe(unknown))
    assert world.store.claims[1].what.fingerprint == unknown
    world.store.claims[1].tell(world.completed("pay 5", recipe=77))
    world.store.reads[0].tell(KEPT)
    assert answer.result().outcome is Outcome.REPLAYED


async def test_rule_34_recipes_that_change_with_every_claim_end_in_a_503(world):
    answer = world.wait()
    for number in range(4):
        world.store.claims[number].tell(OtherRecipe(Text("x").by(2 + number % 2)))
    assert len(world.store.claims) == 4
    assert world.upstream.sendings == []
    assert code(answer.result()) == "store-unavailable"
    world.assert_nothing_is_left()


async def test_rule_35_without_the_store_an_unprotected_request_is_forwarded_marked_counted_and_adopted(world):
    answer = world.wait(**FORWARD)
    world.store.claims[0].tell(Unavailable("timeout"))
    assert world.store.abandoned == []
    assert world.sending.write()
    world.sending.reply(201, b"made")
    asked = world.store.adoptions[0]
    assert world.store.settles == []
    assert asked.claim == world.store.claims[0].what
    assert (asked.what.claim_id, asked.what.body) == (asked.claim.claim_id, b"made")
    got = answer.result()
    assert (got.outcome, got.reason, got.body) == (Outcome.UNPROTECTED, "store_failure", b"made")
    assert b"Idempotency-Status: unprotected\r\n" in got.head
    assert world.observer.count("event", "ran_unprotected") == 1
    asked.tell(SettleOutcome.DONE)
    assert world.at_once().body == b"made"
    world.assert_nothing_is_left()


async def test_rule_35_what_runs_and_what_is_known_here_is_asked_before_the_store(world):
    world.wait(**FORWARD)
    world.store.claims[0].tell(Unavailable("timeout"))
    world.sending.write()
    assert code(world.at_once(**FORWARD)) == "outstanding"
    world.sending.reply(201, b"made")
    assert code(world.at_once(**FORWARD)) == "outstanding"
    assert world.at_once("other", **FORWARD).outcome is Outcome.MISMATCH
    world.store.adoptions[0].tell(SettleOutcome.DONE)
    assert world.at_once(**FORWARD).body == b"made"
    assert world.upstream.written == 1


async def test_rule_35_an_unprotected_request_that_was_never_sent_gives_its_claim_back(world):
    answer = world.wait(**FORWARD)
    world.store.claims[0].tell(Unavailable("timeout"))
    world.sending.refuse()
    assert world.store.adoptions == []
    assert [request.claim_id for request in world.store.abandoned] == [world.store.claims[0].what.claim_id]
    assert code(answer.result()) == "upstream-unreachable"
    world.assert_nothing_is_left()


async def test_rule_35_an_unprotected_request_without_an_answer_is_adopted_in_doubt(world):
    answer = world.wait(**FORWARD)
    world.store.claims[0].tell(Unavailable("timeout"))
    world.sending.write()
    world.sending.break_off()
    assert world.store.adoptions[0].what.settlement is Settlement.HOLD
    assert code(answer.result()) == "outcome-unknown"
    world.store.adoptions[0].tell(SettleOutcome.LOST)
    assert world.store.looks == []
    world.assert_nothing_is_left()


async def test_rule_35_an_adopted_execution_that_another_overtook_is_counted(world):
    answer = world.wait(**FORWARD)
    world.store.claims[0].tell(Unavailable("timeout"))
    world.sending.write()
    stream = world.sending.stream()
    world.store.adoptions[0].tell(SettleOutcome.LOST)
    assert answer.result().stream is stream
    assert not stream.aborted
    assert world.observer.count("late_reply") == 1
    world.assert_nothing_is_left()


async def test_rule_35_an_untrusted_lease_does_not_keep_the_policy_from_forwarding_without_the_store(world):
    answer = world.wait(**FORWARD)
    world.acquire(trusted=0)
    world.sending.write()
    world.store.claims[1].tell(Unavailable("timeout"))
    assert world.sending.write()
    world.sending.reply(201)
    assert world.store.settles == []
    assert world.store.adoptions[0].claim.claim_id == world.store.claims[0].what.claim_id
    assert answer.result().outcome is Outcome.UNPROTECTED
    assert world.observer.count("event", "ran_unprotected") == 1


async def test_rule_35_answered_requests_that_wait_for_the_store_take_no_place_from_new_ones():
    world = World(in_flight=2)
    for number in range(5):
        world.wait(key=f"k{number}", **FORWARD)
        world.store.claims[-1].tell(Unavailable("connect"))
        world.sending.write()
        world.sending.reply(201)
    assert world.upstream.written == 5
    assert len(world.exchanges.running) == 5
    for asked in world.store.adoptions:
        asked.tell(SettleOutcome.DONE)
    world.assert_nothing_is_left()


async def test_rule_35_but_the_memory_for_them_is_bounded():
    world = World(buffer_memory_bytes=20_000)
    for number in range(100):
        if not hasattr(world.begin(key=f"k{number}", **FORWARD), "result"):
            break
        world.store.claims[-1].tell(Unavailable("connect"))
        world.sending.write()
        world.sending.reply(201)
    assert 2 <= world.upstream.written <= 10
    assert code(world.at_once(key="one more", **FORWARD)) == "over-capacity"


# ---- what a claim finds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "status", "name"),
    [
        (Held(5000, 1.8e9), 409, "outstanding"),
        (InDoubt(2500, 1.8e9), 409, "in-doubt"),
        (InDoubt(None, 1.8e9), 409, "in-doubt"),
        (Mismatch(1.8e9, 201), 422, "key-reused"),
        (Mismatch(1.8e9, None), 422, "key-reused"),
    ],
)
async def test_what_is_in_the_way_is_told_and_nothing_is_sent_or_written(world, found, status, name):
    answer = world.wait()
    world.store.claims[0].tell(found)
    assert world.upstream.sendings == []
    assert world.store.abandoned == []
    assert (answer.result().status, code(answer.result())) == (status, name)
    world.assert_nothing_is_left()


async def test_doubt_that_ends_by_itself_names_the_wait_and_other_doubt_does_not(world):
    ends, stays = world.wait(key="a"), world.wait(key="b")
    world.store.claims[0].tell(InDoubt(2500, 1.8e9))
    world.store.claims[1].tell(InDoubt(None, 1.8e9))
    assert problem(ends.result())["retry_after"] == 3
    assert problem(ends.result())["next"] == "retry_same_key"
    assert "retry_after" not in problem(stays.result())
    assert problem(stays.result())["next"] == "check_outcome"


async def test_a_takeover_of_an_open_outcome_is_counted_and_is_an_event(world):
    answer = world.wait()
    world.acquire(attempt=2, took_over=TookOver.EXPIRED)
    world.sending.write()
    world.sending.reply()
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert world.observer.count("took_over", TookOver.EXPIRED) == 1
    assert world.observer.count("event", "ran_again") == 1
    assert (answer.result().attempt, answer.result().took_over) == (2, "expired")


async def test_a_takeover_after_a_release_is_counted_and_is_no_event(world):
    world.wait()
    world.acquire(attempt=2, took_over=TookOver.RELEASED)
    assert world.observer.count("took_over", TookOver.RELEASED) == 1
    assert world.observer.count("event") == 0


async def test_a_completed_record_is_replayed_with_its_status_head_and_bytes(world):
    answer = world.wait()
    found = world.completed()
    assert isinstance(found, Completed)
    world.store.claims[0].tell(found)
    world.store.reads[0].tell(KEPT)
    got = answer.result()
    assert world.upstream.sendings == []
    assert (got.status, got.body, got.source) == (201, b"the other's", "store")
    assert got.head.startswith(KEPT.head)
    assert b"Idempotency-Status: replayed\r\n" in got.head
    assert world.observer.count("replayed", "store") == 1
    world.assert_nothing_is_left()
