"""Writes that are repeated until the store's answer is definite: settlements, abandoned claims, adopted executions."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.model import Acquired, ClaimRequest, OtherRecipe, SettleOutcome, SettleRequest
from gateway.store.clock import Anchor, boot
from gateway.store.faults import Fault, Kind
from gateway.store.heartbeat import Heartbeat
from gateway.store.lanes import MAX_BATCH_BYTES, MAX_BATCH_ROWS, Answer, Lane, call_back
from gateway.store.link import Link
from gateway.store.session import Role
from gateway.store.statements import abandon_arguments, claim_arguments, claim_outcome, settle_arguments, settle_outcome

MAX_PENDING_BYTES = 64 * 1024 * 1024
"""Replies that wait for the store. What comes beyond is completed without its reply, never dropped."""
_ROW_BYTES = 128
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.05, 1.0
_STUCK_SECONDS = 0.2
"""Between two tries at a record that others have locked: half of the lane's time at most."""
_ADOPT_ROUNDS = 3


class _Ending(msgspec.Struct, eq=False):
    """A settlement on its way. `size`: bytes of its reply."""

    request: SettleRequest
    done: Callable[[SettleOutcome], None]
    size: int
    not_before: float = 0.0  # boot-time clock

    def bury(self, *, head_too: bool) -> None:
        """Keep the completion, let go of the reply: a tombstone."""
        head = None if head_too else self.request.head
        self.request = msgspec.structs.replace(self.request, head=head, body=None)
        self.size = len(head or b"")


class _Adoption(msgspec.Struct, eq=False):
    """An execution without an acknowledged claim: claim first, then settle."""

    request: ClaimRequest
    ending: _Ending


