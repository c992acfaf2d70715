"""Several holders on one record, in any order, with any delays, against the rules written down a second time.

The model is short and slow on purpose: it knows nothing of SQL, batches or snapshots.
"""

import asyncio
from typing import Any

import asyncpg
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from gateway.model import (
    Acquired,
    ClaimRequest,
    Completed,
    Held,
    InDoubt,
    Mismatch,
    OnInDoubt,
    Settlement,
    SettleOutcome,
    TookOver,
    Unavailable,
)

from .conftest import Bench, claim_request, settle_request

LEASE, EFFECT, KEEP, MOST = 30, 60, 3600, 3
STRICTNESS = list(OnInDoubt)
ENDS = {Settlement.COMPLETE: "completed", Settlement.RELEASE: "released", Settlement.HOLD: "in_doubt"}


class Record:
    """One record as the lease protocol has it. Times are seconds."""

    def __init__(self) -> None:
        self.there = False
        self.state = ""
        self.lease_end = 0.0

    def open(self, t: float) -> bool:
        return self.state == "in_doubt" or (self.state == "in_progress" and self.lease_end <= t)

    def since(self) -> float:
        return self.lease_end if self.state == "in_progress" else self.doubt

    def runs_again_at(self, asked: OnInDoubt) -> float | None:
        policy = max(self.policy, asked, key=STRICTNESS.index)
        if policy is OnInDoubt.BLOCK or self.reruns + 1 >= MOST:
            return None
        return self.since() + (0 if policy is OnInDoubt.PROBE else EFFECT)

    def forgotten(self, t: float) -> bool:
        if self.expires > t:
            return False
        if self.state in ("completed", "released"):
            return True
        return self.policy is OnInDoubt.RUN_AGAIN and self.open(t) and self.since() + EFFECT <= t

    def claim(self, request: ClaimRequest, t: float) -> Any:
        mine, body = request.claim_id, request.fingerprint.digest
        fresh = not self.there or (self.claim_id != mine and self.forgotten(t))
        if fresh:
            self.there, self.attempt, self.reruns, self.bound = True, 0, 0, False
            self.doubt, self.policy, self.expires = None, request.on_in_doubt, 0.0
        elif self.claim_id == mine:
            if self.state != "in_progress":
                return self._in_the_way(request, t)
            self.lease_end = max(self.lease_end, t + LEASE)
            return self._acquired()
        else:
            again_at = self.runs_again_at(request.on_in_doubt) if self.open(t) else None
            may = (self.state == "released" and (not self.bound or self.body == body)) or (
                self.body == body and again_at is not None and again_at <= t
            )
            if not may:
                return self._in_the_way(request, t)
            if self.state != "released":
                self.doubt, self.reruns, self.bound = self.since(), self.reruns + 1, True
            else:
                self.reruns = 0
            self.policy = max(self.policy, request.on_in_doubt, key=STRICTNESS.index)
        self.state, self.claim_id, self.body = "in_progress", mine, body
        self.attempt += 1
        self.lease_end = t + LEASE
        self.expires = max(self.expires, t + KEEP)
        return self._acquired()

    def _acquired(self) -> tuple[Any, ...]:
        took = TookOver.EXPIRED if self.doubt is not None else TookOver.RELEASED if self.attempt > 1 else None
        return Acquired, self.attempt, took

    def _in_the_way(self, request: ClaimRequest, t: float) -> Any:
        if self.body != request.fingerprint.digest:
            return (Mismatch,)
        if self.state == "completed":
            return Completed, self.claim_id
        if self.state == "released":
            return (Unavailable,)
        if not self.open(t):
            return Held, round((self.lease_end - t) * 1000)
        again_at = self.runs_again_at(request.on_in_doubt)
        return InDoubt, None if again_at is None else max(0, round((again_at - t) * 1000))

    def settle(self, request: ClaimRequest, settlement: Settlement, forwarded: bool, binds: bool, t: float) -> Any:
        if not self.there or self.claim_id != request.claim_id:
            return SettleOutcome.LOST
        back = settlement is Settlement.RELEASE and not forwarded and self.doubt is not None
        ends = (
            "in_doubt"
            if back
            else {"complete": "completed", "release": "released", "hold": "in_doubt"}[settlement.value]
        )
        if not (self.state == "in_progress" or (self.state == "in_doubt" and ends != "in_doubt")):
            return SettleOutcome.ALREADY if self.state == ends else SettleOutcome.REFUSED
        if ends != "in_doubt":
            self.doubt, self.reruns = None, 0
        elif forwarded:
            self.doubt = t
        else:
            self.reruns -= self.doubt is not None
            self.doubt = t if self.doubt is None else self.doubt
        self.state, self.bound = ends, self.bound or binds
        if ends == "completed":
            self.expires = max(self.expires, t + KEEP)
        return SettleOutcome.DONE

    def abandon(self, request: ClaimRequest, t: float) -> None:
        if not self.there:
            self.there, self.state = True, "released"
            self.claim_id, self.body = request.claim_id, request.fingerprint.digest
            self.attempt, self.reruns, self.bound, self.doubt = 0, 0, False, None
            self.policy, self.expires = request.on_in_doubt, t + KEEP
        elif self.claim_id == request.claim_id and self.state == "in_progress":
            self.attempt -= 1
            self.state = "released" if self.doubt is None else "in_doubt"
            self.reruns -= self.doubt is not None
        elif self.claim_id != request.claim_id and self.state == "released":
            self.claim_id = request.claim_id


