"""What a request says, as a digest: two requests with one key are retries of each other if their fingerprints agree.

Told apart are method, host, path, query, chosen headers, media type and body. A JSON body counts by its content:
member order, white space and the way a string is escaped do not matter; the order of arrays, and every number as it
is written, do (`1`, `1.0` and `1e0` are three). Whatever is not plainly JSON counts by its bytes, under another tag,
so that no doubt ever makes two requests equal. What a `recipe` is, is said at `recipe`.
"""

import hashlib
import json
import re
import struct
from typing import Final

import msgspec

from gateway.config.policy import BodyForm, FingerprintSettings
from gateway.model import Fields, Fingerprint

VERSION: Final = 1
"""Of the algorithm. Any change to what a digest is made of counts it up; old records are then told by their recipe."""

DEEPEST: Final = 256
"""Levels of nesting that are read as JSON. Far within the interpreter's own bound, which moves with its stack."""

LONGEST: Final = 1024 * 1024
"""Bytes that are read as JSON, at most: larger bodies count by their bytes and do not hold up the event loop."""

LONGEST_LITERAL: Final = 256 * 1024
"""The same for the literal path, which is several times slower."""

_LENGTHS: Final = struct.Struct(">4I").pack


class Recipe(msgspec.Struct, frozen=True):
    """Settings with the number that identifies them and the algorithm: a signed 32-bit integer, kept with each
    fingerprint. Digests of different recipes are never compared. `start`: what every digest of it begins with.
    """

    number: int
    settings: FingerprintSettings
    start: bytes


def recipe(settings: FingerprintSettings) -> Recipe:
    """Return the recipe of a policy's settings. Made once per policy, and the same in every process and release."""
    parts = (b"%d" % VERSION, settings.body.value.encode(), b"query" if settings.query else b"", *settings.headers)
    start = hashlib.sha256(_joined(parts)).digest()[:4]
    return Recipe(int.from_bytes(start, "big", signed=True), settings, start)


class Content:
    """A protected request as it is fingerprinted. The canonical form is made when it is asked for, and once.

    `target` and `host` are those that are forwarded; `seen` is the received view of the header lines.
    """

    __slots__ = ("_body", "_fingerprint", "_head", "_media_type", "_recipe", "_request", "raw_digest")

    def __init__(self, recipe: Recipe, method: bytes, target: bytes, *, host: bytes, seen: Fields, body: bytes) -> None:
        self._recipe = recipe
        self._request = method, target, host, seen
        self._body = body
        self._fingerprint: Fingerprint | None = None
        settings = recipe.settings
        if settings.body is BodyForm.NONE:
            body = b""
        self._media_type = _media_type(seen) if body else b""  # no body and an empty one are the same
        what = target if settings.query else target.partition(b"?")[0]
        lengths = _LENGTHS(len(method), len(host), len(what), len(self._media_type))
        chosen = _chosen(seen, settings.headers) if settings.headers else b""
        self._head = (recipe.start, lengths, method, host.lower(), what, self._media_type, chosen)
        self.raw_digest = hashlib.sha256(b"".join((*self._head, b"raw:", body))).digest()
        """Digest by the body's bytes: where two are equal, so are the fingerprints, at a fraction of the cost."""

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint by the policy's own recipe."""
        if self._fingerprint is None:
            form, digest = self._recipe.settings.body, self.raw_digest
            if form is BodyForm.JSON or (form is BodyForm.AUTO and _is_json(self._media_type)):
                canonical = canonical_json(self._body)
                if canonical is not None:
                    digest = hashlib.sha256(b"".join((*self._head, b"json:", canonical))).digest()
            self._fingerprint = Fingerprint(self._recipe.number, digest)
        return self._fingerprint

    def fingerprint_like(self, stored: Fingerprint) -> Fingerprint:
        """Return the fingerprint by the recipe of `stored`; `stored` itself if that recipe cannot be known.

        Known are this version's, for any `body` and `query` and either the policy's headers or none: after such an
        edit a record still tells a retry from another request. Any other recipe counts as equal, never as a mismatch.
        """
        own = self.fingerprint()
        if stored.recipe == own.recipe:
            return own
        method, target, host, seen = self._request
        for headers in {self._recipe.settings.headers, ()}:
            for form in BodyForm:
                for query in (True, False):
                    known = recipe(FingerprintSettings(form, query, headers))
                    if known.number == stored.recipe:
                        return Content(known, method, target, host=host, seen=seen, body=self._body).fingerprint()
        return stored


