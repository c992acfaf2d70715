"""The protocol: one request's life from claim to settlement.

An `Exchange` is one object with a method per event; the store and the upstream call it back. It belongs to nobody's
task: a client that hangs up changes nothing. It decides nothing by itself (`decision` does), writes no SQL and no
socket (the ports do), and reads no clock but those of its context.
"""

import asyncio
import math
import os
from collections.abc import Callable
from typing import Any, Literal, assert_never

import msgspec

from gateway import decision, wire
from gateway.exchange.context import Answer, Call, Context
from gateway.exchange.ports import BodyStream, Sending
from gateway.exchange.replies import LONGEST_SECONDS, CachedReply
from gateway.model import (
    ClaimOutcome,
    ClaimRequest,
    Completed,
    Lease,
    NeverSent,
    NoReply,
    NotTrusted,
    OnInDoubt,
    Outcome,
    ReplyHead,
    Settlement,
    SettleOutcome,
    SettleRequest,
    StoredReply,
    TookOver,
    Unavailable,
    UpstreamFailure,
)

_CLAIMS_AT_MOST = 4
"""Claims of one exchange: the first, and again for another recipe or for a lease that was no longer trusted."""

_ADOPTED_BYTES = 4096
"""What an exchange weighs, beside its bodies, that waits for the store to come back."""

AnswerFor = Callable[[Call], Answer]
"""Makes the answer that a request gets which does not run, for any request that is the same one."""

_Owed = Callable[[SettleOutcome | None], Answer]
"""Makes the client's answer from what the store said of the settlement; None when it has not said anything in time."""


