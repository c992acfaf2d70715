"""What crosses the gateway: exact bytes in, exact bytes out, one framing, nothing re-sent, nothing smuggled."""

import pytest

from tests.support import RawUpstream, chunked, close, hang, play, reply, request, then

from .conftest import TRUSTED, Gate, Start, end_to_end, post

KIB = 1024


def protected(path: str) -> bool:
    return path.startswith(("/orders", "/accounts", "/files"))


# ---- C12 --------------------------------------------------------------------------------------------------------

FIRST = b'{"a":1,"b":{"x":1,"y":2}}'


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (FIRST, b'{"b":{"y":2,"x":1},"a":1}', True),
        (FIRST, b'\n{ "a" : 1,\t"b":{"x":1 ,"y":2}}\r\n', True),
        (b'{"s":"\\u0041/"}', b'{"s":"A\\/"}', True),
        (b'{"items":[1,2]}', b'{"items":[2,1]}', False),
        (b'{"n":1}', b'{"n":1.0}', False),
        (b'{"n":10000000000000000001}', b'{"n":10000000000000000002}', False),
        (b'{"n":0.1}', b'{"n":0.10000000000000001}', False),
        (b'{"n":1}', b'{"n":"1"}', False),
        (b'{"n":null}', b"{}", False),
        (b'{"n":0}', b'{"n":-0}', False),
        (b'{"a":1,"a":2}', b'{"a":2}', False),
        (b'{"a":1,"a":2}', b'{"a":2,"a":1}', False),
        (b'{"a":1}', b'\xef\xbb\xbf{"a":1}', False),
        (b"", b"{}", False),
        (b"[]", b"{}", False),
        (b"{not json", b"{not json ", False),
        (b"{not json", b"{not json", True),
        (b"[" * 100_000, b"[" * 100_000, True),
        (b"[" * 100_000, b"[" * 100_001, False),
    ],
)
async def test_c12_a_json_body_counts_by_its_content_and_arrives_by_its_bytes(
    replicas: tuple[Gate, Gate], upstream: Start, key: str, *, one: bytes, other: bytes, same: bool
) -> None:
    up = await upstream(reply(201, b"made"))
    first = await replicas[0].ask(post(key=key, body=one))
    for gate in replicas:
        second = await gate.ask(post(key=key, body=other))
        assert up.executions["/orders", key] == 1
        assert (first.status, second.status) == (201, 201 if same else 422)
        assert (second.value("Idempotent-Replayed") == "true") is same
    assert up.requests[0].body == one


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("application/json", "application/json; charset=utf-8", True),
        ("application/json", "APPLICATION/JSON", True),
        ("application/vnd.x+json", "application/vnd.x+json;v=1", True),
        ("application/json", "text/plain", False),
        ("application/json", None, False),
    ],
)
async def test_c12_parameters_of_the_media_type_do_not_count(
    replicas: tuple[Gate, Gate], upstream: Start, key: str, *, one: str, other: str | None, same: bool
) -> None:
    gate, up = replicas[0], await upstream(reply(201))
    await gate.ask(post(key=key, body=b'{"a":1}', content_type=one))
    second = await gate.ask(post(key=key, body=b'{"a":1}', content_type=other))
    assert up.executions["/orders", key] == 1
    assert second.status == (201 if same else 422)
    assert up.requests[0].values("Content-Type") == [one.encode()]


async def test_c12_no_body_and_an_empty_one_are_the_same_and_an_empty_object_is_not(
    gate: Gate, upstream: Start, key: str
) -> None:
    up = await upstream(reply(201))
    statuses = [
        (await gate.ask(post(key=key, body=None))).status,
        (await gate.ask(post(key=key, body=b""))).status,
        (await gate.ask(post(key=key, chunks=[]))).status,
        (await gate.ask(post(key=key, body=None, content_type=None))).status,
        (await gate.ask(post(key=key, body=b"{}"))).status,
    ]
    assert up.executions["/orders", key] == 1
    assert statuses == [201, 201, 201, 201, 422]


