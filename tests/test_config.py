"""Loading a file: what is accepted, what is refused and in which words, how the layers of a policy come together."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.config import Config, ConfigError, Mode, OnMissingKey, OnStoreFailure, Policy, load
from gateway.model import OnInDoubt, Settlement

LEAST: dict[str, Any] = {
    "service": "ledger",
    "store": {"dsn": "postgresql://gateway@db/ledger"},
    "upstreams": {"ledger": {"url": "http://127.0.0.1:8081"}},
    "defaults": {"extends": "at-most-once", "scope": "none", "on_missing_key": "reject"},
    "routes": {"create": {"match": "POST /transfers"}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def written(folder: Path, text: str) -> Path:
    path = folder / "gateway.yaml"
    path.write_text(text, "utf-8")
    return path


def loaded(folder: Path, **changes: Any) -> Config:
    return load(written(folder, yaml.safe_dump({**LEAST, **changes}, sort_keys=False)), {})


def policy(folder: Path, route: dict[str, Any], **changes: Any) -> Policy:
    routes = {"create": {"match": "POST /transfers", **route}}
    return loaded(folder, routes=routes, **changes).routes["create"].policy


def faults(folder: Path, text: str | None = None, **changes: Any) -> list[str]:
    """The faults of a file, without its path: `line: path: sentence`."""
    path = written(folder, text if text is not None else yaml.safe_dump({**LEAST, **changes}, sort_keys=False))
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    assert all(fault.startswith(f"{path}:") for fault in caught.value.faults)
    return [fault.removeprefix(f"{path}:") for fault in caught.value.faults]


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    return found[0]


def fault_of(folder: Path, **fields: Any) -> str:
    """The only fault that a field of `defaults` makes."""
    return only(faults(folder, defaults={**LEAST["defaults"], **fields}))


# ---- what is loaded ---------------------------------------------------------------------------------------------


def test_the_least_file_has_a_default_for_everything_else(folder: Path) -> None:
    config = loaded(folder)
    route = config.routes["create"]
    assert (config.listen, config.monitor) == ("0.0.0.0:8080", "0.0.0.0:9090")
    assert (config.shutdown.delay_ms, config.shutdown.timeout_ms) == (5_000, 35_000)
    assert (config.limits.in_flight, config.limits.buffer_memory_bytes) == (256, 128 * 1024**2)
    assert (config.store.schema_name, config.store.timeout_ms, config.store.janitor.batch) == (
        "idempotency",
        2000,
        1000,
    )
    assert config.upstreams["ledger"].serves[0].segments == ()
    assert (route.operation, route.policy.mode) == ("create", Mode.ENFORCE)
    assert (route.policy.retention_ms, route.policy.lease_ttl_ms) == (86_400_000, 30_000)
    assert (route.policy.key.header, route.policy.key.name) == (b"idempotency-key", "Idempotency-Key")


def test_waits_that_are_left_out_follow_upstream_timeout(folder: Path) -> None:
    made = policy(folder, {"upstream_timeout": "45s"})
    assert (made.respond_within_ms, made.effect_deadline_ms) == (45_000, 90_000)
    made = policy(folder, {"upstream_timeout": "45s", "respond_within": "25s", "effect_deadline": "2m"})
    assert (made.respond_within_ms, made.effect_deadline_ms) == (25_000, 120_000)


def test_statuses_settle_by_one_look_up_as_the_design_lists_them(folder: Path) -> None:
    settlement = policy(folder, {"policy": "at-least-once"}).outcomes.settlement
    stored = [200, 201, 204, 299, 303, 308, 400, 405, 406, 410, 411, 413, 414, 415, 422]
    released = [401, 403, 404, 408, 409, 421, 423, 425, 429, 499, 500, 502, 503, 504, 520, 600, 999]
    assert {settlement(status) for status in stored} == {Settlement.COMPLETE}
    assert {settlement(status) for status in released} == {Settlement.RELEASE}
    assert policy(folder, {}).outcomes.statuses(Settlement.HOLD) == {500, 502, 504}


def test_scope_parts_are_sorted_by_name_because_the_order_of_a_map_never_counts(folder: Path) -> None:
    scope = {"tenant": {"header": "X-Tenant", "set_by": "trusted_proxies"}, "caller": {"authorization": "digest"}}
    parts = policy(folder, {"scope": scope}, trusted_proxies=["10.0.0.0/8"]).scope
    assert [(part.name, part.kind, part.header, part.trusted_only) for part in parts] == [
        ("caller", "authorization", b"authorization", False),
        ("tenant", "header", b"x-tenant", True),
    ]


def test_a_secret_is_read_anew_each_time_and_never_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = folder / "dsn"
    secret.write_text("postgresql://first\n", "utf-8")
    dsn = loaded(folder, store={"dsn": {"file": str(secret)}}).store.dsn
    assert dsn.read() == "postgresql://first"
    secret.write_text("postgresql://second\n", "utf-8")
    assert dsn.read() == "postgresql://second"
    monkeypatch.setenv("LEDGER_DSN", "postgresql://third")
    assert loaded(folder, store={"dsn": {"env": "LEDGER_DSN"}}).store.dsn.read() == "postgresql://third"
    config = loaded(folder, store={"dsn": "postgresql://gateway:hunter2@db/x"})
    assert config.store.dsn.read() == "postgresql://gateway:hunter2@db/x"
    assert "hunter2" not in repr(config)
    assert "hunter2" not in only(faults(folder, store={"dsn": {"user": "hunter2"}}))
    assert loaded(folder, store={"dsn": "embedded"}).store.embedded


# ---- layers -----------------------------------------------------------------------------------------------------


def test_layers_are_laid_built_in_then_defaults_then_the_policy_then_the_route(folder: Path) -> None:
    policies = {
        "partner": {"extends": "at-most-once", "retention": "72h", "lease_ttl": "20s", "upstream_timeout": "60s"},
        "card": {"extends": "partner", "lease_ttl": "10s"},
    }
    defaults = {"extends": "at-least-once", "scope": "none", "on_missing_key": "forward", "retention": "1h"}
    route = {"policy": "card", "upstream_timeout": "5s"}
    made = policy(folder, route, policies=policies, defaults=defaults)
    assert made.on_missing_key is OnMissingKey.FORWARD  # defaults
    assert made.on_in_doubt is OnInDoubt.BLOCK  # at-most-once, over defaults' at-least-once
    assert made.retention_ms == 72 * 3_600_000  # partner, over defaults
    assert made.lease_ttl_ms == 10_000  # card, over partner
    assert made.upstream_timeout_ms == 5_000  # the route, over all
    assert made.on_store_failure is OnStoreFailure.REJECT  # built in


def test_extends_beside_a_routes_own_fields_lies_over_its_policy(folder: Path) -> None:
    policies = {"near": {"retention": "2h"}, "far": {"retention": "3h", "lease_ttl": "9s"}}
    made = policy(folder, {"policy": "far", "extends": "near"}, policies=policies)
    assert (made.retention_ms, made.lease_ttl_ms) == (7_200_000, 9_000)


def test_one_built_in_policy_over_the_other_leaves_nothing_of_it(folder: Path) -> None:
    again = policy(folder, {"policy": {"extends": "at-least-once"}})
    assert again.on_in_doubt is OnInDoubt.RUN_AGAIN
    assert again.outcomes.statuses(Settlement.HOLD) == frozenset()
    assert policy(folder, {"policy": {"extends": "at-least-once"}, "extends": "at-most-once"}) == policy(folder, {})


def test_maps_merge_and_lists_replace(folder: Path) -> None:
    defaults = {
        **LEAST["defaults"],
        "key": {"max_length": 64},
        "fingerprint": {"headers": ["X-One"], "query": False},
        "scope": {"customer": {"header": "X-Customer-Id"}},
    }
    route = {
        "key": {"header": "X-Key"},
        "fingerprint": {"headers": ["X-Two", "x-two"]},
        "scope": {"tenant": {"header": "X-Tenant"}, "customer": {"authorization": "digest"}},
    }
    made = policy(folder, route, defaults=defaults)
    assert (made.key.header, made.key.max_length) == (b"x-key", 64)
    assert (made.fingerprint.headers, made.fingerprint.query) == ((b"x-two",), False)
    assert [(part.name, part.kind) for part in made.scope] == [("customer", "authorization"), ("tenant", "header")]
    assert policy(folder, {"scope": "none"}, defaults=defaults).scope == ()


def test_an_exact_status_beats_a_class_and_the_nearer_layer_the_farther(folder: Path) -> None:
    defaults = {**LEAST["defaults"], "outcomes": {"hold": [503], "store": [409]}}
    outcomes = policy(folder, {"outcomes": {"store": ["5xx"], "release": [503, 422]}}, defaults=defaults).outcomes
    assert outcomes.settlement(500) is Settlement.HOLD  # exact, in at-most-once
    assert outcomes.settlement(501) is Settlement.COMPLETE  # class, on the route
    assert outcomes.settlement(503) is Settlement.RELEASE
    assert outcomes.settlement(422) is Settlement.RELEASE
    assert outcomes.settlement(409) is Settlement.COMPLETE


# ---- what is refused --------------------------------------------------------------------------------------------


def test_every_fault_is_reported_at_once_sorted_by_line_with_what_to_do(folder: Path) -> None:
    text = """\
