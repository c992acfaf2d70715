"""A reply's head: which of the upstream's lines go to the client, which are kept for replays, our own marks, framing.

A head here is bytes: the status line and header lines, each ended by CRLF, without framing and without the empty
line. `answer` and `stream_head` add those last, because they depend on who is asking and not on what is answered.
"""

import datetime as dt
import re
import time
from functools import lru_cache
from typing import Final, Literal

import msgspec

from gateway.model import Headers, Outcome, ReplyHead
from gateway.wire.requests import HOP_BY_HOP, NOMINATES_NOTHING, nominated

OWN: Final = frozenset(
    {
        b"idempotency-status",
        b"idempotency-record",
        b"idempotent-replayed",
        b"idempotency-expires",
        b"idempotency-original-request-id",
    }
)
"""Names that only the gateway may say something with: an upstream's are dropped, or it could forge a replay."""

NOT_KEPT: Final = frozenset(
    {
        b"date",  # when the first answer was made; a replay has its own
        b"set-cookie",  # sessions: whoever replays would be logged in as the first caller's browser was
        b"set-cookie2",
        b"authorization",  # tokens that services hand out in headers, as the common frameworks name them
        b"authentication-info",  # proof of one exchange (RFC 7615)
        b"x-auth-token",
        b"x-access-token",
        b"x-refresh-token",
        b"x-session-token",
        b"x-csrf-token",
        b"x-xsrf-token",
    }
)
"""Names that are relayed but not kept: what belongs to one moment, and what would be a credential in the store."""

_Kind = Literal["dropped", "connection", "length", "passing", "date", "location", "request_id"]
"""What a line is that is not simply relayed and kept. The first three do not cross, `passing` and `date` only once."""

_KEPT_KINDS: Final[dict[bytes, _Kind]] = {b"location": "location", b"x-request-id": "request_id"}
_DROPPED_KINDS: Final[dict[bytes, _Kind]] = {
    **dict.fromkeys(HOP_BY_HOP | OWN, "dropped"),
    b"connection": "connection",
    b"content-length": "length",
}
_STATUS_LINES: Final = {
    outcome: f"Idempotency-Status: {outcome}\r\n"
    + ("Idempotent-Replayed: true\r\n" if outcome is Outcome.REPLAYED else "")
    for outcome in Outcome
}
_WITHOUT_BODY: Final = frozenset({204, 304})
_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_LOCATION = re.compile(rb"\r\nlocation:[ \t]*([^\r]*)", re.IGNORECASE)
_REQUEST_ID_LINE = re.compile(rb"\r\nx-request-id:", re.IGNORECASE)
_LF, _CR, _NUL = b"\n\r\0"
_CONTROL = re.compile(rb"[\r\n\0]")

LAST_CHUNK: Final = b"0\r\n\r\n"
"""Ends a chunked body. Trailers of the upstream are dropped."""


class ReplyLines(msgspec.Struct, frozen=True, gc=False):
    """An upstream's head in two cuts: `live` for this client, `kept` for replays.

    `request_id` is the upstream's own `X-Request-Id`, which is relayed and kept: where it is not None no second one
    is added. `length` is the upstream's `Content-Length` as received, for answers to HEAD and for streams.
    `dated`: `live` has a `Date`; the gateway adds one where the upstream did not (RFC 9110, 6.6.1).
    """

    live: bytes
    kept: bytes
    request_id: bytes | None
    location: bytes | None
    length: bytes | None
    dated: bool


class StreamHead(msgspec.Struct, frozen=True, gc=False):
    """The complete head before a body that is relayed as it comes. `chunked`: each piece goes through `chunk`.

    `close`: the connection ends with the body, because it marks the end or the client asked for it.
    """

    head: bytes
    chunked: bool
    close: bool


# ---- the upstream's lines ---------------------------------------------------------------------------------------


