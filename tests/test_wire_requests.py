"""Request heads: the received view, faults, and what goes to the upstream."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import wire

STRANGER = wire.Peer(b"203.0.113.9", trusted=False)
PROXY = wire.Peer(b"10.0.0.1", trusted=True, scheme=b"https")
GUARD = wire.guarded(b"idempotency-key", [b"x-customer-id"], [b"x-version"])
SHOP = (b"Host", b"shop.example")


def sent(headers, *, method=b"POST", target=b"/orders", peer=STRANGER, **more):
    look = wire.look(method, target, headers)
    head = wire.forward_head(method, look, headers, peer=peer, request_id="r1", **more)
    start, *lines = head.removesuffix(b"\r\n").split(b"\r\n")
    return start, [tuple(line.split(b": ", 1)) for line in lines]


def names(headers, **more):
    return [name.lower() for name, _ in sent(headers, **more)[1]]


def fault(*headers, method=b"POST", target=b"/orders", **more):
    lines = list(headers) or [SHOP]
    return wire.look(method, target, lines, **more).fault


# ---- the received view ------------------------------------------------------------------------------------------


def test_fields_are_lower_case_and_show_repetition():
    seen = wire.fields([(b"A", b"1"), (b"b", b"2"), (b"a", b"1"), (b"A", b"")])
    assert seen == {b"a": [b"1", b"1", b""], b"b": b"2"}


def test_c30_connection_cannot_take_the_key_from_the_received_view():
    seen = wire.fields([(b"Connection", b"close, Idempotency-Key, Authorization"), (b"Idempotency-Key", b"k")])
    assert seen[b"idempotency-key"] == b"k"


@given(st.lists(st.tuples(st.sampled_from([b"A", b"a", b"Bc", b"Host"]), st.binary(max_size=5))))
def test_a_look_measures_target_and_lines_as_they_crossed_the_wire(headers):
    size = len(b"/x") + sum(len(name + b": " + value + b"\r\n") for name, value in headers)
    assert wire.look(b"POST", b"/x", headers).size_bytes == size


# ---- faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"Idempotency-Key", b"AUTHORIZATION", b"x-customer-id", b"X-Version", b"host"])
def test_c30_a_nominated_header_that_must_reach_the_service_is_refused(name):
    attack = (b"Connection", b"close, " + name)
    assert wire.hides(wire.fields([attack]), GUARD)
    assert wire.hides(wire.fields([(b"Connection", b"close"), attack]), GUARD)
    assert not wire.hides(wire.fields([(b"Connection", b"keep-alive, X-Debug")]), GUARD)
    assert fault(SHOP, attack) is None


@pytest.mark.parametrize(
    "target", [b"", b"orders", b"*", b"ftp://h/x", b"http://", b"http:///x", b"h:80", b"/a#b", b"/a b", b"/\t"]
)
def test_c26_a_target_that_is_no_path_is_refused(target):
    assert fault(target=target) == "target"


@pytest.mark.parametrize("target", [b"/%", b"/a|b", b"/caf\xe9", b"/p;v=1", b"/x?", b"/?" + b"q" * 7000, b"http://h/x"])
def test_c26_odd_targets_are_left_to_the_service(target):
    assert fault(target=target) is None


@pytest.mark.parametrize(
    "headers",
    [
        [(b"A", b"1")],
        [SHOP, SHOP],
        [SHOP, (b"Host", b"other")],
        [(b"Host", b"a b")],
        [(b"Host", b"a/b")],
        [(b"Host", b"a@b")],
    ],
)
def test_exactly_one_valid_host_is_needed(headers):
    assert fault(*headers) == "host"


def test_http_10_may_leave_the_host_out():
    assert fault((b"A", b"1"), http11=False) is None
    assert fault(SHOP, SHOP, http11=False) == "host"


@pytest.mark.parametrize("value", [b"a\r\nX: 1", b"a\n", b"a\r", b"a\0b"])
def test_a_control_byte_in_a_line_is_refused(value):
    assert fault(SHOP, (b"X-A", value)) == "control_character"


@pytest.mark.parametrize(
    "headers",
    [
        [(b"Content-Length", b"2"), (b"Transfer-Encoding", b"chunked")],
        [(b"Content-Length", b"2"), (b"Content-Length", b"3")],
        [(b"Content-Length", b"2"), (b"Content-Length", b"2")],
        [(b"Content-Length", b"+2")],
        [(b"Content-Length", b"")],
        [(b"Content-Length", b"0x2")],
        [(b"Content-Length", b"9" * 19)],
        [(b"Content-Length", "²".encode("latin-1"))],
        [(b"Transfer-Encoding", b"xchunked")],
        [(b"Transfer-Encoding", b"chunked, identity")],
        [(b"Transfer-Encoding", b"chunked"), (b"Transfer-Encoding", b"chunked")],
    ],
)
def test_c31_ambiguous_framing_is_refused(headers):
    assert fault(SHOP, *headers) == "framing"


def test_c31_plain_framing_is_accepted():
    assert fault(SHOP, (b"Content-Length", b"2")) is None
    assert fault(SHOP, (b"Transfer-Encoding", b"Chunked")) is None


# ---- the target -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        b"/f%2Fg%7Eh%28i%29/%41/x%20y+z?q=a%2Bb%20c+d&x=%2F&y=%3A&k=2&k=1&e=&f",
        b"/caf%e9?x=%ff",
        b"/p;v=1",
        b"/a|b",
        b"/%",
        b"/a%00b",
        b"/x?",
        b"//x",
        b"/" + b"q" * 7000,
    ],
)
def test_c26_a_path_goes_upstream_byte_for_byte(target):
    assert wire.origin_form(b"POST", target) == target
    assert sent([SHOP], target=target)[0] == b"POST " + target + b" HTTP/1.1"


@pytest.mark.parametrize(
    ("method", "target", "origin"),
    [
        (b"POST", b"http://other.example/a%2Fb?c", b"/a%2Fb?c"),
        (b"POST", b"HTTPS://other.example:8443/x", b"/x"),
        (b"POST", b"http://other.example", b"/"),
        (b"POST", b"http://other.example?q=/", b"/?q=/"),
        (b"OPTIONS", b"http://other.example", b"*"),
        (b"OPTIONS", b"*", b"*"),
    ],
)
def test_c26_absolute_form_loses_its_authority_only(method, target, origin):
    assert wire.origin_form(method, target) == origin


# ---- what is forwarded ------------------------------------------------------------------------------------------


def test_c30_hop_by_hop_and_nominated_lines_do_not_cross():
    headers = [
        SHOP,
        (b"Connection", b"keep-alive, X-Debug"),
        (b"connection", b"x-OTHER ,, "),
        (b"X-Debug", b"1"),
        (b"X-Other", b"1"),
        (b"TE", b"trailers"),
        (b"Trailer", b"X-Sum"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Proxy-Connection", b"keep-alive"),
        (b"Proxy-Authorization", b"Basic x"),
        (b"Upgrade", b"h2c"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Content-Length", b"3"),
        (b"Expect", b"100-continue"),
        (b"X-Kept", b"1"),
    ]
    assert [name for name in names(headers) if not name.startswith(b"x-forwarded-")] == [
        b"host",
        b"x-kept",
        b"x-request-id",
    ]


def test_order_case_repetition_and_bytes_of_everything_else_are_kept():
    kept = [
        (b"X-b", b"2"),
        (b"x-A", b"caf\xe9"),
        (b"COOKIE", b"sid=three"),
        (b"X-b", b" 1,"),
        (b"Idempotency-Key", b'"k"'),
    ]
    _, lines = sent([kept[0], SHOP, *kept[1:]])
    assert lines[0] == SHOP
    assert lines[1 : 1 + len(kept)] == kept


def test_exactly_one_host_goes_upstream():
    assert sent([(b"HOST", b"shop.example")])[1].count(SHOP) == 1
    assert sent([SHOP], host=b"ledger.int:81")[1][0] == (b"Host", b"ledger.int:81")
    assert names([SHOP], host=b"ledger.int:81").count(b"host") == 1
    assert sent([])[1][0] == (b"Host", b"")


def test_the_key_is_stripped_where_the_policy_says_so():
    headers = [SHOP, (b"IDEMPOTENCY-Key", b"k")]
    assert b"idempotency-key" in names(headers)
    assert b"idempotency-key" not in names(headers, strip=b"idempotency-key")


def test_a_stranger_cannot_say_where_a_request_came_from():
    forged = [
        (b"X-Forwarded-For", b"6.6.6.6"),
        (b"X-Forwarded-Proto", b"https"),
        (b"X-Forwarded-Host", b"evil"),
        (b"X-Forwarded-Port", b"1"),
        (b"X_Forwarded_For", b"6.6.6.6"),
        (b"Forwarded", b"for=6.6.6.6"),
        (b"X-Request-Id", b"forged"),
    ]
    assert sent([SHOP, *forged])[1][1:] == [
        (b"X-Forwarded-For", b"203.0.113.9"),
        (b"X-Forwarded-Proto", b"http"),
        (b"X-Forwarded-Host", b"shop.example"),
        (b"Forwarded", b'for=203.0.113.9;proto=http;host="shop.example"'),
        (b"X-Request-Id", b"r1"),
    ]


def test_a_trusted_proxy_is_continued():
    given_ = [
        (b"X-Forwarded-For", b"1.1.1.1"),
        (b"X-Forwarded-For", b"2.2.2.2"),
        (b"X-Forwarded-Proto", b"http"),
        (b"X-Forwarded-Host", b"public.example"),
        (b"X-Forwarded-Port", b"443"),
        (b"Forwarded", b"for=1.1.1.1"),
    ]
    lines = sent([SHOP, *given_], peer=PROXY)[1]
    assert lines[1:] == [
        (b"X-Forwarded-Proto", b"http"),
        (b"X-Forwarded-Host", b"public.example"),
        (b"X-Forwarded-Port", b"443"),
        (b"X-Forwarded-For", b"1.1.1.1, 2.2.2.2, 10.0.0.1"),
        (b"Forwarded", b'for=1.1.1.1, for=10.0.0.1;proto=https;host="shop.example"'),
        (b"X-Request-Id", b"r1"),
    ]


def test_a_trusted_proxy_that_speaks_only_forwarded_gets_nothing_else_beside_it():
    found = names([SHOP, (b"Forwarded", b"for=1.1.1.1")], peer=PROXY)
    assert found == [b"host", b"forwarded", b"x-request-id"]


def test_an_ipv6_peer_is_quoted_in_forwarded_and_a_unix_socket_is_unknown():
    forged = (b"Forwarded", b"x")
    six = sent([SHOP, forged], peer=wire.Peer(b"2001:db8::1", trusted=False))[1]
    assert (b"X-Forwarded-For", b"2001:db8::1") in six
    assert (b"Forwarded", b'for="[2001:db8::1]";proto=http;host="shop.example"') in six
    assert (b"X-Forwarded-For", b"unknown") in sent([SHOP], peer=wire.Peer(b"", trusted=False))[1]


@pytest.mark.parametrize("value", [b"", b"a b", b"x" * 129, b"caf\xe9", b"a\tb"])
def test_an_unusable_request_id_is_replaced(value):
    assert wire.request_id(wire.fields([(b"X-Request-Id", value)]), PROXY, "made") == "made"


def test_a_request_id_is_kept_from_trusted_peers_only():
    seen = wire.fields([(b"X-Request-Id", b"u1")])
    assert wire.request_id(seen, PROXY, "made") == "u1"
    assert wire.request_id(seen, STRANGER, "made") == "made"
    assert wire.request_id({}, PROXY, "made") == "made"
    assert wire.request_id({b"x-request-id": [b"u1", b"u1"]}, PROXY, "made") == "made"


PRINTABLE = st.binary(max_size=20).map(lambda value: re.sub(rb"[\r\n\0]", b"", value))
LINES = st.lists(
    st.tuples(st.sampled_from([b"X-A", b"Connection", b"TE", b"x-forwarded-for", b"Forwarded", b"Host"]), PRINTABLE)
)


@given(LINES, st.booleans())
def test_a_forwarded_head_is_one_line_each_and_nothing_that_stays_here(headers, trusted):
    peer = wire.Peer(b"10.0.0.1", trusted)
    start, lines = sent(headers, method=b"PUT", target=b"/", peer=peer, host=b"h")
    assert start == b"PUT / HTTP/1.1"
    assert all(len(line) == 2 for line in lines)
    nominated = wire.nominated(wire.fields(headers))
    assert [line for line in lines if line[0] == b"X-A"] == [
        line for line in headers if line[0] == b"X-A" and b"x-a" not in nominated
    ]
    found = [name.lower() for name, _ in lines]
    assert not set(found) & (wire.HOP_BY_HOP | nominated - {b"host", b"forwarded", b"x-forwarded-for"})
    assert found.count(b"host") == found.count(b"x-request-id") == 1
    assert found.count(b"forwarded") == any(name == b"Forwarded" for name, _ in headers)
