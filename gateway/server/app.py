"""The composition root: builds the process from its configuration, listens, and stops it gracefully."""

import asyncio
import contextlib
import gc
import signal
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version
from typing import TypeVar

from aiohttp import web

from gateway.config import Config, Mode
from gateway.errors import GatewayError
from gateway.exchange import Context, Exchanges, Limits
from gateway.janitor import Janitor
from gateway.log import Log
from gateway.metrics import Metrics
from gateway.routes import RouteTable
from gateway.server.handler import Handler
from gateway.server.listener import Listener
from gateway.server.monitor import Readiness, monitor_app
from gateway.server.observers import ExchangeEvents, JanitorEvents, StoreEvents, UpstreamEvents
from gateway.store import PostgresStore
from gateway.store.upkeep import PostgresUpkeep
from gateway.upstream import HttpUpstream

T = TypeVar("T")

_SWEEP_SECONDS = 0.25
_BACKLOG = 1024


boot_clock = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Return seconds of the boot-time clock, which goes on while the machine sleeps. Asked ten times a request."""


class App:
    """One gateway process."""

    def __init__(self, config: Config, dsn: Callable[[], str]) -> None:
        self._config = config
        self._stopping = asyncio.Event()
        self._hurried = asyncio.Event()
        self._started = False
        self._delaying = False
        protected = {name: route for name, route in config.routes.items() if route.policy.mode is Mode.ENFORCE}
        self.log = Log(config.service, config.log.level)
        self.metrics = Metrics(config.service, protected, config.upstreams)
        settings = config.store
        self.store = PostgresStore(
            dsn=dsn,
            schema=settings.schema_name,
            pool_mode="transaction" if settings.pool_mode == "transaction" else "session",
            pool_size=settings.pool_size,
            timeout_ms=settings.timeout_ms,
            observer=StoreEvents(self.metrics, self.log, self._route_of, lambda: self.store.state.sentence),
        )
        upstream_events = UpstreamEvents(self.metrics)
        self.upstreams = {
            name: HttpUpstream(
                name,
                upstream.host_name,
                upstream.port,
                ssl=ssl.create_default_context() if upstream.tls else None,
                server_name=upstream.host_name if upstream.tls else None,
                connect_timeout_ms=upstream.connect_timeout_ms,
                max_connections=upstream.max_connections,
                keep_alive=upstream.keep_alive,
                idle_timeout_ms=upstream.idle_timeout_ms,
                head_limit_bytes=config.limits.head_size_bytes,
                observer=upstream_events,
            )
            for name, upstream in config.upstreams.items()
        }
        self.context = Context(
            self.store,
            dict(self.upstreams),
            ExchangeEvents(self.metrics, self.log),
            Limits(
                in_flight=config.limits.in_flight,
                replay_cache_bytes=config.limits.replay_cache_bytes,
                store_timeout_seconds=settings.timeout_ms / 1000,
                buffer_memory_bytes=config.limits.buffer_memory_bytes,
            ),
            config.problems.type_base,
            boot_clock=boot_clock,
        )
        self.exchanges = Exchanges(self.context)
        handler = Handler(
            config=config,
            routes=RouteTable(config),
            exchanges=self.exchanges,
            context=self.context,
            upstreams=self.upstreams,
            metrics=self.metrics,
            log=self.log,
            clock=boot_clock,
        )
        self.listener = Listener(
            handler,
            trusted=config.trusted_proxies,
            head_limit_bytes=config.limits.head_size_bytes,
            stall_seconds=config.limits.body_timeout_ms / 1000,
        )
        self._gauges()
        horizon_ms = max(
            (route.policy.upstream_timeout_ms + route.policy.retention_ms for route in protected.values()), default=0
        )
        lease_ms = max((route.policy.lease_ttl_ms for route in protected.values()), default=0)
        self._janitor = Janitor(
            PostgresUpkeep(dsn, settings.schema_name),
            JanitorEvents(self.metrics, self.log),
            horizon_ms=horizon_ms,
            lease_ms=lease_ms,
            batch=settings.janitor.batch,
        )

    # ---- life ----------------------------------------------------------------------------------------------------

    async def run(self, started: Callable[[str], None]) -> None:
        """Serve until SIGTERM or SIGINT, then drain. `started` is told sentences for people."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        monitor = web.AppRunner(monitor_app(self.metrics, self.readiness), access_log=None)
        await monitor.setup()
        await _listening(self._config.monitor, lambda host, port: web.TCPSite(monitor, host, port).start())
        await self.store.start()
        if not self.store.state.up:
            self.log.event("store_down", "error", store=self.metrics.store_name, text=self.store.state.sentence)
        server = await _listening(
            self._config.listen,
            lambda host, port: loop.create_server(self.listener, host, port, backlog=_BACKLOG, start_serving=False),
        )
        janitor = None
        if self._config.store.janitor.enabled:
            janitor = asyncio.create_task(self._janitor.run(self._config.store.janitor.interval_ms / 1000))
        sweeper = asyncio.create_task(self._sweep())
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        await server.start_serving()
        self._started = True
        self.log.event("started", listen=self._config.listen, version=version("idempotency-gateway"))
        started(f"listening on {self._config.listen}")
        await self._stopping.wait()
        delay, timeout = self._config.shutdown.delay_ms / 1000, self._config.shutdown.timeout_ms / 1000
        started(f"stopping: serving on for {delay:g} s (a second signal ends that), then at most {timeout:g} s")
        await self._drain(server)
        sweeper.cancel()
        if janitor is not None:
            janitor.cancel()
        await asyncio.gather(*(upstream.close() for upstream in self.upstreams.values()))
        await self.store.close()
        await monitor.cleanup()
        self.log.event("stopped")
        self.log.flush()

    def _stop(self) -> None:
        (self._hurried if self._stopping.is_set() else self._stopping).set()

    async def _drain(self, server: asyncio.Server) -> None:
        """Not ready but serving for `delay`; then nothing new, and what runs may finish for `timeout`."""
        self._delaying = True
        self.log.event("stopping", delay_ms=self._config.shutdown.delay_ms, timeout_ms=self._config.shutdown.timeout_ms)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.shutdown.delay_ms / 1000):
                await self._hurried.wait()
        self.context.draining = True
        server.close()
        deadline = boot_clock() + self._config.shutdown.timeout_ms / 1000
        settling = min(self._config.store.timeout_ms / 1000, self._config.shutdown.timeout_ms / 2000)
        await self._until(lambda: not self.exchanges.running and not self.listener.active, deadline - settling)
        self.exchanges.stop_unfinished()
        await self._until(lambda: not self.exchanges.running, deadline)
        await self.store.drain(max(0.0, deadline - boot_clock()))
        await self.listener.shutdown(min(1.0, max(0.1, deadline - boot_clock())))

    async def _until(self, condition: Callable[[], bool], deadline: float) -> None:
        while not condition() and boot_clock() < deadline:  # noqa: ASYNC110 -- it has many ends, and is seldom
            await asyncio.sleep(0.02)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            await asyncio.sleep(0)  # after a pause of the process, read what came meanwhile before calling it overdue
            self.exchanges.sweep()
            self.listener.sweep()
            self.log.flush()

    # ---- what is shown -------------------------------------------------------------------------------------------

    def readiness(self) -> Readiness:
        """Started, schema usable, not draining. A store that is down does not make a process unready."""
        state = self.store.state
        if not self._started:
            return Readiness(ready=False, reason="starting", store=state.sentence)
        if self._delaying:
            return Readiness(ready=False, reason="stopping", store=state.sentence)
        if state.schema_usable is False:
            return Readiness(ready=False, reason="schema", store=state.sentence)
        return Readiness(ready=True, reason="", store=state.sentence)

    def _route_of(self, record_id: bytes) -> str:
        exchange = self.exchanges.running.get(record_id)
        return exchange.call.route if exchange is not None else ""

    def _gauges(self) -> None:
        metrics, config, store = self.metrics, self._config, self.metrics.store_name
        metrics.gauge("in_flight", "Protected exchanges at once.", (), lambda: {(): len(self.exchanges.running)})
        metrics.gauge("buffer_bytes", "Bodies held in memory.", (), lambda: {(): self.context.buffer_bytes})
        metrics.gauge("replay_cache_bytes", "Replies held in memory.", (), lambda: {(): self.context.replies.bytes})
        metrics.gauge("leases_held", "Leases that this process holds.", (), lambda: {(): self.store.leases_held})
        metrics.gauge(
            "limit",
            "Configured bounds.",
            ("what",),
            lambda: {
                ("in_flight",): config.limits.in_flight,
                ("buffer_memory",): config.limits.buffer_memory_bytes,
                ("replay_cache",): config.limits.replay_cache_bytes,
            },
        )
        metrics.gauge(
            "upstream_connections",
            "Connections to an upstream, and requests that wait for one.",
            ("upstream", "state"),
            lambda: {
                (name, state): getattr(upstream, state)
                for name, upstream in self.upstreams.items()
                for state in ("idle", "active", "waiting")
            },
        )
        metrics.gauge("store_up", "Whether the store answers.", ("store",), lambda: {(store,): self.store.state.up})
        metrics.gauge(
            "completions_pending",
            "Settlements that the store has not acknowledged yet.",
            ("store",),
            lambda: {(store,): self.store.pending_completions},
        )
        metrics.gauge("build_info", "The version.", ("version",), lambda: {(version("idempotency-gateway"),): 1})
        metrics.gauge(
            "route_info",
            "What a route promises.",
            ("route", "mode", "on_in_doubt"),
            lambda: {
                (name, route.policy.mode.value, route.policy.on_in_doubt.value): 1
                for name, route in config.routes.items()
            },
        )


async def _listening(address: str, listen: Callable[[str, int], Awaitable[T]]) -> T:
    """Listen on an address; a port that is taken is a sentence."""
    host, _, port = address.rpartition(":")
    try:
        return await listen(host.strip("[]"), int(port))
    except OSError as error:
        raise GatewayError(
            f"cannot listen on {address}: {error.strerror or error}. "
            "Free the port, or write another address in the file."
        ) from None
