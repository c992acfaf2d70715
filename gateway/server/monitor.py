"""The monitor listener: /healthz, /readyz and /metrics. Nothing secret, nothing to change, no token."""

from collections.abc import Callable

import msgspec
from aiohttp import web

from gateway.metrics import Metrics


class Readiness(msgspec.Struct, frozen=True):
    """Whether new requests should come here, and why not. `store` tells its state; it does not decide readiness."""

    ready: bool
    reason: str
    store: str


def monitor_app(metrics: Metrics, readiness: Callable[[], Readiness]) -> web.Application:
    """Return the application of the monitor listener."""

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        now = readiness()
        body = msgspec.to_builtins(now)
        return web.json_response(body, status=200 if now.ready else 503)

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(
            body=metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", exposition)
    return app
