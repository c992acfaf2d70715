"""A lane: one loop with a connection of its own, woken when there is something to do. Knows no statement.

What waits while a statement is under way goes out together in the next one; nothing waits on a timer.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from gateway.store.clock import boot
from gateway.store.faults import Fault, Kind, classify
from gateway.store.link import Link
from gateway.store.session import Role, Session

MAX_BATCH_ROWS = 512
MAX_BATCH_BYTES = 4 * 1024 * 1024
_SWEEP_SECONDS = 0.05


def call_back(done: Callable[[Any], None], outcome: Any) -> None:
    """Give a caller its answer; what it does with it must not stop the lane."""
    try:
        done(outcome)
    except Exception as error:  # noqa: BLE001 -- a caller's fault, told as such
        report(f"a callback of the store failed: {done!r}", error)


def report(message: str, error: Exception) -> None:
    """Tell of a defect by way of the loop's exception handler."""
    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})


class Lane(ABC):
    """One loop, one connection, one batch under way."""

    def __init__(self, link: Link, role: Role) -> None:
        self.link = link
        self.session: Session | None = None
        self.busy_since: float | None = None
        """Boot-time clock when the statement under way was sent."""
        self._role = role
        self._woken: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether the loop waits to be woken."""
        return self._woken is not None

    @property
    def connected(self) -> bool:
        """Whether it has a session that is not known to be lost."""
        return self.session is not None and not self.session.closed

    def start(self) -> None:
        """Start the loop."""
        self._task = asyncio.ensure_future(self._run())

    def wake(self) -> None:
        """Let the loop look for work."""
        woken = self._woken
        if woken is not None:
            self._woken = None
            if not woken.done():
                woken.set_result(None)

    async def stop(self) -> None:
        """End the loop, whatever is under way, and close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.session is not None:
            await self.session.close()
            self.session = None

    @abstractmethod
    async def work(self) -> bool:
        """Do one round. False: there was nothing to do."""

    async def ready(self) -> Session | None:
        """Return an open session, opening one if need be; None when that failed, which is counted already."""
        if self.session is not None:
            if not self.session.closed:
                return self.session
            self.discard_session()
        try:
            session = await self.link.open(self._role)
        except Exception as error:  # noqa: BLE001 -- adapters translate at one point: classify
            self.unreachable(classify(error))
            return None
        self.session = session
        session.lost = self._lost
        return session

    def unreachable(self, fault: Fault) -> None:  # noqa: B027 -- most lanes just try again
        """Told when no session could be opened."""

    async def ask(self, name: str, arguments: Any, rows: int, seconds: float) -> "Answer":
        """Run one statement; a fault is part of the answer, and a session that may be spoiled is dropped."""
        session = self.session
        assert session is not None  # noqa: S101 -- `ready` came before
        self.busy_since = sent_at = boot()
        try:
            found = await session.fetch(name, arguments, seconds)
        except Exception as error:  # noqa: BLE001 -- adapters translate at one point: classify
            fault = classify(error)
            self.link.observer.error(name, fault.cause)
            if fault.kind is Kind.UNKNOWN:
                self.link.disturbed()
                self.discard_session()
            return Answer([], fault)
        finally:
            self.busy_since = None
        self.link.observer.statement(name, rows, boot() - sent_at)
        row = found[0]
        if "t" in row:
            self.link.answered(sent_at, row["t"], row["epoch"])
        return Answer(found, None)

    def discard_session(self) -> None:
        """Discard the session."""
        session, self.session = self.session, None
        if session is not None:
            self.link.discard(session)

    async def _run(self) -> None:
        while True:
            try:
                more = await self.work()
            except Exception as error:  # noqa: BLE001 -- a defect: told, and no reason to stop the lane
                report("a lane of the store failed", error)
                self.discard_session()
                more = False
            if not more:
                self._woken = asyncio.get_running_loop().create_future()
                await self._woken
                self._woken = None
            # One more turn of the loop: what it reads goes out in the same batch (at 32 connections 15 rows, not 9).
            await asyncio.sleep(0)

    def _lost(self) -> None:
        self.link.disturbed()
        self.wake()


class Answer:
    """Rows, or the fault instead."""

    __slots__ = ("fault", "rows")

    def __init__(self, rows: list[Any], fault: Fault | None) -> None:
        self.rows = rows
        self.fault = fault


class Deadlines:
    """Ends what waits too long, although the lanes are busy: one coarse timer, armed only while somebody waits.

    `overdue(now)` ends whoever's deadline has passed and says whether somebody still waits.
    """

    def __init__(self, overdue: Callable[[float], bool]) -> None:
        self._overdue = overdue
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Somebody waits."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    def stop(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = None
        if self._overdue(boot()):
            self.watch()
