"""Asks for leases: batches of claims over two or more lanes, each claim for a bounded time."""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from gateway.model import Acquired, ClaimOutcome, ClaimRequest, Held, Unavailable
from gateway.store.clock import VOID, Anchor, boot
from gateway.store.faults import Fault, Kind
from gateway.store.heartbeat import Heartbeat
from gateway.store.lanes import MAX_BATCH_BYTES, MAX_BATCH_ROWS, Deadlines, Lane, call_back
from gateway.store.link import Link
from gateway.store.session import Role
from gateway.store.statements import claim_arguments, claim_outcome

_ROUNDS = 3
"""How often a claim is asked again because the row changed between snapshot and write."""
_SLOW_SECONDS = 0.05
"""A statement under way for longer lets the next lane go ahead: before, two batches would only be smaller ones."""
_PAUSE_SECONDS = 0.05
_ROW_BYTES = 256


class _Asked(msgspec.Struct, eq=False):
    """A claim on its way."""

    request: ClaimRequest
    done: Callable[[ClaimOutcome], None]
    deadline: float
    rounds: int = 0
    sent: bool = False  # a statement with it went out and its fate is not known
    abandoned: bool = False
    ended: bool = False  # its caller was told, and gives up by itself what comes later


class Claims:
    """All claims that wait or are under way, and their lanes."""

    def __init__(self, link: Link, heartbeat: Heartbeat, lanes: int, give_up: Callable[[ClaimRequest], None]) -> None:
        self._link = link
        self._heartbeat = heartbeat
        self._give_up = give_up
        self._pending: dict[bytes, _Asked] = {}  # oldest deadline first
        self._uncertain: set[bytes] = set()
        self._endings: list[asyncio.Future[None]] = []
        self._waiting: deque[_Asked] = deque()
        self._deadlines = Deadlines(self._overdue)
        self.lanes = [_ClaimLane(link, self, first=number == 0) for number in range(lanes)]
        self._first = self.lanes[0]
        link.on_down.append(self._fail_waiting)

    def start(self) -> None:
        """Start the lanes."""
        for lane in self.lanes:
            lane.start()

    async def stop(self) -> None:
        """End the lanes; whoever still waits is told `Unavailable`."""
        self._deadlines.stop()
        await asyncio.gather(*(lane.stop() for lane in self.lanes))
        self._waiting.clear()
        for asked in list(self._pending.values()):
            self._finish(asked, Unavailable("closed"))

    def ask(self, request: ClaimRequest, done: Callable[[ClaimOutcome], None]) -> None:
        """Let a claim wait for the next batch."""
        asked = _Asked(request, done, boot() + self._link.timeout)
        self._pending[request.claim_id] = asked
        if not self._link.up:
            self._link.soon(self._finish, asked, Unavailable(self._link.fault.cause))
            return
        self._waiting.append(asked)
        self._first.wake()
        self._deadlines.watch()

    def abandon(self, claim_id: bytes) -> bool:
        """Whether the claim may have been, or may yet be, written, and nothing else sees to giving it up."""
        asked = self._pending.get(claim_id)
        if asked is not None:
            asked.abandoned = True
            return False
        if claim_id in self._uncertain:
            self._uncertain.discard(claim_id)
            return True
        return False

    async def abandoned(self) -> None:
        """Wait until no claim that was given up is under way any more."""
        while any(asked.abandoned for asked in self._pending.values()):
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._endings.append(ended)
            await ended

    @property
    def waiting(self) -> bool:
        """Whether a claim waits for a lane."""
        return bool(self._waiting)

    # ---- for the lanes -------------------------------------------------------------------------------------------

    def take(self) -> list[_Asked]:
        """Take the next batch: bounded in rows and bytes, one entry for each record."""
        waiting, size = self._waiting, 0
        batch: list[_Asked] = []
        later: list[_Asked] = []
        records: set[bytes] = set()
        while waiting and len(batch) < MAX_BATCH_ROWS:
            asked = waiting.popleft()
            if asked.ended:
                continue
            if asked.abandoned and not asked.sent:
                self._finish(asked, Unavailable("abandoned"))
                continue
            identity = asked.request.identity
            if identity.record_id in records:
                later.append(asked)
                continue
            size += _ROW_BYTES + len(identity.key) + len(identity.scope)
            if batch and size > MAX_BATCH_BYTES:
                later.append(asked)
                break
            records.add(identity.record_id)
            batch.append(asked)
        waiting.extendleft(reversed(later))
        return batch

    def answered(self, asked: _Asked, outcome: ClaimOutcome | None, anchor: Anchor) -> None:
        """The statement's word on one claim. None: it has to be asked again."""
        if asked.ended:
            return
        asked.sent = False
        if outcome is None:
            asked.rounds += 1
            if asked.rounds < _ROUNDS:
                self.again([asked])
                return
            outcome = Held(0, first_seen_unix=anchor.boot + anchor.offset)  # each time somebody else came first
        if not isinstance(outcome, Acquired):
            self._heartbeat.forget(asked.request.claim_id)
        elif asked.abandoned:
            self._give_up(asked.request)
            outcome = Unavailable("abandoned")
        else:
            self._heartbeat.keep(outcome.lease, anchor)
        self._finish(asked, outcome)

    def again(self, batch: list[_Asked]) -> None:
        """Put back what has to be asked again by the same claim id, or end it if the store is down."""
        living = [asked for asked in batch if not asked.ended]
        if self._link.up:
            self._waiting.extendleft(reversed(living))
            return
        for asked in living:
            self._finish(asked, Unavailable(self._link.fault.cause))

    def failed(self, batch: list[_Asked]) -> None:
        """A defect kept these from being answered."""
        for asked in batch:
            self._finish(asked, Unavailable("client_fault"))

    def refuse(self, asked: _Asked, fault: Fault) -> None:
        """A definite failure: nothing was written."""
        asked.sent = False
        self._finish(asked, Unavailable(fault.cause))

    # ---- within --------------------------------------------------------------------------------------------------

    def _finish(self, asked: _Asked, outcome: ClaimOutcome) -> None:
        if asked.ended:
            return
        asked.ended = True
        claim_id = asked.request.claim_id
        del self._pending[claim_id]
        if asked.sent:  # Unavailable, and it may have been written
            if asked.abandoned:
                self._give_up(asked.request)
            else:
                self._uncertain.add(claim_id)
        elif self._uncertain:
            self._uncertain.discard(claim_id)
        call_back(asked.done, outcome)
        if self._endings:
            endings, self._endings = self._endings, []
            for ended in endings:
                ended.set_result(None)

    def _overdue(self, now: float) -> bool:
        while self._pending:
            asked = next(iter(self._pending.values()))
            if asked.deadline > now:
                self._relieve(now)
                return True
            self._finish(asked, Unavailable("timeout"))
        return False

    def _fail_waiting(self, fault: Fault) -> None:
        waiting = list(self._waiting)
        self._waiting.clear()
        for asked in waiting:
            self._finish(asked, Unavailable(fault.cause))

    def _relieve(self, now: float) -> None:
        """Let the next lane go ahead when every busy one is slow."""
        if not self._waiting:
            return
        for lane in self.lanes:
            if lane.idle:
                lane.wake()
                return
            if lane.busy_since is not None and now - lane.busy_since < _SLOW_SECONDS:
                return


