"""Replies of completed records, kept in the process for a short while. Nothing here decides what may be replayed.

A completed record never changes, so its reply may be served without asking the store; at most for 30 s, never longer
than the store keeps it, and not beyond a change of the store's epoch.
"""

from collections import OrderedDict

import msgspec

from gateway.model import Fingerprint

LONGEST_SECONDS = 30.0
_OVERHEAD_BYTES = 600  # of an entry with its keys and objects, about


class CachedReply(msgspec.Struct, frozen=True, gc=False):
    """A stored reply with what a retry is compared with. `until` is an instant of the boot-time clock, seconds."""

    raw_digest: bytes
    fingerprint: Fingerprint
    status: int
    head: bytes
    body: bytes
    until: float
    expires_unix: float
    first_seen_unix: float


class ReplyCache:
    """The most recently used replies, bounded in bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self.bytes = 0
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[bytes, CachedReply] = OrderedDict()
        self._epoch = 0

    def get(self, record_id: bytes, now: float, epoch: int) -> CachedReply | None:
        """Return the reply of a record if it may still be used at `now`, under the store's `epoch`."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._entries.clear()
            self.bytes = 0
            return None
        entry = self._entries.get(record_id)
        if entry is None:
            return None
        if now >= entry.until:
            self._drop(record_id)
            return None
        self._entries.move_to_end(record_id)
        return entry

    def put(self, record_id: bytes, entry: CachedReply) -> None:
        """Keep a reply; the least recently used ones make room. One larger than the whole bound is not kept."""
        size = _size(entry)
        if size > self._limit_bytes:
            return
        self._drop(record_id)
        self._entries[record_id] = entry
        self.bytes += size
        while self.bytes > self._limit_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.bytes -= _size(oldest)

    def _drop(self, record_id: bytes) -> None:
        entry = self._entries.pop(record_id, None)
        if entry is not None:
            self.bytes -= _size(entry)


def _size(entry: CachedReply) -> int:
    return len(entry.head) + len(entry.body) + _OVERHEAD_BYTES
