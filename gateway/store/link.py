"""Whether the store can be used, as all lanes see it: up or down, since when undisturbed, which server, which epoch."""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from gateway.errors import SchemaError
from gateway.store.clock import boot
from gateway.store.faults import Fault, UnfitError, classify
from gateway.store.observer import StoreObserver
from gateway.store.session import Role, Server, Session, open_session

_CLOCK_JUMP_SECONDS = 0.5
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.05, 1.0


class LinkSettings(msgspec.Struct, frozen=True):
    """How to reach the store. `dsn` is asked again for every new connection: its file may have been rotated."""

    dsn: Callable[[], str]
    schema: str
    transaction_pooled: bool
    timeout_ms: int


class StoreState(msgspec.Struct, frozen=True):
    """For `/readyz`. `cause` is a word and `sentence` for people, both empty while up.

    `schema_usable` is None until the schema could be asked. `warnings`: what weakens the guarantees, as sentences.
    """

    up: bool
    cause: str
    sentence: str
    schema_usable: bool | None
    warnings: tuple[str, ...]


class Link:
    """Opens sessions; when the lane that matters cannot have one, the store is down until the probe can."""

    def __init__(self, settings: LinkSettings, observer: StoreObserver) -> None:
        self.settings = settings
        self.observer = observer
        self.timeout = settings.timeout_ms / 1000
        self.up = False
        self.fault = Fault(kind=classify(TimeoutError()).kind, cause="starting", sentence="Not connected yet.")
        self.schema_usable: bool | None = None
        self.server: Server | None = None
        self.epoch = 0
        self.on_down: list[Callable[[Fault], None]] = []
        self._rising = asyncio.Event()
        self._spare: Session | None = None
        self._probe: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._calm_from = -math.inf
        self._database_less_boot: tuple[float, float] | None = None

    @property
    def state(self) -> StoreState:
        """How it stands, for people."""
        cause, sentence = ("", "") if self.up else (self.fault.cause, self.fault.sentence)
        warnings = self.server.warnings if self.server is not None else ()
        return StoreState(self.up, cause, sentence, self.schema_usable, warnings)

    # ---- sessions ------------------------------------------------------------------------------------------------

    async def open(self, role: Role) -> Session:
        """Return a session for `role`. Raises what `faults.classify` knows; it is counted already."""
        if role is Role.CLAIM and self._spare is not None:
            session, self._spare = self._spare, None
            if not session.closed:
                return session
        try:
            settings = self.settings
            session = await open_session(
                settings.dsn(),
                settings.schema,
                role,
                transaction_pooled=settings.transaction_pooled,
                timeout_ms=settings.timeout_ms,
            )
            try:
                self._meet(session.server)
            except UnfitError:
                self.discard(session)
                raise
        except Exception as error:
            fault = classify(error)
            self.observer.error("connect", fault.cause)
            if isinstance(error, SchemaError):
                self.schema_usable = False
            self.disturbed()
            raise
        return session

    def discard(self, session: Session) -> None:
        """Close a session that saw a fault, in the background."""
        self.spawn(session.close())

    async def start(self) -> None:
        """Try to connect once. Raises only `SchemaError`; while the store cannot be reached it keeps trying."""
        try:
            self._spare = await self.open(Role.CLAIM)
        except SchemaError as error:
            self.fault = classify(error)
            raise
        except Exception as error:  # noqa: BLE001 -- whatever it is, the probe goes on and the state tells it
            self.lower(classify(error))
        else:
            self._calm_from = -math.inf
            self._rise()

    def lower(self, fault: Fault) -> None:
        """The lane that matters has no session: the store is down, and a probe tries until it is not."""
        was_up, self.up, self.fault = self.up, False, fault
        self._rising.clear()
        if was_up:
            self.observer.up(False)
        for told in self.on_down:
            told(fault)
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._probing())

    async def risen(self) -> None:
        """Wait until the store is up."""
        await self._rising.wait()

    async def close(self) -> None:
        """Stop probing and close what the link itself still has."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        if self._spare is not None:
            await self._spare.close()
            self._spare = None
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self.up = False

    def soon(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call from the loop, after the caller has returned: no callback comes from within a method of the store."""
        asyncio.get_running_loop().call_soon(call, *arguments)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside, until `close`."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- contact -------------------------------------------------------------------------------------------------

    def disturbed(self) -> None:
        """Contact was lost, or this may be another server than before: others may not have been able to renew."""
        self._calm_from = math.inf

    def answered(self, sent_at: float, database_time: float, epoch: int) -> None:
        """A statement sent at `sent_at` (boot-time clock) was answered, with the database's clock and epoch."""
        now = boot()
        if self._calm_from == math.inf:
            self._calm_from = now
        self.epoch = epoch
        earliest, latest = database_time - now, database_time - sent_at
        if self._database_less_boot is not None:
            low, high = self._database_less_boot
            if earliest > high + _CLOCK_JUMP_SECONDS or latest < low - _CLOCK_JUMP_SECONDS:
                self._calm_from = now
                self.observer.error("clock", "database_clock_jumped")
        self._database_less_boot = earliest, latest

    def calm_ms(self) -> int | None:
        """For how long contact has been undisturbed; None: always. A takeover waits for one lease of it."""
        if self._calm_from == -math.inf:
            return None
        return max(0, int((boot() - self._calm_from) * 1000)) if self._calm_from != math.inf else 0

    # ---- within --------------------------------------------------------------------------------------------------

    async def _probing(self) -> None:
        wait = _FIRST_WAIT_SECONDS
        while True:
            await asyncio.sleep(wait * random.uniform(0.8, 1.0))  # noqa: S311 -- jitter, no secret
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
            try:
                self._spare = await self.open(Role.CLAIM)
            except Exception as error:  # noqa: BLE001 -- whatever it is, go on trying; the state tells it
                self.fault = classify(error)
            else:
                self._rise()
                return

    def _rise(self) -> None:
        self.up = self.schema_usable = True
        self._rising.set()
        self.observer.up(True)

    def _meet(self, server: Server) -> None:
        """Refuse the old primary of a split brain; be careful with a new one."""
        known, self.server = self.server, server
        if known is not None and known.system_identifier == server.system_identifier:
            if (server.timeline or 0) < (known.timeline or 0):
                self.server = known
                raise UnfitError(
                    "old_primary",
                    f"This PostgreSQL is on timeline {server.timeline}, behind {known.timeline} that was seen before: "
                    "it is the old primary after a failover. Take it off the DSN.",
                )
            if server.timeline == known.timeline:
                return
        if known is not None:
            self.disturbed()
            self._database_less_boot = None
        self.epoch = server.epoch