async def test_c12_chosen_headers_and_raw_bodies_count_where_a_route_says_so(
    gate: Gate, upstream: Start, key: str
) -> None:
    up = await upstream(reply(201))
    answers = [await gate.ask(post("/by-language", key, b"{}", ("X-Language", value))) for value in ("de", "de", "fr")]
    assert up.executions["/by-language", key] == 1
    assert [answer.status for answer in answers] == [201, 201, 422]
    answers = [await gate.ask(post("/by-bytes", key, body)) for body in (b'{"a":1}', b'{"a":1}', b'{"a": 1}')]
    assert up.executions["/by-bytes", key] == 1
    assert [answer.status for answer in answers] == [201, 201, 422]


# ---- C23 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "POST"])
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warmed"])
@pytest.mark.parametrize("path", ["/accounts/7", "/open"])
async def test_c23_nothing_is_sent_twice_when_the_upstream_drops_the_connection(
    gate: Gate, upstream: Start, key: str, *, method: str, warm: bool, path: str
) -> None:
    up = await upstream([*([reply(200)] if warm else []), close()])
    if warm:
        await gate.ask(request("GET", "/warm"))
    answer = await gate.ask(post(path, key, method=method))
    assert up.executions[path, key] == 1
    assert up.requests[-1].connection == 1, "the warmed connection is the one that is used"
    assert answer.status == 502
    assert b'"code":"outcome-unknown"' in answer.body
    assert b'"effect":"unknown"' in answer.body
    if protected(path):
        again = await gate.ask(post(path, key, method=method))
        assert up.executions[path, key] == 1
        assert again.status == 409
        assert b'"code":"in-doubt"' in again.body
        assert int(again.value("Retry-After") or 0) > 30, "the effect deadline, twice the upstream's timeout"


async def test_c23_a_connection_that_the_upstream_closed_while_idle_is_not_used(
    gate: Gate, upstream: Start, key: str
) -> None:
    up = await upstream(reply(201))
    assert (await gate.ask(post(key=f"{key}-1"))).status == 201
    await up.close_connections()
    assert (await gate.ask(post(key=f"{key}-2"))).status == 201
    assert (up.executions["/orders", f"{key}-2"], up.connections) == (1, 2)


# ---- C25 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/orders", "/open"])
async def test_c25_no_client_sends_another_ones_cookies(gate: Gate, upstream: Start, key: str, path: str) -> None:
    up = await upstream(reply(200, b"", [("Set-Cookie", "sid=one; Path=/"), ("Set-Cookie", "t=two; Path=/")]))
    login = await gate.ask(post("/login", f"{key}-1", host="localhost"))
    assert login.values("Set-Cookie") == [b"sid=one; Path=/", b"t=two; Path=/"]
    await gate.ask(post(path, f"{key}-2", host="localhost"))
    await gate.ask(post(path, f"{key}-3", b"{}", ("Cookie", "sid=three"), host="localhost"))
    assert [asked.values("Cookie") for asked in up.requests] == [[], [], [b"sid=three"]]
    assert {asked.connection for asked in up.requests} == {1}


# ---- C26 --------------------------------------------------------------------------------------------------------

TARGETS: list[bytes] = [
    b"/f%2Fg%7Eh%28i%29/%41/x%20y+z?q=a%2Bb%20c+d&x=%2F&y=%3A&k=2&k=1&e=&f",
    b"/caf%e9?x=%ff",
    b"/p;v=1",
    b"/a|b",
    b"/%",
    b"/%zz?%",
    b"/a%00b",
    b"/x?",
    b"/x??",
    b"/x?a=b?c#".rstrip(b"#"),
    b"/x?" + b"q" * 7000,
    b"/./a/../b",
    b"//double//slash",
    b"/a\\b",
    b"/{curly}[square]\"quote'`^",
    b"/x?next=http://a.test/b",
    b"/:80/@:",
]


@pytest.mark.parametrize("target", TARGETS)
async def test_c26_the_target_arrives_byte_for_byte(gate: Gate, plain: Start, key: str, target: bytes) -> None:
    up = await plain(reply(200))
    for line, arrives in (
        (b"/plain" + target, b"/plain" + target),
        (b"http://else.where:81/plain" + target, b"/plain" + target),
    ):
        answer = await gate.ask(post(line.decode("latin-1"), key))
        assert answer.status == 200
        assert up.requests[-1].line == b"POST " + arrives + b" HTTP/1.1"
        assert up.requests[-1].values("Host") == [b"gateway.test"]


