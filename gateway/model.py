"""Values and closed sets that every layer shares. No I/O, no clock, no logging, no imports from the package.

Values are immutable `msgspec.Struct`s (0.3 µs to make, where a frozen dataclass of twelve fields costs 4).
Durations are whole milliseconds (`_ms`), instants of the boot-time clock are seconds (`_at`), wall-clock
instants are Unix seconds (`_unix`).
"""

import datetime as dt
import enum

import msgspec

Headers = list[tuple[bytes, bytes]]
"""Header lines as received: order, case, repetition and bytes kept."""

Fields = dict[bytes, bytes | list[bytes]]
"""The same by lower-case name, for looking: one line's value, or the list of values of a repeated line."""


class Word(enum.Enum):
    """A closed set of words.

    Members hash by identity, and `word` is a plain attribute: `Enum`'s own hash and `value` are Python functions, and
    both are on the request path.
    """

    __hash__ = object.__hash__

    def __init__(self, word: str) -> None:
        self.word = word


class State(Word):
    """States of a record, by the names PostgreSQL stores."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    RELEASED = "released"
    IN_DOUBT = "in_doubt"


class OnInDoubt(Word):
    """What a policy does when nobody can tell whether a request took effect, weakest protection first."""

    RUN_AGAIN = "run_again"
    PROBE = "probe"
    BLOCK = "block"


class Settlement(Word):
    """How a forwarded request ends for its record."""

    COMPLETE = "complete"
    RELEASE = "release"
    HOLD = "hold"


class Outcome(enum.StrEnum):
    """Closed set of `Idempotency-Status`, and of the metrics' label `outcome`."""

    __hash__ = str.__hash__

    def __init__(self, word: str) -> None:
        self.word = word

    EXECUTED = "executed"
    RELEASED = "released"
    REPLAYED = "replayed"
    RECOVERED = "recovered"
    OUTSTANDING = "outstanding"
    IN_DOUBT = "in-doubt"
    MISMATCH = "mismatch"
    REFUSED = "refused"
    UNPROTECTED = "unprotected"
    OBSERVED = "observed"


class Fingerprint(msgspec.Struct, frozen=True, gc=False):
    """Digest of a request's canonical form.

    `recipe` identifies algorithm version and the route's fingerprint settings (a signed 32-bit integer):
    digests of different recipes are never compared with each other. `digest` has 32 bytes.
    """

    recipe: int
    digest: bytes


class Identity(msgspec.Struct, frozen=True, gc=False):
    """Whose key on which operation: what names a record.

    `record_id` is SHA-256 over a recipe id, service, operation, scope parts and key, each length-prefixed, so
    that no two different identities meet. `scope` is readable (`customer=C-4711`) and never holds a credential.
    """

    record_id: bytes
    service: str
    operation: str
    scope: str
    key: str

    @property
    def record(self) -> str:
        """The public reference of the record: 12 hex digits, for tickets, logs and problems."""
        return self.record_id[:6].hex()


class ClaimRequest(msgspec.Struct, frozen=True):
    """Everything one claim says to the store.

    `claim_id`: 16 random bytes, drawn once per exchange; it fences every later write.
    """

    identity: Identity
    fingerprint: Fingerprint
    claim_id: bytes
    on_in_doubt: OnInDoubt
    lease_ms: int
    effect_ms: int
    keep_ms: int  # upstream_timeout + retention: how long the record lives from this claim on


class Lease(msgspec.Struct, eq=False, gc=False):
    """An exclusive right to execute, as its holder knows it. The heartbeat moves `trusted_until` and sets `lost`.

    `trusted_until` is an instant of the boot-time clock, in seconds: the sending of the last statement that wrote
    `locked_until`, plus the lease, minus a margin. 0.0 when the trust is void.
    """

    record_id: bytes
    claim_id: bytes
    lease_ms: int
    trusted_until: float
    lost: bool = False


