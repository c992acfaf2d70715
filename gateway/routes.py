"""The compiled route table: from a request line and its headers to a route, an upstream, or a refusal. Pure.

A request never escapes its policy by spelling. Its path is percent-decoded once and matched as it then reads; letter
case counts, a trailing slash does not (the fingerprint still holds the path as sent). What can be read in two ways is
never guessed at:

* dot segments, doubled or encoded slashes, backslashes, control characters, a `#`, a `%` without two hex digits and
  over-long UTF-8 are `Ambiguous` on every upstream that has protected routes, and pass untouched to those without;
* what some servers read more generously is read so as well: `;parameters` ignored, escapes decoded again, trailing
  dots and spaces and a final `.extension` cut off, the method in upper case. If that reading meets a more specific
  protected route than the plain one does, the request is `Ambiguous`. A route that names the spelling itself, with
  `mode: pass` if need be, settles it.
* a query or header condition that only one of several lines or parameters meets is `Ambiguous`.

Not seen here, and so not guarded: a method in `X-HTTP-Method-Override` or in a form, letter case on servers that
ignore it, and conditions met by the body alone.
"""

import re
from collections.abc import Iterable, Iterator
from enum import Enum

import msgspec

from gateway.config import Config, Mode, Pattern, Policy, Prefix, Wild
from gateway.config.match import reached
from gateway.model import Fields

MOST_REMEMBERED = 4096  # decisions by raw path; some 2 MB at the very most
LONGEST_REMEMBERED = 256  # bytes of path, and of host


class Route(msgspec.Struct, frozen=True):
    """A protected route, with the upstream that this request goes to."""

    name: str
    operation: str
    upstream: str
    policy: Policy


class Protect(msgspec.Struct, frozen=True):
    """The request is under a route's policy."""

    route: Route


class Pass(msgspec.Struct, frozen=True):
    """The request goes through untouched. `route` names the one with `mode: pass`, if that is why."""

    upstream: str
    route: str | None = None


class NoRoute(msgspec.Struct, frozen=True):
    """The request goes nowhere: no upstream serves it, or `unmatched: reject`."""


class Ambiguous(msgspec.Struct, frozen=True):
    """The request can be read in two ways, and one of them may be protected. `reason` is for people who ask why."""

    reason: str


Matched = Protect | Pass | NoRoute | Ambiguous


class _Entry(msgspec.Struct, frozen=True):
    """One pattern with the route it belongs to."""

    pattern: Pattern
    rank: tuple[bool, tuple[int, ...], int]
    name: str
    protects: bool
    conditional: bool


class _Open(msgspec.Struct, frozen=True):
    """A decision that the query or headers still have a say in. `suspects` match a more generous reading only."""

    upstream: str
    entries: tuple[_Entry, ...]
    suspects: tuple[_Entry, ...]


class _Holds(Enum):
    YES = "yes"
    NO = "no"
    PERHAPS = "perhaps"


