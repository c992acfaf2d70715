"""Durations and sizes as a file writes them (`30s`, `1MiB`), to and from whole milliseconds and bytes. Nothing else."""

import re

_DURATION = re.compile(r"(\d{1,12})(ms|s|m|h|d)")
_SIZE = re.compile(r"(\d{1,12})(B|KiB|MiB|GiB)")
_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}

DURATION_PATTERN = r"^[0-9]{1,12}(ms|s|m|h|d)$"
SIZE_PATTERN = r"^[0-9]{1,12}(B|KiB|MiB|GiB)$"
DAYS_SHOWN_FROM = 7  # 72h reads as an operator writes it, 168h does not


def duration_ms(text: str) -> int:
    """Milliseconds of a duration such as `250ms`, `30s`, `5m`, `24h` or `7d`. ValueError for anything else."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return int(found[1]) * _MS[found[2]]


def size_bytes(text: str) -> int:
    """Bytes of a size such as `10B`, `64KiB`, `1MiB` or `2GiB`. ValueError for anything else."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return int(found[1]) * _BYTES[found[2]]


def duration_text(ms: int) -> str:
    """A duration in the largest unit that leaves no rest; days from a week on."""
    for unit in ("d", "h", "m", "s"):
        count, rest = divmod(ms, _MS[unit])
        if count and not rest and (unit != "d" or count >= DAYS_SHOWN_FROM):
            return f"{count}{unit}"
    return f"{ms}ms"


def size_text(size: int) -> str:
    """A size in the largest unit that leaves no rest."""
    for unit in ("GiB", "MiB", "KiB"):
        count, rest = divmod(size, _BYTES[unit])
        if count and not rest:
            return f"{count}{unit}"
    return f"{size}B"