def reply_heads(head: ReplyHead, not_kept: frozenset[bytes] = NOT_KEPT) -> ReplyLines:
    """Cut an upstream's head into what is relayed and what is kept. `not_kept`: lower-case names, of the policy.

    All else is kept as it came: a replay repeats `X-Request-Id`, rate limits and `Retry-After` of the first answer,
    and its `Content-Encoding` with the same bytes, whatever encodings the retry accepts.
    """
    return _cut(head.status, head.reason, head.headers, _kinds(not_kept))


@lru_cache(maxsize=64)  # one for each `not_kept` of the policies
def _kinds(not_kept: frozenset[bytes]) -> dict[bytes, _Kind]:
    passing: dict[bytes, _Kind] = {name: "date" if name == b"date" else "passing" for name in not_kept}
    return _KEPT_KINDS | passing | _DROPPED_KINDS


def _cut(status: int, reason: bytes, headers: Headers, kinds: dict[bytes, _Kind]) -> ReplyLines:
    start = b"HTTP/1.1 %d %b" % (status, reason)
    live, kept = [start], [start]
    request_id = location = length = None
    dated = False
    for line in headers:
        kind = kinds.get(line[0].lower())
        if kind is None:
            text = b": ".join(line)
            live.append(text)
            kept.append(text)
        elif kind == "date":
            live.append(b": ".join(line))
            dated = True
        elif kind == "length":
            length = line[1]
        elif kind in {"location", "request_id"}:
            text = b": ".join(line)
            live.append(text)
            kept.append(text)
            if kind == "location":
                location = line[1]
            else:
                request_id = line[1]
        elif kind == "passing":
            live.append(b": ".join(line))
        elif kind == "connection" and line[1] not in NOMINATES_NOTHING:
            names = nominated({b"connection": line[1]}) - _DROPPED_KINDS.keys()
            if any(kinds.get(name) != "dropped" for name in names):
                return _cut(status, reason, headers, kinds | dict.fromkeys(names, "dropped"))
    whole = b"\r\n".join(live) + b"\r\n"
    ends = len(live)
    if whole.count(_LF) != ends or whole.count(_CR) != ends or _NUL in whole:
        return _cut(status, _plain(reason), [(_plain(name), _plain(value)) for name, value in headers], kinds)
    return ReplyLines(whole, b"\r\n".join(kept) + b"\r\n", request_id, location, length, dated)


def _plain(value: bytes) -> bytes:
    """Folded lines and stray control bytes become a space (RFC 9112, 5.2; RFC 9110, 5.5): no line is ever split."""
    return _CONTROL.sub(b" ", value)


def location_of(kept: bytes) -> str | None:
    """Return the `Location` of a kept head, if it has one."""
    found = _LOCATION.search(kept)
    return None if found is None else found[1].decode("latin-1")


def has_request_id(kept: bytes) -> bool:
    """Return whether a kept head carries the upstream's own `X-Request-Id`, so that a replay adds no second one."""
    return _REQUEST_ID_LINE.search(kept) is not None


# ---- our lines --------------------------------------------------------------------------------------------------


def marks(
    outcome: Outcome,
    *,
    record: str | None,
    request_id: str | None,
    expires_unix: float | None = None,
    now_unix: float | None = None,
) -> bytes:
    """Return the gateway's header lines for an answer.

    `record` is the public reference, None before there is one. `request_id` is None where the upstream's own stands
    in the head. `expires_unix`: when the record's retention ends. `now_unix` adds a fresh `Date`, for replays and for
    upstreams that sent none.
    """
    lines = _STATUS_LINES[outcome]
    if record is not None:
        lines += f"Idempotency-Record: {record}\r\n"
    if request_id is not None:
        lines += f"X-Request-Id: {request_id}\r\n"
    if expires_unix is not None:
        lines += f"Idempotency-Expires: {_http_date(int(expires_unix))}\r\n"
    if now_unix is not None:
        lines += f"Date: {_http_date(int(now_unix))}\r\n"
    return lines.encode("ascii")


