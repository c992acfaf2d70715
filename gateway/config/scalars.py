"""Types of single values in the file: each reads one value strictly, or says in a sentence what to write instead.

They are annotations for pydantic, and carry their own JSON schema.
"""

import enum
import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from gateway.config import match
from gateway.config.policy import STATUSES
from gateway.config.secret import Secret
from gateway.config.source import shown
from gateway.config.units import DURATION_PATTERN, SIZE_PATTERN, duration_ms, size_bytes

SENTENCE = "sentence"
"""Type of our own pydantic errors; their context holds the sentence."""

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

NOT_BUILT = "is not built yet"


def refuse(sentence: str) -> PydanticCustomError:
    """An error that reaches the user as this sentence."""
    return PydanticCustomError(SENTENCE, "{sentence}", {"sentence": sentence})


class Scalar:
    """An annotation that reads a value with `read` and describes itself with `schema`."""

    def read(self, value: Any) -> Any:
        """The value in the tree. Raises `refuse(...)`."""
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        """JSON schema of what may be written."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return self.schema()


@dataclass(frozen=True)
class Duration(Scalar):
    """`30s` to milliseconds, between two bounds."""

    least: str = "1ms"
    most: str = "24h"

    def read(self, value: Any) -> int:
        example = "write a whole number and a unit: 250ms, 30s, 5m, 24h or 7d"
        if not isinstance(value, str):
            raise refuse(f"must be a duration, not {shown(value)}; {example}")
        try:
            ms = duration_ms(value)
        except ValueError:
            raise refuse(f"must be a duration, not {shown(value)}; {example}") from None
        if ms < duration_ms(self.least):
            raise refuse(f"must be at least {self.least}, not {shown(value)}")
        if ms > duration_ms(self.most):
            raise refuse(f"must be at most {self.most}, not {shown(value)}")
        return ms

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": DURATION_PATTERN, "description": f"From {self.least} to {self.most}."}


@dataclass(frozen=True)
class Size(Scalar):
    """`1MiB` to bytes, between two bounds."""

    least: str = "1B"
    most: str = "1GiB"

    def read(self, value: Any) -> int:
        example = "write a whole number and a unit: 10B, 64KiB, 1MiB or 2GiB"
        if not isinstance(value, str):
            raise refuse(f"must be a size, not {shown(value)}; {example}")
        try:
            size = size_bytes(value)
        except ValueError:
            raise refuse(f"must be a size, not {shown(value)}; {example}") from None
        if size < size_bytes(self.least):
            raise refuse(f"must be at least {self.least}, not {shown(value)}")
        if size > size_bytes(self.most):
            raise refuse(f"must be at most {self.most}, not {shown(value)}")
        return size

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": SIZE_PATTERN, "description": f"From {self.least} to {self.most}."}


@dataclass(frozen=True)
class Count(Scalar):
    """A whole number between two bounds."""

    least: int
    most: int

    def read(self, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not self.least <= value <= self.most:
            raise refuse(f"must be a whole number from {self.least} to {self.most}, not {shown(value)}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


class Flag(Scalar):
    """`true` or `false`, and no other word."""

    def read(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise refuse(f"must be true or false, not {shown(value)}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Word(Scalar):
    """One word of a closed set, to its value. `later`: words and map keys of the dialect that are not built yet."""

    words: Mapping[str, Any]
    later: tuple[str, ...] = ()

    def read(self, value: Any) -> Any:
        if isinstance(value, str) and value in self.words:
            return self.words[value]
        choice = " or ".join(self.words)
        used = value if isinstance(value, str) else next(iter(value), "") if isinstance(value, dict) else ""
        if used in self.later:
            raise refuse(f"`{used}` {NOT_BUILT}; write {choice}")
        raise refuse(f"must be {choice}, not {shown(value)}")

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.words)}


def words(of: type[enum.Enum], *, but: frozenset[enum.Enum] = frozenset()) -> dict[str, Any]:
    """The words of an enumeration whose values are what a file writes."""
    return {member.value: member for member in of if member not in but}


@dataclass(frozen=True)
class Text(Scalar):
    """A text of a pattern, described in words."""

    pattern: str
    words: str

    def read(self, value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value):
            raise refuse(f"must be {self.words}, not {shown(value)}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^(?:{self.pattern})$"}


@dataclass(frozen=True)
class Parsed(Scalar):
    """A value that a function of this package reads; its ValueError holds the sentence."""

    parse: Callable[[Any], Any]
    shape: dict[str, Any] = field(hash=False)

    def read(self, value: Any) -> Any:
        try:
            return self.parse(value)
        except ValueError as error:
            raise refuse(str(error)) from None

    def schema(self) -> dict[str, Any]:
        return dict(self.shape)


HeaderName = Text(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}", "a header name such as X-Customer-Id")
Name = Text(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "a name of letters, digits, `-`, `_` and `.`, at most 64")
PolicyName = Text(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,63}", "the name of a policy")


def _status(value: Any) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and value in STATUSES:
        return value
    if isinstance(value, str) and re.fullmatch("[2-5]xx", value):
        return value
    raise ValueError(f"must be a final status such as 409, or a class such as 4xx, not {shown(value)}")


Status = Parsed(
    _status,
    {"anyOf": [{"type": "integer", "minimum": 200, "maximum": 999}, {"type": "string", "pattern": "^[2-5]xx$"}]},
)


def _address(value: Any) -> str:
    example = "write host:port such as 127.0.0.1:8080, or [::]:8080"
    if isinstance(value, str) and value.startswith("unix:"):
        raise ValueError(f"a unix socket {NOT_BUILT}; {example}")
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})", value) if isinstance(value, str) else None
    if found is None or int(found[2]) > 65535:
        raise ValueError(f"must be an address, not {shown(value)}; {example}")
    if found[1].startswith("["):
        try:
            ipaddress.IPv6Address(found[1][1:-1])
        except ValueError:
            raise ValueError(f"has no IPv6 address in {shown(value)}; {example}") from None
    return str(value)


Address = Parsed(_address, {"type": "string", "pattern": r"^.+:[0-9]{1,5}$"})


def _network(value: Any) -> IPNetwork:
    if not isinstance(value, str):
        raise ValueError(f"must be a network such as 10.0.0.0/8, not {shown(value)}")  # noqa: TRY004 -- the sentence's way
    try:
        return ipaddress.ip_network(value)
    except ValueError:
        pass
    try:
        wide = ipaddress.ip_network(value, strict=False)
    except ValueError:
        raise ValueError(f"must be a network such as 10.0.0.0/8, not {shown(value)}") from None
    raise ValueError(f"{shown(value)} names a host within a network; write {wide}")


Network = Parsed(_network, {"type": "string"})


def _url(value: Any) -> str:
    example = "write it like http://127.0.0.1:8081"
    if not isinstance(value, str):
        raise ValueError(f"must be a URL, not {shown(value)}; {example}")  # noqa: TRY004 -- the sentence's way
    try:
        url = urlsplit(value)
        port = url.port
    except ValueError:
        raise ValueError(f"must be a URL; {example}") from None
    if "@" in url.netloc:
        raise ValueError("has a user in its URL, which is not sent; remove it")
    if url.scheme not in {"http", "https"} or not url.hostname or port == 0:
        raise ValueError(f"must be an http or https URL, not {shown(value)}; {example}")
    if url.path not in {"", "/"} or "?" in value or "#" in value:
        raise ValueError("has more than scheme, host and port; requests keep their own path, so remove the rest")
    if not re.fullmatch(r"[A-Za-z0-9._:\[\]-]+", url.netloc):
        raise ValueError(f"has a host that cannot be in {shown(value)}; {example}")
    return value.removesuffix("/")


Url = Parsed(_url, {"type": "string", "pattern": "^https?://[^/?#@]+/?$"})

Serves = Parsed(
    lambda value: match.prefix(value) if isinstance(value, str) else _wrong(f"must be [host]/path, not {shown(value)}"),
    {"type": "string", "pattern": "/"},
)

_CONDITIONS = {"type": "object", "additionalProperties": {"type": "string"}}
Match = Parsed(
    match.pattern,
    {
        "anyOf": [
            {"type": "string", "pattern": r"^\S+\s+\S*/\S*$"},
            {
                "type": "object",
                "properties": {"path": {"type": "string"}, "query": _CONDITIONS, "header": _CONDITIONS},
                "required": ["path"],
                "additionalProperties": False,
            },
        ]
    },
)


def _wrong(sentence: str) -> Any:
    raise ValueError(sentence)


def is_dsn(text: str) -> bool:
    """Whether a text looks like one of libpq's two forms: a URL, or `host=... dbname=...`."""
    return re.match(r"postgres(ql)?://|[a-z_]+\s*=", text) is not None


def _dsn(value: Any) -> Secret:
    """Never shows what is written: it may hold a password."""
    if value == "embedded":
        return Secret("embedded", "")
    if isinstance(value, dict) and len(value) == 1:
        kind, place = next(iter(value.items()))
        if kind in {"file", "env"} and isinstance(place, str) and place:
            return Secret("file" if kind == "file" else "env", place)
    if isinstance(value, str) and is_dsn(value):
        return Secret("text", value)
    raise ValueError("must be a DSN such as postgresql://user@host/name, {file: PATH}, {env: NAME}, or embedded")


Dsn = Parsed(
    _dsn,
    {
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "properties": {"file": {"type": "string"}, "env": {"type": "string"}},
                "minProperties": 1,
                "maxProperties": 1,
                "additionalProperties": False,
            },
        ]
    },
)
