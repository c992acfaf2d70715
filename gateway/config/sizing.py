"""What a configuration costs: bytes kept, memory, connections, time to stop. Arithmetic only."""

import math

from gateway.config.load import Config, RouteConfig
from gateway.config.policy import Mode

SECONDS_A_DAY = 86_400
MS_A_DAY = 86_400_000

RECORD_BYTES = 710
"""One completed record with its three index entries, at fill factor 50: measured on PostgreSQL 18, 20,000 rows."""

REPLY_BYTES = 1_750
"""One stored reply with 300 bytes of head and 1 KiB of body, its index entry included: measured likewise."""

KILL_MARGIN_SECONDS = 5
"""Between the end of our own shutdown and the KILL of whoever runs us: time to write what is in doubt."""

LEAST_LANES = 4  # settlements, reads, and two for claims
_UNITS = ("B", "kB", "MB", "GB", "TB")
EXTRA_CONNECTIONS = 2  # the heartbeat's, and the janitor's while it works


def stored_bytes(rps: float, keep_days: float, record_bytes: int = RECORD_BYTES + REPLY_BYTES) -> int:
    """Bytes kept in the long run: requests/s x 86,400 x days x bytes a record."""
    return round(rps * SECONDS_A_DAY * keep_days * record_bytes)


def route_bytes(route: RouteConfig, rps: float) -> int:
    """Bytes that a route keeps at so many first-time requests a second; nothing with `mode: pass`."""
    if route.policy.mode is Mode.PASS:
        return 0
    return stored_bytes(rps, route.policy.retention_ms / MS_A_DAY)


def grace_seconds(config: Config) -> int:
    """Seconds between TERM and KILL that the process needs (`terminationGracePeriodSeconds`)."""
    return math.ceil((config.shutdown.delay_ms + config.shutdown.timeout_ms) / 1000) + KILL_MARGIN_SECONDS


def connections(config: Config) -> int:
    """PostgreSQL connections that one process may have open."""
    return max(config.store.pool_size, LEAST_LANES) + EXTRA_CONNECTIONS


def bytes_text(size: float) -> str:
    """A large number of bytes, to be read by people: 5.3 GB."""
    unit = 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit and size < 100 else f"{size:,.0f} {_UNITS[unit]}"
