"""CPU time of processes, as the kernel counts it in /proc, and cores for them to run on."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on (the second, a name in brackets, may hold spaces)."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def parent(pid: int) -> int:
    """Return the parent's process id."""
    return int(_stat(pid)[1])


def name(pid: int) -> str | None:
    """Return the program's name; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def family(pid: int) -> list[int]:
    """Return `pid` and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                children.setdefault(parent(int(entry.name)), []).append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended meanwhile
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def cpu_seconds(pid: int) -> float:
    """Return user and system time of `pid`, of all that descend from it and of those that ended, in seconds."""
    ticks = 0
    for one in family(pid):
        try:
            ticks += sum(int(field) for field in _stat(one)[11:15])  # utime, stime, cutime, cstime
        except (FileNotFoundError, ProcessLookupError):
            continue
    return ticks / _TICKS_A_SECOND


def pin(pid: int, cores: Iterable[int]) -> None:
    """Let `pid`, its threads and all that descend from it run on these cores only."""
    for one in family(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one of PostgreSQL's workers ended meanwhile
            for thread in Path(f"/proc/{one}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)