class RouteTable:
    """Routes and upstreams of a configuration, ready to match. Decisions are remembered by raw path, bounded."""

    def __init__(self, config: Config) -> None:
        entries = [
            _Entry(
                pattern,
                pattern.rank,
                route.name,
                route.policy.mode is Mode.ENFORCE,
                bool(pattern.query or pattern.headers),
            )
            for route in config.routes.values()
            for pattern in route.matches
        ]
        entries.sort(key=lambda entry: entry.rank, reverse=True)
        self._by_method = {
            method: _by_first_segment([entry for entry in entries if method in entry.pattern.methods])
            for method in {method for entry in entries for method in entry.pattern.methods}
        }
        self._matched: dict[tuple[str, str], Matched] = {
            (route.name, upstream): Protect(Route(route.name, route.operation, upstream, route.policy))
            if route.policy.mode is Mode.ENFORCE
            else Pass(upstream, route.name)
            for route in config.routes.values()
            for upstream in config.upstreams
        }
        self._prefixes = sorted(
            ((prefix, name) for name, upstream in config.upstreams.items() for prefix in upstream.serves),
            key=lambda served: served[0].rank,
            reverse=True,
        )
        self._by_host = any(prefix.host for prefix, _ in self._prefixes) or any(entry.pattern.host for entry in entries)
        self._reject = config.unmatched == "reject"
        self.guarded = _guarded(config, entries, [prefix for prefix, _ in self._prefixes])
        """Names of the upstreams with protected routes, and of those that lead to the same server."""
        self._decided: dict[tuple[str, bytes | None, bytes], Matched | _Open] = {}

    def match(self, method: str, host: bytes | None, target: bytes, fields: Fields) -> Matched:
        """Return where a request goes. `target` is the raw request target, `host` the Host header's value.

        `fields` are the received header lines by lower-case name; only conditions on headers look at them.
        """
        path, _, query = target.partition(b"?")
        if not self._by_host:
            host = None
        key = (method, host, path)
        decision = self._decided.get(key)
        if decision is None:
            decision = self._decide(method, host, path)
            if len(path) <= LONGEST_REMEMBERED and (host is None or len(host) <= LONGEST_REMEMBERED):
                if len(self._decided) >= MOST_REMEMBERED:
                    self._decided.clear()
                self._decided[key] = decision
        if isinstance(decision, _Open):
            return self._judge(decision, query, fields)
        return decision

    def _decide(self, method: str, host: bytes | None, path: bytes) -> Matched | _Open:
        """All that can be told without query and headers."""
        host = None if host is None else _host_name(host)
        path = _origin_form(path)
        if path == b"*":
            upstream = self._upstream(host, ())
            return NoRoute() if upstream is None or self._reject else Pass(upstream)
        segments, doubt = _read(path)
        upstream = self._upstream(host, segments)
        if upstream is None:
            return NoRoute()
        if doubt and upstream in self.guarded:
            return Ambiguous(doubt)
        if doubt:
            return NoRoute() if self._reject else Pass(upstream)
        entries = tuple(self._entries(method, host, segments))
        suspects = self._suspects(method, host, segments, entries) if upstream in self.guarded else ()
        decision = _Open(upstream, entries, suspects)
        for entry in entries + suspects:
            if entry.conditional:
                return decision
        return self._judge(decision, b"", {})

    def _suspects(
        self, method: str, host: bytes | None, segments: tuple[bytes, ...], entries: tuple[_Entry, ...]
    ) -> tuple[_Entry, ...]:
        """What protects the same request as a more generous server reads it, and not as we do."""
        if method.isupper() and not _GENEROUS.search(b"/".join(segments)):
            return ()
        found = [
            entry
            for spelled in {method, method.upper()}
            for reading in _generous(segments)
            for entry in self._entries(spelled, host, reading)
            if entry.protects and entry not in entries
        ]
        return tuple(sorted(found, key=lambda entry: entry.rank, reverse=True))

    def _judge(self, decision: _Open, query: bytes, fields: Fields) -> Matched:
        chosen = None
        for entry in decision.entries:
            holds = _conditions_hold(entry.pattern, query, fields)
            if holds is _Holds.PERHAPS and decision.upstream in self.guarded:
                return Ambiguous("a condition of a route is met by one of several values")
            if holds is _Holds.YES:
                chosen = entry
                break
        for entry in decision.suspects:
            if chosen is not None and entry.rank <= chosen.rank:
                break
            if _conditions_hold(entry.pattern, query, fields) is not _Holds.NO:
                return Ambiguous(f"some servers read it as {entry.pattern.text}")
        if chosen is not None:
            return self._matched[chosen.name, decision.upstream]
        return NoRoute() if self._reject else Pass(decision.upstream)

    def _entries(self, method: str, host: bytes | None, segments: tuple[bytes, ...]) -> Iterator[_Entry]:
        """What matches, the most specific first, down to the first without conditions."""
        by_first = self._by_method.get(method)
        if by_first is None:
            return
        for entry in by_first.get(segments[0] if segments else None) or by_first[None]:
            pattern = entry.pattern
            if (pattern.host is None or pattern.host == host) and _path_matches(pattern.segments, segments):
                yield entry
                if not entry.conditional:
                    return

    def _upstream(self, host: bytes | None, segments: tuple[bytes, ...]) -> str | None:
        for prefix, name in self._prefixes:
            if (prefix.host is None or prefix.host == host) and segments[: len(prefix.segments)] == prefix.segments:
                return name
        return None


def _by_first_segment(entries: list[_Entry]) -> dict[bytes | None, tuple[_Entry, ...]]:
    """Entries that may match a path by its first segment; under None those that any path may match."""

    def first(entry: _Entry) -> bytes | None:
        segment = entry.pattern.segments[0] if entry.pattern.segments else None
        return segment if isinstance(segment, bytes) else None

    return {
        segment: tuple(entry for entry in entries if first(entry) in {None, segment})
        for segment in {None, *map(first, entries)}
    }


def _guarded(config: Config, entries: list[_Entry], prefixes: list[Prefix]) -> frozenset[str]:
    protected = [prefix for entry in entries if entry.protects for prefix in reached(entry.pattern, prefixes)]
    servers = {
        (upstream.host_name, upstream.port)
        for upstream in config.upstreams.values()
        if any(prefix in protected for prefix in upstream.serves)
    }
    return frozenset(name for name, to in config.upstreams.items() if (to.host_name, to.port) in servers)


# ---- reading a request line -------------------------------------------------------------------------------------

_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_DOUBTFUL = re.compile(rb"%(?![0-9A-Fa-f]{2})|%2[Ff]|[#\\]")
_DOUBTFUL_DECODED = re.compile(rb"[\x00-\x1f\x7f\\]|[\xc0\xc1][\x80-\xbf]|\xe0[\x80-\x9f]")
_GENEROUS = re.compile(rb"[;%. ]")
_EXTENSION = re.compile(rb"\.[A-Za-z0-9]+$")
_HOST_PORT = re.compile(rb"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")


