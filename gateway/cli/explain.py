"""What `explain` says about one request: its route, scope, record and promise. Nothing is sent or asked."""

from urllib.parse import urlsplit

from gateway import wire
from gateway.config import Config, OnMissingKey
from gateway.config.promise import guarantee
from gateway.errors import GatewayError
from gateway.identity import Identifier, Refusal
from gateway.model import Fields
from gateway.routes import Ambiguous, NoRoute, Pass, Protect, Route, RouteTable


def explain(config: Config, method: str, url: str, header_lines: tuple[str, ...], *, peer_trusted: bool) -> str:
    """Say in one line what a request would meet. Raises GatewayError for what is no URL or header."""
    host, target = _target(url)
    headers = [_header(line) for line in header_lines]
    if host and not any(name.lower() == b"host" for name, _ in headers):
        headers.append((b"Host", host))
    seen = wire.fields(headers)
    hosts = seen.get(b"host")
    matched = RouteTable(config).match(method, hosts if isinstance(hosts, bytes) else None, target, seen)
    match matched:
        case Protect(route):
            return _protected(config, route, seen, peer_trusted=peer_trusted)
        case Pass(upstream, None):
            return f"no route matches: passes through to upstream {upstream}, unprotected"
        case Pass(upstream, name):
            return f"route {name} · mode pass: passes through to upstream {upstream}, unprotected"
        case Ambiguous(reason):
            return f"refused: 400 path-ambiguous ({reason})"
        case NoRoute():
            return "refused: 404 no-route"


def _protected(config: Config, route: Route, seen: Fields, *, peer_trusted: bool) -> str:
    policy = route.policy
    identifier = Identifier(policy.scope, policy.key, service=config.service, operation=route.operation)
    identity = identifier.identify(seen, peer_trusted=peer_trusted)
    if isinstance(identity, Refusal):
        if identity.code == "key-missing" and policy.on_missing_key is OnMissingKey.FORWARD:
            return f"route {route.name} · no {policy.key.name}: forwarded to upstream {route.upstream}, unprotected"
        members = ", ".join(f"{name} {value}" for name, value in identity.members.items())
        return f"route {route.name} · refused: {identity.code} ({members})"
    return (
        f"route {route.name} · scope {identity.scope or 'none'} · record {identity.record} · "
        f"upstream {route.upstream} · guarantee {guarantee(policy)}"
    )


def _target(url: str) -> tuple[bytes, bytes]:
    """Host and raw request target."""
    if url.startswith("/"):
        return b"", url.encode()
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise GatewayError(f"{url!r} is neither a path nor an http URL; write it like http://host/path or /path.")
    rest = url.partition("://")[2][len(parts.netloc) :]
    return parts.netloc.rpartition("@")[2].encode(), (rest if rest.startswith("/") else "/" + rest).encode()


def _header(line: str) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip():
        raise GatewayError(f"{line!r} is no header line; write it like 'X-Customer-Id: C-4711'.")
    return name.strip().encode(), value.strip().encode()
