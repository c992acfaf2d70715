"""The data listener: the connections of a process, what ends them, and whom it trusts."""

import asyncio
import ipaddress
from collections.abc import Sequence

from gateway.server.connection import Connection, Handler

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Listener:
    """Makes a `Connection` for each client; `asyncio` calls it for that. `stall_seconds`: how long a client may leave
    what is written for it, or let a body be waited for. `active`: requests that are being answered.
    """

    def __init__(
        self, handler: Handler, *, trusted: Sequence[Network], head_limit_bytes: int, stall_seconds: float
    ) -> None:
        self.handler = handler
        self.connections: set[Connection] = set()
        self.active = 0
        self._trusted = trusted
        self._head_limit_bytes = head_limit_bytes
        self._stall_seconds = stall_seconds
        self._all_lost: asyncio.Future[None] | None = None

    def __call__(self) -> Connection:
        """Make the protocol of a new connection."""
        return Connection(self, self._head_limit_bytes)

    def sweep(self) -> None:
        """End what has run out of time. Called a few times a second; no request has a timer of its own."""
        now = asyncio.get_running_loop().time()
        for connection in list(self.connections):
            connection.sweep(now, self._stall_seconds)

    def lost(self, connection: Connection) -> None:
        """Forget a connection; it is closed."""
        self.connections.discard(connection)
        if self._all_lost is not None and not self.connections and not self._all_lost.done():
            self._all_lost.set_result(None)

    async def shutdown(self, timeout: float) -> None:  # noqa: ASYNC109 -- what is not done by then is cut off
        """Close every connection: one that answers a request after that, but within `timeout` seconds."""
        for connection in list(self.connections):
            connection.shut_down()
        if self.connections:
            self._all_lost = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._all_lost], timeout=timeout)
        for connection in list(self.connections):
            connection.abort()

    def trusts(self, address: str) -> bool:
        """Return whether a peer is one of `trusted_proxies`."""
        if not self._trusted:
            return False
        try:
            ip = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        return any(ip in network for network in self._trusted)
