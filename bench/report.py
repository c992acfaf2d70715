"""From the rounds to a table. A number is the median of its rounds."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

from bench.load import Load
from bench.scenarios import Scenario


@dataclass(frozen=True)
class Round:
    """One burst: what wrk saw, and what it cost. CPU in seconds; None: not measured, or nothing to measure."""

    load: Load
    server_cpu: float
    postgres_cpu: float | None
    batch_rows: float | None

    @property
    def server_us(self) -> float:
        """The server's CPU time per request, in microseconds."""
        return self.server_cpu * 1e6 / self.load.requests

    @property
    def postgres_us(self) -> float | None:
        """PostgreSQL's CPU time per request, in microseconds."""
        return None if self.postgres_cpu is None else self.postgres_cpu * 1e6 / self.load.requests


@dataclass(frozen=True)
class Line:
    """A scenario's medians. `ratio`: its server's CPU per request over the plain proxy's, round by round."""

    name: str
    connections: int
    per_second: float
    p50_ms: float
    p99_ms: float
    server_us: float
    postgres_us: float | None
    ratio: float
    ratio_least: float
    ratio_most: float
    batch_rows: float | None
    broken: int
    refused: int


def lines(results: dict[Scenario, list[Round]]) -> list[Line]:
    """Return a line for each scenario, compared with the plain proxy's rounds at the same number of connections."""
    plain = {one.connections: rounds for one, rounds in results.items() if one.server == "plain"}
    return [_line(scenario, rounds, plain[scenario.connections]) for scenario, rounds in results.items()]


def _line(scenario: Scenario, rounds: list[Round], plain: list[Round]) -> Line:
    ratios = [mine.server_us / its.server_us for mine, its in zip(rounds, plain, strict=True)]
    return Line(
        name=scenario.name,
        connections=scenario.connections,
        per_second=_median(rounds, lambda one: one.load.per_second) or 0.0,
        p50_ms=_median(rounds, lambda one: one.load.p50_ms) or 0.0,
        p99_ms=_median(rounds, lambda one: one.load.p99_ms) or 0.0,
        server_us=_median(rounds, lambda one: one.server_us) or 0.0,
        postgres_us=_median(rounds, lambda one: one.postgres_us),
        ratio=statistics.median(ratios),
        ratio_least=min(ratios),
        ratio_most=max(ratios),
        batch_rows=_median(rounds, lambda one: one.batch_rows),
        broken=sum(one.load.broken for one in rounds),
        refused=sum(one.load.refused for one in rounds),
    )


def _median(rounds: list[Round], of: Callable[[Round], float | None]) -> float | None:
    values = [value for one in rounds if (value := of(one)) is not None]
    return statistics.median(values) if values else None


def table(found: list[Line]) -> str:
    """Return the lines for people."""
    rows = [["", "conns", "req/s", "p50 ms", "p99 ms", "CPU us", "/ plain", "(rounds)", "PG us", "rows/claim", "bad"]]
    rows += [
        [
            one.name,
            f"{one.connections}",
            f"{one.per_second:,.0f}",
            f"{one.p50_ms:.2f}",
            f"{one.p99_ms:.2f}",
            f"{one.server_us:.0f}",
            f"{one.ratio:.2f}",
            f"{one.ratio_least:.2f}-{one.ratio_most:.2f}",
            "-" if one.postgres_us is None else f"{one.postgres_us:.0f}",
            "-" if one.batch_rows is None else f"{one.batch_rows:.1f}",
            f"{one.broken + one.refused}",
        ]
        for one in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in enumerate(both))
        for both in (list(zip(row, widths, strict=True)) for row in rows)
    )


def as_json(found: list[Line]) -> list[dict[str, object]]:
    """Return the lines for programs."""
    return [asdict(one) for one in found]
