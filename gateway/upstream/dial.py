"""Making a connection. Errors of sockets, name service and TLS become proxy error types of RFC 9209 here."""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from ssl import SSLContext
from typing import TypeVar

_P = TypeVar("_P", bound=asyncio.Protocol)

_BY_ERRNO = {
    errno.ECONNREFUSED: "connection_refused",
    errno.ETIMEDOUT: "connection_timeout",
    errno.EHOSTUNREACH: "destination_ip_unroutable",
    errno.ENETUNREACH: "destination_ip_unroutable",
    errno.EADDRNOTAVAIL: "destination_ip_unroutable",
    errno.EACCES: "destination_ip_prohibited",
    errno.EPERM: "destination_ip_prohibited",
    errno.EMFILE: "proxy_internal_error",
    errno.ENFILE: "proxy_internal_error",
    errno.ENOBUFS: "proxy_internal_error",
    errno.ENOMEM: "proxy_internal_error",
}


class DialError(Exception):
    """No connection. `cause` is a proxy error type of RFC 9209, section 2.3; not a byte of a request was sent."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


async def dial(
    factory: Callable[[], _P], host: str, port: int, *, tls: SSLContext | None, server_name: str | None, seconds: float
) -> _P:
    """Connect, TLS handshake included, within `seconds`: each address in turn has a fair share of what is left.

    Raises `DialError` with the cause of the last address tried.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    addresses = await _resolve(host, port, deadline)
    cause = "dns_error"
    for index, address in enumerate(addresses):
        share = (deadline - loop.time()) / (len(addresses) - index)
        try:
            async with asyncio.timeout(share):
                name = (server_name or host) if tls else None
                _, protocol = await loop.create_connection(factory, address, port, ssl=tls, server_hostname=name)
                return protocol
        except OSError as error:
            cause = cause_of(error, "destination_unavailable")
    raise DialError(cause)


async def _resolve(host: str, port: int, deadline: float) -> list[str]:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return [host]
    try:
        async with asyncio.timeout_at(deadline):
            return await _look_up(host, port)
    except TimeoutError:
        raise DialError("dns_timeout") from None
    except (OSError, UnicodeError):
        raise DialError("dns_error") from None


async def _look_up(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def cause_of(error: BaseException | None, otherwise: str) -> str:
    """Name an error of a socket or of TLS by its proxy error type."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "tls_certificate_error"
    if isinstance(error, ssl.SSLError):
        return "tls_alert_received" if "ALERT" in (error.reason or "") else "tls_protocol_error"
    if isinstance(error, ConnectionResetError | BrokenPipeError | ConnectionAbortedError):
        return "connection_terminated"
    if isinstance(error, TimeoutError):
        return "connection_timeout"
    return _BY_ERRNO.get(error.errno or 0, otherwise) if isinstance(error, OSError) else otherwise
