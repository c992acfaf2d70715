"""One request's life: claim, decide, forward, settle.

`exchange` is the protocol; `table` holds what runs in this process and answers what needs no round trip; `context` is
what they share; `replies` the bounded cache; `ports` what adapters must offer.
"""

from gateway.exchange.context import Answer, Call, Content, Context, Limits
from gateway.exchange.ports import BodyStream, Observer, Receiver, Sending, Store, Upstream
from gateway.exchange.table import Exchanges

__all__ = [
    "Answer",
    "BodyStream",
    "Call",
    "Content",
    "Context",
    "Exchanges",
    "Limits",
    "Observer",
    "Receiver",
    "Sending",
    "Store",
    "Upstream",
]
