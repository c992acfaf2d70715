"""One burst of wrk."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("requests.lua")


@dataclass(frozen=True)
class Load:
    """What wrk saw. `broken`: connections and time-outs; `refused`: answers from 400 on. Both should be 0."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    broken: int
    refused: int

    @property
    def per_second(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds


def drive(url: str, keys: str, seed: str, *, connections: int, seconds: int, cores: set[int]) -> Load:
    """Send POSTs for so long over so many connections. `keys`: "unique" ones that begin with `seed`, or that "one"."""
    output = subprocess.run(
        ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout=10s", f"-s{SCRIPT}", url, "--", keys, seed],
        check=True,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ).stdout
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    return Load(**json.loads(line.removeprefix("RESULT ")))
