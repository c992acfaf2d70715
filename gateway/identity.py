"""From a request's received lines to whose key it is: the key's syntax, the parts of the scope, the record's id.

Reads only what it is given, decides nothing about a missing key (the policy's `on_missing_key` does) and shows no
credential: an `Authorization` part is known by its digest.
"""

import hashlib
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from gateway.config.policy import KeySource, ScopePart
from gateway.model import Fields, Identity

RECIPE: Final = "idempotency-gateway record 1"
"""Names the way in which record ids are made. Another way needs another name, and a migration of the records."""

LONGEST_PART: Final = 1024
"""Bytes of a scope part's value, at most: it is stored and searched with every record."""

KeyFault = Literal["repeated", "empty", "too_long", "not_printable", "not_a_string"]


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """Why there is no identity: a problem's code, with the members that explain it."""

    code: Literal["key-missing", "key-invalid", "scope-missing", "scope-forged"]
    members: dict[str, str]


class Identifier:
    """Tells whose key a request of one route has. What its requests have in common is prepared once.

    A record's id is SHA-256 over what is fixed for the route (the digest of recipe, service, operation and the sorted
    names of the scope's parts) and what a request says (their values and the key), each with its length before
    it, so that no separator that a caller can write makes two identities meet.
    """

    __slots__ = ("_key", "_operation", "_parts", "_prefix", "_readable", "_service")

    def __init__(self, scope: Iterable[ScopePart], key: KeySource, *, service: str, operation: str) -> None:
        self._key = key
        self._service = service
        self._operation = operation
        parts = sorted(scope, key=lambda part: part.name)
        self._parts = tuple(parts)
        self._readable = ",".join([part.name.replace("%", "%%") + "=%s" for part in parts])
        fixed = (RECIPE, service, operation, *[part.name for part in parts])
        self._prefix = hashlib.sha256(_each_with_its_length(fixed)).digest()

    def identify(self, seen: Fields, *, peer_trusted: bool) -> Identity | Refusal:
        """Return whose key this is, or why that cannot be told. The key is looked at first, then the scope by name.

        `seen` is the received view (`wire.look`), so that a `Connection` line cannot hide a key or a credential.
        """
        sent = seen.get(self._key.header)
        if sent is None:
            return Refusal("key-missing", {"header": self._key.name})
        key, fault = ("", "repeated") if isinstance(sent, list) else read_key(sent, self._key.max_length)
        if fault is not None:
            return Refusal("key-invalid", {"reason": fault})
        values: list[str] = []
        for part in self._parts:
            value = seen.get(part.header if part.kind == "header" else b"authorization")
            if part.trusted_only and not peer_trusted and value is not None:
                return Refusal("scope-forged", {"part": part.name})
            whose = None if value is None or isinstance(value, list) else _part_value(part, value)
            if whose is None:
                header = part.header if part.kind == "header" else b"authorization"
                return Refusal("scope-missing", {"part": part.name, "header": header.decode("ascii").title()})
            values.append(whose)
        return Identity(self.record_id(values, key), self._service, self._operation, self.readable(values), key)

    def record_id(self, values: list[str], key: str) -> bytes:
        """Return the id of the record of `key`; `values` are those of the scope's parts, sorted by their names."""
        return hashlib.sha256(self._prefix + _each_with_its_length((*values, key))).digest()

    def readable(self, values: list[str]) -> str:
        """Return the scope for people: `customer=C-4711,tenant=x`, with `%` and `,` in values escaped."""
        together = "".join(values)
        if "%" in together or "," in together:
            values = [whose.replace("%", "%25").replace(",", "%2C") for whose in values]
        return self._readable % tuple(values)


def _each_with_its_length(texts: tuple[str, ...]) -> bytes:
    said = b""
    for text in texts:
        data = text.encode()
        said += len(data).to_bytes(4, "big") + data
    return said


def read_key(value: bytes, max_length: int) -> tuple[str, KeyFault | None]:
    """Return the key that a header's value holds, or what is wrong with it.

    A value that begins with a quotation mark must be exactly one string of RFC 8941 (section 3.3.3), without
    parameters; any other is the key as it stands, inner spaces included, so `"abc"` and `abc` are the same key. A
    bare comma is how intermediaries join two lines into one (RFC 9110, 5.3), so a key that has one must be quoted.
    """
    value = value.strip(b" \t")
    if not value:
        return "", "empty"
    if len(value) > 2 * max_length + 2:  # every character escaped, and the quotation marks
        return "", "too_long"
    text = value.decode("latin-1")
    if not (text.isascii() and text.isprintable()):
        return "", "not_printable"
    if text[0] == '"':
        text, fault = _unquote(text)
        if fault is not None:
            return "", fault
    elif "," in text:
        return "", "repeated"
    if len(text) > max_length:
        return "", "too_long"
    return (text, None) if text else ("", "empty")


def _unquote(text: str) -> tuple[str, KeyFault | None]:
    end = text.find('"', 1)
    if "\\" not in text:
        if end == len(text) - 1:
            return text[1:-1], None
        return "", _after_string(text[end + 1 :]) if end > 0 else "not_a_string"
    characters: list[str] = []
    rest = iter(range(1, len(text)))
    for at in rest:
        character = text[at]
        if character == '"':
            after = text[at + 1 :]
            return ("".join(characters), None) if not after else ("", _after_string(after))
        if character == "\\":
            character = text[at + 1 : at + 2]
            if character not in ('"', "\\"):
                return "", "not_a_string"
            next(rest)
        characters.append(character)
    return "", "not_a_string"


def _after_string(after: str) -> KeyFault:
    """A list of strings is two lines joined; parameters and anything else are not the string alone."""
    return "repeated" if after.lstrip(" ").startswith(",") else "not_a_string"


def _part_value(part: ScopePart, value: bytes) -> str | None:
    """The value as it names the caller: None for what is empty, too long or not printable ASCII."""
    if part.kind == "authorization":
        scheme, _, credentials = value.strip(b" \t").partition(b" ")
        credentials = credentials.strip(b" \t")
        if not scheme or not credentials:
            return None
        return hashlib.sha256(b"%b %b" % (scheme.lower(), credentials)).hexdigest()[:32]
    text = value.decode("latin-1").strip(" \t")
    return text if 0 < len(text) <= LONGEST_PART and text.isascii() and text.isprintable() else None


__all__ = [
    "LONGEST_PART",
    "RECIPE",
    "Identifier",
    "KeyFault",
    "KeySource",
    "Refusal",
    "ScopePart",
    "read_key",
]
