"""Reply heads: what is relayed, what is kept, our marks, and framing for whoever asks."""

import re
import time
from email.utils import formatdate, parsedate_to_datetime

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import wire
from gateway.model import Outcome, ReplyHead


def cut(*headers, status=201, reason=b"Created", **more):
    return wire.reply_heads(ReplyHead(status, reason, list(headers)), **more)


def lines(head):
    start, *rest = head.removesuffix(b"\r\n").split(b"\r\n")
    return start, [tuple(line.split(b": ", 1)) for line in rest]


class Parsed:
    """An answer as a strict client reads it."""

    def __init__(self, data):
        self.body, self.headers, self.complete = b"", [], False
        self.parser = httptools.HttpResponseParser(self)
        self.parser.feed_data(data)

    def on_headers_complete(self):
        self.keep_alive = self.parser.should_keep_alive()

    def on_header(self, name, value):
        self.headers.append((name.lower(), value))

    def on_body(self, body):
        self.body += body

    def on_message_complete(self):
        self.complete = True


# ---- live and kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 204, 207, 303, 404, 406, 410, 422])
def test_c05_status_and_end_to_end_lines_are_kept_as_they_came(status):
    headers = [
        (b"Content-Type", b"application/vnd.shop+json; charset=utf-8"),
        (b"ETag", b'"abc"'),
        (b"Link", b"</a>; rel=next"),
        (b"Link", b"</b>; rel=prev"),
        (b"Content-Disposition", b'attachment; filename="a, b.pdf"'),
        (b"location", b"/orders/9"),
        (b"Retry-After", b"3"),
        (b"X-Request-Id", b"u1"),
        (b"X-RateLimit-Remaining", b"7"),
        (b"X-Caf", b"caf\xe9"),
    ]
    found = cut(*headers, status=status, reason=b"As It Is")
    assert lines(found.kept) == (b"HTTP/1.1 %d As It Is" % status, headers)
    assert found.live == found.kept
    assert (found.request_id, found.location) == (b"u1", b"/orders/9")