class _ClaimLane(Lane):
    """Asks for one batch at a time. The first lane keeps a session open: it tells whether the store is up."""

    def __init__(self, link: Link, claims: Claims, *, first: bool) -> None:
        super().__init__(link, Role.CLAIM)
        self._claims = claims
        self._first = first
        self._failed = False

    async def work(self) -> bool:
        """Ask for what waits."""
        claims = self._claims
        if self._first:
            while not self.link.up or await self.ready() is None:
                await self.link.risen()
        elif not claims.waiting or not self.link.up or await self.ready() is None:
            return False
        batch = claims.take()
        try:
            if batch:
                await self._ask(batch)
        except Exception:
            claims.failed(batch)
            raise
        return bool(batch)

    def unreachable(self, fault: Fault) -> None:
        """Without the first lane there are no claims: the store is down."""
        if self._first:
            self.link.lower(fault)

    async def _ask(self, batch: list[_Asked], *, deadlocked: bool = False) -> None:
        claims = self._claims
        if await self.ready() is None:
            claims.again(batch)
            return
        batch = [asked for asked in batch if not asked.ended]
        if not batch:
            return
        for asked in batch:
            asked.sent = True
        anchor = Anchor()
        arguments = claim_arguments([asked.request for asked in batch], self.link.calm_ms())
        answer = await self.ask("claim", arguments, len(batch), self.link.timeout)
        if answer.fault is not None:
            await self._after(answer.fault, batch, deadlocked=deadlocked)
            return
        self._failed = False
        lease_ms, trusted_until = 0, VOID
        for row in answer.rows:
            asked = batch[row["n"] - 1]
            request = asked.request
            if request.lease_ms != lease_ms:  # judged once for a batch, which mostly has leases of one length
                lease_ms, trusted_until = request.lease_ms, anchor.trusted_until(request.lease_ms)
            claims.answered(asked, claim_outcome(row, request, trusted_until), anchor)

    async def _after(self, fault: Fault, batch: list[_Asked], *, deadlocked: bool) -> None:
        """What a failed statement means for its claims. None of the ways is endless: each claim has its deadline."""
        claims = self._claims
        if fault.kind is Kind.UNKNOWN:
            claims.again(batch)
            if self._failed:
                await asyncio.sleep(_PAUSE_SECONDS)  # twice in a row: not as fast as it can
            self._failed = True
            return
        for asked in batch:
            asked.sent = False
        if fault.kind is Kind.DEADLOCK and not deadlocked:
            await self._ask(batch, deadlocked=True)
        elif fault.kind is Kind.LOCKED and len(batch) > 1:
            for asked in batch:
                await self._ask([asked])
        elif fault.kind is Kind.ROW and len(batch) > 1:
            half = len(batch) // 2
            await self._ask(batch[:half])
            await self._ask(batch[half:])
        else:
            for asked in batch:
                claims.refuse(asked, fault)
