"""The metrics: what is exposed, born at 0, and documented."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import load
from gateway.metrics import PREFIX, Counter, Gauge, Histogram, Metrics, code_class
from gateway.model import Outcome, TookOver
from gateway.server.app import App

ROOT = Path(__file__).parents[1]
FORBIDDEN = {"key", "scope", "tenant", "customer", "path", "host", "client", "record", "request_id"}


def metrics() -> Metrics:
    return Metrics("ledger-core", ["create", "cancel"], ["ledger"])


def exposed(of: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels, without the service."""
    found = {}
    for family in text_string_to_metric_families(of.exposition().decode()):
        for sample in family.samples:
            assert sample.labels.pop("service") == of.service
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(of: Metrics, name: str, **labels: str) -> float | None:
    return exposed(of).get((PREFIX + name, tuple(sorted(labels.items()))))


# ---- born at 0 --------------------------------------------------------------------------------------------------


def test_what_alerts_ask_for_is_there_at_0_before_anything_happened():
    fresh = metrics()
    for route in ("create", "cancel"):
        for outcome in (Outcome.EXECUTED, Outcome.REPLAYED):
            assert value(fresh, "requests_total", route=route, outcome=outcome, reason="", code_class="2xx") == 0
        for reason in ("no_key", "store_failure"):
            for klass in ("2xx", "4xx", "5xx"):
                labels = {"route": route, "outcome": "unprotected", "reason": reason, "code_class": klass}
                assert value(fresh, "requests_total", **labels) == 0
        for cause in TookOver:
            assert value(fresh, "takeovers_total", route=route, cause=cause.value) == 0
        assert value(fresh, "leases_lost_total", route=route) == 0
        assert value(fresh, "late_replies_total", route=route) == 0
        for settlement, reason in (("hold", "shutdown"), ("tombstone", "too_large"), ("release", "never_sent")):
            assert value(fresh, "settlements_total", route=route, settlement=settlement, reason=reason) == 0
    refused = {"cause": "connection_refused", "sent": "no", "connection": "new"}
    assert value(fresh, "upstream_failures_total", upstream="ledger", **refused) == 0
    assert value(fresh, "store_errors_total", store="default", statement="claim", cause="timeout") == 0
    assert value(fresh, "janitor_removed_total", store="default") == 0


def test_every_counter_and_histogram_that_a_fresh_process_has_is_at_0():
    fresh = metrics()
    assert set(exposed(fresh).values()) == {0.0}
    for series in fresh._series:
        assert isinstance(series, Gauge) or series.values, f"{series.name} has no series yet"


# ---- counting ---------------------------------------------------------------------------------------------------


def test_a_counter_adds_and_a_new_set_of_labels_is_a_new_series():
    counted = metrics()
    labels = {"route": "create", "outcome": "executed", "reason": "", "code_class": "2xx"}
    counted.requests.add(tuple(labels.values()))
    counted.requests.add(tuple(labels.values()), 2)
    assert value(counted, "requests_total", **labels) == 3
    counted.requests.add(("create", "executed", "", "5xx"))
    assert value(counted, "requests_total", **{**labels, "code_class": "5xx"}) == 1


def test_a_histogram_counts_into_the_bucket_whose_bound_is_not_below_and_cumulates():
    histogram = Histogram("h", "text", ("route",), (0.1, 1.0))
    for amount in (0.05, 0.1, 0.5, 1.0, 7.0):
        histogram.observe(("a",), amount)
    samples = {
        (sample.name.removeprefix(PREFIX), sample.labels.get("le")): sample.value
        for sample in histogram.family("s").samples
    }
    assert samples == {
        ("h_bucket", "0.1"): 2,
        ("h_bucket", "1.0"): 4,
        ("h_bucket", "+Inf"): 5,
        ("h_count", None): 5,
        ("h_sum", None): pytest.approx(8.65),
    }


def test_a_gauge_is_read_at_scrape():
    numbers = {("a",): 1.0}
    gauged = metrics()
    gauged.gauge("waiters", "text", ("what",), lambda: numbers)
    assert value(gauged, "waiters", what="a") == 1
    numbers[("a",)] = 5.0
    assert value(gauged, "waiters", what="a") == 5


def test_a_labels_value_is_escaped():
    counted = metrics()
    counted.store_errors.add(("default", "claim", 'odd "cause"\n\\'))
    assert value(counted, "store_errors_total", store="default", statement="claim", cause='odd "cause"\n\\') == 1


@pytest.mark.parametrize(("status", "klass"), [(200, "2xx"), (303, "3xx"), (499, "4xx"), (504, "5xx"), (999, "9xx")])
def test_a_status_is_counted_by_its_class(status, klass):
    assert code_class(status) == klass


def test_outcomes_in_the_label_are_the_words_of_the_header():
    words = {outcome for (_, outcome, _, _) in metrics().requests.values}
    assert words <= {outcome.value for outcome in Outcome}


def test_no_label_could_hold_what_belongs_to_a_client():
    for series in metrics()._series:
        assert not FORBIDDEN & set(series.labels), series.name


# ---- documented -------------------------------------------------------------------------------------------------


async def test_the_documented_table_lists_every_metric_with_its_type_and_labels():
    app = App(load(ROOT / "config" / "minimal.yaml", {"GATEWAY_DSN": "postgresql://localhost/x"}), lambda: "")
    kinds = {Counter: "counter", Histogram: "histogram", Gauge: "gauge"}
    registered = [
        (name.removeprefix(PREFIX), kinds[type(series)], ", ".join(series.labels) or "none")
        for name, series in zip(app.metrics.names(), app.metrics._series, strict=True)
    ]
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    documented = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]+?) \| [^|]+ \|$", text, re.MULTILINE)
    assert len(registered) == len(set(registered))
    assert sorted(documented) == sorted(registered)
