"""What a configuration promises, and what it risks, in plain sentences. `check` and `explain` print them."""

import difflib
from collections.abc import Iterator

import msgspec
import yaml

from gateway.config import sizing
from gateway.config.layers import BASE, BUILT_IN, QUESTIONS, Layer, merge
from gateway.config.load import Config, RouteConfig
from gateway.config.match import Prefix, reached
from gateway.config.policy import ForwardKey, Mode, OnMissingKey, OnStoreFailure, Policy
from gateway.config.units import duration_text, size_text
from gateway.errors import GatewayError
from gateway.model import OnInDoubt, Settlement

_TELLING_5XX = (500, 502, 504)  # a service, or a proxy before it, that failed half-way
_CREDENTIALS = ("api-key", "apikey", "token", "secret", "password", "session", "auth", "signature")
_EVERYBODY = {"0.0.0.0/0", "::/0"}
_NOBODYS = frozenset({b"x-forwarded-for", b"forwarded", b"x-real-ip", b"user-agent", b"x-request-id", b"traceparent"})


class Risk(msgspec.Struct, frozen=True):
    """Something allowed that may surprise: the path it concerns, and what may happen."""

    path: str
    sentence: str


def report(config: Config, rps: float | None = None) -> str:
    """All that `check` prints about a file without faults; with `rps`, what each route stores at that rate."""
    lines = []
    width = max(len(name) for name in config.routes)
    for name, route in config.routes.items():
        first, *more = [pattern.text for pattern in route.matches]
        lines.append(f"  {name:<{width}}  {first}")
        lines += [f"  {'':<{width}}  {text}" for text in more]
        lines.append(f"      {promise(route)}")
        if rps is not None and route.policy.mode is Mode.ENFORCE:
            stored = sizing.bytes_text(sizing.route_bytes(route, rps))
            kept = duration_text(route.policy.retention_ms)
            lines.append(f"      At {rps:g} requests/s it stores about {stored} ({kept}, replies of 1 KiB).")
    lines.append(needs(config))
    return "\n".join(lines)


def needs(config: Config) -> str:
    """What the deployment has to give one process."""
    return (
        f"for the deployment: terminationGracePeriodSeconds >= {sizing.grace_seconds(config)}; "
        f"buffers up to {size_text(config.limits.buffer_memory_bytes)}; "
        f"PostgreSQL connections per process: {sizing.connections(config)}; "
        f"DSN: {config.store.dsn.place}{_missing_here(config)}"
    )


def _missing_here(config: Config) -> str:
    """Whether the DSN can be read where this is asked; there it need not be."""
    if not config.store.embedded:
        try:
            config.store.read_dsn()
        except GatewayError as error:
            return f" (not here: {error})"
    return ""


def promise(route: RouteConfig) -> str:
    """What a route promises, in one paragraph."""
    policy = route.policy
    if policy.mode is Mode.PASS:
        return "not guarded: forwarded as if the gateway were not there."
    return " ".join([_guarantee(policy) + ".", *_answers(policy)])


def built_in(name: str) -> str:
    """A built-in policy as a file would write it, complete. Raises GatewayError for a name that is none."""
    if name not in BUILT_IN:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"built in are {' and '.join(BUILT_IN)}."
        raise GatewayError(f"No built-in policy has the name {name!r}; {hint}")
    merged = merge([Layer(BASE, ()), Layer(BUILT_IN[name], ())])
    statuses = [*merged.classes.items(), *merged.exact.items()]
    outcomes = {
        key: [status for status, settlement in statuses if settlement is wanted]
        for key, wanted in (("store", Settlement.COMPLETE), ("release", Settlement.RELEASE), ("hold", Settlement.HOLD))
    }
    fields = {**merged.fields, "outcomes": outcomes}
    text = yaml.safe_dump({name: fields}, sort_keys=False, default_flow_style=None, width=110)
    still_open = ", ".join(question for question in QUESTIONS if question not in fields)
    return f"{text}# to be answered by who extends it: {still_open}"


def guarantee(policy: Policy) -> str:
    """The core of a promise, for one line."""
    return "not guarded" if policy.mode is Mode.PASS else _guarantee(policy)


def _guarantee(policy: Policy) -> str:
    kept = duration_text(policy.retention_ms)
    if policy.on_in_doubt is OnInDoubt.BLOCK:
        return f"at most once within {kept}; if nobody can tell whether it ran: 409 in-doubt until a person says"
    deadline = duration_text(policy.effect_deadline_ms)
    return (
        f"at least once within {kept}, once unless something breaks; if nobody can tell whether it ran: 409 until "
        f"{deadline} have passed (by then the service must have committed or given up), then a retry runs it again"
    )


