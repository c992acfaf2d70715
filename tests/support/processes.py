"""Gateways and ledgers as real processes, for tests."""

import asyncio
import contextlib
import json
import random
import secrets
import signal
import socket
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from gateway.demo.child import Child

CONFIG = """
service: test
listen: 127.0.0.1:{port}
monitor: {{listen: "127.0.0.1:{monitor}"}}
shutdown: {{delay: 0s, timeout: {shutdown}}}
store: {{dsn: "{dsn}", schema: {schema}{store}}}
upstreams:
  up: {{url: "http://{upstream}"{up}}}
{upstreams}
defaults:
  extends: at-least-once
  scope: none
  on_missing_key: reject
  on_in_doubt: run_again
{defaults}
routes:
{routes}
{top}
"""
ROUTES = """
  orders: {match: POST /orders}
"""


def free_port() -> int:
    """Return a port that nobody listens on, below those that the kernel gives to outgoing connections: a process that
    is killed and started again must find it free.
    """
    while True:
        port = random.randint(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Gateway:
    """A gateway process. `defaults`, `routes`, `upstreams` and `top` are YAML, indented as they come; `store` and `up`
    are the rest of flow maps. `program` runs it, with the arguments of the command line after it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dsn: str,
        schema: str,
        upstream: str,
        defaults: str = "",
        routes: str = ROUTES,
        top: str = "",
        store: str = "",
        up: str = "",
        upstreams: str = "",
        shutdown: str = "5s",
        program: Sequence[str] = ("-m", "gateway"),
    ) -> None:
        self.program = program
        self.port, self.monitor_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.name = f"gateway-{secrets.token_hex(3)}"
        self.file = folder / f"{self.name}.yaml"
        self.log = folder / f"{self.name}.log"
        self.file.write_text(
            CONFIG.format(
                port=self.port,
                monitor=self.monitor_port,
                dsn=dsn.replace("$", "$$"),
                schema=schema,
                shutdown=shutdown,
                upstream=upstream,
                defaults=textwrap.indent(textwrap.dedent(defaults).strip(), "  "),
                routes=textwrap.indent(textwrap.dedent(routes).strip(), "  "),
                top=textwrap.dedent(top),
                store=f", {store}" if store else "",
                up=f", {up}" if up else "",
                upstreams=textwrap.indent(textwrap.dedent(upstreams).strip(), "  "),
            ),
            encoding="utf-8",
        )
        self.child: Child | None = None

    async def start(self, *, ready: bool = True) -> "Gateway":
        """Start the process and wait until it listens (and, with `ready`, until it says so)."""
        self.child = Child(self.name, [sys.executable, *self.program, "serve", str(self.file)], self.log)
        await asyncio.to_thread(self.child.wait_until_listening, "127.0.0.1", self.port)
        if ready:
            await self.until(lambda status: status["ready"])
        return self

    async def until(self, condition: Callable[[dict[str, Any]], bool], within: float = 20.0) -> None:
        """Wait until /readyz says what is asked for."""
        deadline = asyncio.get_running_loop().time() + within
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"http://127.0.0.1:{self.monitor_port}/readyz") as reply:
                    status = await reply.json()
                if condition(status):
                    return
                assert asyncio.get_running_loop().time() < deadline, status
                await asyncio.sleep(0.02)

    async def metrics(self) -> dict[str, float]:
        """Return the series of /metrics by their text, `service` label left out."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.monitor_port}/metrics") as reply,
        ):
            text = await reply.text()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {
            name.replace('service="test",', "").replace('{service="test"}', ""): float(value)
            for name, _, value in lines
        }

    def lines(self, event: str = "request") -> list[dict[str, Any]]:
        """Return the log's lines of one event."""
        found = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in found if line["event"] == event]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.child is not None
        self.child.process.send_signal(number)

    async def kill(self) -> None:
        """End the process as a crash would."""
        self.signal(signal.SIGKILL)
        await self.ended()

    async def stop(self) -> int:
        """End the process gracefully; returns its exit code."""
        if self.child is None or self.child.process.poll() is not None:
            return 0
        self.signal(signal.SIGTERM)
        return await self.ended()

    async def ended(self) -> int:
        """Wait for its end."""
        assert self.child is not None
        return await asyncio.to_thread(self.child.process.wait, 30)


class Ledger:
    """The sample legacy service as a process, with rows to count."""

    def __init__(self, folder: Path, dsn: str, schema: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.log = folder / f"ledger-{self.port}.log"
        self._command = [
            sys.executable, "-m", "gateway.demo.ledger", "--dsn", dsn, "--port", str(self.port), "--schema", schema,
        ]  # fmt: skip
        self.child: Child | None = None

    async def start(self) -> "Ledger":
        """Start it and wait until it listens."""
        self.child = Child("ledger", self._command, self.log)
        await asyncio.to_thread(self.child.wait_until_listening, "127.0.0.1", self.port)
        return self

    async def stop(self) -> None:
        """End it at once."""
        if self.child is not None and self.child.process.poll() is None:
            self.child.process.kill()
            await asyncio.to_thread(self.child.process.wait, 10)
