"""Which route a request meets, however it is spelled."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import load
from gateway.model import Fields
from gateway.routes import MOST_REMEMBERED, Ambiguous, Matched, NoRoute, Pass, Protect, RouteTable

UPSTREAMS = {"ledger": {"url": "http://127.0.0.1:8081"}}
ORDERS = {
    "create": "POST /orders",
    "cancel": "POST /orders/{id}/cancel",
    "change": "PATCH|DELETE /orders/{id}",
}


def table(folder: Path, routes: dict[str, Any], **changes: Any) -> RouteTable:
    path = folder / "gateway.yaml"
    tree = {
        "service": "s",
        "store": {"dsn": "embedded"},
        "upstreams": UPSTREAMS,
        "defaults": {"extends": "at-most-once", "scope": "none", "on_missing_key": "reject"},
        "routes": {
            name: match if isinstance(match, dict) and "match" in match else {"match": match}
            for name, match in routes.items()
        },
        **changes,
    }
    path.write_text(yaml.safe_dump(tree), "utf-8")
    return RouteTable(load(path, {}))


@pytest.fixture
def orders(tmp_path: Path) -> RouteTable:
    return table(tmp_path, ORDERS)


def word(matched: Matched) -> str:
    """A match as one word: the route's name, or what it is else."""
    match matched:
        case Protect(route):
            return route.name
        case Pass(upstream, None):
            return f"pass {upstream}"
        case Pass(upstream, name):
            return f"pass {upstream} by {name}"
        case NoRoute():
            return "no route"
        case Ambiguous():
            return "ambiguous"


def met(routes: RouteTable, line: str | bytes, host: bytes | None = b"ledger", seen: Fields | None = None) -> str:
    method, _, target = (line.encode("latin-1") if isinstance(line, str) else line).partition(b" ")
    found = {word(routes.match(method.decode(), host, target, seen or {})) for _ in range(2)}
    assert len(found) == 1, "a remembered decision is the decision"
    return found.pop()


@pytest.mark.parametrize(
    ("line", "route"),
    [
        ("POST /orders", "create"),
        ("POST /orders/7/cancel", "cancel"),
        ("PATCH /orders/7", "change"),
        ("DELETE /orders/7", "change"),
        ("POST /orders/", "create"),  # another fingerprint, so a reused key is a 422
        ("POST /Orders", "pass ledger"),  # letter case counts, as in HTTP
        ("GET /orders", "pass ledger"),
    ],
)
def test_c10_each_operation_is_its_own_route(orders: RouteTable, line: str, route: str) -> None:
    assert met(orders, line) == route


def test_c10_two_virtual_hosts_are_two_routes(tmp_path: Path) -> None:
    routes = table(tmp_path, {"pay": "POST pay.example/orders", "shop": "POST shop.example/orders"})
    assert met(routes, "POST /orders", b"pay.example") == "pay"
    assert met(routes, "POST /orders", b"SHOP.example.:8080") == "shop"
    assert met(routes, "POST /orders", b"other.example") == "pass ledger"
    assert met(routes, "POST /orders", None) == "pass ledger"


@pytest.mark.parametrize(
    "target",
    [
        "/orders?x=1",
        "/orders?",
        "/%6Frders",
        "/%6f%72ders",
        "/orders/?a=/../b",
        "http://elsewhere/orders",
        "HTTP://elsewhere:80/orders?x",
    ],
)
def test_other_spellings_of_one_path_meet_its_route(orders: RouteTable, target: str) -> None:
    assert met(orders, f"POST {target}") == "create"


DOUBTFUL = [
    "/./orders",
    "/x/../orders",
    "/x/%2e%2e/orders",
    "/x/.%2E/orders",
    "/x/..;/orders",
    "/x/..;v=1/orders",
    "//orders",
    "/orders//",
    "/x//y",
    "/%2Forders",
    "/x%2f..%2forders",
    "/x\\..\\orders",
    "/x%5Corders",
    "/orders%00",
    "/orders%0a",
    "/orders\x01",
    "/orders#top",
    "/orders%",
    "/orders%zz",
    "/%u006frders",
    "/x%c0%ae%c0%ae/orders",
    "/x%c0%aforders",
    "/x%e0%80%aforders",
    "orders",
    "ledger/orders",
]


@pytest.mark.parametrize("target", DOUBTFUL)
def test_what_can_be_read_in_two_ways_is_refused_where_there_are_protected_routes(
    orders: RouteTable, target: str
) -> None:
    assert met(orders, f"POST {target}") == "ambiguous"
    assert met(orders, f"GET {target}") == "ambiguous"


