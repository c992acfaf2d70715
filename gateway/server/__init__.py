"""Composition root: build, listen, HTTP request <-> exchange, graceful stop.

`app` builds and stops a process; `listener` holds the connections of clients, `connection` is one of them, `inbound`
what is read from it; `handler` goes from a request to its answer, `monitor` serves health and metrics, `observers` turn
what happens into metrics and log events.
"""

import asyncio
import contextlib
from collections.abc import Callable

import uvloop

from gateway.config import Config
from gateway.server.app import App
from gateway.store import embedded
from gateway.store.migrate import migrate


def serve(config: Config, say: Callable[[str], None]) -> int:
    """Run a gateway until it is told to stop; returns the exit code. `say` gets sentences for who started it.

    Raises `GatewayError` when it cannot start.
    """
    with contextlib.ExitStack() as stack:
        dsn = config.store.read_dsn
        if not config.store.embedded:
            dsn()  # one that cannot be read now is the operator's to mend, not a store that is down
        else:
            say("store: EMBEDDED PostgreSQL, for demonstration and development only: one machine, no standby")
            own = stack.enter_context(embedded.running())
            dsn = lambda: own  # noqa: E731
            asyncio.run(migrate(own, config.store.schema_name))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(config, dsn, say))
    return 0


async def _run(config: Config, dsn: Callable[[], str], say: Callable[[str], None]) -> None:
    await App(config, dsn).run(say)


__all__ = ["serve"]
