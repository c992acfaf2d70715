"""A raw upstream and a raw client: exact bytes in, exact bytes out, because a framework hides half of all faults."""

from tests.support.raw_client import RawAnswer, RawClient, request
from tests.support.raw_upstream import (
    RawUpstream,
    Request,
    Turn,
    chunked,
    close,
    early,
    endless,
    hang,
    play,
    reply,
    reset,
    then,
    wait_for,
)

__all__ = [
    "RawAnswer",
    "RawClient",
    "RawUpstream",
    "Request",
    "Turn",
    "chunked",
    "close",
    "early",
    "endless",
    "hang",
    "play",
    "reply",
    "request",
    "reset",
    "then",
    "wait_for",
]
