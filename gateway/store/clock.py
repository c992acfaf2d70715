"""Clocks, and what a holder may believe of its lease. No I/O.

Trust is anchored to the boot-time clock as it was *before* the statement that wrote the lease was sent: the lease can
only end later than that plus its length. CLOCK_MONOTONIC would stop while the machine sleeps.
"""

import functools
import time

_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # elsewhere than on Linux the latter counts sleep too

VOID = 0.0
"""`trusted_until` of a lease that nobody may rely on."""


boot = functools.partial(time.clock_gettime, _BOOT)
"""Return the boot-time clock in seconds."""


def wall_less_boot() -> float:
    """Return by how much the wall clock is ahead of the boot-time clock, in seconds.

    Constant but for the slow corrections of NTP. A step tells that one of the two clocks cannot be believed: a virtual
    machine that was paused or restored, a clock set by hand.
    """
    return time.time() - time.clock_gettime(_BOOT)


def margin_seconds(lease_ms: int) -> float:
    """Return how much earlier than its end a lease stops being trusted: a tenth, at most a second."""
    return min(1.0, lease_ms / 10_000)


class Anchor:
    """The moment before a statement was sent, by both clocks."""

    __slots__ = ("boot", "offset")

    def __init__(self) -> None:
        self.boot = boot()
        self.offset = wall_less_boot()

    def drifted(self, lease_ms: int) -> bool:
        """Tell whether the two clocks have gone apart since by more than a lease's margin."""
        return abs(wall_less_boot() - self.offset) > margin_seconds(lease_ms)

    def trusted_until(self, lease_ms: int) -> float:
        """Return until when a lease written by that statement may be trusted, VOID if the clocks went apart since."""
        if self.drifted(lease_ms):
            return VOID
        return self.boot + lease_ms / 1000 - margin_seconds(lease_ms)
