"""Ports of an exchange whose callbacks a test fires by hand, in any order that their contracts allow."""

import asyncio
import hashlib
import itertools
import json
import secrets
from collections.abc import Callable
from datetime import date
from typing import Any

from gateway.config import (
    BodyForm,
    FingerprintSettings,
    ForwardKey,
    KeySource,
    Mode,
    OnMismatch,
    OnMissingKey,
    OnOutstanding,
    OnStoreFailure,
    Outcomes,
    Policy,
)
from gateway.exchange import Answer, Call, Context, Exchanges, Limits
from gateway.exchange.exchange import Exchange
from gateway.model import (
    Acquired,
    Completed,
    Fingerprint,
    Identity,
    Lease,
    NeverSent,
    NoReply,
    NotTrusted,
    OnInDoubt,
    ReplyHead,
    Settlement,
    TookOver,
)

STORED = {*range(200, 400), 400, 405, 406, 410, 411, 413, 414, 415, 422}
HELD = {502, 504}
TABLE = tuple(
    Settlement.HOLD if status in HELD else Settlement.COMPLETE if status in STORED else Settlement.RELEASE
    for status in range(1000)
)
POLICY = Policy(
    mode=Mode.ENFORCE,
    scope=(),
    key=KeySource(b"idempotency-key", "Idempotency-Key", 255),
    on_missing_key=OnMissingKey.REJECT,
    on_outstanding=OnOutstanding.REJECT,
    on_mismatch=OnMismatch(422),
    on_in_doubt=OnInDoubt.RUN_AGAIN,
    on_store_failure=OnStoreFailure.REJECT,
    fingerprint=FingerprintSettings(BodyForm.AUTO, query=True, headers=()),
    outcomes=Outcomes(TABLE),
    retention_ms=86_400_000,
    longest_retry_ms=None,
    lease_ttl_ms=30_000,
    upstream_timeout_ms=30_000,
    respond_within_ms=30_000,
    effect_deadline_ms=60_000,
    max_request_body_bytes=1 << 20,
    max_response_body_bytes=1 << 20,
    forward_key=ForwardKey.PASS,
)
FORWARD = {"on_store_failure": OnStoreFailure.FORWARD}
TIMEOUT = 2.0
KNOWN_RECIPES = {1, 2}


def policy(**changes: Any) -> Policy:
    import msgspec

    return msgspec.structs.replace(POLICY, **changes)


class Clock:
    """A clock that a test moves."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Text:
    """A request's content: two texts that differ in white space only are retries of each other."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.raw_digest = hashlib.sha256(text.encode()).digest()

    def by(self, recipe: int) -> Fingerprint:
        return Fingerprint(recipe, hashlib.sha256(f"{recipe} {self.text.strip()}".encode()).digest())

    def fingerprint(self) -> Fingerprint:
        return self.by(1)

    def fingerprint_like(self, stored: Fingerprint) -> Fingerprint:
        return self.by(stored.recipe) if stored.recipe in KNOWN_RECIPES else stored


class Asked:
    """Something that was asked of the store; `tell` answers it, once."""

    def __init__(self, what: Any, done: Callable[[Any], None], **more: Any) -> None:
        self.what = what
        self.done = done
        self.told = False
        self.__dict__.update(more)

    def tell(self, outcome: Any) -> None:
        assert not self.told, "the port calls back once"
        self.told = True
        self.done(outcome)


class ScriptedStore:
    def __init__(self) -> None:
        self.epoch = 1
        self.claims: list[Asked] = []
        self.settles: list[Asked] = []
        self.adoptions: list[Asked] = []
        self.reads: list[Asked] = []
        self.looks: list[Asked] = []
        self.abandoned: list[Any] = []

    def claim(self, request, done):
        self.claims.append(Asked(request, done))

    def settle(self, request, done):
        self.settles.append(Asked(request, done))

    def abandon(self, request):
        self.abandoned.append(request)

    def adopt(self, request, settle, done):
        self.adoptions.append(Asked(settle, done, claim=request))

    def reply(self, record_id, completed, done):
        self.reads.append(Asked(completed, done, record_id=record_id))

    def look(self, record_id, done):
        self.looks.append(Asked(record_id, done))


class ScriptedStream:
    def __init__(self) -> None:
        self.aborted = False

    async def read(self) -> bytes:
        return b""

    def abort(self) -> None:
        self.aborted = True


class ScriptedSending:
    """A request under way. `write` is the moment of the first byte."""

    def __init__(self, head: bytes, body: bytes, receiver: Exchange, log: list[str]) -> None:
        self.head = head
        self.body = body
        self.receiver = receiver
        self.sent = False
        self.aborted = False
        self.told = False
        self._log = log

    @property
    def open(self) -> bool:
        return not self.aborted and not self.told

    def write(self) -> bool:
        """Ask for trust and write in one go; without trust the sender is told so."""
        assert self.open
        assert not self.sent
        self._log.append("trust?")
        if self.receiver.may_send():
            self._log.append("write")
            self.sent = True
        else:
            self._end()
            self.receiver.on_failure(NotTrusted())
        return self.sent

    def reply(self, status: int = 201, body: bytes = b"made", *lines: tuple[bytes, bytes]) -> None:
        self._end(sent=True)
        self.receiver.on_reply(ReplyHead(status, b"Said", list(lines)), body)

    def stream(self, status: int = 201, *lines: tuple[bytes, bytes]) -> ScriptedStream:
        self._end(sent=True)
        stream = ScriptedStream()
        self.receiver.on_stream(ReplyHead(status, b"Said", list(lines)), stream)
        return stream

    def break_off(self, cause: str = "connection_terminated", *, reused: bool = False) -> None:
        self._end(sent=True)
        self.receiver.on_failure(NoReply(cause, reused))

    def refuse(self, cause: str = "connection_refused") -> None:
        self._end(sent=False)
        self.receiver.on_failure(NeverSent(cause))

    def abort(self) -> None:
        self.aborted = True

    def _end(self, *, sent: bool | None = None) -> None:
        assert self.open
        assert sent is None or self.sent is sent
        self.told = True


