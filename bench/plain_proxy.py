"""A pass-through proxy as one writes it with aiohttp: the yardstick. Server and client of aiohttp on uvloop, streaming
both ways, one pooled session, no logs, no metrics, nothing clever.

`python -m bench.plain_proxy PORT UPSTREAM_URL`
"""

import asyncio
import signal
import sys

import aiohttp
import uvloop
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

HOP_BY_HOP = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ]
)


def end_to_end(headers: "CIMultiDictProxy[str]") -> "CIMultiDict[str]":
    """Return the headers that may cross a proxy."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in HOP_BY_HOP)


class PlainProxy:
    """One handler over one client session."""

    def __init__(self, session: aiohttp.ClientSession, upstream: str) -> None:
        self._session = session
        self._upstream = upstream

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Relay one request and its answer."""
        async with self._session.request(
            request.method,
            URL(self._upstream + request.raw_path, encoded=True),
            headers=end_to_end(request.headers),
            data=request.content if request.body_exists else None,
            allow_redirects=False,
        ) as reply:
            response = web.StreamResponse(status=reply.status, reason=reply.reason, headers=end_to_end(reply.headers))
            await response.prepare(request)
            async for piece in reply.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


async def serve(port: int, upstream: str) -> None:
    """Serve until SIGTERM."""
    async with aiohttp.ClientSession(
        auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(), connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", PlainProxy(session, upstream).handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        print(f"plain proxy listening on 127.0.0.1:{port}", flush=True)
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()
        await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2]))
