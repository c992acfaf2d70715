"""Reads of single records: a stored reply, and whether a record is completed. One statement each, with scalars."""

from collections import deque
from collections.abc import Callable
from typing import Any

from gateway.model import Completed, StoredReply, Unavailable
from gateway.store.clock import boot
from gateway.store.faults import Fault, Kind
from gateway.store.lanes import Deadlines, Lane, call_back
from gateway.store.link import Link
from gateway.store.session import Role
from gateway.store.statements import looked, stored_reply


class _Question:
    """A read on its way."""

    __slots__ = ("answered", "arguments", "deadline", "done", "meaning", "name")

    def __init__(
        self,
        name: str,
        arguments: tuple[Any, ...],
        meaning: Callable[[Any], Any],
        done: Callable[[Any], None],
        deadline: float,
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.meaning = meaning
        self.done = done
        self.deadline = deadline
        self.answered = False

    def answer(self, outcome: Any) -> None:
        """Tell the caller, once."""
        if not self.answered:
            self.answered = True
            call_back(self.done, outcome)


class Reads(Lane):
    """One lane. Its connection is opened by the first read."""

    def __init__(self, link: Link) -> None:
        super().__init__(link, Role.READ)
        self._waiting: deque[_Question] = deque()  # the first is being asked; oldest deadline first
        self._deadlines = Deadlines(self._overdue)
        link.on_down.append(lambda fault: self._fail(fault.cause))

    def reply(
        self, record_id: bytes, completed: Completed, done: Callable[[StoredReply | Unavailable | None], None]
    ) -> None:
        """Fetch a stored reply."""
        if completed.reply_on is None:
            self.link.soon(call_back, done, None)
            return
        arguments = (completed.reply_on, record_id, completed.claim_id)
        self._ask("reply", arguments, lambda row: stored_reply(row, completed.status), done)

    def look(self, record_id: bytes, done: Callable[[Completed | Unavailable | None], None]) -> None:
        """Read whether a record is completed."""
        self._ask("look", (record_id, None), looked, done)

    async def stop(self) -> None:
        """End the lane; whoever still waits is told `Unavailable`."""
        self._deadlines.stop()
        await super().stop()
        self._fail("closed")

    async def work(self) -> bool:
        """Ask the next question."""
        while self._waiting and self._waiting[0].answered:
            self._waiting.popleft()
        if not self._waiting or await self.ready() is None or not self._waiting:
            return False
        question = self._waiting[0]
        answer = await self.ask(question.name, question.arguments, 1, self.link.timeout)
        if answer.fault is None:
            self.link.epoch = answer.rows[0]["epoch"]
            question.answer(question.meaning(answer.rows[0]))
        elif answer.fault.kind is not Kind.UNKNOWN:
            question.answer(Unavailable(answer.fault.cause))
        return True  # an unknown one is asked again while its caller waits

    def unreachable(self, fault: Fault) -> None:
        """Who waits need not wait longer."""
        self._fail(fault.cause)

    def _ask(
        self, name: str, arguments: tuple[Any, ...], meaning: Callable[[Any], Any], done: Callable[[Any], None]
    ) -> None:
        if not self.link.up:
            self.link.soon(call_back, done, Unavailable(self.link.fault.cause))
            return
        self._waiting.append(_Question(name, arguments, meaning, done, boot() + self.link.timeout))
        self.wake()
        self._deadlines.watch()

    def _overdue(self, now: float) -> bool:
        for question in self._waiting:
            if question.deadline > now:
                return True
            question.answer(Unavailable("timeout"))
        return False

    def _fail(self, cause: str) -> None:
        for question in self._waiting:
            question.answer(Unavailable(cause))
