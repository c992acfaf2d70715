"""Keeps leases: renews all that the process holds in one statement, well before they run out, on its own connection."""

import asyncio
import random

import msgspec

from gateway.model import Lease
from gateway.store.clock import VOID, Anchor, boot
from gateway.store.lanes import MAX_BATCH_ROWS, Lane
from gateway.store.link import Link
from gateway.store.session import Role
from gateway.store.statements import renew_arguments

_LONGEST_TICK_SECONDS = 10.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.05, 1.0


class _Kept(msgspec.Struct, eq=False):
    """A lease and the moment before the statement was sent that last wrote its end."""

    lease: Lease
    anchor: Anchor
    settling: bool = False


class Heartbeat(Lane):
    """The leases held, by claim id, and the loop that renews them."""

    def __init__(self, link: Link) -> None:
        super().__init__(link, Role.RENEW)
        self._kept: dict[bytes, _Kept] = {}
        self._shortest_ms = 0
        self._wait = _FIRST_WAIT_SECONDS
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, claim_id: object) -> bool:
        return claim_id in self._kept

    def keep(self, lease: Lease, anchor: Anchor) -> None:
        """Renew `lease`, written by a statement sent at `anchor`, until told otherwise."""
        sooner = not self._kept or lease.lease_ms < self._shortest_ms
        self._kept[lease.claim_id] = _Kept(lease, anchor)
        if sooner:
            self._shortest_ms = lease.lease_ms
            self._set_alarm(self._tick_seconds())

    def settling(self, claim_id: bytes) -> None:
        """A settlement is on its way: a renewal that finds the lease gone may have met just that."""
        if (kept := self._kept.get(claim_id)) is not None:
            kept.settling = True

    def forget(self, claim_id: bytes) -> bool:
        """Stop renewing; True if the lease was held."""
        return self._kept.pop(claim_id, None) is not None

    async def stop(self) -> None:
        """End the loop and close the connection; nothing is renewed any more."""
        if self._alarm is not None:
            self._alarm.cancel()
        await super().stop()

    async def work(self) -> bool:
        """Renew what is due. The connection is opened ahead, so that the first renewal finds it."""
        if not self._kept and not self.connected and not self.link.up:
            await self.link.risen()  # with leases to keep it tries by itself
        if await self.ready() is None:
            await self._pause()
            return True
        due = self._due()
        for start in range(0, len(due), MAX_BATCH_ROWS):
            if not await self._renew(due[start : start + MAX_BATCH_ROWS]):
                await self._pause()
                return True
        self._wait = _FIRST_WAIT_SECONDS
        if self._kept:
            self._shortest_ms = min(kept.lease.lease_ms for kept in self._kept.values())
            self._set_alarm(self._tick_seconds())
        return False

    def _due(self) -> list[_Kept]:
        """Whatever would be older than a third of its length at the next tick."""
        now, tick = boot(), self._tick_seconds()
        for kept in self._kept.values():
            if kept.lease.trusted_until and kept.anchor.drifted(kept.lease.lease_ms):
                kept.lease.trusted_until = VOID
        return [kept for kept in self._kept.values() if now - kept.anchor.boot + tick > kept.lease.lease_ms / 3000]

    async def _renew(self, batch: list[_Kept]) -> bool:
        anchor = Anchor()
        timeout = min(self.link.timeout, max(0.1, self._shortest_ms / 3000))
        answer = await self.ask("renew", renew_arguments([kept.lease for kept in batch]), len(batch), timeout)
        for row in answer.rows:
            kept = batch[row["n"] - 1]
            lease = kept.lease
            if row["renewed"]:
                kept.anchor = anchor
                lease.trusted_until = anchor.trusted_until(lease.lease_ms)
            elif not row["mine"] and not kept.settling and self._kept.get(lease.claim_id) is kept:
                del self._kept[lease.claim_id]
                lease.lost, lease.trusted_until = True, VOID
                self.link.observer.lease_lost(lease)
        return answer.fault is None

    def _tick_seconds(self) -> float:
        return min(self._shortest_ms / 3000, _LONGEST_TICK_SECONDS)

    def _set_alarm(self, seconds: float) -> None:
        """Wake the loop then, or a little earlier: processes that started together must not tick together."""
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds * random.uniform(0.8, 1.0)  # noqa: S311 -- jitter, no secret
        if self._alarm is not None:
            if loop.time() < self._alarm_at <= at:
                return
            self._alarm.cancel()
        self._alarm_at = at
        self._alarm = loop.call_at(at, self.wake)

    async def _pause(self) -> None:
        # After its restart a database keeps leases for the length of one: several tries have to fall into that.
        longest = min(self._tick_seconds(), _LONGEST_WAIT_SECONDS) if self._kept else _LONGEST_WAIT_SECONDS
        wait, self._wait = min(self._wait, longest), min(2 * self._wait, longest)
        await asyncio.sleep(wait * random.uniform(0.8, 1.0))  # noqa: S311 -- jitter, no secret
