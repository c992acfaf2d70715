"""A client that leaves changes nothing; a stop ends everything; what comes late does nothing."""

import asyncio

import pytest

from gateway.model import Held, Mismatch, Outcome, Settlement, SettleOutcome, StoredReply
from tests.exchange.scripted import FORWARD, TIMEOUT, World, code

KEPT = StoredReply(201, b"HTTP/1.1 201 Said\r\n", b"kept")


# ---- the client leaves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", ["claiming", "waiting for a connection", "sent", "settling"])
async def test_a_client_that_leaves_at_any_stage_changes_nothing(world, leaves):
    answer = world.wait()

    def stage(name: str) -> None:
        if name == leaves:
            answer.cancel()

    stage("claiming")
    world.acquire()
    stage("waiting for a connection")
    world.sending.write()
    stage("sent")
    world.move(1)
    world.sending.reply(201, b"made")
    stage("settling")
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert world.upstream.written == 1
    assert world.store.abandoned == []
    assert world.at_once().body == b"made"
    world.assert_nothing_is_left()


@pytest.mark.parametrize("outcome", SettleOutcome)
@pytest.mark.parametrize("leaves", ["before", "while settling"])
async def test_a_stream_that_nobody_will_read_is_aborted_after_its_tombstone_is_settled(world, leaves, outcome):
    answer = world.sent()
    if leaves == "before":
        answer.cancel()
    stream = world.sending.stream()
    answer.cancel()
    assert not stream.aborted
    assert world.store.settles[0].what.settlement is Settlement.COMPLETE
    world.store.settles[0].tell(outcome)
    assert stream.aborted
    world.assert_nothing_is_left()


async def test_a_stream_whose_client_was_told_still_running_is_aborted(world):
    answer = world.sent(respond_within_ms=1000)
    world.move(1)
    stream = world.sending.stream()
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert code(answer.result()) == "still-running"
    assert stream.aborted
    world.assert_nothing_is_left()


@pytest.mark.parametrize("outcome", SettleOutcome)
async def test_a_stream_that_the_client_reads_is_never_aborted(world, outcome):
    answer = world.sent()
    stream = world.sending.stream()
    world.move(TIMEOUT)
    assert answer.result().stream is stream
    world.move(1000)
    world.exchanges.stop_unfinished()
    world.store.settles[0].tell(outcome)
    assert not stream.aborted
    world.assert_nothing_is_left()


async def test_an_unprotected_stream_whose_client_left_is_aborted(world):
    answer = world.wait(**FORWARD)
    from gateway.model import Unavailable

    world.store.claims[0].tell(Unavailable("timeout"))
    world.sending.write()
    answer.cancel()
    stream = world.sending.stream()
    assert stream.aborted
    world.store.adoptions[0].tell(SettleOutcome.DONE)
    world.assert_nothing_is_left()


async def test_a_client_that_leaves_while_the_other_attempts_reply_is_read_changes_nothing(world):
    answer = world.sent()
    world.sending.reply(201, b"mine")
    world.store.settles[0].tell(SettleOutcome.LOST)
    answer.cancel()
    world.store.looks[0].tell(world.completed())
    assert world.store.reads == []
    world.assert_nothing_is_left()


# ---- the process stops --------------------------------------------------------------------------------------------


async def test_at_the_stop_what_was_sent_is_written_in_doubt_after_its_socket_is_closed(world):
    answer = world.sent()
    world.exchanges.stop_unfinished()
    assert world.sending.aborted
    assert [(a.what.settlement, a.what.forwarded) for a in world.store.settles] == [(Settlement.HOLD, True)]
    assert world.store.abandoned == []
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert (answer.result().status, code(answer.result())) == (502, "outcome-unknown")
    assert world.observer.count("settled", "hold", "shutdown") == 1
    world.assert_nothing_is_left()


async def test_at_the_stop_a_settlement_goes_on(world):
    answer = world.sent()
    world.sending.reply(201, b"made")
    world.exchanges.stop_unfinished()
    assert len(world.store.settles) == 1
    assert world.store.abandoned == []
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert answer.result().outcome is Outcome.EXECUTED
    world.assert_nothing_is_left()


async def test_at_the_stop_a_replay_goes_on_and_gives_back_nothing_that_it_never_had(world):
    answer = world.wait()
    world.store.claims[0].tell(world.completed())
    world.exchanges.stop_unfinished()
    assert world.store.abandoned == []
    world.store.reads[0].tell(KEPT)
    assert answer.result().body == b"kept"
    world.assert_nothing_is_left()


