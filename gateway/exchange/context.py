"""What the exchanges of a process share: the ports, the clocks, the replies they keep, and how answers are made.

Nothing here knows the order of things; `exchange` does.
"""

import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec

from gateway import decision, wire
from gateway.config import Policy
from gateway.exchange.ports import BodyStream, Observer, Store, Upstream
from gateway.exchange.replies import CachedReply, ReplyCache
from gateway.model import Fingerprint, Identity, Outcome


class Content(Protocol):
    """What a request says, as `fingerprint` digests it; canonical forms are computed when they are asked for."""

    raw_digest: bytes

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint by the route's own recipe."""

    def fingerprint_like(self, stored: Fingerprint) -> Fingerprint:
        """Return the fingerprint by the recipe of `stored`; `stored` itself if that recipe is not known here."""


class Call(msgspec.Struct, frozen=True):
    """A protected request as it was matched, identified and read: what is claimed is what is forwarded.

    `head` makes the head for the upstream; a request that is not forwarded needs none.
    """

    route: str
    policy: Policy
    upstream: str
    identity: Identity
    content: Content
    head: Callable[[], bytes]
    body: bytes
    request_id: str


class Answer(msgspec.Struct):
    """What the client gets, with the facts that its log line and counters want.

    `head`: status line and header lines without framing. The content is `stream` if there is one, else `body`;
    `length` is a stream's declared `Content-Length`. `code` is that of a problem, empty for a reply of the service.
    `source` says where a replay came from.
    """

    outcome: Outcome
    status: int
    head: bytes
    body: bytes = b""
    stream: BodyStream | None = None
    length: bytes | None = None
    reason: str = ""
    code: str = ""
    record: str = ""
    attempt: int = 0
    took_over: str = ""
    source: str = ""
    sent: bool = False
    upstream_seconds: float = 0.0


class Limits(msgspec.Struct, frozen=True):
    """Bounds: exchanges at once, bytes of cached replies, how long an answer waits for the store, bytes of bodies."""

    in_flight: int
    replay_cache_bytes: int
    store_timeout_seconds: float
    buffer_memory_bytes: int


class Context:
    """The ports and clocks of all exchanges of a process, and the answers that do not depend on one's progress."""

    def __init__(
        self,
        store: Store,
        upstreams: dict[str, Upstream],
        observer: Observer,
        limits: Limits,
        type_base: str,
        *,
        boot_clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.upstreams = upstreams
        self.observer = observer
        self.limits = limits
        self.boot_clock = boot_clock
        self.wall_clock = wall_clock
        self.replies = ReplyCache(limits.replay_cache_bytes)
        self.draining = False
        self.buffer_bytes = 0
        self.adopting = 0
        """Exchanges that were answered without a lease and wait for the store to come back."""
        self._type_base = type_base
        self._durations: dict[str, deque[float]] = {}

    def note_duration(self, route: str, seconds: float) -> None:
        """Remember how long an execution took, for `Retry-After`."""
        durations = self._durations.get(route)
        if durations is None:
            durations = self._durations[route] = deque(maxlen=64)
        durations.append(seconds)

    def problem(self, call: Call, outcome: Outcome, code: str, **members: Any) -> Answer:
        """Return one of the gateway's own answers."""
        problem = wire.problem(
            code, type_base=self._type_base, request_id=call.request_id, record=call.identity.record, **members
        )
        return Answer(outcome, problem.status, problem.head, problem.body, code=code, record=call.identity.record)

    def outstanding(self, call: Call, elapsed: float, remaining: float, first_seen_unix: float) -> Answer:
        """Refuse a request whose record another one holds; times in seconds."""
        durations = self._durations.get(call.route, ())
        jitter = random.random()  # noqa: S311 -- spreads clients, hides nothing
        wait = decision.retry_after_seconds(durations, elapsed, remaining, jitter)
        seen = wire.timestamp(first_seen_unix)
        return self.problem(call, Outcome.OUTSTANDING, "outstanding", retry_after=wait, first_seen=seen)

    def mismatch(self, call: Call, first_seen_unix: float, original_status: int | None) -> Answer:
        """Refuse a key that came with another request before."""
        return self.problem(
            call,
            Outcome.MISMATCH,
            "key-reused",
            status=call.policy.on_mismatch.status,
            first_seen=wire.timestamp(first_seen_unix),
            original_status=original_status,
        )

    def replay(self, call: Call, reply: CachedReply, source: Literal["process", "store"]) -> Answer:
        """Answer with a stored reply."""
        self.observer.replayed(call.route, source)
        marks = wire.marks(
            Outcome.REPLAYED,
            record=call.identity.record,
            request_id=None if wire.has_request_id(reply.head) else call.request_id,
            expires_unix=reply.expires_unix,
            now_unix=self.wall_clock(),
        )
        record = call.identity.record
        return Answer(Outcome.REPLAYED, reply.status, reply.head + marks, reply.body, record=record, source=source)
