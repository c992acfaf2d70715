"""Any order of events that the ports' contracts allow: nothing raises, hangs, leaks or runs twice.

The test plays the store, the upstream, the clock, the clients and the stop; hypothesis draws who moves next. A model of
the store grants a record's lease to one claim id at a time, and to another only when the first was lost or has ended.
"""

import asyncio
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway.config import OnStoreFailure
from gateway.exchange import Answer
from gateway.model import (
    Acquired,
    Completed,
    Held,
    InDoubt,
    Lease,
    Mismatch,
    OnInDoubt,
    OtherRecipe,
    SettleOutcome,
    StoredReply,
    TookOver,
    Unavailable,
)
from tests.exchange.scripted import Asked, ScriptedSending, ScriptedStream, Text, World, code

KEYS = ("a", "a", "a", "b")
TEXTS = ("pay 5", "pay 5", " pay 5 ", "pay 6")
STATUSES = (200, 303, 404, 422, 500, 502)
NOTHING_SENT = {"store-unavailable", "draining", "upstream-unreachable", "over-capacity"}


class Play:
    """One random run."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.world = World(in_flight=5, buffer_memory_bytes=40_000, replay_cache_bytes=3000)
        self.futures: list[asyncio.Future[Answer]] = []
        self.streams: list[ScriptedStream] = []
        self.holders: dict[bytes, Lease] = {}
        self.leases: dict[bytes, list[Lease]] = {}
        self.unanswered: set[bytes] = set()  # claims that were told Unavailable
        self.writes: dict[bytes, int] = {}
        self.attempts = 0

    def draw(self, *choices: Any) -> Any:
        return self.data.draw(st.sampled_from(choices))

    # ---- who may move ----------------------------------------------------------------------------------------------

    def moves(self, *, finishing: bool) -> list[tuple[Any, ...]]:
        store, upstream = self.world.store, self.world.upstream
        found: list[tuple[Any, ...]] = [
            (self.sent if sending.sent else self.unsent, sending) for sending in upstream.sendings if sending.open
        ]
        found += [(self.looked, asked) for asked in store.looks if not asked.told]
        found += [(self.read, asked) for asked in store.reads if not asked.told]
        found += [(self.settled, asked) for asked in (*store.settles, *store.adoptions) if not asked.told]
        found += [(self.claimed, asked) for asked in store.claims if not asked.told]
        if not finishing:
            found = 2 * found  # rather on than aside
            found += [(self.begins,), (self.time_passes,), (self.epoch,)]
            found += [(self.leaves, future) for future in self.futures if not future.done()]
            found += 2 * [(self.loses, lease) for lease in self.holders.values()]
        return found

    def move(self, *, finishing: bool = False) -> bool:
        moves = self.moves(finishing=finishing)
        if not moves:
            return False
        act, *arguments = self.draw(*moves)
        act(*arguments)
        self.check()
        return True

    # ---- the clients, the clock, the process -----------------------------------------------------------------------

    def begins(self) -> None:
        answer = self.world.begin(
            self.draw(*TEXTS),
            self.draw(*KEYS),
            on_store_failure=self.draw(OnStoreFailure.FORWARD, OnStoreFailure.REJECT),
            on_in_doubt=self.draw(OnInDoubt.BLOCK, OnInDoubt.RUN_AGAIN),
            respond_within_ms=self.draw(30_000, 5000),
        )
        if isinstance(answer, asyncio.Future):
            self.futures.append(answer)

    def leaves(self, future: "asyncio.Future[Answer]") -> None:
        future.cancel()

    def time_passes(self) -> None:
        self.world.move(self.draw(0.1, 1.0, 5.0, 31.0))

    def epoch(self) -> None:
        self.world.store.epoch += 1

    def drains(self) -> None:
        self.world.context.draining = True

    def stops(self) -> None:
        self.world.exchanges.stop_unfinished()

    def loses(self, lease: Lease) -> None:
        lease.lost, lease.trusted_until = True, 0.0
        del self.holders[lease.record_id]

    # ---- the store -------------------------------------------------------------------------------------------------

    def claimed(self, asked: Asked) -> None:
        request = asked.what
        record, claim = request.identity.record_id, request.claim_id
        holder = self.holders.get(record)
        abandoned = any(given_up.claim_id == claim for given_up in self.world.store.abandoned)
        outcomes: list[Any] = [
            Unavailable("timeout"),
            InDoubt(self.draw(None, 2500), 1.8e9),
            Mismatch(1.8e9, None),
            OtherRecipe(Text(self.draw(*TEXTS)).by(self.draw(2, 77))),
            self.world.completed(self.draw(*TEXTS), reply=self.draw(True, False)),
        ]
        if holder is not None and holder.claim_id != claim:
            outcomes = [Held(1000, 1.8e9), Unavailable("timeout")]
        elif not abandoned:
            outcomes = ["acquired"] * 12 + outcomes
        outcome = self.draw(*outcomes)
        if outcome == "acquired":
            trusted = self.draw(20.0, 20.0, 20.0, 0.0)
            lease = Lease(record, claim, request.lease_ms, self.world.boot.now + trusted if trusted else 0.0)
            self.holders[record] = lease
            self.leases.setdefault(claim, []).append(lease)
            outcome = Acquired(lease, 1, self.draw(None, *TookOver))
        elif isinstance(outcome, Unavailable):
            self.unanswered.add(claim)
        elif holder is not None and holder.claim_id == claim:
            del self.holders[record]  # a definite answer other than the lease: another had it
        asked.tell(outcome)

    def settled(self, asked: Asked) -> None:
        request = asked.what
        holder = self.holders.get(request.record_id)
        mine = holder is not None and holder.claim_id == request.claim_id
        if mine:
            del self.holders[request.record_id]
        asked.tell(self.draw(*SettleOutcome) if mine or holder is None else SettleOutcome.LOST)

    def read(self, asked: Asked) -> None:
        head = b"HTTP/1.1 201 Said\r\nLocation: /1\r\n"
        kept = StoredReply(201, head, b"kept")
        asked.tell(self.draw(kept, Unavailable("timeout"), None, StoredReply(201, head, None)))

    def looked(self, asked: Asked) -> None:
        found: list[Completed | Unavailable | None]
        found = [self.world.completed(self.draw(*TEXTS), reply=reply) for reply in (True, True, False)]
        found += [None, Unavailable("timeout")]
        asked.tell(self.draw(*found))

    # ---- the upstream ----------------------------------------------------------------------------------------------

    def unsent(self, sending: ScriptedSending) -> None:
        if self.draw(True, True, False):
            exchange = sending.receiver
            lease = exchange.lease
            if sending.write():
                claim = exchange.claim_id
                self.writes[claim] = self.writes.get(claim, 0) + 1
                if lease is None:
                    assert exchange.call.policy.on_store_failure is OnStoreFailure.FORWARD
                    assert claim in self.unanswered
                else:
                    assert lease in self.leases[claim]
                    assert self.holders.get(lease.record_id) is lease
        else:
            sending.refuse()

    def sent(self, sending: ScriptedSending) -> None:
        match self.draw("reply", "stream", "break off"):
            case "reply":
                sending.reply(self.draw(*STATUSES), b"said")
            case "stream":
                self.streams.append(sending.stream(self.draw(*STATUSES)))
            case "break off":
                sending.break_off(self.draw("connection_terminated", "connection_read_timeout"))

    def reads(self, stream: object) -> bool:
        """Whether a client has it, its own or passed on from the one before."""
        answered = (future.result() for future in self.futures if future.done() and not future.cancelled())
        return any(answer.stream is stream for answer in answered)

    # ---- what always holds -----------------------------------------------------------------------------------------

    def check(self) -> None:
        world = self.world
        assert all(count == 1 for count in self.writes.values()), "a claim id forwards once"
        assert world.context.buffer_bytes >= 0
        assert 0 <= world.context.adopting <= len(world.exchanges.running)
        assert world.context.replies.bytes <= 3000
        for stream in self.streams:
            assert not (self.reads(stream) and stream.aborted), "the client reads it"

    def check_the_end(self) -> None:
        world, store = self.world, self.world.store
        world.assert_nothing_is_left()
        assert all(future.done() for future in self.futures)
        for stream in self.streams:
            assert self.reads(stream) != stream.aborted, "aborted exactly when nobody reads it"
        settled = [asked.what.claim_id for asked in (*store.settles, *store.adoptions)]
        abandoned = [request.claim_id for request in store.abandoned]
        assert len(settled) == len(set(settled)), "settled once"
        assert len(abandoned) == len(set(abandoned))
        assert not set(settled) & set(abandoned)
        assert set(self.writes) <= set(settled), "what was forwarded is settled, and never abandoned"
        assert self.unanswered <= {*settled, *abandoned}, "no claim of unknown fate is left"
        by_future: dict[int, bool] = {}
        for sending in world.upstream.sendings:
            by_future[id(sending.receiver.answer)] = by_future.get(id(sending.receiver.answer), False) or sending.sent
        for future in self.futures:
            if not future.cancelled() and future.result().body.startswith(b"{"):
                nothing = code(future.result()) in NOTHING_SENT
                assert not (nothing and by_future.get(id(future), False)), "a 503 of ours means that nothing was sent"


async def play(data: st.DataObject) -> None:
    run = Play(data)
    drains = data.draw(st.sampled_from((50, 25)))
    for number in range(50):
        if number == drains:
            run.drains()
        run.move()
    if data.draw(st.booleans()):
        run.stops()
        run.check()
    while run.move(finishing=True):
        pass
    for _ in run.futures:
        await asyncio.sleep(0)  # an answer is passed on from one that waited to the next, a turn of the loop each
    run.check_the_end()


@settings(
    max_examples=150,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking plays of 50 moves takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_any_order_of_events_leaves_nothing_behind_and_runs_nothing_twice(data):
    asyncio.run(play(data))