def _answers(policy: Policy) -> Iterator[str]:
    held = [str(status) for status in range(500, 600) if policy.outcomes.settlement(status) is Settlement.HOLD]
    if len(held) > 90:
        yield "A 5xx of the service counts as in doubt."
    elif held:
        yield f"A {', '.join(held)} of the service counts as in doubt, other 5xx as not done."
    elif policy.outcomes.settlement(500) is Settlement.RELEASE:
        yield "A 5xx of the service counts as not done: a retry runs at once."
    parts = " and ".join(
        f"{part.name} ({'digest of Authorization' if part.kind == 'authorization' else part.header.decode().title()})"
        for part in policy.scope
    )
    yield f"Keys belong to each {parts}." if parts else "Keys are everybody's."
    yield "No key: 400." if policy.on_missing_key is OnMissingKey.REJECT else "No key: forwarded unprotected."
    if policy.on_store_failure is OnStoreFailure.REJECT:
        yield "Store down: 503."
    else:
        yield "Store down: forwarded unprotected."
    yield "First still running: 409."
    if policy.respond_within_ms < policy.upstream_timeout_ms:
        yield f"Slower than {duration_text(policy.respond_within_ms)}: 504, and a retry gets the late answer."
    yield f"Key reused for another request: {policy.on_mismatch.status}."
    limit = size_text(policy.max_response_body_bytes)
    yield f"A reply over {limit} is passed on but not kept: a retry gets 409 reply-not-stored."
    if policy.forward_key is ForwardKey.STRIP:
        yield "The service does not see the key."


# ---- risks ------------------------------------------------------------------------------------------------------


def risks(config: Config) -> list[Risk]:
    """What is allowed and may surprise."""
    found = list(_process_risks(config))
    for name, route in config.routes.items():
        if route.policy.mode is Mode.ENFORCE:
            found += [Risk(f"routes.{name}", sentence) for sentence in _route_risks(config, route)]
    return found


def _process_risks(config: Config) -> Iterator[Risk]:
    if config.store.embedded:
        yield Risk("store.dsn", "embedded is for one process and for trying things out, never for production")
    if any(str(network) in _EVERYBODY for network in config.trusted_proxies):
        yield Risk("trusted_proxies", "everybody is trusted: any client may name its own address and scope")
    longest = max((route.policy.upstream_timeout_ms for route in config.routes.values()), default=0)
    if config.shutdown.timeout_ms < longest:
        yield Risk(
            "shutdown.timeout",
            f"is {duration_text(config.shutdown.timeout_ms)}, and a request may run for {duration_text(longest)}: what "
            "has not ended by then is in doubt after each deployment",
        )


def _route_risks(config: Config, route: RouteConfig) -> Iterator[str]:
    policy = route.policy
    if not policy.scope:
        yield "scope is none: two clients that happen to choose one key get one answer"
    for part in policy.scope:
        header = part.header.decode()
        if part.kind == "header" and any(word in header for word in _CREDENTIALS):
            yield f"scope {part.name} is the header {header}, which looks like a credential: it is stored readable"
        if part.header in _NOBODYS:
            yield f"scope {part.name} is the header {header}, which changes between attempts: a retry may run again"
    if policy.on_missing_key is OnMissingKey.FORWARD:
        yield "on_missing_key is forward: requests without a key run as often as they are sent"
    if policy.on_store_failure is OnStoreFailure.FORWARD:
        yield "on_store_failure is forward: while PostgreSQL cannot be reached, every retry runs"
    if policy.on_in_doubt is OnInDoubt.RUN_AGAIN:
        yield "on_in_doubt is run_again: after a crash or a timeout one key may run twice"
    else:
        released = [str(code) for code in _TELLING_5XX if policy.outcomes.settlement(code) is Settlement.RELEASE]
        if released:
            yield f"on_in_doubt is block, but {', '.join(released)} of the service counts as not done: a retry runs"
    if policy.longest_retry_ms is not None and policy.retention_ms < 2 * policy.longest_retry_ms:
        yield (
            f"retention ({duration_text(policy.retention_ms)}) is less than twice longest_retry "
            f"({duration_text(policy.longest_retry_ms)}): a late retry may find its record gone and run again"
        )
    if b"authorization" in policy.fingerprint.headers:
        yield "fingerprint.headers has Authorization: a retry with a renewed token is refused as another request"
    yield from _open_hosts(config, route)


def _open_hosts(config: Config, route: RouteConfig) -> Iterator[str]:
    served = {prefix: name for name, upstream in config.upstreams.items() for prefix in upstream.serves}
    for pattern in route.matches:
        hostless: list[Prefix] = [prefix for prefix in reached(pattern, served) if prefix.host is None]
        if pattern.host is not None and hostless:
            host, name = pattern.host.decode(), served[hostless[0]]
            yield (
                f"matches the host {host} only, and the upstream {name} serves every host: the same request with "
                "another Host goes through unprotected"
            )