class ScriptedUpstream:
    def __init__(self) -> None:
        self.sendings: list[ScriptedSending] = []
        self.log: list[str] = []

    def send(self, head, body, limit_bytes, receiver):
        sending = ScriptedSending(head, body, receiver, self.log)
        self.sendings.append(sending)
        return sending

    @property
    def written(self) -> int:
        """How many requests reached the upstream."""
        return self.log.count("write")


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def settled(self, route, settlement, reason):
        self.told.append(("settled", settlement, reason))

    def took_over(self, route, cause):
        self.told.append(("took_over", cause))

    def upstream_answered(self, upstream, status, seconds):
        self.told.append(("upstream_answered", status, seconds))

    def upstream_timed_out(self, upstream, *, sent):
        self.told.append(("timed_out", sent))

    def replayed(self, route, source):
        self.told.append(("replayed", source))

    def late_reply(self, route):
        self.told.append(("late_reply",))

    def event(self, name, **facts):
        self.told.append(("event", name, facts))

    def count(self, *what: Any) -> int:
        return sum(entry[: len(what)] == what for entry in self.told)


def identity(key: str) -> Identity:
    return Identity(hashlib.sha256(key.encode()).digest(), "ledger", "pay", "customer=1", key)


class World:
    """A process: its exchanges, with every port and clock in the test's hand."""

    def __init__(self, **limits: Any) -> None:
        self.boot = Clock(1000.0)
        self.wall = Clock(1_800_000_000.0)
        self.store = ScriptedStore()
        self.upstream = ScriptedUpstream()
        self.observer = Recorder()
        bounds = {
            "in_flight": 100,
            "replay_cache_bytes": 1 << 20,
            "store_timeout_seconds": TIMEOUT,
            "buffer_memory_bytes": 128 << 20,
            **limits,
        }
        self.context = Context(
            self.store,
            {"ledger": self.upstream},
            self.observer,
            Limits(**bounds),
            "/problems#",
            boot_clock=self.boot,
            wall_clock=self.wall,
        )
        self.exchanges = Exchanges(self.context)
        self._requests = itertools.count(1)

    # ---- the client ----------------------------------------------------------------------------------------------

    def begin(self, text: str = "pay 5", key: str = "k", **changes: Any) -> "Answer | asyncio.Future[Answer]":
        number = next(self._requests)
        call = Call(
            route="pay",
            policy=policy(**changes),
            upstream="ledger",
            identity=identity(key),
            content=Text(text),
            head=lambda: b"POST /pay HTTP/1.1\r\n",
            body=text.encode(),
            request_id=f"r{number}",
        )
        return self.exchanges.begin(call)

    def wait(self, text: str = "pay 5", key: str = "k", **changes: Any) -> "asyncio.Future[Answer]":
        """Begin what has to ask the store."""
        answer = self.begin(text, key, **changes)
        assert isinstance(answer, asyncio.Future)
        return answer

    def at_once(self, text: str = "pay 5", key: str = "k", **changes: Any) -> Answer:
        """Begin what is answered without asking anybody."""
        asked = len(self.store.claims)
        answer = self.begin(text, key, **changes)
        assert isinstance(answer, Answer)
        assert len(self.store.claims) == asked
        return answer

    # ---- the store and the upstream ------------------------------------------------------------------------------

    def acquire(self, trusted: float = 20.0, attempt: int = 1, took_over: TookOver | None = None) -> Lease:
        """Grant the last claim."""
        asked = self.store.claims[-1]
        request = asked.what
        lease = Lease(request.identity.record_id, request.claim_id, request.lease_ms, self.boot.now + trusted)
        asked.tell(Acquired(lease, attempt, took_over))
        return lease

    @property
    def sending(self) -> ScriptedSending:
        return self.upstream.sendings[-1]

    def sent(self, text: str = "pay 5", key: str = "k", **changes: Any) -> "asyncio.Future[Answer]":
        """Begin, acquire and write."""
        answer = self.wait(text, key, **changes)
        self.acquire()
        assert self.sending.write()
        return answer

    def completed(self, text: str = "pay 5", keeps_ms: int = 3_600_000, reply: bool = True, recipe: int = 1):
        day = date(2030, 1, 2) if reply else None
        return Completed(201, secrets.token_bytes(16), day, keeps_ms, self.wall.now - 60, Text(text).by(recipe))

    def move(self, seconds: float) -> None:
        """Let time pass, and the sweep come by."""
        self.boot.now += seconds
        self.wall.now += seconds
        self.exchanges.sweep()

    # ---- what is left --------------------------------------------------------------------------------------------

    def assert_nothing_is_left(self) -> None:
        assert self.exchanges.running == {}
        assert self.context.buffer_bytes == 0
        assert self.context.adopting == 0


def code(answer: Answer) -> str:
    """The code of a problem."""
    return json.loads(answer.body)["code"]


def problem(answer: Answer) -> dict[str, Any]:
    return json.loads(answer.body)