def test_c30_hop_by_hop_and_nominated_lines_are_neither_relayed_nor_kept():
    found = cut(
        (b"X-Internal", b"s"),
        (b"Keep-Alive", b"timeout=5"),
        (b"X-Kept", b"1"),
        (b"Connection", b"keep-alive, X-Internal"),
        (b"connection", b"x-two"),
        (b"X-Two", b"2"),
        (b"Proxy-Authenticate", b"Basic"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Trailer", b"X-Sum"),
        (b"Upgrade", b"h2c"),
    )
    assert lines(found.live)[1] == lines(found.kept)[1] == [(b"X-Kept", b"1")]


def test_what_belongs_to_one_moment_or_one_caller_is_relayed_but_not_kept():
    once = [
        (b"Date", b"Mon, 30 Nov 2026 03:12:31 GMT"),
        (b"Set-Cookie", b"sid=1"),
        (b"Set-Cookie", b"b=2"),
        (b"X-Auth-Token", b"t"),
    ]
    found = cut(*once, (b"X-Kept", b"1"))
    assert lines(found.live)[1] == [*once, (b"X-Kept", b"1")]
    assert lines(found.kept)[1] == [(b"X-Kept", b"1")]
    assert found.dated
    assert not cut((b"X-Kept", b"1")).dated
    assert b"sid=1" in cut(*once, not_kept=wire.NOT_KEPT - {b"set-cookie"}).kept


@pytest.mark.parametrize("name", sorted(wire.OWN))
def test_an_upstream_cannot_speak_in_the_gateways_name(name):
    found = cut((name.title(), b"true"), (b"X-Kept", b"1"))
    assert lines(found.live)[1] == lines(found.kept)[1] == [(b"X-Kept", b"1")]


def test_the_upstreams_framing_is_only_told():
    found = cut((b"Content-Length", b"12"), (b"X-Kept", b"1"))
    assert found.length == b"12"
    assert b"ength" not in found.live + found.kept


def test_c28_a_content_encoding_stays_with_its_bytes():
    headers = [(b"Content-Encoding", b"gzip"), (b"Vary", b"Accept-Encoding")]
    assert lines(cut(*headers).kept)[1] == headers


@given(
    st.lists(st.tuples(st.sampled_from([b"X-A", b"Date", b"Location", b"Connection"]), st.binary(max_size=12))),
    st.binary(max_size=8),
)
def test_no_value_splits_a_line(headers, reason):
    found = cut(*headers, reason=reason)
    for head in (found.live, found.kept):
        assert head.count(b"\n") == head.count(b"\r") == head.count(b"\r\n")
        assert all(
            re.match(rb"HTTP/1\.1 201 |(X-A|Date|Location): ", line)
            for line in head.removesuffix(b"\r\n").split(b"\r\n")
        )
        assert b"\0" not in head


def test_a_kept_head_is_asked_for_its_location_and_request_id():
    kept = cut((b"LOCATION", b"/o/9?x=: y"), (b"x-request-ID", b"u1")).kept
    assert wire.location_of(kept) == "/o/9?x=: y"
    assert wire.has_request_id(kept)
    bare = cut((b"X-Location", b"/a"), (b"X-A", b"x-request-id: 1")).kept
    assert wire.location_of(bare) is None
    assert not wire.has_request_id(bare)


# ---- marks ------------------------------------------------------------------------------------------------------


def test_c05_the_replay_marker_is_on_replays_only():
    for outcome in Outcome:
        marks = wire.marks(outcome, record="29808f52e400", request_id="r1")
        assert b"Idempotency-Status: " + outcome.value.encode() + b"\r\n" in marks
        assert (b"Idempotent-Replayed: true\r\n" in marks) == (outcome is Outcome.REPLAYED)
        assert b"Date" not in marks


def test_marks_say_what_they_are_given():
    marks = wire.marks(Outcome.EXECUTED, record=None, request_id=None, expires_unix=1796008351.9, now_unix=0.0)
    assert marks == (
        b"Idempotency-Status: executed\r\nIdempotency-Expires: Mon, 30 Nov 2026 03:12:31 GMT\r\n"
        b"Date: Thu, 01 Jan 1970 00:00:00 GMT\r\n"
    )


@given(st.integers(0, 2**33))
def test_http_dates_are_those_of_the_standard_library(unix):
    assert wire.http_date(unix) == formatdate(unix, usegmt=True)
    assert parsedate_to_datetime(wire.http_date(unix)).timestamp() == unix


def test_timestamps_are_rfc_3339_in_utc():
    assert wire.timestamp(1796008351.9) == "2026-11-30T03:12:31Z"
    assert wire.timestamp(time.time()).endswith("Z")


# ---- framing ----------------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nX-A: 1\r\n"


@pytest.mark.parametrize("body", [bytes(range(256)) * 64, b"", b'{"a": 1,  "a": 2}\n'])
def test_c06_a_body_goes_out_as_it_is(body):
    found = Parsed(wire.answer(HEAD, body, status=200, http11=True, keep_alive=True))
    assert found.body == body
    assert found.complete
    assert found.keep_alive
    assert found.headers == [(b"x-a", b"1"), (b"content-length", b"%d" % len(body))]


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_gets_none(status):
    data = wire.answer(b"HTTP/1.1 %d X\r\n" % status, b"abc", status=status, http11=True, keep_alive=True)
    assert data == b"HTTP/1.1 %d X\r\n\r\n" % status


def test_a_304_and_an_answer_to_head_repeat_the_upstreams_length():
    for status, head_request in ((304, False), (200, True)):
        data = wire.answer(
            HEAD, b"", status=status, http11=True, keep_alive=True, head_request=head_request, length=b"12"
        )
        assert data == HEAD + b"Content-Length: 12\r\n\r\n"
    data = wire.answer(HEAD, b"abc", status=200, http11=True, keep_alive=True, head_request=True)
    assert data == HEAD + b"Content-Length: 3\r\n\r\n"
    data = wire.answer(HEAD, b"", status=204, http11=True, keep_alive=True, head_request=True, length=b"12")
    assert data == HEAD + b"\r\n"


def test_a_205_is_empty():
    data = wire.answer(HEAD, b"abc", status=205, http11=True, keep_alive=True)
    assert data == HEAD + b"Content-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("http11", "keep_alive", "line"),
    [
        (True, True, b""),
        (True, False, b"Connection: close\r\n"),
        (False, True, b"Connection: keep-alive\r\n"),
        (False, False, b"Connection: close\r\n"),
    ],
)
def test_connection_is_said_where_it_is_not_the_clients_default(http11, keep_alive, line):
    assert (
        wire.answer(HEAD, b"", status=200, http11=http11, keep_alive=keep_alive)
        == HEAD + b"Content-Length: 0\r\n" + line + b"\r\n"
    )


def test_c31_a_stream_is_chunked_for_http_11_and_can_be_parsed():
    head = wire.stream_head(HEAD, status=200, http11=True, keep_alive=True)
    assert head.chunked
    assert not head.close
    pieces = [b"one", b"", bytes(256), b"x" * 70000]
    found = Parsed(head.head + b"".join(map(wire.chunk, pieces)) + wire.LAST_CHUNK)
    assert found.body == b"".join(pieces)
    assert found.complete
    assert found.keep_alive


def test_c31_a_stream_to_http_10_ends_with_its_connection():
    head = wire.stream_head(HEAD, status=200, http11=False, keep_alive=True)
    assert (head.chunked, head.close) == (False, True)
    assert head.head == HEAD + b"Connection: close\r\n\r\n"


@pytest.mark.parametrize("http11", [True, False])
def test_a_stream_of_known_length_is_framed_by_it(http11):
    head = wire.stream_head(HEAD, status=200, http11=http11, keep_alive=True, length=b"5")
    assert (head.chunked, head.close) == (False, False)
    found = Parsed(head.head + b"12345")
    assert (found.body, found.complete) == (b"12345", True)
    assert b"Transfer-Encoding" not in head.head


def test_a_streamed_answer_to_head_is_its_head():
    head = wire.stream_head(HEAD, status=200, http11=True, keep_alive=True, head_request=True, length=b"5")
    assert head == wire.StreamHead(HEAD + b"Content-Length: 5\r\n\r\n", chunked=False, close=False)