class Exchange:
    """One protected request, from its claim to the store's definite word on its settlement."""

    # What most exchanges never change stands here once, and not in each of them.
    lease: Lease | None = None
    attempt = 0
    took_over: TookOver | None = None
    _phase: Literal["claiming", "replaying", "sending", "settling", "done"] = "claiming"
    _claims = 0
    _asked_at = 0.0
    _adopting = False
    _sending: Sending | None = None
    _sent_at = 0.0
    _upstream_by = 0.0
    _upstream_seconds = 0.0
    _respond_by = math.inf
    _lines: wire.ReplyLines | None = None
    _stream: BodyStream | None = None
    _verdict: decision.Verdict | None = None
    _settlement: SettleRequest | None = None
    _owed: _Owed | None = None

    def __init__(
        self, context: Context, call: Call, answer: asyncio.Future[Answer], finished: "Callable[[Exchange], None]"
    ) -> None:
        self.call = call
        self.answer = answer
        self.claim_id = os.urandom(16)
        self.fingerprint = call.content.fingerprint()
        self.began = context.boot_clock()
        self.began_unix = context.wall_clock()
        self.followers: list[Callable[[AnswerFor | None], None]] = []
        """Who waits beside until it is known whether this one runs (None), or else what the same request gets."""
        self._context = context
        self._finished = finished
        policy = call.policy
        if policy.respond_within_ms < policy.upstream_timeout_ms:
            self._respond_by = self.began + policy.respond_within_ms / 1000
        self._buffered = len(call.body)
        context.buffer_bytes += self._buffered

    @property
    def _answer_by(self) -> float:
        """Until when the client waits for the store to acknowledge the settlement."""
        return self._asked_at + self._context.limits.store_timeout_seconds

    @property
    def lost(self) -> bool:
        """Whether another may hold the record by now."""
        return self.lease is not None and self.lease.lost

    @property
    def undecided(self) -> bool:
        """Whether nobody here knows yet what becomes of the record: it may be another's, or have its reply."""
        return self.lease is None and self._phase in {"claiming", "replaying"}

    # ---- claim ---------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Ask for the lease; again with the same claim id where the first answer did not serve."""
        self._phase = "claiming"
        self._claims += 1
        self._asked_at = self._context.boot_clock()
        self._context.store.claim(self._claim_request(), self.on_claim)

    def on_claim(self, outcome: ClaimOutcome) -> None:
        """Act on what the claim found."""
        if self._phase != "claiming":
            return  # stopped meanwhile; what the claim took is abandoned
        call = self.call
        action = decision.decide(outcome, call.policy.on_store_failure)
        match action:
            case decision.Forward():
                self._on_lease(action)
            case decision.ForwardUnprotected():
                self.lease = None  # one of an earlier claim is not trusted, or it had not been claimed again
                self._event("ran_unprotected", cause="store_failure")
                self._forward()
            case decision.Replay(completed):
                self._phase = "replaying"
                self._fetch(completed)
            case decision.ClaimAgain(stored):
                self.fingerprint = call.content.fingerprint_like(stored)
                self._claim_again()
            case decision.Refuse(code="store-unavailable"):
                self._abandon("store-unavailable")
            case decision.Refuse():
                self._end(lambda call: self._refusal(call, action))
            case _:
                assert_never(action)

    def _claim_again(self) -> None:
        if self._context.draining:
            self._abandon("draining")
        elif self._claims < _CLAIMS_AT_MOST:
            self.claim()
        else:
            self._abandon("store-unavailable")

    def _on_lease(self, granted: decision.Forward) -> None:
        self.lease, self.attempt = granted.lease, granted.attempt
        if granted.took_over is not None and self.took_over is None:
            self.took_over = granted.took_over
            self._context.observer.took_over(self.call.route, granted.took_over)
            if granted.took_over is TookOver.EXPIRED:
                self._event("ran_again")
        self._forward()

    def _refusal(self, call: Call, refuse: decision.Refuse) -> Answer:
        """The answer to a request that does not run."""
        context = self._context
        seen = refuse.first_seen_unix or 0.0
        if refuse.code == "outstanding":
            remaining = (refuse.again_in_ms or 0) / 1000
            return context.outstanding(call, context.wall_clock() - seen, remaining, seen)
        if refuse.code == "key-reused":
            return context.mismatch(call, seen, refuse.original_status)
        if refuse.code == "reply-not-stored":
            return self._tombstone(call, refuse.original_status, None)
        return context.problem(
            call,
            Outcome.IN_DOUBT,
            "in-doubt",
            retry_after=_whole_seconds(refuse.again_in_ms),
            blocked=refuse.again_in_ms is None,
            first_seen=wire.timestamp(seen),
        )

    # ---- replay --------------------------------------------------------------------------------------------------

    def _fetch(self, completed: Completed) -> None:
        self._context.store.reply(
            self.call.identity.record_id, completed, lambda reply: self.on_stored_reply(completed, reply)
        )

    def on_stored_reply(self, completed: Completed, reply: StoredReply | Unavailable | None) -> None:
        """Replay what the store kept; a reply that is not there is a tombstone, never an execution.

        Who forwarded and lost the record has a reply of its own to fall back on, and may not say that nothing was sent.
        """
        context, call = self._context, self.call
        if isinstance(reply, StoredReply) and reply.body is not None:
            keeps = completed.keeps_ms / 1000
            cached = CachedReply(
                raw_digest=call.content.raw_digest,
                fingerprint=completed.fingerprint,
                status=completed.status,
                head=reply.head,
                body=reply.body,
                until=self._asked_at + min(keeps, LONGEST_SECONDS),
                expires_unix=context.wall_clock() + keeps,
                first_seen_unix=completed.first_seen_unix,
            )
            context.replies.put(call.identity.record_id, cached)
            self._end(lambda call: context.replay(call, cached, "store"))
        elif self._owed is not None:
            self._give(self._owed(None))
            self._finish()
        elif isinstance(reply, Unavailable):
            self._end(lambda call: context.problem(call, Outcome.REFUSED, "store-unavailable", retry_after=5))
        else:
            head = None if reply is None else reply.head
            self._end(lambda call: self._tombstone(call, completed.status, head))

    def _tombstone(self, call: Call, status: int | None, kept_head: bytes | None) -> Answer:
        location = None if kept_head is None else wire.location_of(kept_head)
        self._context.observer.replayed(call.route, "store")
        return self._context.problem(
            call, Outcome.REPLAYED, "reply-not-stored", original_status=status, location=location
        )

    # ---- forward -------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        context, call = self._context, self.call
        self._phase = "sending"
        self._sent_at = context.boot_clock()
        self._upstream_by = self._sent_at + call.policy.upstream_timeout_ms / 1000
        upstream = context.upstreams[call.upstream]
        self._sending = upstream.send(call.head(), call.body, call.policy.max_response_body_bytes, self)
        self._tell_followers(None)

    def may_send(self) -> bool:
        """Invariant 1 at the moment of the first write: the lease is trusted (or the policy forwards without one)."""
        return self.lease is None or self._context.boot_clock() < self.lease.trusted_until

    def on_reply(self, head: ReplyHead, body: bytes) -> None:
        """Settle by the status of a complete answer."""
        self._buffer(len(body))
        self._on_answer(head, body, whole=True)

    def on_stream(self, head: ReplyHead, stream: BodyStream) -> None:
        """Settle before more of the body is relayed: a crash in the middle of it must not run it again."""
        self._stream = stream
        self._on_answer(head, b"", whole=False)

    def on_failure(self, failure: UpstreamFailure) -> None:
        """Settle what was never sent as released, and what was sent as in doubt; without trust, claim again."""
        self._upstream_seconds = self._context.boot_clock() - self._sent_at
        match failure:
            case NotTrusted():
                self._claim_again()
            case NeverSent(cause):
                verdict = decision.settle(failure, self.call.policy.outcomes.settlement)
                self._settle(
                    verdict,
                    lambda _: self._failed(Outcome.RELEASED, "upstream-unreachable", retry_after=1, cause=cause),
                )
            case NoReply():
                self._hold(failure)
            case _:
                assert_never(failure)

    def _on_answer(self, head: ReplyHead, body: bytes, *, whole: bool) -> None:
        context, call, status = self._context, self.call, head.status
        self._upstream_seconds = context.boot_clock() - self._sent_at
        self._lines = wire.reply_heads(head)
        context.note_duration(call.route, self._upstream_seconds)
        context.observer.upstream_answered(call.upstream, status, self._upstream_seconds)
        verdict = decision.settle(decision.Answered(status, whole), call.policy.outcomes.settlement)
        if verdict.settlement is Settlement.HOLD:
            self._event("in_doubt", cause="status")
        self._settle(verdict, lambda settled: self._own_reply(status, body, settled), status, body)

    def _hold(self, failure: NoReply, *, stopped: bool = False) -> None:
        policy = self.call.policy
        verdict = decision.settle(failure, policy.outcomes.settlement)
        timed_out = verdict.reason == "timeout"
        if stopped:
            verdict = msgspec.structs.replace(verdict, reason="shutdown")
        blocked = policy.on_in_doubt is OnInDoubt.BLOCK
        self._event("in_doubt", cause=failure.cause)
        self._settle(
            verdict,
            lambda _: self._failed(
                Outcome.IN_DOUBT,
                "outcome-unknown",
                status=504 if timed_out else 502,
                retry_after=None if blocked else _whole_seconds(policy.effect_deadline_ms),
                blocked=blocked,
                cause=failure.cause,
            ),
        )

    # ---- settle --------------------------------------------------------------------------------------------------

    def _settle(
        self, verdict: decision.Verdict, owed: _Owed, status: int | None = None, body: bytes | None = None
    ) -> None:
        """Write the settlement; the client gets what it is owed when the store has acknowledged it.

        Without an acknowledged lease the record is adopted when the store returns, and the client does not wait.
        """
        context = self._context
        self._phase = "settling"
        self._verdict = verdict
        self._owed = owed
        self._asked_at = context.boot_clock()
        complete = verdict.settlement is Settlement.COMPLETE
        self._settlement = settlement = SettleRequest(
            record_id=self.call.identity.record_id,
            claim_id=self.claim_id,
            settlement=verdict.settlement,
            forwarded=verdict.forwarded,
            binds=verdict.binds,
            status=status if complete else None,
            head=self._kept_head() if complete else None,
            body=body if verdict.keep else None,
            keep_ms=self.call.policy.retention_ms,
        )
        if self.lease is not None:
            context.store.settle(settlement, self.on_settled)
            return
        self._give(owed(None))
        if verdict.forwarded:
            self._adopting = True
            context.adopting += 1
            self._buffer(_ADOPTED_BYTES)
            context.store.adopt(self._claim_request(), settlement, self.on_settled)
        else:
            context.store.abandon(self._claim_request())
            self._finish()

    def on_settled(self, outcome: SettleOutcome) -> None:
        """Give the client its answer, now that the store has said what became of the record."""
        context, verdict, owed = self._context, self._verdict, self._owed
        if verdict is None or owed is None:
            return  # finished meanwhile
        if outcome is SettleOutcome.DONE or outcome is SettleOutcome.ALREADY:
            tombstone = verdict.settlement is Settlement.COMPLETE and not verdict.keep
            label = "tombstone" if tombstone else verdict.settlement.word
            context.observer.settled(self.call.route, label, verdict.reason)
            if verdict.keep:
                self._keep_in_process()
            self._give(owed(outcome))
            self._finish()
            return
        context.observer.late_reply(self.call.route)
        self._event("late_reply", cause=outcome.word)
        self._owed = lambda _: owed(outcome)
        if self.answer.done() or self._stream is not None:
            self._give(owed(outcome))
            self._finish()
        else:
            context.store.look(self.call.identity.record_id, self.on_look)

    def on_look(self, completed: Completed | Unavailable | None) -> None:
        """After a lost lease: if another attempt at this request completed the record, all see that one answer.

        The record may by now be another request's: one that corrected a refusal, or came after the retention.
        """
        if self._owed is None:
            return  # finished meanwhile
        if (
            not self.answer.done()
            and isinstance(completed, Completed)
            and completed.reply_on is not None
            and self.call.content.fingerprint_like(completed.fingerprint) == completed.fingerprint
        ):
            self._fetch(completed)
            return
        self._give(self._owed(None))
        self._finish()

    # ---- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """End what has run out of time at `now`, an instant of the boot-time clock."""
        sending = self._sending
        if self._phase == "sending" and sending is not None:
            if now >= self._upstream_by or (now >= self._respond_by and not sending.sent):
                sending.abort()
                self._context.observer.upstream_timed_out(self.call.upstream, sent=sending.sent)
                if sending.sent:
                    self.on_failure(NoReply("http_response_timeout", reused=False))
                else:
                    self.on_failure(NeverSent("connection_timeout"))
            elif now >= self._respond_by and not self.answer.done():
                self._give(self._failed(Outcome.OUTSTANDING, "still-running", retry_after=0))
        elif self._phase == "settling" and self._owed is not None and not self.answer.done() and now >= self._answer_by:
            self._give(self._owed(None))

    def stop(self) -> None:
        """The process ends: hold what was forwarded, abandon what was not. A settlement or a replay goes on."""
        sending = self._sending
        if self._phase == "sending" and sending is not None and sending.sent:
            sending.abort()
            self._hold(NoReply("connection_terminated", reused=False), stopped=True)
        elif self._phase in {"claiming", "sending"}:
            if sending is not None:
                sending.abort()
            self._abandon("draining")

    # ---- answers -------------------------------------------------------------------------------------------------

    def _own_reply(self, status: int, body: bytes, settled: SettleOutcome | None) -> Answer:
        """The upstream's own reply with our marks."""
        context, call, lines, verdict = self._context, self.call, self._lines, self._verdict
        assert lines is not None  # noqa: S101 -- an answer was received
        assert verdict is not None  # noqa: S101 -- and is being settled
        reason = ""
        expires_unix = None
        if settled is SettleOutcome.LOST or settled is SettleOutcome.REFUSED:
            outcome, reason = Outcome.IN_DOUBT, "lease_lost"
        elif self.lease is None:
            outcome, reason = Outcome.UNPROTECTED, "store_failure"
        elif verdict.settlement is Settlement.COMPLETE:
            outcome, reason = Outcome.EXECUTED, "" if verdict.keep else "too_large"
            if settled is not None:
                expires_unix = context.wall_clock() + call.policy.retention_ms / 1000
        elif verdict.settlement is Settlement.RELEASE:
            outcome = Outcome.RELEASED
        else:
            outcome = Outcome.IN_DOUBT
        record = call.identity.record
        marks = wire.marks(
            outcome,
            record=record,
            request_id=None if lines.request_id is not None else call.request_id,
            expires_unix=expires_unix,
            now_unix=None if lines.dated else context.wall_clock(),
        )
        return Answer(
            outcome=outcome,
            status=status,
            head=lines.live + marks,
            body=body,
            stream=self._stream,
            length=lines.length,
            reason=reason,
            record=record,
            attempt=self.attempt,
            took_over=self.took_over.word if self.took_over is not None else "",
            sent=True,
            upstream_seconds=self._upstream_seconds,
        )

    def _failed(self, outcome: Outcome, code: str, **members: Any) -> Answer:
        return self._with_facts(self._context.problem(self.call, outcome, code, **members))

    def _with_facts(self, answer: Answer) -> Answer:
        answer.record = self.call.identity.record
        answer.attempt = self.attempt
        answer.took_over = self.took_over.word if self.took_over is not None else ""
        answer.sent = self._sending is not None and self._sending.sent
        answer.upstream_seconds = self._upstream_seconds
        if answer.sent and self.lease is None:
            answer.reason = "store_failure"
        return answer

    def _give(self, answer: Answer) -> None:
        stream, self._stream = self._stream, None
        if not self.answer.done():
            self.answer.set_result(answer)
        elif stream is not None:
            stream.abort()  # the client had to be told `still-running`: nobody reads it

    def _end(self, answer_for: AnswerFor) -> None:
        """Answer without an execution of ours."""
        self._give(self._with_facts(answer_for(self.call)))
        self._finish()
        self._tell_followers(answer_for)

    def _abandon(self, code: Literal["draining", "store-unavailable"]) -> None:
        """Answer 503 and never forward afterwards: the claim, held or of unknown fate, is given back."""
        context = self._context
        context.store.abandon(self._claim_request())
        wait = 1 if code == "draining" else 5
        self._end(lambda call: context.problem(call, Outcome.REFUSED, code, retry_after=wait))

    def _tell_followers(self, answer_for: AnswerFor | None) -> None:
        followers, self.followers = self.followers, []
        for told in followers:
            told(answer_for)

    def _finish(self) -> None:
        self._phase = "done"
        self._context.buffer_bytes -= self._buffered
        self._context.adopting -= self._adopting
        self._buffered = 0
        self._adopting = False
        self._owed = self._settlement = self._sending = None  # no cycles for the collector
        self._finished(self)

    # ---- small parts ---------------------------------------------------------------------------------------------

    def _buffer(self, size: int) -> None:
        self._buffered += size
        self._context.buffer_bytes += size

    def _claim_request(self) -> ClaimRequest:
        policy = self.call.policy
        return ClaimRequest(
            identity=self.call.identity,
            fingerprint=self.fingerprint,
            claim_id=self.claim_id,
            on_in_doubt=policy.on_in_doubt,
            lease_ms=policy.lease_ttl_ms,
            effect_ms=policy.effect_deadline_ms,
            keep_ms=policy.upstream_timeout_ms + policy.retention_ms,
        )

    def _kept_head(self) -> bytes:
        assert self._lines is not None  # noqa: S101 -- only an answer completes
        return self._lines.kept + b"Idempotency-Original-Request-Id: " + self.call.request_id.encode("ascii") + b"\r\n"

    def _keep_in_process(self) -> None:
        """Let retries be answered from here for a while: the store has said that the reply is kept."""
        context, kept = self._context, self._settlement
        if kept is None or kept.head is None or kept.body is None or kept.status is None:
            return
        keeps = kept.keep_ms / 1000
        cached = CachedReply(
            raw_digest=self.call.content.raw_digest,
            fingerprint=self.fingerprint,
            status=kept.status,
            head=kept.head,
            body=kept.body,
            until=self._asked_at + min(keeps, LONGEST_SECONDS),
            expires_unix=context.wall_clock() + keeps,
            first_seen_unix=self.began_unix,
        )
        context.replies.put(self.call.identity.record_id, cached)

    def _event(self, name: str, **facts: str | float | None) -> None:
        call = self.call
        record, request_id = call.identity.record, call.request_id
        self._context.observer.event(
            name, route=call.route, record=record, request_id=request_id, attempt=self.attempt, **facts
        )


def _whole_seconds(milliseconds: int | None) -> int | None:
    """Round up, so that a client which waits that long does not come too early."""
    return None if milliseconds is None else -(-milliseconds // 1000)
