"""Reads of single records: a stored reply, and whether a record is completed. One statement each, with scalars."""

from collections.abc import Callable
from typing import Any

from gateway.model import Completed, StoredReply, Unavailable
from gateway.store.clock import boot
from gateway.store.faults import Fault, Kind
from gateway.store.lanes import Lane, Waiting, call_back
from gateway.store.link import Link
from gateway.store.session import Role
from gateway.store.statements import looked, stored_reply


class _Question:
    """A read on its way."""

    __slots__ = ("arguments", "deadline", "done", "meaning", "name")

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


class Reads(Lane):
    """One lane. Its connection is opened by the first read."""

    def __init__(self, link: Link) -> None:
        super().__init__(link, Role.READ)
        self._waiting: Waiting[_Question] = Waiting(self._expire)
        link.on_down.append(self._fail_waiting)

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
        self._waiting.stop()
        await super().stop()
        for question in self._waiting.clear():
            call_back(question.done, Unavailable("closed"))

    async def work(self) -> bool:
        """Ask the next question."""
        if not len(self._waiting):
            return False
        if await self.ready() is None:
            return bool(len(self._waiting))
        if not len(self._waiting):
            return False
        question = self._waiting.popleft()
        timeout = question.deadline - boot()
        if timeout <= 0:
            self._expire(question)
            return True
        answer = await self.ask(question.name, question.arguments, 1, timeout)
        if answer.fault is None:
            self.link.epoch = answer.rows[0]["epoch"]
            call_back(question.done, question.meaning(answer.rows[0]))
        elif answer.fault.kind is Kind.UNKNOWN and self.link.up:
            self._waiting.push_back([question])
        else:
            call_back(question.done, Unavailable(answer.fault.cause))
        return True

    def unreachable(self, fault: Fault) -> None:
        """Who waits need not wait longer."""
        self._fail_waiting(fault)

    def _ask(
        self, name: str, arguments: tuple[Any, ...], meaning: Callable[[Any], Any], done: Callable[[Any], None]
    ) -> None:
        if not self.link.up:
            self.link.soon(call_back, done, Unavailable(self.link.fault.cause))
            return
        self._waiting.append(_Question(name, arguments, meaning, done, boot() + self.link.timeout))
        if self.idle:
            self.wake()
        else:
            self._waiting.watch()

    def _expire(self, question: _Question) -> None:
        call_back(question.done, Unavailable("timeout"))

    def _fail_waiting(self, fault: Fault) -> None:
        for question in self._waiting.clear():
            call_back(question.done, Unavailable(fault.cause))
