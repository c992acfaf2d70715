"""A request's head: how it is looked at, what is wrong with it, and which of its lines go to the upstream.

Two views that are never mixed: `look` is what was *received*, and key, scope and fingerprint are read from it;
`forward_head` is what is *sent*, where hop-by-hop lines and those that `Connection` names are gone (RFC 9110, 7.6.1).
Framing is no header here: the upstream adapter adds `Content-Length`.
"""

import re
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from gateway.model import Fields, Headers

HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Lines that speak about one connection only, or to a proxy: they never cross, in either direction."""

_REWRITTEN: Final = frozenset({b"host", b"x-request-id", b"x-forwarded-for", b"forwarded"})
_NOT_FORWARDED: Final = HOP_BY_HOP | _REWRITTEN | {b"content-length", b"expect"}
_ALWAYS_GUARDED: Final = frozenset({b"authorization", b"content-encoding", b"content-type", b"cookie", b"host"})
_NOTHING: Final[frozenset[bytes]] = frozenset()

_LF, _CR, _NUL = b"\n\r\0"
_LONGEST_LENGTH: Final = 18  # digits of a Content-Length: what every reader of 64-bit integers reads alike

NOMINATES_NOTHING: Final = (b"keep-alive", b"close", b"Keep-Alive", b"Close")
"""What nearly every `Connection` line says, alone."""

_is_target = re.compile(rb"[!\"$-~\x80-\xff]+").fullmatch  # no control byte, no space, no "#": a fragment is never sent
_is_path = re.compile(rb"/[!\"$-~\x80-\xff]*").fullmatch
_is_host = re.compile(rb"[!$%&'()*+,;=:\[\]._~0-9A-Za-z-]*").fullmatch  # uri-host [":" port], RFC 9110, section 7.2
_is_request_id = re.compile(rb"[!-~]{1,128}").fullmatch


RequestFault = Literal["malformed", "target", "host", "control_character", "framing", "expectation", "connection"]
"""Why a request is refused as `request-invalid`. `malformed` is the parser's word, the others are `look`'s."""


class Peer(msgspec.Struct, frozen=True, gc=False):
    """Who is at the other end of the connection. `address` without brackets; empty for a Unix socket.

    `trusted`: listed in `trusted_proxies`, so what it says about the client before it is believed.
    """

    address: bytes
    trusted: bool
    scheme: bytes = b"http"
    introduced: bytes = b""
    """The lines with which it is told to the upstream where nobody has forwarded a request before it."""

    def __post_init__(self) -> None:
        """Make once what is written with every request."""
        lines = b"X-Forwarded-For: %b\r\nX-Forwarded-Proto: %b\r\n" % (self.address or b"unknown", self.scheme)
        msgspec.structs.force_setattr(self, "introduced", lines)


class Look(msgspec.Struct, frozen=True, gc=False):
    """A head as it was received. `size_bytes`: request target and header lines.

    `fault` is the `reason` of `request-invalid`; None if the head is usable, and then no part of it has a line break
    or a zero byte, `target` is in origin-form (see `origin_form`) and `host` is that of the only `Host` line.
    `is_direct`: certainly no line speaks for an earlier hop.
    """

    seen: Fields
    size_bytes: int
    target: bytes
    host: bytes
    is_direct: bool
    fault: RequestFault | None


# ---- looking ----------------------------------------------------------------------------------------------------


def look(method: bytes, target: bytes, headers: Headers, *, http11: bool = True) -> Look:
    """Look at a request's head: what it says, how large it is, and what makes it unusable.

    The parser refuses most of the faults before; what two readers could read in two ways must not depend on it.
    """
    seen: Fields = {}
    parts: list[bytes] = []
    for name, value in headers:
        lower = name.lower()
        seen[lower] = value
        parts += (lower, value)
    if len(seen) < len(headers):
        seen = _with_repeated(headers)
    everything = b"".join(parts)
    size = len(everything) + len(b": \r\n") * len(headers) + len(target)
    host = seen.get(b"host", None if http11 else b"")
    origin = target if _is_path(target) else origin_form(method, target)
    fault: RequestFault | None = None
    if origin is None:
        fault = "target"
    elif not isinstance(host, bytes) or not _is_host(host):
        fault = "host"
    elif _LF in everything or _CR in everything or _NUL in everything:
        fault = "control_character"
    elif not _is_framed(seen, http11=http11):
        fault = "framing"
    elif http11 and b"expect" in seen and not expects_continue(seen):
        fault = "expectation"
    host = host if isinstance(host, bytes) else b""
    return Look(seen, size, origin or b"", host, everything.find(b"forwarded") < 0, fault)


def fields(headers: Headers) -> Fields:
    """Return the received lines by lower-case name; a repeated line has the list of its values, in order."""
    seen: Fields = {name.lower(): value for name, value in headers}
    return seen if len(seen) == len(headers) else _with_repeated(headers)


def _with_repeated(headers: Headers) -> Fields:
    lists: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        lists.setdefault(name.lower(), []).append(value)
    return {name: values if len(values) > 1 else values[0] for name, values in lists.items()}


def _is_framed(seen: Fields, *, http11: bool) -> bool:
    """Whether the body's length is told in one way at the most (RFC 9112, 6.3).

    HTTP/1.0 knows no codings (section 6.1): what was before us saw another end.
    """
    length, coding = seen.get(b"content-length"), seen.get(b"transfer-encoding")
    if coding is not None:
        return http11 and length is None and isinstance(coding, bytes) and coding.lower() == b"chunked"
    return length is None or (isinstance(length, bytes) and length.isdigit() and len(length) <= _LONGEST_LENGTH)


def nominated(seen: Fields) -> frozenset[bytes]:
    """Return the names that `Connection` lists, lower-case, without its own words `close` and `keep-alive`."""
    value = seen.get(b"connection")
    if value is None or value in NOMINATES_NOTHING:
        return _NOTHING
    whole = b",".join(value) if isinstance(value, list) else value
    names = frozenset(name.strip(b" \t") for name in whole.lower().split(b","))
    return names - {b"close", b"keep-alive", b""}


def guarded(
    key_header: bytes, scope_headers: Iterable[bytes], fingerprint_headers: Iterable[bytes]
) -> frozenset[bytes]:
    """Return the lower-case names that a protected request cannot lose on the way without becoming another one."""
    return _ALWAYS_GUARDED | {key_header} | frozenset(scope_headers) | frozenset(fingerprint_headers)


def origin_form(method: bytes, target: bytes) -> bytes | None:
    """Return the target as it is sent: absolute-form loses scheme and authority (RFC 9112, 3.2.2), the rest is kept
    byte for byte. None for what is neither a path, nor `*`, nor an http(s) URL, and for bytes that no target has.
    """
    if _is_path(target):
        return target
    if not _is_target(target):
        return None
    if target == b"*":
        return target if method == b"OPTIONS" else None
    scheme, found, rest = target.partition(b"://")
    if not found or scheme.lower() not in (b"http", b"https"):
        return None
    authority = re.match(rb"[^/?]+", rest)
    if authority is None:
        return None
    path = rest[authority.end() :]
    if path.startswith(b"/"):
        return path
    if not path and method == b"OPTIONS":
        return b"*"
    return b"/" + path


def hides(seen: Fields, guard: frozenset[bytes]) -> bool:
    """Return whether `Connection` nominates a guarded name, which is `request-invalid` with the reason `connection`.

    Dropping it, as RFC 9110 asks for nominated lines, would forward another request than the one that was claimed;
    keeping it would leak what is hop-by-hop.
    """
    return b"connection" in seen and not guard.isdisjoint(nominated(seen))


def expects_continue(seen: Fields) -> bool:
    """Return whether the client waits for `100 Continue` before it sends the body (RFC 9110, 10.1.1)."""
    value = seen.get(b"expect")
    return isinstance(value, bytes) and value.lower() == b"100-continue"


def request_id(seen: Fields, peer: Peer, made: str) -> str:
    """Return the request's id: a trusted peer's `X-Request-Id` if it is usable, otherwise the one just `made`."""
    given = seen.get(b"x-request-id")
    if peer.trusted and isinstance(given, bytes) and _is_request_id(given) is not None:
        return given.decode("ascii")
    return made


# ---- forwarding -------------------------------------------------------------------------------------------------


def forward_head(
    method: bytes,
    look: Look,
    headers: Headers,
    *,
    peer: Peer,
    request_id: str,
    host: bytes | None = None,
    strip: bytes | None = None,
) -> bytes:
    """Return request line and header lines for the upstream, each ended by CRLF, without framing or the empty line.

    The lines are exactly one `Host` first, then what was received and may cross, in its order, case and bytes, then
    those that say where the request came from. `host` replaces the received one (`host: upstream`); `strip` is the
    lower-case name of a header that is not forwarded (`forward_key: strip`). `Expect` is dropped: the gateway has the
    whole body or its own wait for it. `look` is at `headers`, and without a fault.
    """
    dropped, origin = _NOT_FORWARDED, peer.introduced
    if b"connection" in look.seen:
        dropped |= nominated(look.seen)
    if strip is not None:
        dropped |= {strip}
    if look.host:
        origin = b"%bX-Forwarded-Host: %b\r\n" % (origin, look.host)
    if not look.is_direct:
        origin = _origin(look, peer, origin)
        if not peer.trusted:
            dropped |= {name for name in look.seen if _says_where_from(name)}
    return b"\r\n".join(
        [
            b"%b %b HTTP/1.1\r\nHost: %b" % (method, look.target, look.host if host is None else host),
            *[b": ".join(line) for line in headers if line[0].lower() not in dropped],
            b"%bX-Request-Id: %b\r\n" % (origin, request_id.encode("ascii")),
        ]
    )


def _says_where_from(lower: bytes) -> bool:
    """Whether a line speaks for an earlier hop. `_` counts as `-`: CGI and WSGI services cannot tell them apart."""
    lower = lower.replace(b"_", b"-")
    return lower.startswith(b"x-forwarded-") or lower == b"forwarded"


def _origin(look: Look, peer: Peer, begun: bytes) -> bytes:
    """Return `X-Forwarded-*` and `Forwarded` (RFC 7239): continued for a trusted peer, `begun` anew for others.

    `Forwarded` is written only where the request brought one. A trusted proxy that speaks only `Forwarded` gets no
    `X-Forwarded-For` beside it: a service that prefers that one would take the proxy for the client.
    """
    seen, host, address = look.seen, look.host, peer.address or b"unknown"
    before, elements = _all(seen, b"x-forwarded-for"), _all(seen, b"forwarded")
    lines = begun
    if peer.trusted:
        lines = b""
        if before or not elements:
            lines += b"X-Forwarded-For: %b\r\n" % b", ".join([*before, address])
            if b"x-forwarded-proto" not in seen:
                lines += b"X-Forwarded-Proto: %b\r\n" % peer.scheme
            if host and b"x-forwarded-host" not in seen:
                lines += b"X-Forwarded-Host: %b\r\n" % host
    if elements:
        node = b'"[%b]"' % address if b":" in address else address
        element = b"for=%b;proto=%b" % (node, peer.scheme) + (b';host="%b"' % host if host else b"")
        lines += b"Forwarded: %b\r\n" % b", ".join([*elements, element] if peer.trusted else [element])
    return lines


def _all(seen: Fields, name: bytes) -> list[bytes]:
    value = seen.get(name)
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


__all__ = [
    "HOP_BY_HOP",
    "NOMINATES_NOTHING",
    "Look",
    "Peer",
    "RequestFault",
    "expects_continue",
    "fields",
    "forward_head",
    "guarded",
    "hides",
    "look",
    "nominated",
    "origin_form",
    "request_id",
]
