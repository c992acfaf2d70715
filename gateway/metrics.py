"""The Prometheus adapter: every metric is declared here, counted as plain numbers, and read at scrape.

All label sets that a counter can be expected to have are created at 0, because `increase()` does not see a series
that is born at 1. No key, scope, tenant, path or host is ever a label.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.model import Outcome, TookOver

PREFIX = "idempotency_gateway_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_FINE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

Labels = tuple[str, ...]


class Counter:
    """Numbers that only grow, by label values."""

    def __init__(self, name: str, text: str, labels: Labels) -> None:
        self.name, self.text, self.labels = name, text, labels
        self.values: dict[Labels, float] = {}

    def zero(self, *values: str) -> None:
        """Create a series at 0."""
        self.values.setdefault(values, 0)

    def add(self, values: Labels, amount: float = 1) -> None:
        """Count; a new set of label values is a new series."""
        self.values[values] = self.values.get(values, 0) + amount

    def family(self, service: str) -> Metric:
        """Return what is exposed."""
        family = CounterMetricFamily(PREFIX + self.name, self.text, labels=("service", *self.labels))
        for values, amount in self.values.items():
            family.add_metric((service, *values), amount)
        return family


class Histogram:
    """Distributions over fixed bounds, by label values."""

    def __init__(self, name: str, text: str, labels: Labels, bounds: tuple[float, ...]) -> None:
        self.name, self.text, self.labels, self.bounds = name, text, labels, bounds
        self.values: dict[Labels, list[float]] = {}  # a count for each bucket, the one above all bounds, then the sum

    def zero(self, *values: str) -> None:
        """Create a series at 0."""
        self.values.setdefault(values, [0.0] * (len(self.bounds) + 2))

    def observe(self, values: Labels, amount: float) -> None:
        """Count one observation."""
        counts = self.values.get(values)
        if counts is None:
            self.zero(*values)
            counts = self.values[values]
        counts[bisect_left(self.bounds, amount)] += 1
        counts[-1] += amount

    def family(self, service: str) -> Metric:
        """Return what is exposed, cumulated."""
        family = HistogramMetricFamily(PREFIX + self.name, self.text, labels=("service", *self.labels))
        names = [str(float(bound)) for bound in self.bounds] + ["+Inf"]
        for values, counts in self.values.items():
            running, buckets = 0.0, []
            for name, count in zip(names, counts[:-1], strict=True):
                running += count
                buckets.append((name, running))
            family.add_metric((service, *values), buckets, counts[-1])
        return family


class Gauge:
    """What is true at scrape: `read` returns the current series."""

    def __init__(self, name: str, text: str, labels: Labels, read: Callable[[], Mapping[Labels, float]]) -> None:
        self.name, self.text, self.labels, self.read = name, text, labels, read

    def family(self, service: str) -> Metric:
        """Return what is exposed."""
        family = GaugeMetricFamily(PREFIX + self.name, self.text, labels=("service", *self.labels))
        for values, amount in self.read().items():
            family.add_metric((service, *values), amount)
        return family


_EXPECTED: tuple[tuple[Outcome, str, str], ...] = (
    (Outcome.EXECUTED, "", "2xx"),
    (Outcome.EXECUTED, "", "3xx"),
    (Outcome.EXECUTED, "", "4xx"),
    (Outcome.EXECUTED, "too_large", "2xx"),
    (Outcome.RELEASED, "", "4xx"),
    (Outcome.RELEASED, "", "5xx"),
    (Outcome.REPLAYED, "", "2xx"),
    (Outcome.REPLAYED, "", "3xx"),
    (Outcome.REPLAYED, "", "4xx"),
    (Outcome.OUTSTANDING, "", "4xx"),
    (Outcome.OUTSTANDING, "", "5xx"),
    (Outcome.IN_DOUBT, "", "4xx"),
    (Outcome.IN_DOUBT, "", "5xx"),
    (Outcome.MISMATCH, "", "4xx"),
    (Outcome.REFUSED, "", "4xx"),
    (Outcome.REFUSED, "", "5xx"),
    (Outcome.UNPROTECTED, "no_key", "2xx"),
    (Outcome.UNPROTECTED, "no_key", "4xx"),
    (Outcome.UNPROTECTED, "no_key", "5xx"),
    (Outcome.UNPROTECTED, "store_failure", "2xx"),
    (Outcome.UNPROTECTED, "store_failure", "4xx"),
    (Outcome.UNPROTECTED, "store_failure", "5xx"),
)
_SETTLEMENTS = (
    ("complete", "status"),
    ("tombstone", "too_large"),
    ("release", "status"),
    ("release", "never_sent"),
    ("hold", "status"),
    ("hold", "timeout"),
    ("hold", "reset"),
    ("hold", "reset_on_reused_connection"),
    ("hold", "shutdown"),
)
_FAILURES = (
    *((cause, "no", "new") for cause in ("connection_refused", "connection_timeout", "connection_limit_reached")),
    ("http_response_timeout", "yes", "new"),
    *((cause, "no", "new") for cause in ("destination_unavailable", "dns_error", "dns_timeout", "tls_protocol_error")),
    *(
        (cause, "yes", connection)
        for cause in ("connection_terminated", "http_response_incomplete", "http_protocol_error")
        for connection in ("new", "reused")
    ),
)
_STATEMENTS = ("claim", "settle", "renew", "abandon", "reply", "look")
_CLASSES = ("2xx", "3xx", "4xx", "5xx")
_CODE_CLASSES = tuple(f"{hundreds}xx" for hundreds in range(10))


def code_class(status: int) -> str:
    """Return `2xx` and the like."""
    return _CODE_CLASSES[status // 100]


class Metrics(Collector):
    """All metrics of a process. The exchange, the store, the upstreams and the janitor count here."""

    def __init__(self, service: str, routes: Iterable[str], upstreams: Iterable[str], store: str = "default") -> None:
        self.service = service
        self.store_name = store
        self._series: list[Counter | Histogram | Gauge] = []
        counter, histogram = self._counter, self._histogram
        self.requests = counter(
            "requests",
            "Requests on protected routes, by what came of them.",
            "route",
            "outcome",
            "reason",
            "code_class",
        )
        self.passed = counter("passed_requests", "Requests relayed without protection.", "upstream", "code_class")
        self.request_seconds = histogram(
            "request_duration_seconds", "From the head to the answer.", _SECONDS, "route", "outcome"
        )
        self.overhead_seconds = histogram(
            "overhead_seconds",
            "The gateway's own share of a request: without upstream and waiting.",
            _FINE_SECONDS,
            "route",
        )
        self.upstream_seconds = histogram(
            "upstream_duration_seconds", "From sending to the final head.", _SECONDS, "upstream", "code_class"
        )
        self.upstream_failures = counter(
            "upstream_failures",
            "Requests without a complete answer, by RFC 9209 cause.",
            "upstream",
            "cause",
            "sent",
            "connection",
        )
        self.replays = counter("replays", "Stored replies served.", "route", "source")
        self.settlements = counter(
            "settlements", "Settlements that the store acknowledged.", "route", "settlement", "reason"
        )
        self.takeovers = counter("takeovers", "Records taken over; expired means that it ran again.", "route", "cause")
        self.leases_lost = counter("leases_lost", "Leases that another took before they were settled.", "route")
        self.late_replies = counter("late_replies", "Answers that came after their lease was lost.", "route")
        self.statement_seconds = histogram(
            "store_statement_duration_seconds",
            "Statements of the store, each one commit.",
            _FINE_SECONDS,
            "store",
            "statement",
        )
        self.batch_rows = histogram(
            "store_batch_rows", "Rows that went out in one statement.", _ROWS, "store", "statement"
        )
        self.store_errors = counter("store_errors", "Failed statements and connections.", "store", "statement", "cause")
        self.janitor_removed = counter("janitor_removed", "Expired records deleted.", "store")
        for route in routes:
            for outcome, reason, klass in _EXPECTED:
                self.requests.zero(route, outcome, reason, klass)
            for settlement, reason in _SETTLEMENTS:
                self.settlements.zero(route, settlement, reason)
            for source in ("process", "store"):
                self.replays.zero(route, source)
            for cause in TookOver:
                self.takeovers.zero(route, cause.value)
            self.leases_lost.zero(route)
            self.late_replies.zero(route)
            self.overhead_seconds.zero(route)
            self.request_seconds.zero(route, Outcome.EXECUTED)
            self.request_seconds.zero(route, Outcome.REPLAYED)
        for upstream in upstreams:
            for klass in _CLASSES:
                self.passed.zero(upstream, klass)
                self.upstream_seconds.zero(upstream, klass)
            for failure in _FAILURES:
                self.upstream_failures.zero(upstream, *failure)
        for statement in _STATEMENTS:
            self.statement_seconds.zero(store, statement)
            self.batch_rows.zero(store, statement)
        for statement in ("connect", *_STATEMENTS):
            for fault in ("connection", "timeout"):
                self.store_errors.zero(store, statement, fault)
        self.janitor_removed.zero(store)

    def gauge(self, name: str, text: str, labels: Labels, read: Callable[[], Mapping[Labels, float]]) -> None:
        """Expose something that is read at scrape."""
        self._series.append(Gauge(name, text, labels, read))

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the families, for prometheus-client."""
        for series in self._series:
            yield series.family(self.service)

    def names(self) -> list[str]:
        """Return the full names as exposed, for the documentation's test."""
        return [PREFIX + series.name + ("_total" if isinstance(series, Counter) else "") for series in self._series]

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        series = Counter(name, text, labels)
        self._series.append(series)
        return series

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        series = Histogram(name, text, labels, bounds)
        self._series.append(series)
        return series