class TookOver(Word):
    """From what a claim took a record over: a `released` one, or one whose lease ran out or was in doubt."""

    RELEASED = "released"
    EXPIRED = "expired"


# ---- what a claim finds: a closed set ---------------------------------------------------------------------------


class Acquired(msgspec.Struct, frozen=True):
    """The caller holds the lease. `attempt` counts from 1."""

    lease: Lease
    attempt: int
    took_over: TookOver | None


class Held(msgspec.Struct, frozen=True):
    """Another holder's lease runs for `remaining_ms` more."""

    remaining_ms: int
    first_seen_unix: float


class Completed(msgspec.Struct, frozen=True):
    """The record has its reply. `reply_on` is None for a tombstone. `keeps_ms`: until the record expires."""

    status: int
    claim_id: bytes
    reply_on: dt.date | None
    keeps_ms: int
    first_seen_unix: float
    fingerprint: Fingerprint


class InDoubt(msgspec.Struct, frozen=True):
    """Nobody can tell whether it ran. `again_in_ms`: until the effect deadline; None if never again by itself."""

    again_in_ms: int | None
    first_seen_unix: float


class Mismatch(msgspec.Struct, frozen=True):
    """The key belongs to another request. `original_status` is None while that one has no reply."""

    first_seen_unix: float
    original_status: int | None


class OtherRecipe(msgspec.Struct, frozen=True):
    """The record's fingerprint was made by another recipe: compute with that one, or take it as equal; claim again."""

    fingerprint: Fingerprint


class Conflict(msgspec.Struct, frozen=True):
    """The record under this id says that it is another identity's: a damaged row. Never a reason to execute."""


class Unavailable(msgspec.Struct, frozen=True):
    """The store did not answer in time. Whether the claim was written is unknown: abandon it, or keep its id."""

    cause: str


ClaimOutcome = Acquired | Held | Completed | InDoubt | Mismatch | OtherRecipe | Conflict | Unavailable


# ---- settling --------------------------------------------------------------------------------------------------


class SettleRequest(msgspec.Struct, frozen=True):
    """One settlement, fenced by `claim_id`.

    `forwarded`: a byte may have reached the upstream. `binds`: this execution may have had an effect under its
    fingerprint, so a released record refuses another one; False for never sent and for a refusal (4xx).
    `body` is None for a tombstone, which may keep its head; both are None for anything that is not a completion.
    `keep_ms` is the retention.
    """

    record_id: bytes
    claim_id: bytes
    settlement: Settlement
    forwarded: bool
    binds: bool
    status: int | None
    head: bytes | None
    body: bytes | None
    keep_ms: int


class SettleOutcome(Word):
    """What a settle found: mine and written; mine and already so; another's; mine but ended otherwise."""

    DONE = "done"
    ALREADY = "already"
    LOST = "lost"
    REFUSED = "refused"


class StoredReply(msgspec.Struct, frozen=True, gc=False):
    """A reply as kept: `head` starts with the status line, its lines end in CRLF, without framing or final CRLF.

    `body` is None for a tombstone of which the head was kept.
    """

    status: int
    head: bytes
    body: bytes | None


# ---- the upstream ----------------------------------------------------------------------------------------------


class ReplyHead(msgspec.Struct, frozen=True):
    """Head of an upstream's final (not 1xx) answer, as received."""

    status: int
    reason: bytes
    headers: Headers


class NeverSent(msgspec.Struct, frozen=True, gc=False):
    """Not a byte of the request was handed to a transport. `cause` is a proxy error type of RFC 9209, section 2.3."""

    cause: str


class NoReply(msgspec.Struct, frozen=True, gc=False):
    """Sent, or partly sent, without a complete answer. `cause` is of RFC 9209; `reused`: on a kept-alive connection."""

    cause: str
    reused: bool


class NotTrusted(msgspec.Struct, frozen=True, gc=False):
    """Not a byte was sent because the sender could not trust its lease at the moment of writing."""


UpstreamFailure = NeverSent | NoReply | NotTrusted