def _host_name(host: bytes) -> bytes:
    """A Host value without port and trailing dot, in lower case (RFC 9110, sections 4.2.3 and 7.2)."""
    found = _HOST_PORT.fullmatch(host.strip(b" \t"))
    return (found[1] if found else host).lower().removesuffix(b".")


def _origin_form(path: bytes) -> bytes:
    """The path of an absolute-form target, whose host does not count; any other as it is (RFC 9112, section 3.2)."""
    if path.startswith(b"/"):
        return path
    scheme, mark, rest = path.partition(b"://")
    if not mark or not scheme.isalnum():
        return path
    _, slash, rest = rest.partition(b"/")
    return slash + rest or b"/"


def _decoded(text: bytes) -> bytes:
    return _ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), text) if b"%" in text else text


def _read(path: bytes) -> tuple[tuple[bytes, ...], str]:
    """The decoded segments of a path, and why it can be read in two ways, if it can."""
    doubt = ""
    if not path.startswith(b"/"):
        doubt = "the target is neither a path nor a URL"
    elif _DOUBTFUL.search(path):
        doubt = "the path has an encoded slash, a backslash, a `#`, or a `%` without two hex digits"
    decoded = _decoded(path)
    if not doubt and _DOUBTFUL_DECODED.search(decoded):
        doubt = "the path has a backslash, a control character or over-long UTF-8"
    parts = decoded.split(b"/")[1:]
    if parts and not parts[-1]:
        parts.pop()
    if not doubt and b"" in parts:
        doubt = "the path has a doubled slash"
    if not doubt and any(part.partition(b";")[0] in {b".", b".."} for part in parts):
        doubt = "the path has a dot segment"
    return tuple(part for part in parts if part), doubt


def _generous(segments: tuple[bytes, ...]) -> Iterator[tuple[bytes, ...]]:
    """How servers that forgive more may read the same path; the path as it is comes first."""
    yield segments
    text = _decoded(_decoded(b"/".join(segments))).replace(b"\\", b"/")
    parts: list[bytes] = []
    for part in text.split(b"/"):
        name = part.partition(b";")[0]
        if name == b".." and parts:
            parts.pop()
        elif name := name.rstrip(b". "):
            parts.append(name)
    yield tuple(parts)
    if parts and (bare := _EXTENSION.sub(b"", parts[-1])):
        yield (*parts[:-1], bare)


def _path_matches(wanted: tuple[bytes | Wild, ...], segments: tuple[bytes, ...]) -> bool:
    """Whether a path matches. `**` stands for any rest, none included."""
    if wanted and wanted[-1] is Wild.REST:
        wanted = wanted[:-1]
        if len(segments) < len(wanted):
            return False
    elif len(segments) != len(wanted):
        return False
    for part, segment in zip(wanted, segments, strict=False):  # noqa: SIM110 -- a generator costs more than the rest
        if part is not Wild.ONE and part != segment:
            return False
    return True


# ---- conditions -------------------------------------------------------------------------------------------------


def _conditions_hold(pattern: Pattern, query: bytes, fields: Fields) -> _Holds:
    answer = _Holds.YES
    for name, wanted in pattern.query:
        # Some servers part parameters at `;` too.
        values = [*_parameters(query, name, b"&"), *_parameters(query.replace(b";", b"&"), name, b"&")]
        held = _all_equal(values, wanted)
        if held is _Holds.NO:
            return held
        answer = held if held is _Holds.PERHAPS else answer
    for name, wanted in pattern.headers:
        sent = fields.get(name, [])
        lines = sent if isinstance(sent, list) else [sent]
        held = _all_equal([_unquoted(line) for line in lines], _unquoted(wanted))
        if held is _Holds.NO:
            return held
        answer = held if held is _Holds.PERHAPS else answer
    return answer


def _all_equal(values: Iterable[bytes], wanted: bytes) -> _Holds:
    equal = {value == wanted for value in values}
    if equal == {True}:
        return _Holds.YES
    return _Holds.PERHAPS if True in equal else _Holds.NO


def _parameters(query: bytes, name: bytes, separator: bytes) -> Iterator[bytes]:
    """The values of a parameter, form-decoded."""
    for pair in query.partition(b"#")[0].split(separator):
        key, _, value = pair.partition(b"=")
        if _decoded(key.replace(b"+", b" ")) == name:
            yield _decoded(value.replace(b"+", b" "))


def _unquoted(value: bytes) -> bytes:
    """A header's value without the quotation marks that SOAPAction and others may have."""
    value = value.strip(b" \t")
    return value[1:-1] if len(value) > 1 and value[:1] == value[-1:] == b'"' else value
