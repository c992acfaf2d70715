"""What `check` says in words and numbers."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import Config, load
from gateway.config.promise import built_in, needs, promise, report, risks
from gateway.config.sizing import bytes_text, connections, grace_seconds, route_bytes, stored_bytes
from gateway.errors import GatewayError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def made(folder: Path, route: dict[str, Any], **changes: Any) -> Config:
    tree = {
        "service": "s",
        "store": {"dsn": {"env": "GATEWAY_DSN"}},
        "upstreams": {"ledger": {"url": "http://127.0.0.1:8081"}},
        "defaults": {
            "extends": "at-most-once",
            "scope": {"customer": {"header": "X-Customer-Id"}},
            "on_missing_key": "reject",
        },
        "routes": {"create": {"match": "POST /transfers", **route}},
        **changes,
    }
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(tree), "utf-8")
    return load(path, {})


def said(folder: Path, route: dict[str, Any]) -> str:
    return promise(made(folder, route).routes["create"])


def test_block_promises_at_most_once_and_says_who_decides(folder: Path) -> None:
    assert said(folder, {"retention": "72h"}) == (
        "at most once within 72h; if nobody can tell whether it ran: 409 in-doubt until a person says. "
        "A 500, 502, 504 of the service counts as in doubt, other 5xx as not done. "
        "Keys belong to each customer (X-Customer-Id). No key: 400. Store down: 503. First still running: 409. "
        "Key reused for another request: 422. "
        "A reply over 1MiB is passed on but not kept: a retry gets 409 reply-not-stored."
    )


def test_run_again_promises_at_least_once_and_says_when(folder: Path) -> None:
    text = said(folder, {"policy": "at-least-once", "scope": "none", "on_missing_key": "forward", "retention": "7d"})
    assert text.startswith("at least once within 7d, once unless something breaks; if nobody can tell whether it ran: ")
    assert "409 until 1m have passed" in text
    assert "A 5xx of the service counts as not done: a retry runs at once." in text
    assert "Keys are everybody's. No key: forwarded unprotected." in text


def test_other_settings_show_in_the_promise(folder: Path) -> None:
    text = said(
        folder,
        {
            "on_store_failure": "forward",
            "respond_within": "25s",
            "forward_key": "strip",
            "on_mismatch": {"status": 409},
            "outcomes": {"hold": ["5xx"]},
            "max_response_body": "64KiB",
            "scope": {"caller": {"authorization": "digest"}},
        },
    )
    for sentence in (
        "Store down: forwarded unprotected.",
        "Slower than 25s: 504, and a retry gets the late answer.",
        "The service does not see the key.",
        "Key reused for another request: 409.",
        "A 5xx of the service counts as in doubt.",
        "A reply over 64KiB is passed on",
        "Keys belong to each caller (digest of Authorization) and customer (X-Customer-Id).",
    ):
        assert sentence in text
    assert said(folder, {"mode": "pass"}) == "not guarded: forwarded as if the gateway were not there."


def test_the_deployment_is_told_what_it_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_DSN", "postgresql://gateway@db/gateway")
    config = made(folder, {}, shutdown={"delay": "10s", "timeout": "130s"}, limits={"buffer_memory": "512MiB"})
    assert grace_seconds(config) == 145
    assert needs(config) == (
        "for the deployment: terminationGracePeriodSeconds >= 145; buffers up to 512MiB; "
        f"PostgreSQL connections per process: {connections(config)}; DSN: environment variable GATEWAY_DSN"
    )
    monkeypatch.setenv("GATEWAY_DSN", "no dsn")
    assert "(not here: What stands in environment variable GATEWAY_DSN is no DSN; put one there" in needs(config)
    assert grace_seconds(made(folder, {}, shutdown={"delay": "1500ms", "timeout": "2s"})) == 9
    assert connections(made(folder, {}, store={"dsn": "embedded", "pool_size": 12})) == 14


def test_stored_bytes_are_rate_by_seconds_by_days_by_record_size(folder: Path) -> None:
    assert stored_bytes(50, 7, 2_000) == 50 * 86_400 * 7 * 2_000
    week = made(folder, {"retention": "7d"}).routes["create"]
    assert route_bytes(week, 50) == stored_bytes(50, 7)
    assert route_bytes(made(folder, {"mode": "pass"}).routes["create"], 50) == 0
    assert [bytes_text(size) for size in (0, 999, 1_000, 123_456, 5.3e9, 2e18)] == [
        "0 B", "999 B", "1.0 kB", "123 kB", "5.3 GB", "2,000,000 TB",
    ]  # fmt: skip


def test_the_report_has_each_route_with_its_promise_and_its_bytes(folder: Path) -> None:
    config = made(folder, {"match": ["POST /transfers", "PUT /transfers/{id}"]})
    text = report(config, 50)
    assert text.startswith("  create  POST /transfers\n          PUT /transfers/{id}\n      at most once within 24h; ")
    assert f"At 50 requests/s it stores about {bytes_text(route_bytes(config.routes['create'], 50))} (24h" in text
    assert text.endswith(needs(config))
    assert "requests/s" not in report(config)


def test_a_policy_without_risks_has_none(folder: Path) -> None:
    assert risks(made(folder, {})) == []


@pytest.mark.parametrize(
    ("route", "changes", "path", "sentence"),
    [
        ({"scope": "none"}, {}, "routes.create", "scope is none"),
        ({"scope": {"a": {"header": "X-Api-Key"}}}, {}, "routes.create", "looks like a credential"),
        ({"scope": {"a": {"header": "X-Forwarded-For"}}}, {}, "routes.create", "changes between attempts"),
        ({"on_missing_key": "forward"}, {}, "routes.create", "run as often as they are sent"),
        ({"on_store_failure": "forward"}, {}, "routes.create", "every retry runs"),
        ({"on_in_doubt": "run_again"}, {}, "routes.create", "may run twice"),
        ({"outcomes": {"release": [500]}}, {}, "routes.create", "500 of the service counts as not done"),
        ({"longest_retry": "13h"}, {}, "routes.create", "less than twice longest_retry (13h)"),
        ({"fingerprint": {"headers": ["Authorization"]}}, {}, "routes.create", "renewed token"),
        ({"match": "POST pay.example/x"}, {}, "routes.create", "with another Host goes through unprotected"),
        ({"upstream_timeout": "60s"}, {}, "shutdown.timeout", "in doubt after each deployment"),
        ({}, {"store": {"dsn": "embedded"}}, "store.dsn", "never for production"),
        ({}, {"trusted_proxies": ["0.0.0.0/0"]}, "trusted_proxies", "everybody is trusted"),
    ],
)
def test_what_may_surprise_is_a_risk(
    folder: Path, route: dict[str, Any], changes: dict[str, Any], path: str, sentence: str
) -> None:
    found = risks(made(folder, route, **changes))
    assert [(risk.path, sentence in risk.sentence) for risk in found] == [(path, True)]
    assert risks(made(folder, {**route, "mode": "pass"}))[1:] == []


def test_built_in_policies_are_printed_whole_and_others_are_told_so() -> None:
    shown = yaml.safe_load(built_in("at-most-once"))["at-most-once"]
    assert (shown["on_in_doubt"], shown["outcomes"]["hold"], shown["retention"]) == ("block", [500, 502, 504], "24h")
    assert built_in("at-least-once").rstrip().endswith("scope, on_missing_key")
    with pytest.raises(GatewayError, match="did you mean at-most-once"):
        built_in("at-mostonce")