async def test_at_the_stop_a_second_claim_is_given_back_once(world):
    answer = world.wait()
    world.acquire(trusted=0)
    world.sending.write()
    world.exchanges.stop_unfinished()
    assert len(world.store.abandoned) == 1
    world.acquire()
    assert len(world.upstream.sendings) == 1
    assert code(answer.result()) == "draining"
    world.assert_nothing_is_left()


async def test_at_the_stop_an_unprotected_request_is_adopted_in_doubt(world):
    from gateway.model import Unavailable

    answer = world.wait(**FORWARD)
    world.store.claims[0].tell(Unavailable("timeout"))
    world.sending.write()
    world.exchanges.stop_unfinished()
    assert world.store.adoptions[0].what.settlement is Settlement.HOLD
    assert code(answer.result()) == "outcome-unknown"


async def test_after_the_drain_has_begun_nothing_new_begins_but_what_is_known_is_answered(world):
    world.sent(key="known")
    world.sending.reply(201)
    world.store.settles[0].tell(SettleOutcome.DONE)
    world.sent(key="runs")
    world.context.draining = True
    assert code(world.at_once(key="new")) == "draining"
    assert world.at_once(key="known").outcome is Outcome.REPLAYED
    assert code(world.at_once(key="runs")) == "outstanding"
    world.sending.reply(201, b"made")
    world.store.settles[1].tell(SettleOutcome.DONE)
    assert world.at_once(key="runs").body == b"made"


# ---- late ---------------------------------------------------------------------------------------------------------


async def test_a_claims_answer_that_comes_after_the_end_does_nothing(world):
    for found in (None, "completed"):
        answer = world.wait()
        world.exchanges.stop_unfinished()
        told = len(world.observer.told)
        if found:
            world.store.claims[-1].tell(world.completed())
        else:
            world.acquire()
        assert world.upstream.sendings == []
        assert world.store.reads == []
        assert world.store.settles == []
        assert len(world.observer.told) == told
        assert code(answer.result()) == "draining"
        world.context.draining = False
        world.assert_nothing_is_left()


# ---- the table ----------------------------------------------------------------------------------------------------


async def test_beside_a_running_exchange_a_retry_is_outstanding_and_another_request_a_mismatch(world):
    world.sent("pay 5")
    assert code(world.at_once("pay 5")) == "outstanding"
    assert code(world.at_once(" pay 5 ")) == "outstanding"
    assert code(world.at_once("pay 6")) == "key-reused"
    assert len(world.store.claims) == 1


async def test_beside_a_record_of_an_unknown_recipe_another_request_counts_as_equal(world):
    from gateway.model import OtherRecipe
    from tests.exchange.scripted import Text

    world.wait("pay 5")
    world.store.claims[0].tell(OtherRecipe(Text("?").by(77)))
    world.acquire()
    assert code(world.at_once("pay 6")) == "outstanding"


async def test_beside_one_that_still_asks_a_retry_waits_and_shares_its_lot(world):
    answers = [world.wait(), world.wait(), world.wait()]
    answers[1].cancel()
    world.store.claims[0].tell(world.completed())
    world.store.reads[0].tell(KEPT)
    assert [answers[number].result().body for number in (0, 2)] == [b"kept", b"kept"]
    assert len(world.store.claims) == len(world.store.reads) == 1
    world.assert_nothing_is_left()


async def test_beside_one_that_then_runs_a_retry_is_outstanding_and_another_request_a_mismatch(world):
    world.wait("pay 5")
    retry, other = world.wait(" pay 5 "), world.wait("pay 6")
    world.acquire()
    assert code(retry.result()) == "outstanding"
    assert code(other.result()) == "key-reused"
    assert len(world.store.claims) == 1


async def test_beside_one_that_is_the_wrong_one_itself_another_request_asks_anew(world):
    """Elsewhere "pay 6" runs. Here "pay 5" came first, and only the store can tell which of them reuses the key."""
    wrong, right = world.wait("pay 5"), world.wait("pay 6")
    world.store.claims[0].tell(Mismatch(1.8e9, None))
    world.store.claims[1].tell(Held(1000, 1.8e9))
    assert code(wrong.result()) == "key-reused"
    assert code(await right) == "outstanding"
    world.assert_nothing_is_left()