def _media_type(seen: Fields) -> bytes:
    """Type and subtype, lower-case: parameters such as `charset` come and go between attempts."""
    value = seen.get(b"content-type", b"")
    if isinstance(value, list):
        return b",".join([one.partition(b";")[0].strip() for one in value]).lower()
    return value.partition(b";")[0].strip().lower()


def _chosen(seen: Fields, names: tuple[bytes, ...]) -> bytes:
    """The lines that the policy has chosen, with how many there are of each."""
    parts: list[bytes] = []
    for name in names:
        value = seen.get(name, [])
        values = value if isinstance(value, list) else [value]
        parts += (b"%d" % len(values), *values)
    return _joined(parts)


def _is_json(media_type: bytes) -> bool:
    return media_type in (b"application/json", b"text/json") or media_type.endswith(b"+json")


def _joined(parts: tuple[bytes, ...] | list[bytes]) -> bytes:
    """Each part with its length before it: no content of one part can pass for the start of the next."""
    return b"".join([b"%d:%b" % (len(part), part) for part in parts])


# ---- JSON -------------------------------------------------------------------------------------------------------

_decode = msgspec.json.Decoder(float_hook=msgspec.Raw).decode  # a float stays the text it was
_encode = msgspec.json.Encoder(order="deterministic").encode
_DOUBTFUL = re.compile(rb"-0(?![0-9.eE])|\\u003[aA]")  # an integer zero's sign, an escaped colon


def canonical_json(body: bytes) -> bytes | None:
    """Return a JSON text (RFC 8259) with sorted members, no white space and numbers as written; None for what is no
    JSON, or longer or deeper than is read here. Two texts have the same canonical form only if they have the same
    content, repeated members and the sign of `-0` included. Never raises.

    Decoding in C loses exactly two things: all but the last of repeated members, and the sign of an integer zero.
    A lost member takes at least one colon with it, and only an escaped colon could make up for it. Where either may
    have happened, the literal path decides.
    """
    if len(body) > LONGEST:
        return None
    try:
        value = _decode(body)
        if len(body) > DEEPEST and body.count(b"[") + body.count(b"{") > DEEPEST and _deeper(value, DEEPEST):
            return None
        text = _encode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    plain = body.find(b"-0") < 0 and body.find(b"\\u003") < 0  # a search for neither is quicker than for both
    if text.count(b":") == body.count(b":") and (plain or _DOUBTFUL.search(body) is None):
        return text
    return _literal_json(body) if len(body) <= LONGEST_LITERAL else None


def _literal_json(body: bytes) -> bytes | None:
    """The same without losing anything: every number as its text, repeated members in their order."""
    try:
        return _encode(
            json.loads(
                body.decode("utf-8"),
                parse_int=msgspec.Raw,
                parse_float=msgspec.Raw,
                parse_constant=_refuse_constant,
                object_pairs_hook=_members,
            )
        )
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    repeated: dict[str, list[object]] = {}
    for name, value in pairs:
        repeated.setdefault(name, []).append(value)
    # `repeated` without quotation marks is no JSON value, so this array cannot be one that somebody sent.
    return {
        name: values[0] if len(values) == 1 else [msgspec.Raw(b"repeated"), *values]
        for name, values in repeated.items()
    }


def _refuse_constant(_: str) -> object:
    raise ValueError("NaN and Infinity are no JSON.")


def _deeper(value: object, levels: int) -> bool:
    """Whether containers are nested deeper than `levels`, level by level and without recursion."""
    level = [value]
    for _ in range(levels):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)  # type: ignore[attr-defined]
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


__all__ = ["DEEPEST", "LONGEST", "LONGEST_LITERAL", "VERSION", "Content", "Recipe", "canonical_json", "recipe"]
