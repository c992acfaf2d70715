"""From a request's received lines to whose key it is: the key's syntax, the parts of the scope, the record's id.

Reads only what it is given, decides nothing about a missing key (the policy's `on_missing_key` does) and shows no
credential: an `Authorization` part is known by its digest.
"""

import hashlib
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from gateway.config.policy import KeySource, ScopePart
from gateway.model import Fields, Identity

RECIPE: Final = b"idempotency-gateway record 1"
"""Names the way in which record ids are made. Another way needs another name, and a migration of the records."""

LONGEST_PART: Final = 1024
"""Bytes of a scope part's value, at most: it is stored and searched with every record."""

KeyFault = Literal["repeated", "empty", "too_long", "not_printable", "not_a_string"]


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """Why there is no identity: a problem's code, with the members that explain it."""

    code: Literal["key-missing", "key-invalid", "scope-missing", "scope-forged"]
    members: dict[str, str]


def identify(
    scope: Sequence[ScopePart], key: KeySource, seen: Fields, *, peer_trusted: bool, service: str, operation: str
) -> Identity | Refusal:
    """Return whose key this is, or why that cannot be told. The key is looked at first, then the scope.

    `seen` is the received view (`wire.fields`), so that a `Connection` line cannot hide a key or a credential.
    """
    sent = seen.get(key.header)
    if sent is None:
        return Refusal("key-missing", {"header": key.name})
    text, fault = ("", "repeated") if isinstance(sent, list) else read_key(sent, key.max_length)
    if fault is not None:
        return Refusal("key-invalid", {"reason": fault})
    parts: list[tuple[str, str]] = []
    for part in scope:
        value = seen.get(part.header if part.kind == "header" else b"authorization")
        if part.trusted_only and not peer_trusted and value is not None:
            return Refusal("scope-forged", {"part": part.name})
        whose = None if value is None or isinstance(value, list) else _part_value(part, value)
        if whose is None:
            return Refusal("scope-missing", {"part": part.name})
        parts.append((part.name, whose))
    parts.sort()
    return Identity(record_id(service, operation, parts, text), service, operation, readable(parts), text)


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
    value = value.strip(b" \t")
    if part.kind == "authorization":
        scheme, _, credentials = value.partition(b" ")
        credentials = credentials.strip(b" \t")
        if not scheme or not credentials:
            return None
        return hashlib.sha256(b"%b %b" % (scheme.lower(), credentials)).hexdigest()[:32]
    text = value.decode("latin-1")
    return text if 0 < len(text) <= LONGEST_PART and text.isascii() and text.isprintable() else None


def record_id(service: str, operation: str, parts: Sequence[tuple[str, str]], key: str) -> bytes:
    """Return the id of a record: SHA-256 over recipe, service, operation, the sorted scope parts and the key, each
    length-prefixed, so that no separator that a caller can write makes two identities meet.
    """
    values = [service.encode(), operation.encode()]
    for name, whose in parts:
        values.append(name.encode())
        values.append(whose.encode())
    values.append(key.encode())
    return hashlib.sha256(b"".join([RECIPE, *[b"%d:%b" % (len(value), value) for value in values]])).digest()


def readable(parts: Sequence[tuple[str, str]]) -> str:
    """Return the sorted scope parts for people: `customer=C-4711,tenant=x`, with `%` and `,` in values escaped."""
    return ",".join([f"{name}={whose.replace('%', '%25').replace(',', '%2C')}" for name, whose in parts])


__all__ = [
    "LONGEST_PART",
    "RECIPE",
    "KeyFault",
    "KeySource",
    "Refusal",
    "ScopePart",
    "identify",
    "read_key",
    "record_id",
]