@pytest.mark.parametrize("target", DOUBTFUL)
def test_and_passes_untouched_where_there_are_none(tmp_path: Path, target: str) -> None:
    routes = table(tmp_path, {"create": {"match": "POST /orders", "mode": "pass"}})
    assert routes.guarded == frozenset()
    assert met(routes, f"POST {target}") == "pass ledger"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("POST /orders;v=1", "parameters"),
        ("POST /orders;jsessionid=A/", "parameters"),
        ("POST /orders%3Bv=1", "parameters"),
        ("POST /orders.json", "a suffix"),
        ("POST /orders.", "a final dot"),
        ("POST /orders%20", "a final space"),
        ("POST /%256frders", "escapes twice"),
        ("POST /x%252f..%252forders", "escapes twice"),
        ("POST /x/%252e%252e/orders", "escapes twice"),
        ("POST /orders/7/cancel;x", "parameters"),
        ("post /orders", "the method in lower case"),
        ("Patch /orders/7", "the method in mixed case"),
    ],
)
def test_what_some_servers_read_as_a_protected_route_is_refused(orders: RouteTable, line: str, why: str) -> None:
    assert met(orders, line) == "ambiguous", why


@pytest.mark.parametrize(
    ("line", "route"),
    [
        ("GET /orders;v=1", "pass ledger"),
        ("GET /style.css", "pass ledger"),
        ("GET /a%20b/100%25/x..y;z", "pass ledger"),
        ("POST /other.json", "pass ledger"),
        ("PATCH /orders/7.5", "change"),
        ("PATCH /orders/a%20b", "change"),
        ("PATCH /orders/a;b", "change"),
        ("GET /f%7Eh%28i%29/%41/x%20y+z?q=a%2Bb", "pass ledger"),
        ("GET /caf%e9?x=%ff", "pass ledger"),
        (b"GET /caf\xe9", "pass ledger"),
        ("GET /a|b", "pass ledger"),
    ],
)
def test_c26_odd_spellings_that_lead_nowhere_else_are_no_reason_to_refuse(
    orders: RouteTable, line: str | bytes, route: str
) -> None:
    assert met(orders, line) == route


def test_a_route_of_its_own_settles_a_spelling(tmp_path: Path) -> None:
    routes = table(
        tmp_path, {"create": "POST /orders", "form": {"match": "POST /orders.html", "mode": "pass"}, "any": "POST /{x}"}
    )
    assert met(routes, "POST /orders.html") == "pass ledger by form"
    assert met(routes, "POST /orders.json") == "ambiguous"  # `any` would take it, but `create` is more specific
    assert met(routes, "POST /x.json") == "any"


def test_asterisk_form_passes(orders: RouteTable) -> None:
    assert met(orders, "OPTIONS *") == "pass ledger"


def test_the_most_specific_route_wins_in_whatever_order_they_are_written(tmp_path: Path) -> None:
    patterns: dict[str, Any] = {
        "rest": "POST /a/**",
        "one": "POST /a/{x}",
        "literal": "POST /a/b",
        "left": "POST /a/b/{y}",
        "right": "POST /a/{x}/c",
        "bare": "POST /a",
        "host": "POST pay.example/a/**",
        "query": {"path": "POST /a/b", "query": {"do": "it"}},
        "both": {"path": "POST /a/b", "query": {"do": "it"}, "header": {"X-Kind": "big"}},
    }
    for order in (list(patterns), list(reversed(patterns))):
        routes = table(tmp_path, {name: patterns[name] for name in order})
        big: Fields = {b"x-kind": b"big"}
        assert met(routes, "POST /a") == met(routes, "POST /a/") == "bare"
        assert met(routes, "POST /a/x") == "one"
        assert met(routes, "POST /a/x/y/z") == "rest"
        assert met(routes, "POST /a/b") == "literal"
        assert met(routes, "POST /a/b/c") == "left"
        assert met(routes, "POST /a/x/c") == "right"
        assert met(routes, "POST /a/b?do=it") == "query"
        assert met(routes, "POST /a/b?do=it", seen=big) == "both"
        assert met(routes, "POST /a/b?do=it", b"pay.example", big) == "host"


def test_query_conditions_are_decoded_and_one_of_several_values_is_ambiguous(tmp_path: Path) -> None:
    routes = table(tmp_path, {"create": {"path": "POST /do", "query": {"method": "create order"}}})
    for query in (
        "method=create+order",
        "x&method=create%20order&y=",
        "m%65thod=create+orde%72",
        "method=create order",
    ):
        assert met(routes, f"POST /do?{query}") == "create", query
    for query in ("", "method", "method=", "method=Create+order", "x=method%3Dcreate+order", "Method=create+order"):
        assert met(routes, f"POST /do?{query}") == "pass ledger", query
    for query in (
        "method=create+order&method=x",
        "method=x&method=create+order",
        "method=create+order;x",
        "x=1;method=x&method=create+order",
    ):
        assert met(routes, f"POST /do?{query}") == "ambiguous", query
    assert met(routes, "POST /do.json?method=create+order") == "ambiguous"
    assert met(routes, "POST /do.json?method=other") == "pass ledger"


