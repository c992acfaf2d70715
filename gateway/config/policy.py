"""Settings of one route as the request path reads them: resolved, complete, immutable. No file syntax here.

Durations are whole milliseconds (`_ms`), sizes bytes (`_bytes`), header names lower-case bytes.
"""

import enum
from typing import Literal

import msgspec

from gateway.model import OnInDoubt, Settlement

STATUSES = range(200, 1000)
"""Statuses of a final answer: three digits, and never 1xx (RFC 9110, section 15)."""


class Mode(enum.Enum):
    """Whether a route is guarded, or forwarded as if the gateway were not there."""

    ENFORCE = "enforce"
    PASS = "pass"  # noqa: S105 -- a word


class OnMissingKey(enum.Enum):
    """What happens to a request without a key."""

    REJECT = "reject"
    FORWARD = "forward"


class OnOutstanding(enum.Enum):
    """What happens while another attempt holds the lease."""

    REJECT = "reject"


class OnStoreFailure(enum.Enum):
    """What happens when PostgreSQL cannot be asked before forwarding."""

    REJECT = "reject"
    FORWARD = "forward"


class ForwardKey(enum.Enum):
    """Whether the service sees the key."""

    PASS = "pass"  # noqa: S105 -- a word
    STRIP = "strip"


class BodyForm(enum.Enum):
    """How a body enters the fingerprint: `auto` is json for JSON types and raw for the rest."""

    AUTO = "auto"
    JSON = "json"
    RAW = "raw"
    NONE = "none"


class ScopePart(msgspec.Struct, frozen=True):
    """One part of the scope. `trusted_only`: the header is believed from `trusted_proxies` only.

    An `authorization` part enters records as a digest, never readable.
    """

    name: str
    kind: Literal["header", "authorization"]
    header: bytes
    trusted_only: bool


class KeySource(msgspec.Struct, frozen=True):
    """Where the key stands. `name` is the header as people write it; `max_length` counts characters."""

    header: bytes
    name: str
    max_length: int


class FingerprintSettings(msgspec.Struct, frozen=True):
    """What of a request enters its fingerprint, beside method and path. `headers` is sorted, without repetition."""

    body: BodyForm
    query: bool
    headers: tuple[bytes, ...]


class OnMismatch(msgspec.Struct, frozen=True):
    """How a key that was used for another request is answered."""

    status: int


class Outcomes(msgspec.Struct, frozen=True):
    """How a final status settles a record: one look-up in a table by status."""

    table: tuple[Settlement, ...]

    def settlement(self, status: int) -> Settlement:
        """The settlement of a final status, 200 to 999."""
        return self.table[status]

    def statuses(self, settlement: Settlement) -> frozenset[int]:
        """All statuses that settle so."""
        return frozenset(status for status in STATUSES if self.table[status] is settlement)


class Policy(msgspec.Struct, frozen=True):
    """What a route promises. For `Mode.PASS` only `mode` counts; the open questions then hold harmless answers."""

    mode: Mode
    scope: tuple[ScopePart, ...]
    key: KeySource
    on_missing_key: OnMissingKey
    on_outstanding: OnOutstanding
    on_mismatch: OnMismatch
    on_in_doubt: OnInDoubt
    on_store_failure: OnStoreFailure
    fingerprint: FingerprintSettings
    outcomes: Outcomes
    retention_ms: int
    longest_retry_ms: int | None
    lease_ttl_ms: int
    upstream_timeout_ms: int
    respond_within_ms: int
    effect_deadline_ms: int
    max_request_body_bytes: int
    max_response_body_bytes: int
    forward_key: ForwardKey