service: ledger
servce: typo
service: again
admin: {listen: "127.0.0.1:9091"}
store: {dsn: embedded, pool_size: 0, timeout: 2}
upstreams:
  ledger: {url: "ftp://x", host: yes}
routes:
  a: {match: POST /x, on_missing_key: reject, lease_ttl: 2h, retention: 1h}
  b: {match: post /y, scope: none, on_missing_key: on, on_in_doubt: run_again}
  c: {match: [POST /x, get /x], policy: missing}
"""
    assert faults(folder, text) == [
        "2: servce: is unknown; did you mean `service`?",
        "3: service: is written twice (first on line 1); keep one of them",
        "4: admin: is not built yet; remove it",
        "5: store.pool_size: must be a whole number from 1 to 100, not `0`",
        "5: store.timeout: must be a duration, not `2`; write a whole number and a unit: 250ms, 30s, 5m, 24h or 7d",
        "7: upstreams.ledger.host: must be keep or upstream, not `yes`",
        "7: upstreams.ledger.url: must be an http or https URL, not `ftp://x`; write it like http://127.0.0.1:8081",
        "9: routes.a.lease_ttl: lease_ttl (2h) is longer than retention (1h): shorten the lease, or keep longer",
        (
            "9: routes.a.on_in_doubt: is not answered: what if nobody can tell whether it ran? Write "
            "`on_in_doubt: block`, "
            "or run_again; or extend at-most-once or at-least-once"
        ),
        (
            "9: routes.a.scope: is not answered: whose key is it? Write "
            "`scope: {customer: {header: X-Customer-Id}}`, or "
            "`scope: none`"
        ),
        "10: routes.b.match: has the method `post`; methods are upper-case, write `POST`",
        "10: routes.b.on_missing_key: must be reject or forward, not `on`",
        "11: routes.c.match[0]: `POST /x` ties with `POST /x` of routes.a (line 9); make one of them more specific",
        "11: routes.c.match[1]: has the method `get`; methods are upper-case, write `GET`",
        "11: routes.c.policy: the policy `missing` is unknown; known are at-least-once, at-most-once",
    ]


def test_a_fault_in_a_layer_that_routes_share_is_reported_once_where_it_stands(folder: Path) -> None:
    routes = {"a": {"match": "POST /a"}, "b": {"match": "POST /b"}}
    found = faults(folder, routes=routes, defaults={**LEAST["defaults"], "lease_ttl": "20h", "retention": "2h"})
    assert only(found).split(": ")[1] in {"defaults.lease_ttl", "defaults.retention"}


@pytest.mark.parametrize("question", ["scope", "on_missing_key", "on_in_doubt"])
def test_an_open_question_is_refused_for_each_route_but_not_where_nothing_is_guarded(
    folder: Path, question: str
) -> None:
    answers = {"scope": "none", "on_missing_key": "reject", "on_in_doubt": "block"}
    del answers[question]
    routes = {
        "a": {"match": "POST /a"},
        "b": {"match": "POST /b"},
        "c": {"match": "POST /c", "mode": "pass"},
        "d": {
            "match": "POST /d",
            question: "none" if question == "scope" else LEAST["defaults"].get(question, "block"),
        },
    }
    paths = [fault.split(": ")[1] for fault in faults(folder, routes=routes, defaults=answers)]
    assert paths == [f"routes.a.{question}", f"routes.b.{question}"]


@pytest.mark.parametrize("value", [30, 0, "0s", "-5s", "30", "1.5h", "1h30m", "30 s", "30S", "2w", True, None, [], {}])
def test_what_is_no_duration_is_refused(folder: Path, value: object) -> None:
    assert "defaults.lease_ttl: " in fault_of(folder, lease_ttl=value)


@pytest.mark.parametrize("value", [1024, "0KB", "1MB", "1K", "-1B", "1.5MiB", "1mib", False, None])
def test_what_is_no_size_is_refused(folder: Path, value: object) -> None:
    assert "defaults.max_request_body: " in fault_of(folder, max_request_body=value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"lease_ttl": "999ms"}, "must be at least 1s"),
        ({"retention": "400d"}, "must be at most 366d"),
        ({"retention": "999999999999d"}, "must be at most 366d"),
        ({"effect_deadline": "30d"}, "must be at most 20d"),
        ({"lease_ttl": "25h", "retention": "7d"}, "must be at most 24h"),
        ({"max_response_body": "1GiB"}, "must be at most 256MiB"),
        ({"lease_ttl": "25s", "retention": "20s", "upstream_timeout": "5s"}, "longer than retention"),
        ({"respond_within": "31s"}, "longer than upstream_timeout (30s)"),
        ({"effect_deadline": "29s"}, "shorter than upstream_timeout (30s)"),
        ({"retention": "40s", "upstream_timeout": "50s"}, "retention (40s) is shorter than upstream_timeout (50s)"),
        ({"max_request_body": "1GiB"}, "more than limits.buffer_memory (128MiB)"),
        ({"on_mismatch": {"status": 200}}, "from 400 to 499"),
        ({"on_mismatch": "replay"}, "`replay` is not built yet"),
        ({"mode": "observe"}, "`observe` is not built yet; write enforce or pass"),
        ({"on_outstanding": {"wait": "8s"}}, "`wait` is not built yet; write reject"),
        ({"on_in_doubt": {"probe": "x"}}, "`probe` is not built yet"),
        ({"forward_key": {"derive": "step"}}, "`derive` is not built yet"),
        ({"fingerprint": {"body": "multipart"}}, "`multipart` is not built yet"),
        ({"fingerprint": {"exclude": ["/a"]}}, "fingerprint.exclude: is not built yet"),
        ({"key": [{"header": "X"}]}, "a list of sources is not built yet"),
        ({"key": {"header": "Authorization"}}, "cannot carry a key"),
        ({"key": {"header": "Ungültig"}}, "must be a header name"),
        ({"key": {"max_length": 0}}, "from 1 to 1024"),
        ({"outcomes": {"when": []}}, "outcomes.when: is not built yet"),
        ({"outcomes": {"store": [422], "hold": [422]}}, "422 is also under `store`"),
        ({"outcomes": {"hold": ["5xx", 503, "5xx"]}}, "5xx is also under `hold`"),
        ({"outcomes": {"hold": [101]}}, "must be a final status"),
        ({"outcomes": {"hold": ["6xx"]}}, "must be a final status"),
        ({"outcomes": {"hold": 500}}, "must be a list"),
        ({"scope": {}}, "write `scope: none`"),
        ({"scope": "all"}, "must be `none` or a map"),
        ({"scope": {"a": {"header": "Authorization"}}}, "write {authorization: digest}"),
        ({"scope": {"a": {"header": "cookie"}}}, "would be stored readable"),
        ({"scope": {"a": {"header": "X", "authorization": "digest"}}}, "must have one source"),
        ({"scope": {"a": {}}}, "must have one source"),
        ({"scope": {"a": {"jwt": "bank"}}}, "scope.a.jwt: is not built yet"),
        ({"scope": {"a=b": {"header": "X"}}}, "is not a name for a part"),
        ({"scope": {"a": {"header": "X-A", "set_by": "trusted_proxies"}}}, "but there are none"),
        ({"scope": {"a": {"header": "idempotency-key"}}}, "a key cannot say whose it is"),
        ({"extends": "at-most-onec"}, "did you mean `at-most-once`?"),
        ({"extends": "webhook/stripe"}, "the policy `webhook/stripe` is not built yet"),
        ({"replay": {"keep": []}}, "defaults.replay: is not built yet"),
        ({"longest_rety": "6h"}, "did you mean `longest_retry`?"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_in_a_sentence(
    folder: Path, fields: dict[str, Any], sentence: str
) -> None:
    assert sentence in next(
        fault for fault in faults(folder, defaults={**LEAST["defaults"], **fields}) if sentence in fault
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"service": ""}, "service: must be a name"),
        ({"service": 5}, "service: must be a name"),
        ({"service": None}, "service: must be a name"),
        ({"listen": "8080"}, "listen: must be an address"),
        ({"listen": "h:70000"}, "listen: must be an address"),
        ({"listen": "unix:/run/x"}, "a unix socket is not built yet"),
        ({"listen": ["a:1", "b:2"]}, "a list of other than one address is not built yet"),
        ({"listen": {"address": "a:1", "tls": {}}}, "listen.tls: is not built yet"),
        ({"listen": "h:80", "monitor": {"listen": "h:80"}}, "monitor.listen: `h:80` is the address of `listen` too"),
        ({"shutdown": {"timeout": "0s"}}, "must be at least 1s"),
        ({"log": {"level": "loud"}}, "must be debug or info or warning or error"),
        ({"log": {"requests": "problems"}}, "`problems` is not built yet"),
        ({"trusted_proxies": ["10.0.0.1/8"]}, "write 10.0.0.0/8"),
        ({"trusted_proxies": "10.0.0.0/8"}, "must be a list"),
        ({"limits": {"in_flight": 1.5}}, "must be a whole number"),
        ({"limits": {"in_flight": True}}, "must be a whole number"),
        ({"limits": {"waiters": 5}}, "limits.waiters: is not built yet"),
        ({"problems": {"type_base": "a b"}}, "must be a URI"),
        ({"store": {}}, "store.dsn: is missing"),
        ({"store": {"dsn": "embeded"}}, "must be a DSN"),
        ({"store": {"dsn": "embedded", "schema": "Ledger"}}, "in lower case"),
        ({"store": {"dsn": "embedded", "schema": "pg_x"}}, "not beginning with pg_"),
        ({"store": {"dsn": "embedded", "pool_mode": "statement"}}, "must be session or transaction"),
        ({"store": {"dsn": "embedded", "janitor": {"enabled": "yes"}}}, "must be true or false, not `yes`"),
        ({"stores": {}}, "stores: is not built yet"),
        ({"unmatched": "drop"}, "must be forward or reject"),
        ({"upstreams": {}}, "upstreams: is empty"),
        ({"upstreams": {"a b": {"url": "http://h"}}}, "is not a name"),
        ({"upstreams": {"a": {}}}, "upstreams.a.url: is missing"),
        ({"upstreams": {"a": {"urls": ["http://h"], "url": "http://h"}}}, "urls: is not built yet"),
        ({"upstreams": {"a": {"url": "http://h/base"}}}, "requests keep their own path"),
        ({"upstreams": {"a": {"url": "http://u:p@h"}}}, "has a user"),
        ({"upstreams": {"a": {"url": "http://h:99999"}}}, "must be a URL"),
        ({"upstreams": {"a": {"url": "http://h"}, "b": {"url": "http://i", "serves": ["/"]}}}, "does not say what it"),
        (
            {
                "upstreams": {
                    "a": {"url": "http://h", "serves": ["/x"]},
                    "b": {"url": "http://i", "serves": ["/", "/x/"]},
                }
            },
            "`/x/` is also served by upstreams.a.serves[0]",
        ),
        ({"upstreams": {"a": {"url": "http://h", "serves": ["/other"]}}}, "no upstream serves `POST /transfers`"),
        ({"routes": {}}, "routes: is empty"),
        ({"routes": []}, "routes: must be a map"),
        ({"routes": {"a": None}}, "routes.a: has no value"),
        ({"routes": {"a": {}}}, "routes.a.match: is missing"),
        ({"routes": {"a": {"match": []}}}, "routes.a.match: is empty"),
        ({"routes": {"a": {"match": "/x"}}}, "must be a method and a path"),
        ({"routes": {"a": {"match": "POST x"}}}, "has no path"),
        ({"routes": {"a": {"match": "HEAD|POST /x"}}}, "protects HEAD"),
        ({"routes": {"a": {"match": "POST|POST /x"}}}, "names one method twice"),
        ({"routes": {"a": {"match": "POST /a/**/b"}}}, "`**` before the end"),
        ({"routes": {"a": {"match": "POST /a/{x}.json"}}}, "stands for one whole segment"),
        ({"routes": {"a": {"match": "POST /a/*"}}}, "write `{name}` for one segment"),
        ({"routes": {"a": {"match": "POST /a//b"}}}, "empty or dot segment"),
        ({"routes": {"a": {"match": "POST /a/../b"}}}, "empty or dot segment"),
        ({"routes": {"a": {"match": "POST /a?b=c"}}}, "has a query in its path"),
        ({"routes": {"a": {"match": "POST /a%2Fb"}}}, "servers read in different ways"),
        ({"routes": {"a": {"match": "POST /a;v=1"}}}, "servers read in different ways"),
        ({"routes": {"a": {"match": "POST http://h/x"}}}, "has a scheme"),
        ({"routes": {"a": {"match": "POST h:80/x"}}}, "without port"),
        ({"routes": {"a": {"match": {"query": {"a": "b"}}}}}, "needs a path"),
        ({"routes": {"a": {"match": {"path": "POST /x", "query": {"a": 1}}}}}, "put quotes around numbers"),
        ({"routes": {"a": {"match": {"path": "POST /x", "header": {"X-A": "1", "x-a": "2"}}}}}, "one header twice"),
        ({"routes": {"a": {"match": {"path": "POST /x", "body": "x"}}}}, "unknown key `body`"),
        ({"routes": {"a": {"match": ["POST /x", "POST /x/"]}}}, "matches already"),
        (
            {"routes": {"a": {"match": "POST /x"}, "b": {"match": "POST /y", "operation": "a"}}},
            "has the operation `a`, as routes.a has",
        ),
        ({"policies": {"at-most-once": {}}}, "is the name of a built-in policy"),
        ({"policies": {"a": {"extends": "b"}, "b": {"extends": "a"}}}, "goes in a circle (a -> b -> a)"),
        ({"policies": {"a": {"extends": "a"}}}, "goes in a circle (a -> a)"),
        ({"policies": {"a": {"match": "POST /x"}}}, "policies.a.match: is unknown"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_in_a_sentence(
    folder: Path, changes: dict[str, Any], sentence: str
) -> None:
    found = faults(folder, **changes)
    assert any(sentence in fault for fault in found), found


@pytest.mark.parametrize(
    ("one", "other", "tie"),
    [
        ("POST /a/{x}", "POST /a/{y}", True),
        ("POST|PUT /a", "PUT|PATCH /a/", True),
        ("POST h/a", "POST H/a", True),
        ("POST /a/{x}", "POST /a/b", False),
        ("POST /a/{x}", "PUT /a/{x}", False),
        ("POST /a/**", "POST /a/{x}", False),
        ("POST /a/**", "POST /a", False),
        ("POST /a", "POST h/a", False),
        ("POST /a/{x}/c", "POST /a/b/{y}", False),
        ("POST /a", "POST /A", False),
        ({"path": "POST /a", "query": {"m": "x"}}, "POST /a", False),
        ({"path": "POST /a", "query": {"m": "x"}}, {"path": "POST /a", "query": {"m": "y"}}, False),
        ({"path": "POST /a", "query": {"m": "x"}}, {"path": "POST /a", "query": {"n": "y"}}, True),
        ({"path": "POST /a", "query": {"m": "x"}}, {"path": "POST /a", "header": {"M": "x"}}, True),
    ],
)
def test_two_routes_that_some_request_cannot_choose_between_are_refused(
    folder: Path, one: object, other: object, *, tie: bool
) -> None:
    routes = {"one": {"match": one}, "other": {"match": other}}
    if tie:
        assert "ties with" in only(faults(folder, routes=routes))
    else:
        assert loaded(folder, routes=routes)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["30s", "1MiB", "none", "/", "POST /x", "at-most-once", "POST /{a}", "2xx", "block"]),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=3), st.dictionaries(st.text(max_size=3), st.none()))),
    st.dictionaries(
        st.sampled_from(["extends", "header", "match", "dsn", "scope", "x"]), st.one_of(st.none(), st.text())
    ),
)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_stands_anywhere_the_file_is_loaded_or_its_faults_are_sentences(
    folder: Path, data: st.DataObject
) -> None:
    tree = yaml.safe_load((Path(__file__).parents[1] / "config" / "reference.yaml").read_text("utf-8"))
    for _ in range(data.draw(st.integers(1, 3))):
        here = tree
        while True:
            key = data.draw(st.sampled_from(list(here) if isinstance(here, dict) else range(len(here))))
            if not here[key] or not isinstance(here[key], dict | list) or data.draw(st.integers(0, 3)) == 0:
                here[key] = data.draw(JUNK)
                break
            here = here[key]
        if not isinstance(tree, dict) or not tree:
            break
    path = written(folder, yaml.safe_dump(tree))
    found: list[str] = []
    try:
        load(path, {})
    except ConfigError as error:
        found = error.faults or ["an error without a fault"]
    for fault in found:
        assert re.fullmatch(rf"{re.escape(str(path))}:[0-9]+: [^\n]+: [^\n]+", fault), fault
