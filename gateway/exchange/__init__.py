"""One request's life: claim, decide, forward, settle. `exchange.py` is the protocol, `ports.py` what it needs."""

from gateway.exchange.ports import BodyStream, Observer, Receiver, Sending, Store, Upstream

__all__ = ["BodyStream", "Observer", "Receiver", "Sending", "Store", "Upstream"]