def http_date(unix: float) -> str:
    """Return Unix seconds as an HTTP date (RFC 9110, 5.6.7)."""
    return _http_date(int(unix))


@lru_cache(maxsize=64)  # many answers are made within one second
def _http_date(unix: int) -> str:
    year, month, day, hour, minute, second, weekday, _, _ = time.gmtime(unix)
    return f"{_DAYS[weekday]}, {day:02} {_MONTHS[month - 1]} {year:04} {hour:02}:{minute:02}:{second:02} GMT"


def timestamp(unix: float) -> str:
    """Return Unix seconds as RFC 3339 in UTC, to the second, for members of problems."""
    return _timestamp(int(unix))


@lru_cache(maxsize=64)  # duplicates of one request come together
def _timestamp(unix: int) -> str:
    return dt.datetime.fromtimestamp(unix, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---- framing ----------------------------------------------------------------------------------------------------


def no_body(status: int, *, head_request: bool) -> bool:
    """Return whether an answer ends with its head, whatever its lines say (RFC 9112, 6.3)."""
    return head_request or status in _WITHOUT_BODY or status < 200


def answer(
    head: bytes,
    body: bytes,
    *,
    status: int,
    http11: bool,
    keep_alive: bool,
    head_request: bool = False,
    length: bytes | None = None,
) -> bytes:
    """Return a buffered answer as it goes out: head, framing, and the body where the status may have one.

    `length` is the upstream's declared one: an answer to HEAD or a 304 repeats it, since it tells the size of the
    body that a GET would get; a HEAD without it says the size of `body` if there is one, else nothing.
    """
    if no_body(status, head_request=head_request):
        declared = length
        if declared is None and head_request and body:
            declared = b"%d" % len(body)
        framing = b"" if declared is None or status == 204 or status < 200 else b"Content-Length: %b\r\n" % declared
        body = b""
    else:
        if status == 205:  # it says "reset the view" and must not have content (RFC 9110, 15.3.6)
            body = b""
        framing = b"Content-Length: %d\r\n" % len(body)
    return b"".join((head, framing, _connection(http11=http11, keep_alive=keep_alive), b"\r\n", body))


def stream_head(
    head: bytes, *, status: int, http11: bool, keep_alive: bool, head_request: bool = False, length: bytes | None = None
) -> StreamHead:
    """Return the head before a streamed body: by its declared `length` if known, else in chunks; a client of
    HTTP/1.0 knows none, so there the end of the connection ends the body.
    """
    if no_body(status, head_request=head_request):
        whole = answer(
            head, b"", status=status, http11=http11, keep_alive=keep_alive, head_request=head_request, length=length
        )
        return StreamHead(whole, chunked=False, close=not keep_alive)
    chunked = length is None and http11
    framing = b"Content-Length: %b\r\n" % length if length is not None else b""
    if chunked:
        framing = b"Transfer-Encoding: chunked\r\n"
    keep_alive = keep_alive and (chunked or length is not None)
    connection = _connection(http11=http11, keep_alive=keep_alive)
    return StreamHead(b"".join((head, framing, connection, b"\r\n")), chunked, close=not keep_alive)


def chunk(piece: bytes) -> bytes:
    """Return one piece of a chunked body; empty for an empty piece, which would end the body."""
    return b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""


def _connection(*, http11: bool, keep_alive: bool) -> bytes:
    if not keep_alive:
        return b"Connection: close\r\n"
    return b"" if http11 else b"Connection: keep-alive\r\n"


__all__ = [
    "LAST_CHUNK",
    "NOT_KEPT",
    "OWN",
    "ReplyLines",
    "StreamHead",
    "answer",
    "chunk",
    "has_request_id",
    "http_date",
    "location_of",
    "marks",
    "no_body",
    "reply_heads",
    "stream_head",
    "timestamp",
]