@pytest.mark.parametrize("target", TARGETS)
async def test_c26_where_something_is_protected_it_arrives_byte_for_byte_or_is_refused(
    gate: Gate, upstream: Start, key: str, target: bytes
) -> None:
    up = await upstream(reply(200))
    for prefix in (b"/files", b"/free", b"http://else.where/files"):
        answer = await gate.ask(post((prefix + target).decode("latin-1"), f"{key}{prefix.count(b'/')}"))
        if up.requests:
            assert answer.status == 200
            assert up.requests.pop().target == prefix.removeprefix(b"http://else.where") + target
        else:
            assert answer.status == 400
            assert b'"path-ambiguous"' in answer.body


async def test_c26_options_asterisk_and_absolute_form_without_a_path(gate: Gate, upstream: Start) -> None:
    up = await upstream(reply(204, headers=[("Allow", "GET, POST")]))
    for target in ("*", "http://else.where"):
        answer = await gate.ask(request("OPTIONS", target))
        assert up.requests[-1].line == b"OPTIONS * HTTP/1.1"
        assert (answer.status, answer.value("Allow")) == (204, "GET, POST")
    await gate.ask(request("GET", "http://else.where?q=1"))
    assert up.requests[-1].target == b"/?q=1"


@pytest.mark.parametrize(
    "target", ["*", "orders", "ftp://a/b", "http:///orders", "/a b", "/orders#x", "mailto:x@y", "/caf\xe9", "/x?\xff"]
)
async def test_c26_what_is_no_target_is_refused(gate: Gate, upstream: Start, key: str, target: str) -> None:
    up = await upstream(reply(200))
    answer = await gate.ask(post(target, key))
    assert not up.requests
    assert answer.status == 400


# ---- C30 --------------------------------------------------------------------------------------------------------

HOPS = [
    ("Connection", "keep-alive, X-Debug"),
    ("X-Debug", "1"),
    ("TE", "trailers"),
    ("Keep-Alive", "timeout=5"),
    ("Proxy-Authorization", "Basic x"),
    ("Proxy-Connection", "keep-alive"),
    ("Upgrade", "h2c"),
    ("Trailer", "X-Sum"),
    ("X-End", "to end"),
]


@pytest.mark.parametrize("path", ["/orders", "/open"])
async def test_c30_hop_by_hop_and_nominated_lines_cross_in_neither_direction(
    gate: Gate, upstream: Start, key: str, path: str
) -> None:
    back = [("Connection", "X-Internal, close"), ("X-Internal", "s"), ("Keep-Alive", "timeout=5"), ("x-end", "e")]
    up = await upstream(reply(201, b"made", back, close_after=True))
    for number in range(2):
        answer = await gate.ask(post(path, key, b"{}", *HOPS, ("Connection", "close, HTTP2-Settings, upgrade")))
        assert up.executions[path, key] == (1 if path == "/orders" else number + 1)
        assert end_to_end(answer) == [(b"x-end", b"e")]
        assert answer.body == b"made"
    arrived = {name.lower() for name, _ in up.requests[0].headers}
    assert arrived == {
        b"host", b"idempotency-key", b"content-type", b"x-end", b"content-length", b"x-request-id",
        b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host",
    }  # fmt: skip


@pytest.mark.parametrize(
    "nominated",
    [
        "close, Idempotency-Key, Authorization",
        "idempotency-key",
        "keep-alive,IDEMPOTENCY-KEY",
        "Authorization",
        "X-Customer-Id",
        "Content-Type",
        "Cookie",
        "Host",
    ],
)
async def test_c30_connection_cannot_take_what_protects_a_request(
    gate: Gate, upstream: Start, key: str, nominated: str
) -> None:
    up = await upstream(reply(201))
    lines = [("X-Customer-Id", "c"), ("Authorization", "Bearer x"), ("Connection", nominated)]
    for _ in range(2):
        answer = await gate.ask(post("/by-customer", key, b"{}", *lines))
        assert not up.requests
        assert answer.status == 400
        assert b'"reason":"connection"' in answer.body


