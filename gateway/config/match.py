# ruff: noqa: TRY004 -- a ValueError carries the sentence, whatever is wrong
"""Patterns of requests, as `match` and `serves` write them: their syntax, what beats what, what ties. No requests here.

A trailing slash never tells two patterns apart, and letter case always does, but in host names.
"""

import enum
import re
from collections.abc import Iterable
from typing import Any

import msgspec

TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A header name or a method (RFC 9110, section 5.6.2)."""

UNPROTECTED_METHODS = frozenset({"HEAD", "OPTIONS", "TRACE", "CONNECT"})

_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\]")
_PARAMETER = re.compile(r"\{[A-Za-z_][A-Za-z0-9_-]*\}")
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")


class Wild(enum.Enum):
    """A segment that is not a literal."""

    ONE = "{x}"
    REST = "**"


class Pattern(msgspec.Struct, frozen=True):
    """One pattern of a route. `host` None matches every host; `rest`: anything may follow `segments`.

    Literal segments are percent-decoded bytes. `query` and `headers` are conditions, all of which must hold; header
    names are lower-case.
    """

    methods: tuple[str, ...]
    host: bytes | None
    segments: tuple[bytes | Wild, ...]
    query: tuple[tuple[bytes, bytes], ...] = ()
    headers: tuple[tuple[bytes, bytes], ...] = ()
    text: str = ""

    @property
    def rest(self) -> bool:
        """Whether it ends in `**`."""
        return bool(self.segments) and self.segments[-1] is Wild.REST

    @property
    def rank(self) -> tuple[bool, tuple[int, ...], int]:
        """What beats what, greater first: a host, then the path from the left, then the number of conditions."""
        ranks = tuple(0 if part is Wild.REST else 1 if part is Wild.ONE else 2 for part in self.segments)
        return self.host is not None, ranks if self.rest else (*ranks, 3), len(self.query) + len(self.headers)


class Prefix(msgspec.Struct, frozen=True):
    """What an upstream serves: a host or every host, and the first segments of a path."""

    host: bytes | None
    segments: tuple[bytes, ...]
    text: str = ""

    @property
    def rank(self) -> tuple[bool, int]:
        """What beats what, greater first: a host, then the longer path."""
        return self.host is not None, len(self.segments)


def ties(one: Pattern, other: Pattern) -> bool:
    """Whether some request matches both and neither is more specific."""
    if one.rank != other.rank or one.host != other.host or not set(one.methods) & set(other.methods):
        return False
    if any(a != b for a, b in zip(one.segments, other.segments, strict=True)):
        return False  # of equal rank, so a difference is between two literals
    return not _contradict(one.query, other.query) and not _contradict(one.headers, other.headers)


def meets(one: Pattern, served: Prefix) -> bool:
    """Whether some request that matches the pattern lies under the prefix."""
    if served.host is not None and one.host is not None and served.host != one.host:
        return False
    for place, wanted in enumerate(served.segments):
        part = one.segments[place] if place < len(one.segments) else None
        if part is Wild.REST:
            return True
        if part is not Wild.ONE and part != wanted:
            return False
    return True


def covers(served: Prefix, one: Pattern) -> bool:
    """Whether every request that matches the pattern lies under the prefix."""
    return served.host in {None, one.host} and one.segments[: len(served.segments)] == served.segments


def reached(one: Pattern, prefixes: Iterable[Prefix]) -> list[Prefix]:
    """The prefixes under which requests that match the pattern go: the longest decides, a host before any length."""
    met = [served for served in prefixes if meets(one, served)]
    least = max((served.rank for served in met if covers(served, one)), default=(False, 0))
    return [served for served in met if served.rank >= least]


def _contradict(one: Iterable[tuple[bytes, bytes]], other: Iterable[tuple[bytes, bytes]]) -> bool:
    wanted = dict(other)
    return any(wanted.get(name, value) != value for name, value in one)


def pattern(value: Any) -> Pattern:
    """Read `METHOD[|METHOD] [host]/path`, or `{path, query, header}`. ValueError holds the sentence."""
    if isinstance(value, str):
        return _request_line(value)
    if not isinstance(value, dict):
        raise ValueError("must be like `POST /transfers`, a list of such, or {path: ..., query: {...}, header: {...}}")
    if unknown := sorted(set(value) - {"path", "query", "header"}):
        raise ValueError(f"has the unknown key `{unknown[0]}`; a match has path, query and header")
    if not isinstance(value.get("path"), str):
        raise ValueError("needs a path such as `path: POST /dispatch.do` beside query and header")
    found = _request_line(value["path"])
    return msgspec.structs.replace(
        found,
        query=_conditions("query", value.get("query", {})),
        headers=_conditions("header", value.get("header", {})),
        text=found.text + "".join(f" {kind}" for kind in ("query", "header") if value.get(kind)),
    )


def _conditions(kind: str, value: Any) -> tuple[tuple[bytes, bytes], ...]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"needs names and texts in {kind}, such as {{name: value}}; put quotes around numbers")
    if kind == "query":
        return tuple(sorted((name.encode(), text.encode()) for name, text in value.items()))
    if wrong := [name for name in value if not TOKEN.fullmatch(name)]:
        raise ValueError(f"has `{wrong[0]}` under header, which is no header name")
    names = sorted((name.lower().encode(), text.encode()) for name, text in value.items())
    if len({name for name, _ in names}) < len(names):
        raise ValueError("names one header twice under header; letter case does not count there")
    return tuple(names)


def _request_line(text: str) -> Pattern:
    words = text.split()
    if len(words) != 2:
        raise ValueError(f"must be a method and a path such as `POST /transfers`, not `{text}`")
    methods = tuple(words[0].split("|"))
    for method in methods:
        if not TOKEN.fullmatch(method):
            raise ValueError(f"has `{method}` for a method; write it as in `POST|PUT /transfers/{{id}}`")
        if method != method.upper():
            raise ValueError(f"has the method `{method}`; methods are upper-case, write `{method.upper()}`")
        if method in UNPROTECTED_METHODS:
            raise ValueError(f"protects {method}, which has no effect to protect; remove it")
    if len(set(methods)) < len(methods):
        raise ValueError("names one method twice; keep one of them")
    host, path = _host_and_path(words[1])
    return Pattern(methods, host, tuple(_segments(path)), text=f"{words[0]} {words[1]}")


def prefix(text: str) -> Prefix:
    """Read what an upstream serves: `[host]/path`. ValueError holds the sentence."""
    host, path = _host_and_path(text)
    segments = []
    for segment in _segments(path):
        if isinstance(segment, Wild):
            raise ValueError(f"serves prefixes: remove `{segment.value}` from `{text}`")
        segments.append(segment)
    return Prefix(host, tuple(segments), text)


def _host_and_path(text: str) -> tuple[bytes | None, str]:
    host, slash, path = text.partition("/")
    if not slash:
        raise ValueError(f"has no path in `{text}`; write `/` for all of a host: `{text}/`")
    if "://" in text:
        raise ValueError(f"has a scheme in `{text}`; write host and path alone")
    if not host:
        return None, path
    host = host.lower().removesuffix(".")
    if not _HOST.fullmatch(host):
        raise ValueError(f"has `{host}` for a host; write a name without port, in ASCII, as in `pay.example/payments`")
    return host.encode(), path


def _segments(path: str) -> Iterable[bytes | Wild]:
    parts = path.split("/") if path else []
    if parts and parts[-1] == "":
        parts.pop()
    for at, part in enumerate(parts):
        if part == "**":
            if at < len(parts) - 1:
                raise ValueError("has `**` before the end; it stands for the rest, so nothing can follow it")
            yield Wild.REST
        elif _PARAMETER.fullmatch(part):
            yield Wild.ONE
        else:
            yield _literal(part)


def _literal(part: str) -> bytes:
    if part in {"", ".", ".."}:
        raise ValueError("has an empty or dot segment; write the path without `//`, `/./` and `/../`")
    if "?" in part or "#" in part:
        raise ValueError("has a query in its path; write {path: ..., query: {name: value}}")
    if "{" in part or "}" in part:
        raise ValueError(f"has `{part}`; `{{name}}` stands for one whole segment")
    if "*" in part:
        raise ValueError(f"has `{part}`; write `{{name}}` for one segment or a final `**` for the rest")
    raw = part.encode()
    if b"%" in _ESCAPE.sub(b"", raw):
        raise ValueError(f"has a `%` in `{part}` that two hex digits do not follow")
    decoded = _ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), raw)
    if re.search(rb"[/\\;\x00-\x1f\x7f%]", decoded):
        raise ValueError(f"has `{part}`, which servers read in different ways; leave out slashes, `\\`, `;` and `%`")
    return decoded
