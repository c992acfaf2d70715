"""The table of the exchanges that run in this process, at most one for a record, and what it answers by itself."""

import asyncio

from gateway.exchange.context import Answer, Call, Context
from gateway.exchange.exchange import AnswerFor, Exchange
from gateway.exchange.replies import CachedReply
from gateway.model import Outcome


class Exchanges:
    """Begins, times and ends the exchanges of a process."""

    def __init__(self, context: Context) -> None:
        self.running: dict[bytes, Exchange] = {}
        """By record; one that lost its lease and was overtaken in this process goes on under its claim id."""
        self._following = 0
        self._context = context
        self._loop = asyncio.get_running_loop()

    def begin(self, call: Call) -> "Answer | asyncio.Future[Answer]":
        """Answer from what this process knows, or start an exchange and return the future of its answer."""
        context = self._context
        record_id = call.identity.record_id
        running = self.running.get(record_id)
        if running is not None and not running.lost:
            return self._follow(call, running) if running.undecided else self._beside(call, running)
        cached = context.replies.get(record_id, context.boot_clock(), context.store.epoch)
        if cached is not None:
            answer = self._from_cache(call, cached)
            if answer is not None:
                return answer
        if context.draining:
            return context.problem(call, Outcome.REFUSED, "draining", retry_after=1)
        if self._full:
            return context.problem(call, Outcome.REFUSED, "over-capacity", retry_after=1)
        exchange = Exchange(context, call, self._loop.create_future(), self._finished)
        if running is not None:
            self.running[running.claim_id] = running
        self.running[record_id] = exchange
        exchange.claim()
        return exchange.answer

    def sweep(self) -> None:
        """End what has run out of time. Called a few times a second; no exchange has a timer of its own."""
        now = self._context.boot_clock()
        for exchange in list(self.running.values()):
            exchange.tick(now)

    def stop_unfinished(self) -> None:
        """End of a drain: what was forwarded is written in doubt, what was not is abandoned; nothing new begins."""
        self._context.draining = True
        for exchange in list(self.running.values()):
            exchange.stop()

    def _finished(self, exchange: Exchange) -> None:
        record_id = exchange.call.identity.record_id
        overtaken = self.running.get(record_id) is not exchange
        self.running.pop(exchange.claim_id if overtaken else record_id, None)

    @property
    def _full(self) -> bool:
        context, limits = self._context, self._context.limits
        held = len(self.running) - context.adopting + self._following
        return held >= limits.in_flight or context.buffer_bytes >= limits.buffer_memory_bytes

    def _follow(self, call: Call, running: Exchange) -> "Answer | asyncio.Future[Answer]":
        """Wait until it is known whether the one that asks will run. The same request then shares its lot, with one
        round trip for all; another request, or one that meets an execution, begins anew.
        """
        context = self._context
        if self._full:
            return context.problem(call, Outcome.REFUSED, "over-capacity", retry_after=1)
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._following += 1
        context.buffer_bytes += len(call.body)

        def told(answer_for: AnswerFor | None) -> None:
            self._following -= 1
            context.buffer_bytes -= len(call.body)
            if future.done():
                return  # the client left, and nothing was begun for it
            if answer_for is not None and _same(call, running):
                future.set_result(answer_for(call))
            else:
                _pass_on(self.begin(call), future)

        running.followers.append(told)
        return future

    def _beside(self, call: Call, running: Exchange) -> Answer:
        """Answer a request that meets a running exchange of this process: no round trip is needed to know it."""
        context = self._context
        if not _same(call, running):
            return context.mismatch(call, running.began_unix, None)
        elapsed = context.boot_clock() - running.began
        remaining = running.call.policy.upstream_timeout_ms / 1000 - elapsed
        return context.outstanding(call, elapsed, remaining, running.began_unix)

    def _from_cache(self, call: Call, cached: CachedReply) -> Answer | None:
        if call.content.raw_digest != cached.raw_digest:
            own = call.content.fingerprint()
            if own.recipe != cached.fingerprint.recipe:
                return None
            if own != cached.fingerprint:
                return self._context.mismatch(call, cached.first_seen_unix, cached.status)
        return self._context.replay(call, cached, "process")


def _same(call: Call, running: Exchange) -> bool:
    """Whether a request is the one that runs, sent again."""
    content = call.content
    return content.raw_digest == running.call.content.raw_digest or (
        content.fingerprint_like(running.fingerprint) == running.fingerprint
    )


def _pass_on(answer: "Answer | asyncio.Future[Answer]", to: asyncio.Future[Answer]) -> None:
    """Let `to` have an answer that may still have to come."""
    if isinstance(answer, Answer):
        to.set_result(answer)
        return

    def came(done: asyncio.Future[Answer]) -> None:
        if not to.done():
            to.set_result(done.result())
        elif (stream := done.result().stream) is not None:
            stream.abort()  # nobody reads it

    answer.add_done_callback(came)