def test_header_conditions_ignore_quotation_marks_and_one_of_several_lines_is_ambiguous(tmp_path: Path) -> None:
    routes = table(tmp_path, {"soap": {"path": "POST /ws", "header": {"SOAPAction": "urn:transfer"}}})
    for value in (b"urn:transfer", b'"urn:transfer"', b' "urn:transfer"\t'):
        assert met(routes, "POST /ws", seen={b"soapaction": value}) == "soap"
    assert met(routes, "POST /ws", seen={b"soapaction": b"urn:other"}) == "pass ledger"
    assert met(routes, "POST /ws") == "pass ledger"
    assert met(routes, "POST /ws", seen={b"soapaction": [b"urn:transfer", b"urn:other"]}) == "ambiguous"
    assert met(routes, "POST /ws", seen={b"soapaction": [b"urn:transfer", b'"urn:transfer"']}) == "soap"


def test_serves_decides_the_upstream_by_host_then_by_the_longest_prefix_of_whole_segments(tmp_path: Path) -> None:
    upstreams = {
        "web": {"url": "http://127.0.0.1:1", "serves": ["/"]},
        "api": {"url": "http://127.0.0.1:2", "serves": ["/api", "pay.example/"]},
        "v2": {"url": "http://127.0.0.1:3", "serves": ["/api/v2/"]},
    }
    routes = table(tmp_path, {"create": "POST /api/{version}/orders"}, upstreams=upstreams)
    assert met(routes, "GET /") == met(routes, "GET /apis") == "pass web"
    assert met(routes, "GET /api") == met(routes, "GET /api/v1/x") == met(routes, "GET /%61pi/") == "pass api"
    assert met(routes, "GET /api/v2") == "pass v2"
    assert met(routes, "GET /api/v2", b"pay.example:443") == "pass api"
    protected = [routes.match("POST", None, b"/api/%s/orders" % version, {}) for version in (b"v1", b"v2")]
    assert [matched.route.upstream for matched in protected if isinstance(matched, Protect)] == ["api", "v2"]
    assert routes.guarded == {"api", "v2"}
    assert met(routes, "GET //x") == "pass web"  # untouched: nothing there is protected
    assert met(routes, "GET /api//x") == "ambiguous"


def test_an_upstream_that_leads_to_a_guarded_server_is_guarded_too(tmp_path: Path) -> None:
    upstreams = {
        "files": {"url": "http://127.0.0.1:8081", "serves": ["/files"]},
        "ledger": {"url": "http://127.0.0.1:8081/", "serves": ["/"]},
        "other": {"url": "http://127.0.0.1:8082", "serves": ["/other"]},
    }
    routes = table(tmp_path, {"create": "POST /orders"}, upstreams=upstreams)
    assert met(routes, "POST /files/../orders") == "ambiguous"
    assert met(routes, "POST /other/../orders") == "pass other"


def test_unmatched_requests_are_forwarded_or_refused_as_written(tmp_path: Path) -> None:
    routes = table(tmp_path, {**ORDERS, "open": {"match": "GET /open", "mode": "pass"}}, unmatched="reject")
    assert met(routes, "GET /open") == "pass ledger by open"
    assert met(routes, "GET /orders") == met(routes, "OPTIONS *") == "no route"
    upstreams = {"ledger": {"url": "http://127.0.0.1:1", "serves": ["/orders"]}}
    routes = table(tmp_path, ORDERS, upstreams=upstreams)
    assert met(routes, "GET /else") == "no route"
    assert met(routes, "GET /orders") == "pass ledger"


def test_what_is_remembered_is_bounded(orders: RouteTable) -> None:
    for number in range(MOST_REMEMBERED + 10):
        assert word(orders.match("POST", None, b"/orders/%d/cancel" % number, {})) == "cancel"
    orders.match("POST", None, b"/" + b"x" * 10_000, {})
    assert len(orders._decided) <= MOST_REMEMBERED
    assert max(len(path) for _, _, path in orders._decided) < 10_000


SEGMENTS = [
    "orders",
    "%6frders",
    "ORDERS",
    "x",
    "..",
    ".",
    "",
    "%2e%2e",
    "%2f",
    ";a",
    "orders;b",
    "..;",
    "%",
    "%25",
    "7",
]


@given(st.lists(st.sampled_from(SEGMENTS), max_size=5), st.sampled_from(["POST", "GET", "post", "PATCH"]))
def test_no_spelling_of_a_protected_path_passes(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], method: str
) -> None:
    routes = table(tmp_path_factory.mktemp("routes"), {"create": "POST /orders"})
    target = "/" + "/".join(parts)
    if method.upper() == "POST" and _forgiving(parts) == ["orders"]:
        assert met(routes, f"{method} {target}") in {"create", "ambiguous"}
    assert met(routes, f"GET {target}") in {"pass ledger", "ambiguous"}


def _forgiving(parts: list[str]) -> list[str]:
    """What the most forgiving server makes of a path."""
    walked: list[str] = []
    for part in parts:
        name = part.replace("%6f", "o").replace("%2e", ".").replace("%2f", "/").strip("/").partition(";")[0]
        if name == "..":
            del walked[-1:]
        elif name not in {"", "."}:
            walked.append(name)
    return walked
