"""The ports of an exchange: what it needs of a store, of an upstream and of an observer. No code.

Adapters call back from the event loop; every callback comes exactly once unless it says otherwise.
"""

from collections.abc import Callable
from typing import Protocol

from gateway.model import (
    ClaimOutcome,
    ClaimRequest,
    Completed,
    ReplyHead,
    SettleOutcome,
    SettleRequest,
    StoredReply,
    TookOver,
    Unavailable,
    UpstreamFailure,
)


class Store(Protocol):
    """The lease protocol with PostgreSQL. No method blocks, awaits or raises; each answers by its callback."""

    @property
    def epoch(self) -> int:
        """The store's epoch as last read: when it changes, cached replies are void."""

    def claim(self, request: ClaimRequest, done: Callable[[ClaimOutcome], None]) -> None:
        """Ask for the lease, for at most `store.timeout`, then `Unavailable`.

        Repeats with the same claim id are safe. On Acquired the lease is renewed until it is settled, abandoned
        or lost. After `Unavailable` the caller must `abandon` or `adopt`; the store does neither by itself.
        """

    def settle(self, request: SettleRequest, done: Callable[[SettleOutcome], None]) -> None:
        """Write the settlement, however long it takes: `done` comes only with the store's definite answer.

        Renewal of the lease goes on until then. Memory is bounded by degrading replies to tombstones.
        """

    def abandon(self, request: ClaimRequest) -> None:
        """Give up a claim that never forwarded, held or of unknown fate: repeated until answered; stops renewal."""

    def adopt(self, request: ClaimRequest, settle: SettleRequest, done: Callable[[SettleOutcome], None]) -> None:
        """For a request forwarded without an acknowledged claim (`on_store_failure: forward`): when the store
        returns, claim with the same id, then settle; LOST if another has the record by then.
        """

    def reply(
        self, record_id: bytes, completed: Completed, done: Callable[[StoredReply | Unavailable | None], None]
    ) -> None:
        """Fetch a stored reply, for at most `store.timeout`. None: the record is there, its reply is not kept."""

    def look(self, record_id: bytes, done: Callable[[Completed | Unavailable | None], None]) -> None:
        """Read whether a record is completed (for a holder that lost its lease). None: it is not."""


class BodyStream(Protocol):
    """The rest of a reply that is relayed as it comes. The upstream is paused between reads."""

    async def read(self) -> bytes:
        """Return the next piece, b"" at the complete end. Raises `ConnectionError` when the upstream broke off."""

    def abort(self) -> None:
        """Close the upstream connection; idempotent."""


class Receiver(Protocol):
    """Who sent a request upstream. Exactly one of `on_reply`, `on_stream` and `on_failure` is called, once."""

    def may_send(self) -> bool:
        """Asked in the same callback as the first write, with nothing in between. False: NotTrusted."""

    def on_reply(self, head: ReplyHead, body: bytes) -> None:
        """The complete answer, within the limit."""

    def on_stream(self, head: ReplyHead, stream: BodyStream) -> None:
        """The final head has come and the body will not be buffered: an event stream, declared larger than the
        limit, or grown past it (what was buffered is the first piece of `stream`).
        """

    def on_failure(self, failure: UpstreamFailure) -> None:
        """There is no complete answer and none will come."""


class Sending(Protocol):
    """A request under way."""

    @property
    def sent(self) -> bool:
        """Whether any byte was handed to a transport."""

    def abort(self) -> None:
        """Close the connection or leave the queue. No callback comes afterwards."""


class Upstream(Protocol):
    """One upstream service over HTTP/1.1. Nothing is ever sent twice by itself."""

    def send(self, head: bytes, body: bytes, limit_bytes: int, receiver: Receiver) -> Sending:
        """Send one buffered request.

        `head` is request line and header lines as they go out, each ended by CRLF, without a framing header and
        without the empty line: the adapter adds `Content-Length` and that line. The reply is buffered up to
        `limit_bytes` of body. No callback comes before `send` has returned.
        """


class Observer(Protocol):
    """What happens, for metrics and the log. Calls are cheap and never raise. `route` is a route's name."""

    def settled(self, route: str, settlement: str, reason: str) -> None:
        """The store answered a settlement definitely: `complete`, `tombstone`, `release` or `hold`."""

    def took_over(self, route: str, cause: TookOver) -> None:
        """A claim took a record over; `expired` means that it runs again."""

    def upstream_answered(self, upstream: str, status: int, seconds: float) -> None:
        """A final head came, `seconds` after sending began."""

    def upstream_timed_out(self, upstream: str, *, sent: bool) -> None:
        """No final head, or no complete body, came in time."""

    def replayed(self, route: str, source: str) -> None:
        """A stored reply answered: from the `process` or from the `store`."""

    def late_reply(self, route: str) -> None:
        """A holder that had lost its lease got its answer; the store refused it."""

    def event(self, name: str, **facts: str | float | None) -> None:
        """Something rare and interesting, as evidence: no key, no scope, no body among the facts."""
