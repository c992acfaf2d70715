"""A request's head: how it is looked at, what is wrong with it, and which of its lines go to the upstream.

Two views that are never mixed: `fields` is what was *received*, and key, scope and fingerprint are read from it;
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

_LONGEST_LENGTH: Final = 18  # digits of a Content-Length: what every reader of 64-bit integers reads alike

_TARGET = re.compile(rb"[!\"$-~\x80-\xff]+")  # no control byte, no space, no "#": a fragment is never sent
_HOST = re.compile(rb"[!$%&'()*+,;=:\[\]._~0-9A-Za-z-]*")  # uri-host [":" port], RFC 9110, section 7.2
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


RequestFault = Literal["malformed", "target", "host", "control_character", "framing", "expectation", "connection"]
"""Why a request is refused as `request-invalid`. `malformed` is the parser's word, the others are `fault`'s."""


class Peer(msgspec.Struct, frozen=True, gc=False):
    """Who is at the other end of the connection. `address` without brackets; empty for a Unix socket.

    `trusted`: listed in `trusted_proxies`, so what it says about the client before it is believed.
    """

    address: bytes
    trusted: bool
    scheme: bytes = b"http"


# ---- looking ----------------------------------------------------------------------------------------------------


def fields(headers: Headers) -> Fields:
    """Return the received lines by lower-case name; a repeated line has the list of its values, in order."""
    seen: Fields = {}
    for name, value in headers:
        lower = name.lower()
        before = seen.get(lower)
        if before is None:
            seen[lower] = value
        elif isinstance(before, list):
            before.append(value)
        else:
            seen[lower] = [before, value]
    return seen


def nominated(seen: Fields) -> frozenset[bytes]:
    """Return the names that `Connection` lists, lower-case, without its own words `close` and `keep-alive`."""
    value = seen.get(b"connection")
    if value is None:
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
    byte for byte. None for what is neither a path, nor `*`, nor an http(s) URL.
    """
    if target.startswith(b"/"):
        return target
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


def fault(method: bytes, target: bytes, headers: Headers, seen: Fields, *, http11: bool = True) -> RequestFault | None:
    """Return what makes a request's head unusable, as `reason` of `request-invalid`; None if nothing does.

    The parser refuses most of it before; what two readers could read in two ways must not depend on the parser.
    """
    if origin_form(method, target) is None or _TARGET.fullmatch(target) is None:
        return "target"
    host = seen.get(b"host", b"" if not http11 else None)
    if not isinstance(host, bytes) or _HOST.fullmatch(host) is None:
        return "host"
    everything = b"".join([part for line in headers for part in line])
    if b"\n" in everything or b"\r" in everything or b"\0" in everything:
        return "control_character"
    length, coding = seen.get(b"content-length"), seen.get(b"transfer-encoding")
    if length is not None and not (isinstance(length, bytes) and length.isdigit() and len(length) <= _LONGEST_LENGTH):
        return "framing"
    if coding is not None and not (
        http11 and length is None and isinstance(coding, bytes) and coding.lower() == b"chunked"
    ):
        return "framing"  # HTTP/1.0 knows no codings (RFC 9112, section 6.1): what was before us saw another end
    if http11 and b"expect" in seen and not expects_continue(seen):
        return "expectation"
    return None


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
    if peer.trusted and isinstance(given, bytes) and _REQUEST_ID.fullmatch(given) is not None:
        return given.decode("ascii")
    return made


# ---- forwarding -------------------------------------------------------------------------------------------------


def forward_head(
    method: bytes,
    target: bytes,
    headers: Headers,
    seen: Fields,
    *,
    peer: Peer,
    request_id: str,
    host: bytes | None = None,
    strip: bytes | None = None,
) -> bytes:
    """Return request line and header lines for the upstream, each ended by CRLF, without framing or the empty line.

    `target` is that of `origin_form`; the others are `forward_lines`'.
    """
    lines = forward_lines(headers, seen, peer=peer, request_id=request_id, host=host, strip=strip)
    return b"%b %b HTTP/1.1\r\n" % (method, target) + b"".join([b"%b: %b\r\n" % line for line in lines])


def forward_lines(
    headers: Headers,
    seen: Fields,
    *,
    peer: Peer,
    request_id: str,
    host: bytes | None = None,
    strip: bytes | None = None,
) -> Headers:
    """Return the header lines for the upstream: exactly one `Host` first, then what was received and may cross, in
    its order, case and bytes, then the lines that say where the request came from.

    `host` replaces the received one (`host: upstream`); `strip` is the lower-case name of a header that is not
    forwarded (`forward_key: strip`). `Expect` is dropped: the gateway has the whole body or its own wait for it.
    """
    dropped = _NOT_FORWARDED
    names = nominated(seen)
    if names:
        dropped |= names
    received_host = _only(seen, b"host")
    lines: Headers = [(b"Host", host if host is not None else received_host)]
    for line in headers:
        lower = line[0].lower()
        if lower in dropped or lower == strip:
            continue
        if not peer.trusted and _says_where_from(lower):
            continue
        lines.append(line)
    _add_origin(lines, seen, peer, received_host)
    lines.append((b"X-Request-Id", request_id.encode("ascii")))
    return lines


def _says_where_from(lower: bytes) -> bool:
    """Whether a line speaks for an earlier hop. `_` counts as `-`: CGI and WSGI services cannot tell them apart."""
    if b"_" in lower:
        lower = lower.replace(b"_", b"-")
    return lower.startswith(b"x-forwarded-") or lower == b"forwarded"


def _add_origin(lines: Headers, seen: Fields, peer: Peer, host: bytes) -> None:
    """Append `X-Forwarded-*` and `Forwarded` (RFC 7239): continued for a trusted peer, begun anew for others.

    `Forwarded` is written only where the request brought one. A trusted proxy that speaks only `Forwarded` gets no
    `X-Forwarded-For` beside it: a service that prefers that one would take the proxy for the client.
    """
    address = peer.address or b"unknown"
    before = _all(seen, b"x-forwarded-for") if peer.trusted else []
    elements = _all(seen, b"forwarded")
    if before or not elements or not peer.trusted:
        lines.append((b"X-Forwarded-For", b", ".join([*before, address])))
        if not peer.trusted or b"x-forwarded-proto" not in seen:
            lines.append((b"X-Forwarded-Proto", peer.scheme))
        if host and (not peer.trusted or b"x-forwarded-host" not in seen):
            lines.append((b"X-Forwarded-Host", host))
    if elements:
        node = b'"[%b]"' % address if b":" in address else address
        element = b"for=%b;proto=%b" % (node, peer.scheme)
        if host:
            element += b';host="%b"' % host
        lines.append((b"Forwarded", b", ".join([*elements, element] if peer.trusted else [element])))


def _only(seen: Fields, name: bytes) -> bytes:
    """The value of a line; the first one of a repeated line, which `fault` has refused where it matters."""
    value = seen.get(name, b"")
    return value[0] if isinstance(value, list) else value


def _all(seen: Fields, name: bytes) -> list[bytes]:
    value = seen.get(name)
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


__all__ = [
    "HOP_BY_HOP",
    "Peer",
    "RequestFault",
    "expects_continue",
    "fault",
    "fields",
    "forward_head",
    "forward_lines",
    "guarded",
    "hides",
    "nominated",
    "origin_form",
    "request_id",
]