async def test_c30_where_the_request_came_from_is_ours_to_say_unless_the_peer_is_trusted(
    gate: Gate, upstream: Start, key: str
) -> None:
    up = await upstream(reply(201))
    said = [("X-Forwarded-For", "6.6.6.6"), ("X-Forwarded-Proto", "https"), ("x_forwarded_for", "6.6.6.6")]
    said += [("X-Request-Id", "mine"), ("X-Forwarded-Port", "1"), ("Forwarded", "for=6.6.6.6")]
    for path in ("/orders", "/open"):
        await gate.ask(post(path, f"{key}-1", b"{}", *said))
        asked = up.requests[-1]
        assert asked.values("X-Forwarded-For") == [b"127.0.0.1"]
        assert asked.values("X-Forwarded-Proto") == [b"http"]
        assert b"6.6.6.6" not in asked.head
        assert asked.values("X-Request-Id") != [b"mine"]
        assert len(asked.values("X-Request-Id")) == 1
        await gate.ask(post(path, f"{key}-2", b"{}", *said), TRUSTED)
        asked = up.requests[-1]
        assert asked.values("X-Forwarded-For") == [b"6.6.6.6, 127.0.0.2"]
        assert asked.values("X-Forwarded-Proto") == [b"https"]
        assert asked.values("X-Request-Id") == [b"mine"]


# ---- C31 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/orders", "/open"])
async def test_c31a_a_chunked_request_has_one_framing_header(gate: Gate, upstream: Start, key: str, path: str) -> None:
    up = await upstream(reply(201))
    odd = b"POST %b HTTP/1.1\r\nHost: g\r\nIdempotency-Key: %b-2\r\nTransfer-Encoding: Chunked\r\n\r\n"
    body = b"2;ext=1\r\n{}\r\n0\r\nX-Trailer: t\r\nIdempotency-Key: evil\r\n\r\n"
    for number, data in enumerate(
        (post(path, f"{key}-1", chunks=[b"{", b"}"]), odd % (path.encode(), key.encode()) + body), 1
    ):
        answer = await gate.ask(data)
        assert up.executions[path, f"{key}-{number}"] == 1
        assert answer.status == 201
        asked = up.requests[-1]
        assert asked.body == b"{}"
        framing = len(asked.values("Content-Length")) + len(asked.values("Transfer-Encoding"))
        assert framing == 1
        assert b"evil" not in up.received[asked.connection]


TRAILERS = chunked([b"one", b"two"], 201, [("Trailer", "X-Sum")], end=b"0\r\nX-Sum: 6\r\n\r\n")


@pytest.mark.parametrize("path", ["/orders", "/open"])
async def test_c31b_a_chunked_answer_with_trailers_leaves_the_connection_usable(
    gate: Gate, upstream: Start, key: str, path: str
) -> None:
    up = await upstream(TRAILERS)
    async with gate.client() as client:
        for number in range(2):
            answer = await client.ask(post(path, f"{key}-{number}"))
            assert (answer.status, answer.body) == (201, b"onetwo")
            assert len(answer.values("Content-Length")) + len(answer.values("Transfer-Encoding")) == 1
            assert not answer.values("Trailer")
            assert b"X-Sum" not in answer.head + answer.raw_body, "trailers are dropped"
    assert sum(up.executions.values()) == 2
    assert up.connections == 1


@pytest.mark.parametrize("path", ["/orders", "/open"])
@pytest.mark.parametrize("keep_alive", [False, True])
async def test_c31c_a_client_of_http_1_0_gets_no_chunks(
    gate: Gate, upstream: Start, key: str, *, path: str, keep_alive: bool
) -> None:
    up = await upstream(TRAILERS)
    line = b"Connection: keep-alive\r\n" if keep_alive else b""
    start = b"POST %b HTTP/1.0\r\nIdempotency-Key: %b\r\n%bContent-Length: 2\r\n\r\n{}"
    async with gate.client() as client:
        answer = await client.ask(start % (path.encode(), key.encode(), line))
        assert up.executions[path, key] == 1
        assert (answer.status, answer.body) == (201, b"onetwo")
        assert not answer.values("Transfer-Encoding")
        assert answer.framing == ("length" if path == "/orders" else "close")
        if keep_alive and path == "/orders":
            assert answer.value("Connection") == "keep-alive"
            again = await client.ask(start % (path.encode(), key.encode(), line))
            assert (again.status, again.value("Idempotent-Replayed")) == (201, "true")
        else:
            assert await client.is_closed()
    assert up.executions[path, key] == 1


