"""What exchanges, store, upstreams and janitor tell, turned into metrics and events of the log."""

import time
from collections.abc import Callable

from gateway.log import Log
from gateway.metrics import Metrics, code_class
from gateway.model import Lease, TookOver

_WARNINGS = frozenset({"ran_again", "ran_unprotected", "late_reply", "in_doubt"})


class ExchangeEvents:
    """An `exchange.Observer`."""

    def __init__(self, metrics: Metrics, log: Log) -> None:
        self._metrics = metrics
        self._log = log

    def settled(self, route: str, settlement: str, reason: str) -> None:
        self._metrics.settlements.add((route, settlement, reason))

    def took_over(self, route: str, cause: TookOver) -> None:
        self._metrics.takeovers.add((route, cause.word))

    def upstream_answered(self, upstream: str, status: int, seconds: float) -> None:
        self._metrics.upstream_seconds.observe((upstream, code_class(status)), seconds)

    def upstream_timed_out(self, upstream: str, *, sent: bool) -> None:
        cause = "http_response_timeout" if sent else "connection_timeout"
        self._metrics.upstream_failures.add((upstream, cause, "yes" if sent else "no", "new"))

    def replayed(self, route: str, source: str) -> None:
        self._metrics.replays.add((route, source))

    def late_reply(self, route: str) -> None:
        self._metrics.late_replies.add((route,))

    def event(self, name: str, **facts: str | float | None) -> None:
        self._log.event(name, "warning" if name in _WARNINGS else "info", **facts)


class UpstreamEvents:
    """An `upstream.UpstreamObserver`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def failure(self, upstream: str, cause: str, sent: bool, reused: bool) -> None:
        self._metrics.upstream_failures.add((upstream, cause, "yes" if sent else "no", "reused" if reused else "new"))


class StoreEvents:
    """A `store.StoreObserver`. `route_of` names the route of a record in work here; `why`: the store is down."""

    def __init__(self, metrics: Metrics, log: Log, route_of: Callable[[bytes], str], why: Callable[[], str]) -> None:
        self._metrics = metrics
        self._log = log
        self._route_of = route_of
        self._why = why
        self._name = metrics.store_name

    def statement(self, name: str, rows: int, seconds: float) -> None:
        self._metrics.batch_rows.observe((self._name, name), rows)
        self._metrics.statement_seconds.observe((self._name, name), seconds)

    def error(self, statement: str, cause: str) -> None:
        self._metrics.store_errors.add((self._name, statement, cause))

    def lease_lost(self, lease: Lease) -> None:
        route = self._route_of(lease.record_id)
        self._metrics.leases_lost.add((route,))
        self._log.event("lease_lost", "warning", record=lease.record_id[:6].hex(), route=route)

    def up(self, is_up: bool) -> None:
        if is_up:
            self._log.event("store_up", store=self._name)
        else:
            self._log.event("store_down", "error", store=self._name, text=self._why())


class JanitorEvents:
    """A `janitor.Observer`; keeps what the gauges show."""

    def __init__(self, metrics: Metrics, log: Log) -> None:
        self._log = log
        self._metrics = metrics
        self._headroom_until: float | None = None
        self._oldest_expired = 0.0
        self._last_success = 0.0
        name = metrics.store_name
        metrics.gauge(
            "partition_headroom_seconds",
            "How long replies still find a partition if none is opened any more.",
            ("store",),
            lambda: {} if self._headroom_until is None else {(name,): self._headroom_until - time.time()},
        )
        metrics.gauge(
            "oldest_expired_record_seconds",
            "How long ago the oldest record expired that is still there.",
            ("store",),
            lambda: {(name,): self._oldest_expired},
        )
        metrics.gauge(
            "janitor_last_success_timestamp_seconds",
            "When upkeep was last done without a fault; 0 if another process does it.",
            ("store",),
            lambda: {(name,): self._last_success},
        )

    def removed(self, records: int) -> None:
        self._metrics.janitor_removed.add((self._metrics.store_name,), records)

    def partition_headroom(self, seconds: float) -> None:
        self._headroom_until = time.time() + seconds

    def oldest_expired_record(self, seconds: float) -> None:
        self._oldest_expired = seconds

    def succeeded(self) -> None:
        self._last_success = time.time()

    def failed(self, fault: str) -> None:
        self._log.event("janitor_failed", "error", text=fault)