async def test_who_waits_beside_counts_as_running():
    world = World(in_flight=2)
    world.wait()
    world.wait()
    assert code(world.at_once()) == "over-capacity"
    assert code(world.at_once(key="other")) == "over-capacity"
    world.acquire()
    world.wait(key="other")


async def test_the_cache_tells_a_retry_from_another_request_and_asks_the_store_where_it_cannot(world):
    world.sent("pay 5")
    world.sending.reply(201, b"made")
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert world.at_once("pay 5").body == b"made"
    assert world.at_once(" pay 5 ").body == b"made"
    assert code(world.at_once("pay 6")) == "key-reused"
    world.wait("pay 7", key="other recipe")
    world.store.claims[-1].tell(world.completed("pay 7", recipe=2))
    world.store.reads[-1].tell(KEPT)
    assert world.at_once("pay 7", key="other recipe").body == b"kept"
    world.wait("pay 8", key="other recipe")


async def test_beyond_in_flight_nothing_is_claimed():
    world = World(in_flight=2)
    world.wait(key="a")
    world.wait(key="b")
    assert code(world.at_once(key="c")) == "over-capacity"
    world.acquire()
    world.sending.refuse()
    world.store.settles[0].tell(SettleOutcome.DONE)
    world.wait(key="c")


async def test_a_retry_that_meets_a_lost_lease_here_asks_the_store(world):
    world.wait()
    lease = world.acquire()
    world.sending.write()
    assert code(world.at_once()) == "outstanding"
    lease.lost = True
    world.wait()
    assert len(world.store.claims) == 2
    assert world.store.claims[0].what.claim_id != world.store.claims[1].what.claim_id


async def test_an_exchange_that_was_overtaken_here_still_runs_out_of_time_and_counts_as_running():
    world = World(in_flight=2)
    first = world.wait()
    world.acquire().lost = True
    world.sending.write()
    late = world.sending
    second = world.wait()
    assert code(world.at_once(key="other")) == "over-capacity"
    world.acquire(attempt=2)
    world.sending.write()
    world.move(15)
    world.sending.reply(201, b"second")
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert second.result().body == b"second"
    assert not first.done()
    world.move(15)
    assert late.aborted
    assert world.store.settles[1].what.claim_id == world.store.claims[0].what.claim_id
    world.store.settles[1].tell(SettleOutcome.LOST)
    world.store.looks[0].tell(world.completed())
    world.store.reads[0].tell(StoredReply(201, b"HTTP/1.1 201 Said\r\n", b"second"))
    assert first.result().body == b"second"
    world.assert_nothing_is_left()


async def test_an_exchange_that_was_overtaken_here_is_ended_by_the_stop(world):
    first = world.wait()
    world.acquire().lost = True
    world.sending.write()
    late = world.sending
    world.wait()
    world.exchanges.stop_unfinished()
    assert late.aborted
    assert [a.what.settlement for a in world.store.settles] == [Settlement.HOLD]
    world.store.settles[0].tell(SettleOutcome.LOST)
    world.store.looks[0].tell(None)
    assert code(first.result()) == "outcome-unknown"
    world.assert_nothing_is_left()


async def test_bodies_are_counted_while_they_are_held(world):
    answer = world.wait("x" * 1000)
    assert world.context.buffer_bytes == 1000
    world.acquire()
    world.sending.write()
    world.sending.reply(201, b"y" * 500)
    assert world.context.buffer_bytes == 1500
    world.store.settles[0].tell(SettleOutcome.DONE)
    assert answer.done()
    world.assert_nothing_is_left()


async def test_retry_after_of_an_outstanding_request_follows_how_long_the_route_takes(world):
    for number in range(20):
        world.sent(key=f"k{number}")
        world.boot.now += 6
        world.sending.reply(201)
        world.store.settles[-1].tell(SettleOutcome.DONE)
    world.sent(key="slow")
    assert 6 <= json_retry_after(world.at_once(key="slow")) <= 8
    world.boot.now += 5
    assert json_retry_after(world.at_once(key="slow")) == 1


def json_retry_after(answer) -> int:
    from tests.exchange.scripted import problem

    return problem(answer)["retry_after"]


async def test_the_answer_is_a_future_of_the_running_loop(world):
    assert isinstance(world.begin(), asyncio.Future)


async def test_the_head_and_body_that_were_claimed_are_what_is_forwarded(world):
    world.sent("pay 5")
    assert (world.sending.head, world.sending.body) == (b"POST /pay HTTP/1.1\r\n", b"pay 5")
