"""From a request to its answer: match, identify, read, and hand over to an exchange, or relay without protection.

One pass over the received lines; what was matched, identified and digested is what is forwarded (invariant 6).
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from gateway import wire
from gateway.config import Config, ForwardKey, OnMissingKey
from gateway.errors import UpstreamFailed
from gateway.exchange import Answer, Call, Context, Exchanges
from gateway.fingerprint import Content, recipe
from gateway.identity import Identifier, Refusal
from gateway.log import Log, RequestLine
from gateway.metrics import Metrics, code_class
from gateway.model import Fields, Headers, Identity, NeverSent, NoReply, Outcome
from gateway.routes import Ambiguous, NoRoute, Pass, Protect, Route, RouteTable
from gateway.server.connection import AT_ONCE_BYTES, Answerable, Gone, Later, Ready
from gateway.server.inbound import BodyBroken, HeadFault, Inbound
from gateway.upstream import HttpUpstream

_IDEMPOTENT = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"TRACE"})


class _Request(msgspec.Struct):
    """What the steps of one request share."""

    inbound: Inbound
    method: bytes
    headers: Headers
    look: wire.Look
    seen: Fields
    request_id: str
    began: float
    keep_alive: bool
    http11: bool

    @property
    def is_read(self) -> bool:
        """Whether the whole request has come. If not, its rest must not be taken for the next one: the client may
        have waited for `100 Continue`, and skip the body when it gets another answer.
        """
        return self.inbound.is_read


class _Forwarding(msgspec.Struct, frozen=True):
    """How requests are written to one upstream."""

    client: HttpUpstream
    host: bytes | None


class Handler:
    """Answers every request of the data listener."""

    def __init__(
        self,
        *,
        config: Config,
        routes: RouteTable,
        exchanges: Exchanges,
        context: Context,
        upstreams: Mapping[str, HttpUpstream],
        metrics: Metrics,
        log: Log,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._routes = routes
        self._exchanges = exchanges
        self._context = context
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._forwarding = {name: _Forwarding(client, _host_of(config, name)) for name, client in upstreams.items()}
        self._recipes = {route.name: recipe(route.policy.fingerprint) for route in config.routes.values()}
        self._identifiers = {
            route.name: Identifier(
                route.policy.scope, route.policy.key, service=config.service, operation=route.operation
            )
            for route in config.routes.values()
        }
        self._guards = {
            route.name: wire.guarded(
                route.policy.key.header,
                [part.header for part in route.policy.scope],
                route.policy.fingerprint.headers,
            )
            for route in config.routes.values()
        }
        self._head_limit = config.limits.head_size_bytes
        self._buffer_limit = config.limits.buffer_memory_bytes
        self._type_base = config.problems.type_base
        self._id_prefix = secrets.token_hex(5)
        self._id_count = 0

    def __call__(self, inbound: Inbound) -> Answerable:
        """Answer one request."""
        method, headers, http11 = inbound.method, inbound.headers, inbound.http11
        look = wire.look(method, inbound.target, headers, http11=http11)
        request = _Request(
            inbound=inbound,
            method=method,
            headers=headers,
            look=look,
            seen=look.seen,
            request_id=wire.request_id(look.seen, inbound.connection.peer, self._new_id()),
            began=self._clock(),
            keep_alive=inbound.keep_alive,
            http11=http11,
        )
        if look.size_bytes > self._head_limit:
            return self._problem(request, "head-too-large", limit_bytes=self._head_limit)
        if look.fault is not None:
            return self._problem(request, "request-invalid", reason=look.fault)
        if self._context.draining:
            return self._problem(request, "draining")
        matched = self._routes.match(method.decode("ascii"), look.host, look.target, look.seen)
        match matched:
            case Protect(route):
                return self._protect(request, route)
            case Pass(upstream):
                return self._relay(request, upstream)
            case Ambiguous():
                return self._problem(request, "path-ambiguous")
            case NoRoute():
                return self._problem(request, "no-route")

    def _new_id(self) -> str:
        self._id_count += 1
        return f"{self._id_prefix}{self._id_count:07x}"

    def refuse(self, fault: HeadFault) -> bytes:
        """Return the answer to a head that could not be read."""
        request_id = self._new_id()
        if fault == "too-large":
            problem = wire.problem(
                "head-too-large", type_base=self._type_base, request_id=request_id, limit_bytes=self._head_limit
            )
        else:
            problem = wire.problem(
                "request-invalid", type_base=self._type_base, request_id=request_id, reason="malformed"
            )
        return wire.answer(problem.head, problem.body, status=problem.status, http11=True, keep_alive=False)

    def fault(self, error: BaseException) -> bytes:
        """Return the answer to a request on which the gateway failed."""
        self._log.event("fault", "error", cause=type(error).__name__, text=str(error))
        return b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    # ---- protected -----------------------------------------------------------------------------------------------

    def _protect(self, request: _Request, route: Route) -> Answerable:
        policy, seen, inbound = route.policy, request.seen, request.inbound
        if wire.hides(seen, self._guards[route.name]):
            return self._refuse(request, route, "request-invalid", reason="connection")
        identity = self._identifiers[route.name].identify(seen, peer_trusted=inbound.connection.peer.trusted)
        if isinstance(identity, Refusal):
            if identity.code == "key-missing" and policy.on_missing_key is OnMissingKey.FORWARD:
                return self._relay(request, route.upstream, route)
            return self._refuse(request, route, identity.code, **identity.members)
        if not inbound.is_read:
            return self._protect_read(request, route, identity)
        body = inbound.take()
        if len(body) > policy.max_request_body_bytes:
            return self._refuse(request, route, "request-too-large", limit_bytes=policy.max_request_body_bytes)
        return self._exchange(request, route, identity, body)

    async def _protect_read(self, request: _Request, route: Route, identity: Identity) -> Answerable:
        """Go on when the body has come."""
        body = await self._read_body(request, route.policy.max_request_body_bytes)
        if not isinstance(body, bytes):
            return Gone() if body is None else self._refuse(request, route, body[0], **body[1])
        return self._exchange(request, route, identity, body)

    def _exchange(self, request: _Request, route: Route, identity: Identity, body: bytes) -> Answerable:
        policy, look, seen = route.policy, request.look, request.seen
        started = self._clock()
        call = Call(
            route=route.name,
            policy=policy,
            upstream=route.upstream,
            identity=identity,
            content=Content(
                self._recipes[route.name], request.method, look.target, host=look.host, seen=seen, body=body
            ),
            head=partial(
                wire.forward_head,
                request.method,
                look,
                request.headers,
                peer=request.inbound.connection.peer,
                request_id=request.request_id,
                host=self._forwarding[route.upstream].host,
                strip=policy.key.header if policy.forward_key is ForwardKey.STRIP else None,
            ),
            body=body,
            request_id=request.request_id,
        )
        answer = self._exchanges.begin(call)
        respond = partial(self._respond, request, route, started, len(body))
        return respond(answer) if isinstance(answer, Answer) else Later(answer, respond)

    def _respond(self, request: _Request, route: Route, started: float, size: int, answer: Answer) -> Answerable:
        """Make what an exchange came to the answer of a request."""
        large = len(answer.body) > AT_ONCE_BYTES
        if large and answer.outcome is Outcome.REPLAYED and self._context.buffer_bytes >= self._buffer_limit:
            return self._refuse(request, route, "over-capacity")
        self._account(request, route, answer, size, started)
        if answer.stream is not None:
            return self._stream(request, answer)
        keep_alive = request.keep_alive and not self._context.draining
        data = wire.answer(answer.head, answer.body, status=answer.status, http11=request.http11, keep_alive=keep_alive)
        if not large:
            return Ready(data, keep_alive=keep_alive)
        self._context.buffer_bytes += len(data)
        return self._hand_over(request, data, keep_alive=keep_alive)

    async def _hand_over(self, request: _Request, data: bytes, *, keep_alive: bool) -> Answerable:
        """Write a large answer; it counts as held in memory until the client has taken it."""
        try:
            await request.inbound.write(data)
        except ConnectionError:
            return Gone()
        finally:
            self._context.buffer_bytes -= len(data)
        return Ready(b"", keep_alive=keep_alive)

    async def _read_body(self, request: _Request, limit: int) -> bytes | tuple[str, dict[str, object]] | None:
        """Return the whole body, or the problem that it has, or None when the client left while sending it."""
        pieces: list[bytes] = []
        size = 0
        try:
            declared = request.seen.get(b"content-length")
            if isinstance(declared, bytes) and int(declared) > limit:
                return "request-too-large", {"limit_bytes": limit}
            if self._context.buffer_bytes > self._buffer_limit:
                return "over-capacity", {}
            async for piece in self._pieces(request):
                pieces.append(piece)
                size += len(piece)
                self._context.buffer_bytes += len(piece)
                if size > limit:
                    return "request-too-large", {"limit_bytes": limit}
                if self._context.buffer_bytes > self._buffer_limit:
                    return "over-capacity", {}
        except (TimeoutError, ConnectionError, BodyBroken) as error:
            return _body_fault(error)
        finally:
            self._context.buffer_bytes -= size
        return b"".join(pieces)

    async def _pieces(self, request: _Request) -> AsyncIterator[bytes]:
        """Yield the request's body as it comes. Raises what `_body_fault` knows."""
        inbound = request.inbound
        if request.http11 and not inbound.is_read and wire.expects_continue(request.seen):
            inbound.connection.proceed()
        while piece := await inbound.read():
            yield piece

    def _refuse(self, request: _Request, route: Route, code: str, **members: Any) -> Answerable:
        """Answer a protected request that does not get as far as an exchange, with its log line."""
        problem = wire.problem(code, type_base=self._type_base, request_id=request.request_id, **members)
        sent = code == "outcome-unknown"
        answer = Answer(problem.outcome, problem.status, problem.head, problem.body, code=code, sent=sent)
        self._account(request, route, answer, 0, self._clock())
        keep_alive = request.keep_alive and not problem.closes and request.is_read
        data = wire.answer(
            problem.head, problem.body, status=problem.status, http11=request.http11, keep_alive=keep_alive
        )
        return Ready(data, keep_alive=keep_alive)

    def _account(self, request: _Request, route: Route, answer: Answer, bytes_in: int, started: float) -> None:
        """Count and log a protected request; `started`: when its body had come."""
        now = self._clock()
        overhead = max(0.0, now - started - answer.upstream_seconds)
        metrics, peer = self._metrics, request.inbound.connection.peer
        outcome = answer.outcome.word
        metrics.requests.add((route.name, outcome, answer.reason, code_class(answer.status)))
        metrics.request_seconds.observe((route.name, outcome), now - request.began)
        metrics.overhead_seconds.observe((route.name,), overhead)
        agent = request.seen.get(b"user-agent", b"")
        self._log.request(
            RequestLine(
                ts=self._log.timestamp(self._context.wall_clock()),
                level="info",
                event="request",
                service=self._config.service,
                route=route.name,
                record=answer.record,
                request_id=request.request_id,
                outcome=outcome,
                reason=answer.reason,
                code=answer.code,
                status=answer.status,
                attempt=answer.attempt,
                took_over=answer.took_over,
                upstream=route.upstream,
                upstream_ms=round(answer.upstream_seconds * 1000, 2),
                overhead_ms=round(overhead * 1000, 2),
                wait_ms=0.0,
                sent=answer.sent,
                bytes_in=bytes_in,
                bytes_out=len(answer.body),
                client=peer.address.decode("ascii"),
                user_agent=(agent if isinstance(agent, bytes) else agent[0])[:200].decode("latin-1"),
            )
        )

    async def _stream(self, request: _Request, answer: Answer) -> Answerable:
        """Relay a protected reply that is not kept; its tombstone is written."""
        stream = answer.stream
        if stream is None:
            return Gone()
        head = wire.stream_head(
            answer.head,
            status=answer.status,
            http11=request.http11,
            keep_alive=request.keep_alive,
            length=answer.length,
        )
        return await self._pour(request.inbound, head, stream.read, stream.abort)

    # ---- unprotected ---------------------------------------------------------------------------------------------

    async def _relay(self, request: _Request, upstream: str, route: Route | None = None) -> Answerable:
        """Pass a request through, streaming both ways; with `route` it is one that lacks its key."""
        inbound, seen = request.inbound, request.seen
        if inbound.connection.is_gone:
            return Gone()
        forwarding = self._forwarding[upstream]
        head = wire.forward_head(
            request.method,
            request.look,
            request.headers,
            peer=inbound.connection.peer,
            request_id=request.request_id,
            host=forwarding.host,
        )
        declared = seen.get(b"content-length")
        length = int(declared) if isinstance(declared, bytes) else None
        has_body = length is not None or b"transfer-encoding" in seen
        task = asyncio.current_task()
        if task is not None:
            inbound.on_gone = task.cancel
        head_only = request.method == b"HEAD"
        started = self._clock()
        bound = asyncio.timeout(route.policy.upstream_timeout_ms / 1000 if route is not None else None)
        try:
            async with bound:
                reply, stream = await forwarding.client.open(
                    head, self._pieces(request) if has_body else None, length, head_only=head_only
                )
        except UpstreamFailed as failed:
            return self._relay_failed(request, upstream, route, failed.failure)
        except (TimeoutError, ConnectionError, BodyBroken) as error:
            if bound.expired():
                return self._relay_failed(request, upstream, route, NoReply("http_response_timeout", reused=False))
            if isinstance(error, ConnectionError):
                return Gone()
            # What had come of the body is at the service already: nobody may say that nothing was sent.
            status = 408 if isinstance(error, TimeoutError) else 400
            failure = NoReply("http_request_error", reused=False)
            return self._relay_failed(request, upstream, route, failure, status=status)
        seconds = self._clock() - started
        self._metrics.upstream_seconds.observe((upstream, code_class(reply.status)), seconds)
        lines = wire.reply_heads(reply)
        marked = lines.live
        if route is not None:
            marked += wire.marks(Outcome.UNPROTECTED, record=None, request_id=None)
            answer = Answer(Outcome.UNPROTECTED, reply.status, marked, reason="no_key", sent=True)
            answer.upstream_seconds = seconds
            self._account(request, route, answer, length or 0, started)
        else:
            self._metrics.passed.add((upstream, code_class(reply.status)))
        stream_head = wire.stream_head(
            marked,
            status=reply.status,
            http11=request.http11,
            keep_alive=request.keep_alive and request.is_read and not self._context.draining,
            head_request=head_only,
            length=lines.length,
        )
        return await self._pour(inbound, stream_head, stream.read, stream.abort)

    def _relay_failed(
        self,
        request: _Request,
        upstream: str,
        route: Route | None,
        failure: NeverSent | NoReply,
        *,
        status: int | None = None,
    ) -> Answerable:
        """Answer an unprotected request that got no reply. Who repeats one that was sent may do it twice: unless its
        method is idempotent (RFC 9110, 9.2.2), the client is told to look first.
        """
        code = "upstream-unreachable" if isinstance(failure, NeverSent) else "outcome-unknown"
        blocked = request.method not in _IDEMPOTENT
        if route is not None:
            return self._refuse(request, route, code, cause=failure.cause, blocked=blocked, status=status)
        self._metrics.passed.add((upstream, "5xx" if status is None else code_class(status)))
        return self._problem(request, code, cause=failure.cause, blocked=blocked, status=status)

    async def _pour(
        self,
        inbound: Inbound,
        head: wire.StreamHead,
        read: Callable[[], "asyncio.Future[bytes]"] | Callable[[], object],
        abort: Callable[[], None],
    ) -> Answerable:
        """Write a streamed answer as fast as the client takes it."""
        task = asyncio.current_task()
        if task is not None:
            inbound.on_gone = task.cancel
        write = inbound.write
        try:
            await write(head.head)
            while piece := await read():  # type: ignore[misc]
                await write(wire.chunk(piece) if head.chunked else piece)
            if head.chunked:
                await write(wire.LAST_CHUNK)
        except ConnectionError:
            return Gone()
        finally:
            abort()
            inbound.on_gone = None
        return Ready(b"", keep_alive=not head.close)

    # ---- refusals ------------------------------------------------------------------------------------------------

    def _problem(self, request: _Request, code: str, **members: Any) -> Answerable:
        """Answer a request that no route is concerned with."""
        problem = wire.problem(code, type_base=self._type_base, request_id=request.request_id, **members)
        keep_alive = request.keep_alive and not problem.closes and request.is_read
        data = wire.answer(
            problem.head,
            problem.body,
            status=problem.status,
            http11=request.http11,
            keep_alive=keep_alive,
            head_request=request.method == b"HEAD",
        )
        return Ready(data, keep_alive=keep_alive)


def _body_fault(error: Exception) -> tuple[str, dict[str, object]] | None:
    """Return the problem of a body that broke off; None if its client has left."""
    if isinstance(error, TimeoutError):
        return "request-timeout", {}
    return None if isinstance(error, ConnectionError) else ("request-invalid", {"reason": "framing"})


def _host_of(config: Config, upstream: str) -> bytes | None:
    """The Host to send instead of the received one, if the configuration says so."""
    settings = config.upstreams[upstream]
    return settings.authority.encode("ascii") if settings.host == "upstream" else None