class Writes(Lane):
    """One lane, three queues. Nothing leaves a queue before the store has answered definitely."""

    def __init__(self, link: Link, heartbeat: Heartbeat) -> None:
        super().__init__(link, Role.SETTLE)
        self._heartbeat = heartbeat
        self._endings: deque[_Ending] = deque()
        self._stuck: deque[_Ending] = deque()  # their rows were locked: each alone, after the others
        self._abandons: dict[bytes, ClaimRequest] = {}
        self._adoptions: deque[_Adoption] = deque()
        self._not_before = 0.0  # for abandons and adoptions, after one of their rows was locked
        self._under_way = 0
        self._bytes = 0
        self._wait = _FIRST_WAIT_SECONDS
        self._drained: list[asyncio.Future[None]] = []

    @property
    def pending(self) -> int:
        """Settlements and adoptions without a definite answer."""
        return len(self._endings) + len(self._stuck) + len(self._adoptions) + self._under_way

    @property
    def quiet(self) -> bool:
        """Whether nothing is pending at all."""
        return not self.pending and not self._abandons

    def settle(self, request: SettleRequest, done: Callable[[SettleOutcome], None]) -> None:
        """Queue a settlement."""
        self._heartbeat.settling(request.claim_id)
        self._endings.append(self._ending(request, done))
        self.wake()

    def abandon(self, request: ClaimRequest) -> None:
        """Queue an abandoned claim."""
        self._abandons[request.claim_id] = request
        self.wake()

    def adopt(self, request: ClaimRequest, settle: SettleRequest, done: Callable[[SettleOutcome], None]) -> None:
        """Queue an adopted execution."""
        self._adoptions.append(_Adoption(request, self._ending(settle, done)))
        self.wake()

    async def drained(self) -> None:
        """Wait until nothing is pending."""
        if not self.quiet:
            waiter = asyncio.get_running_loop().create_future()
            self._drained.append(waiter)
            await waiter

    async def work(self) -> bool:
        """Write one batch of what is pending, most urgent first."""
        if not self.connected and not self.link.up:
            await self.link.risen()
        if await self.ready() is None:
            await self._pause()
            return True
        if self._endings:
            await self._settle(self._take())
        if self.session is not None and self._stuck and self._stuck[0].not_before <= boot():
            await self._settle([self._stuck.popleft()])
        if self.session is not None and self._abandons and self._not_before <= boot():
            await self._abandon()
        if self.session is not None and self._adoptions and self._not_before <= boot():
            await self._adopt()
        if self.quiet:
            waiters, self._drained = self._drained, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
            return False
        if self._endings or ((self._abandons or self._adoptions) and self._not_before <= boot()):
            return True
        asyncio.get_running_loop().call_later(_STUCK_SECONDS, self.wake)
        return False

    # ---- settlements ---------------------------------------------------------------------------------------------

    def _ending(self, request: SettleRequest, done: Callable[[SettleOutcome], None]) -> _Ending:
        ending = _Ending(request, done, len(request.head or b"") + len(request.body or b""))
        if self._bytes + ending.size > MAX_PENDING_BYTES:
            ending.bury(head_too=False)
            self.link.observer.error("settle", "pending_memory")
        self._bytes += ending.size
        return ending

    def _take(self) -> list[_Ending]:
        batch: list[_Ending] = []
        size = 0
        while self._endings and len(batch) < MAX_BATCH_ROWS:
            size += _ROW_BYTES + self._endings[0].size
            if batch and size > MAX_BATCH_BYTES:
                break
            batch.append(self._endings.popleft())
        return batch

    async def _settle(self, batch: list[_Ending], *, deadlocked: bool = False) -> None:
        self._under_way += len(batch)
        try:
            arguments = settle_arguments([ending.request for ending in batch])
            answer = await self.ask("settle", arguments, len(batch), self.link.timeout)
        finally:
            self._under_way -= len(batch)
        if answer.fault is not None:
            await self._after(answer.fault, batch, deadlocked=deadlocked)
            return
        for row in answer.rows:
            self._end(batch[row["n"] - 1], settle_outcome(row))

    async def _after(self, fault: Fault, batch: list[_Ending], *, deadlocked: bool) -> None:
        """What a failed statement means for its settlements: nothing is given up, whatever it was."""
        alone = len(batch) == 1
        if fault.kind is Kind.DEADLOCK and not deadlocked:
            await self._settle(batch, deadlocked=True)
        elif fault.kind is Kind.LOCKED and not alone:
            for number, ending in enumerate(batch):
                if self.session is None:
                    self._endings.extendleft(reversed(batch[number:]))
                    return
                await self._settle([ending])
        elif fault.kind is Kind.LOCKED:
            batch[0].not_before = boot() + _STUCK_SECONDS
            self._stuck.append(batch[0])
        elif fault.kind is Kind.ROW and not alone:
            half = len(batch) // 2
            await self._settle_if_connected(batch[:half])
            await self._settle_if_connected(batch[half:])
        elif fault.kind is Kind.ROW and batch[0].request.head is not None:
            self._bytes -= batch[0].size
            batch[0].bury(head_too=True)
            await self._settle(batch)
        elif fault.kind is Kind.ROW:
            self._end(batch[0], SettleOutcome.REFUSED)  # not even a tombstone can be written: a defect, counted
        else:
            self._endings.extendleft(reversed(batch))
            await self._pause()

    async def _settle_if_connected(self, batch: list[_Ending]) -> None:
        if self.session is None:
            self._endings.extendleft(reversed(batch))
        else:
            await self._settle(batch)

    def _end(self, ending: _Ending, outcome: SettleOutcome) -> None:
        self._bytes -= ending.size
        self._heartbeat.forget(ending.request.claim_id)
        call_back(ending.done, outcome)

    # ---- abandons and adoptions ----------------------------------------------------------------------------------

    async def _abandon(self) -> None:
        batch: dict[bytes, ClaimRequest] = {}  # one entry for each record: the rest comes with the next statement
        for request in self._abandons.values():
            if len(batch) == MAX_BATCH_ROWS:
                break
            batch.setdefault(request.identity.record_id, request)
        requests = list(batch.values())
        answer = await self.ask("abandon", abandon_arguments(requests), len(requests), self.link.timeout)
        if answer.fault is not None and answer.fault.kind in (Kind.LOCKED, Kind.ROW) and len(requests) > 1:
            for request in requests:
                if self.session is not None:
                    await self._abandon_alone(request)
        elif answer.fault is not None:
            await self._abandon_failed(answer.fault, requests)
        else:
            for request in requests:
                self._abandons.pop(request.claim_id, None)

    async def _abandon_alone(self, request: ClaimRequest) -> None:
        answer = await self.ask("abandon", abandon_arguments([request]), 1, self.link.timeout)
        if answer.fault is None:
            self._abandons.pop(request.claim_id, None)
        else:
            await self._abandon_failed(answer.fault, [request])

    async def _abandon_failed(self, fault: Fault, requests: list[ClaimRequest]) -> None:
        if fault.kind is Kind.ROW:
            del self._abandons[requests[0].claim_id]  # cannot be written, so its claim never was
            return
        for request in requests:  # to the end: others need not wait for a locked row
            self._abandons[request.claim_id] = self._abandons.pop(request.claim_id)
        await self._wait_after(fault)

    async def _adopt(self) -> None:
        """Claim for executions that went ahead without the store; then they are settlements like any other."""
        adoption = self._adoptions.popleft()
        self._under_way += 1
        try:
            request = adoption.request
            for _ in range(_ADOPT_ROUNDS):
                anchor = Anchor()
                arguments: Any = claim_arguments([request], self.link.calm_ms())
                answer = await self.ask("claim", arguments, 1, self.link.timeout)
                if answer.fault is not None:
                    break
                found = claim_outcome(answer.rows[0], request, anchor.trusted_until(request.lease_ms))
                if isinstance(found, Acquired):
                    self._heartbeat.keep(found.lease, anchor)
                    self._heartbeat.settling(request.claim_id)
                    self._endings.append(adoption.ending)
                    return
                if isinstance(found, OtherRecipe):
                    request = msgspec.structs.replace(request, fingerprint=found.fingerprint)  # taken as equal
                elif found is not None:
                    break
        finally:
            self._under_way -= 1
        if answer.fault is None or answer.fault.kind is Kind.ROW:
            self._end(adoption.ending, SettleOutcome.LOST)
        else:
            self._adoptions.append(adoption)
            await self._wait_after(answer.fault)

    async def _wait_after(self, fault: Fault) -> None:
        """Settlements need not wait for a locked row of an abandoned claim; for a store that fails, all do."""
        if fault.kind is Kind.LOCKED:
            self._not_before = boot() + _STUCK_SECONDS
        elif fault.kind is not Kind.DEADLOCK:
            await self._pause()

    async def ask(self, name: str, arguments: Any, rows: int, seconds: float) -> Answer:
        """Run one statement; an answer ends the growing of the pauses between failures."""
        answer = await super().ask(name, arguments, rows, seconds)
        if answer.fault is None:
            self._wait = _FIRST_WAIT_SECONDS
        return answer

    async def _pause(self) -> None:
        wait, self._wait = self._wait, min(2 * self._wait, _LONGEST_WAIT_SECONDS)
        await asyncio.sleep(wait * random.uniform(0.8, 1.0))  # noqa: S311 -- jitter, no secret