HOST = b"Host: g\r\nIdempotency-Key: KEY\r\n"
SMUGGLED = b"POST /orders HTTP/1.1\r\nHost: g\r\nIdempotency-Key: KEY-smuggled\r\nContent-Length: 2\r\n\r\n{}"
FRAMINGS = {
    "cl-te": HOST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "te-cl": HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "two-lengths": HOST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "two-equal-lengths": HOST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "list-of-lengths": HOST + b"Content-Length: 2, 2\r\n\r\n{}",
    "blank-before-colon": HOST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "blank-before-colon-length": HOST + b"Content-Length : 2\r\n\r\n{}",
    "xchunked": HOST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked-identity": HOST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "gzip-chunked": HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": HOST + b"Transfer-Encoding: identity\r\n\r\n",
    "two-codings": HOST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two-codings-identity": HOST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "tab-coding": HOST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "folded-coding": HOST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "plus": HOST + b"Content-Length: +2\r\n\r\n{}",
    "minus": HOST + b"Content-Length: -2\r\n\r\n{}",
    "empty": HOST + b"Content-Length: \r\n\r\n{}",
    "hex": HOST + b"Content-Length: 0x2\r\n\r\n{}",
    "huge": HOST + b"Content-Length: 184467440737095516170\r\n\r\n{}",
    "bare-cr": HOST + b"X: a\rContent-Length: 2\r\n\r\n{}",
    "bare-lf": HOST + b"X: a\nContent-Length: 2\n\n{}",
    "nul": HOST + b"X: a\0b\r\nContent-Length: 2\r\n\r\n{}",
    "fold": HOST + b"X: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
    "no-host": b"Idempotency-Key: KEY\r\nContent-Length: 2\r\n\r\n{}",
    "two-hosts": HOST + b"Host: h\r\nContent-Length: 2\r\n\r\n{}",
    "bad-chunk-size": HOST + b"Transfer-Encoding: chunked\r\n\r\nx\r\n{}\r\n0\r\n\r\n",
    "negative-chunk-size": HOST + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    "huge-chunk-size": HOST + b"Transfer-Encoding: chunked\r\n\r\n10000000000000002\r\n{}\r\n0\r\n\r\n",
    "chunk-too-long": HOST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
    "chunk-lf": HOST + b"Transfer-Encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("path", ["/orders", "/open"])
@pytest.mark.parametrize("kind", FRAMINGS)
async def test_c31d_to_g_a_request_whose_end_is_doubtful_is_refused_and_nothing_follows_it(
    gate: Gate, upstream: Start, key: str, *, path: str, kind: str
) -> None:
    up = await upstream(reply(201))
    rest = FRAMINGS[kind] + SMUGGLED
    async with gate.client() as client:
        await client.send(b"POST " + path.encode() + b" HTTP/1.1\r\n" + rest.replace(b"KEY", key.encode()))
        answer = await client.read_answer()
        assert sum(up.executions.values()) == 0
        assert answer.status == 400
        assert answer.value("Connection") == "close"
        assert await client.is_closed()
    assert sum(up.executions.values()) == 0
    assert not any(b"smuggled" in received for received in up.received.values())


async def test_c31h_pipelined_requests_are_answered_in_order(gate: Gate, upstream: Start, key: str) -> None:
    up = await upstream(lambda turn: reply(201, turn.request.key.encode())(turn))
    keys = [f"{key}-{number}" for number in range(20)]
    async with gate.client() as client:
        await client.send(b"".join(post(("/orders", "/open")[n % 2], one) for n, one in enumerate(keys)))
        answers = [await client.read_answer() for _ in keys]
    assert sum(up.executions.values()) == 20
    assert [answer.body.decode() for answer in answers] == keys


async def test_c31i_the_second_of_two_pipelined_requests_with_one_key_is_a_replay(
    gate: Gate, upstream: Start, key: str
) -> None:
    up = await upstream(reply(201, b"made"))
    async with gate.client() as client:
        await client.send(post(key=key) * 2)
        first, second = await client.read_answer(), await client.read_answer()
    assert up.executions["/orders", key] == 1
    assert (first.status, second.status) == (201, 201)
    assert second.value("Idempotent-Replayed") == "true"


# ---- C34 --------------------------------------------------------------------------------------------------------

MANY = [(f"X-{number}", "v" * 40) for number in range(150)]


@pytest.mark.parametrize("lines", [[("X-Big", "b" * 9000)], MANY], ids=["big", "many"])
@pytest.mark.parametrize("path", ["/orders", "/open"])
async def test_c34_a_large_head_of_an_answer_is_relayed_and_kept(
    replicas: tuple[Gate, Gate], upstream: Start, key: str, *, lines: list[tuple[str, str]], path: str
) -> None:
    up = await upstream(reply(201, b"made", lines))
    for gate in replicas:
        answer = await gate.ask(post(path, key))
        assert (answer.status, answer.body) == (201, b"made")
        assert end_to_end(answer) == [(name.encode(), value.encode()) for name, value in lines]
    assert up.executions[path, key] == (1 if path == "/orders" else 2)


@pytest.mark.parametrize(
    "answer_bytes",
    [
        b"HTTP/1.1 201 Created\r\nX-Big: " + b"b" * 40 * KIB + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 201 Created\r\n" + b"X-Many: %b\r\n" % (b"m" * 90) * 400 + b"Content-Length: 0\r\n\r\n",
        b"HTTP/1.1 201 Created\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 201 Created\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 201 Created\r\nX-Nul: a\0b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 201 Created\r\nContent-Length: 10\r\n\r\ncut",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 20",
        b"",
    ],
)
async def test_c34_an_answer_that_cannot_be_read_is_outcome_unknown_and_never_a_stored_400(
    gate: Gate, twin: Gate, upstream: Start, key: str, answer_bytes: bytes
) -> None:
    up = await upstream(then(play(answer_bytes), close()))
    first = await gate.ask(post(key=key))
    assert up.executions["/orders", key] == 1
    assert first.status == 502
    assert b'"code":"outcome-unknown"' in first.body
    again = await twin.ask(post(key=key))
    assert up.executions["/orders", key] == 1
    assert again.status == 409
    assert b'"code":"in-doubt"' in again.body


@pytest.mark.parametrize("path", ["/orders", "/open"])
async def test_c34_a_large_head_of_a_request_arrives_and_a_larger_one_is_refused(
    gate: Gate, upstream: Start, key: str, path: str
) -> None:
    up = await upstream(reply(201))
    cookie = "c" * 9000
    assert (await gate.ask(post(path, f"{key}-1", b"{}", ("Cookie", cookie)))).status == 201
    assert up.requests[-1].values("Cookie") == [cookie.encode()]
    target = f"{path}?q={'q' * 9000}"
    assert (await gate.ask(post(target, f"{key}-2"))).status == 201
    assert up.requests[-1].target == target.encode()
    assert (await gate.ask(post(path, f"{key}-3", b"{}", *MANY))).status == 201
    asked = len(up.requests)
    for data in (
        post(path, f"{key}-4", b"{}", ("Cookie", "c" * 33 * KIB)),
        post(f"{path}?q={'q' * 33 * KIB}", f"{key}-4"),
        post(path, f"{key}-4", b"{}", *[(f"X-{n}", "v" * 150) for n in range(230)]),
        post(path, f"{key}-4", b"{}", *[(f"X-{n}", "v") for n in range(1000)]),
        post(path, f"{key}-4", b"{}", ("N" * 33 * KIB, "v")),
    ):
        answer = await gate.ask(data)
        assert len(up.requests) == asked
        assert answer.status in (400, 431)
        assert answer.value("Content-Type") == "application/problem+json"
        assert answer.value("Connection") == "close"
    assert (await gate.ask(post(path, f"{key}-4"))).status == 201


# ---- plain HTTP through the gateway -----------------------------------------------------------------------------


async def test_head_options_204_and_304_pass_with_their_heads(gate: Gate, upstream: Start) -> None:
    up = await upstream(
        {
            "/head": play(b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\nETag: x\r\n\r\n"),
            "/head-chunked": play(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nETag: x\r\n\r\n"),
            "/204": reply(204, headers=[("ETag", "x")]),
            "/304": play(b"HTTP/1.1 304 Not Modified\r\nETag: x\r\nContent-Length: 1234\r\n\r\n"),
            "/205": play(b"HTTP/1.1 205 Reset Content\r\nETag: x\r\nContent-Length: 0\r\n\r\n"),
            "/103": then(play(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"), reply(200, b"ok", [("ETag", "x")])),
            "*": reply(200, b"get", [("ETag", "x")]),
        }
    )
    async with gate.client() as client:
        for method, path, status, length, body in (
            ("HEAD", "/head", 200, "1234", b""),
            ("HEAD", "/head-chunked", 200, None, b""),
            ("GET", "/204", 204, None, b""),
            ("GET", "/304", 304, "1234", b""),
            ("GET", "/205", 205, "0", b""),
            ("GET", "/103", 200, "2", b"ok"),
            ("OPTIONS", "/head-not", 200, "3", b"get"),
            ("TRACE", "/trace", 200, "3", b"get"),
            ("HEAD", "/dot/../dot", 400, None, b""),
        ):
            answer = await client.ask(request(method, path))
            assert (answer.status, answer.body) == (status, body), path
            if status != 400:
                assert answer.value("Content-Length") == length, path
                assert answer.value("ETag") == "x"
    assert len(up.requests) == 8


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("path", ["/orders", "/open"])
async def test_a_body_after_an_answer_that_has_none_is_left_out(
    gate: Gate, upstream: Start, key: str, *, status: int, path: str
) -> None:
    up = await upstream(play(b"HTTP/1.1 %d Nothing\r\nContent-Length: 5\r\n\r\nhello" % status))
    async with gate.client() as client:
        for number in range(3):
            answer = await client.ask(post(path, f"{key}-{number}"))
            assert (answer.status, answer.body) == (status, b"")
    assert sum(up.executions.values()) == 3
    assert up.connections == 3, "a connection that says so is not used again"


async def test_a_get_has_no_framing_header_and_an_empty_post_says_its_length(gate: Gate, upstream: Start) -> None:
    up = await upstream(reply(200))
    await gate.ask(request("GET", "/open"))
    await gate.ask(request("POST", "/open", body=b""))
    await gate.ask(request("DELETE", "/open"))
    assert [asked.values("Content-Length") for asked in up.requests] == [[], [b"0"], []]
    assert not any(asked.values("Transfer-Encoding") for asked in up.requests)


@pytest.mark.parametrize("path", ["/orders", "/open"])
async def test_an_upstream_that_is_not_there_is_a_503_and_a_retry_runs_at_once(
    gate: Gate, upstream_port: int, key: str, path: str
) -> None:
    answer = await gate.ask(post(path, key))
    assert answer.status == 503
    assert b'"code":"upstream-unreachable"' in answer.body
    assert b"connection_refused" in answer.body
    async with RawUpstream(reply(201), host="localhost", port=upstream_port) as up:
        again = await gate.ask(post(path, key))
        assert up.executions[path, key] == 1
        assert again.status == 201


async def test_a_head_request_to_an_upstream_that_is_not_there_gets_a_head_alone(gate: Gate) -> None:
    async with gate.client() as client:
        await client.send(request("HEAD", "/open"))
        await client.send(request("GET", "/open"))
        first = await client.read_answer(head_only=True)
        second = await client.read_answer()
    assert [first.status, second.status] == [503, 503]
    assert b'"code":"upstream-unreachable"' in second.body


async def test_a_request_without_a_key_waits_no_longer_than_its_routes_upstream_timeout(
    gate: Gate, upstream: Start
) -> None:
    up = await upstream(hang())
    answer = await gate.ask(post("/hasty"))
    assert len(up.requests) == 1
    assert (answer.status, answer.value("Idempotency-Status")) == (504, "in-doubt")
    assert answer.value("X-Should-Retry") == "false"
    await up.wait_until_closed()