def told(outcome: Any) -> Any:
    match outcome:
        case Acquired():
            return Acquired, outcome.attempt, outcome.took_over
        case Completed():
            return Completed, outcome.claim_id
        case Held():
            return Held, outcome.remaining_ms
        case InDoubt():
            return InDoubt, outcome.again_in_ms
    return (type(outcome),)


class Holders(RuleBasedStateMachine):
    bench: Bench
    runner: asyncio.Runner

    def __init__(self) -> None:
        super().__init__()
        self.t = 0.0
        self.model = Record()
        self.claims: list[ClaimRequest] = []
        self.completed: set[bytes] = set()
        self.runner.run(
            self.bench.connection.execute("DELETE FROM idempotency_record; DELETE FROM idempotency_response")
        )

    def _claim(self, request: ClaimRequest) -> None:
        found = self.runner.run(self.bench.claim(request, self.t, max_attempts=MOST))
        assert told(found) == self.model.claim(request, self.t)

    @rule(body=st.sampled_from([b"a", b"a", b"b"]), policy=st.sampled_from(OnInDoubt))
    def claims_anew(self, body: bytes, policy: OnInDoubt) -> None:
        request = claim_request(
            body=body, on_in_doubt=policy, lease_ms=LEASE * 1000, effect_ms=EFFECT * 1000, keep_ms=KEEP * 1000
        )
        self.claims.append(request)
        self._claim(request)

    @precondition(lambda self: self.asking)
    @rule(data=st.data())
    def repeats_a_claim(self, data: st.DataObject) -> None:
        self._claim(data.draw(st.sampled_from(self.asking)))

    @property
    def asking(self) -> list[ClaimRequest]:
        """Claims that may still be asked for: nobody asks again after the completion was acknowledged."""
        return [request for request in self.claims if request.claim_id not in self.completed]

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), settlement=st.sampled_from(Settlement), forwarded=st.booleans(), binds=st.booleans())
    def settles(self, data: st.DataObject, settlement: Settlement, forwarded: bool, binds: bool) -> None:
        request = data.draw(st.sampled_from(self.claims))
        forwarded = forwarded or settlement is Settlement.COMPLETE
        asked = settle_request(request, settlement, forwarded=forwarded, binds=binds, keep_ms=KEEP * 1000)
        found = self.runner.run(self.bench.settle(asked, self.t))
        if settlement is Settlement.COMPLETE and found is SettleOutcome.DONE:
            self.completed.add(request.claim_id)
        assert found is self.model.settle(request, settlement, forwarded, binds, self.t)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def abandons(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.claims))
        self.runner.run(self.bench.abandon(request, at=self.t))
        self.model.abandon(request, self.t)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def renews(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.claims))
        mine = self.model.there and self.model.claim_id == request.claim_id and self.model.state == "in_progress"
        assert self.runner.run(self.bench.renew(request, at=self.t)) == ["renewed" if mine else "lost"]
        if mine:
            self.model.lease_end = max(self.model.lease_end, self.t + LEASE)

    @rule(seconds=st.sampled_from([1, LEASE, EFFECT, LEASE + EFFECT, KEEP, 2 * KEEP]))
    def time_passes(self, seconds: int) -> None:
        self.t += seconds

    @invariant()
    def the_record_is_as_the_rules_say(self) -> None:
        row = self.runner.run(self.bench.record(claim_request()))
        model = self.model
        assert (row is not None) == model.there
        if row is None:
            return
        at = self.bench.at
        expected = (
            model.state, model.claim_id, model.body, model.bound, model.attempt, model.reruns, model.policy.value,
            at(model.expires), at(model.lease_end) if model.state == "in_progress" else None,
            None if model.doubt is None else at(model.doubt),
        )  # fmt: skip
        columns = "state claim fingerprint bound attempt reruns on_in_doubt expires_at locked_until doubt_since"
        assert tuple(row[column] for column in columns.split()) == expected


def test_any_order_of_holders_and_delays_obeys_the_rules(dsn: str, tables: str) -> None:
    with asyncio.Runner() as runner:

        async def connect() -> asyncpg.Connection:
            return await asyncpg.connect(dsn, server_settings={"search_path": tables, "synchronous_commit": "local"})

        connection = runner.run(connect())
        machine = type("Machine", (Holders,), {"bench": Bench(connection, tables), "runner": runner})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
        runner.run(connection.close())
