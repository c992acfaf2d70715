"""The processes of a run: nginx as the canned upstream, the plain proxy, the gateway, and its PostgreSQL."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import asyncpg

from bench import cpu
from gateway.demo.child import Child
from gateway.store.migrate import migrate

_Found = TypeVar("_Found")

SCHEMA = "gateway_bench"

NGINX_CONF = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr;
events {{ worker_connections 1024; }}
http {{
  access_log off; keepalive_requests 1000000000; keepalive_timeout 1h;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    default_type application/json;
    add_header Location /transfers/17;
    return 201 '{{"id": 17, "account": "C-4711", "amount": 1250, "client_ref": "bench"}}\\n';
  }}
}}
"""

GATEWAY_YAML = """
service: bench
listen: [{{address: "127.0.0.1:{port}"}}]
monitor: {{listen: "127.0.0.1:{monitor}"}}
shutdown: {{delay: 0s, timeout: 5s}}
store: {{dsn: {{env: GATEWAY_DSN}}, schema: {schema}}}
upstreams: {{canned: {{url: "http://127.0.0.1:{upstream}"}}}}
defaults:
  extends: at-least-once
  scope: {{customer: {{header: X-Customer-Id}}}}
  on_missing_key: reject
  on_in_doubt: run_again
routes:
  create-transfer: {{match: POST /transfers}}
"""

# What can be installed for the asking: the program, and Debian's package.
PROGRAMS = {"wrk": "wrk", "nginx": "nginx-light"}


@dataclass(frozen=True)
class Servers:
    """Where each listens, and which process tree works for it."""

    urls: dict[str, str]
    pids: dict[str, int]
    metrics: str


def need_programs() -> None:
    """Install wrk and nginx where they are missing. Exits with a sentence when that cannot be done."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(f"The benchmark needs {' and '.join(missing)}. Install them: sudo apt-get install {' '.join(missing)}")
    print(f"installing {' and '.join(missing)} (once)", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", *missing]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"`{' '.join(command)}` failed:\n{done.stderr}")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def running(folder: Path, dsn: str | None, server_core: set[int], rest: set[int]) -> Iterator[Servers]:
    """Start nginx, the plain proxy and, given a PostgreSQL, the gateway; end them afterwards.

    What is measured runs on `server_core`, everything else on `rest`.
    """
    upstream, plain, gateway, monitor = free_ports(4)
    ports = {"nginx": upstream, "plain": plain, "gateway": gateway}
    (folder / "nginx.conf").write_text(NGINX_CONF.format(folder=folder, port=upstream), encoding="utf-8")
    (folder / "gateway.yaml").write_text(
        GATEWAY_YAML.format(port=gateway, monitor=monitor, upstream=upstream, schema=SCHEMA), encoding="utf-8"
    )
    commands = {
        "nginx": ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")],
        "plain": [sys.executable, "-m", "bench.plain_proxy", str(plain), f"http://127.0.0.1:{upstream}"],
    }
    if dsn is not None:
        program = Path(sys.executable).with_name("idempotency-gateway")
        commands["gateway"] = [str(program), "serve", str(folder / "gateway.yaml")]
    with contextlib.ExitStack() as stack:
        pids = {}
        for name, command in commands.items():
            child = stack.enter_context(Child(name, command, folder / f"{name}.log", {"GATEWAY_DSN": dsn or ""}))
            child.wait_until_listening("127.0.0.1", ports[name])
            cpu.pin(child.pid, rest if name == "nginx" else server_core)
            pids[name] = child.pid
        postgres = None if dsn is None else postmaster(dsn)
        if postgres is not None:
            pids["postgres"] = postgres
            cpu.pin(postgres, rest)
        urls = {name: f"http://127.0.0.1:{ports[name]}" for name in commands}
        yield Servers(urls, pids, f"http://127.0.0.1:{monitor}/metrics")


def batches(url: str) -> tuple[float, float]:
    """Return rows and number of the claim batches that the gateway has sent, from its metrics."""
    found = {"sum": 0.0, "count": 0.0}
    with urllib.request.urlopen(url) as reply:
        for line in reply.read().decode().splitlines():
            name, _, value = line.rpartition(" ")
            for what in found:
                if name.startswith(f"idempotency_gateway_store_batch_rows_{what}{{") and 'statement="claim"' in name:
                    found[what] += float(value)
    return found["sum"], found["count"]


def postmaster(dsn: str) -> int | None:
    """Return the process id of the PostgreSQL behind `dsn`, None when it is not on this machine."""
    return asyncio.run(_with(dsn, _postmaster))


def fresh_schema(dsn: str) -> None:
    """Drop what an earlier run left and create the gateway's tables anew."""
    asyncio.run(_with(dsn, lambda connection: connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")))
    asyncio.run(migrate(dsn, SCHEMA))


async def _with(dsn: str, work: Callable[[asyncpg.Connection], Awaitable[_Found]]) -> _Found:
    connection = await asyncpg.connect(dsn)
    try:
        return await work(connection)
    finally:
        await connection.close()


async def _postmaster(connection: asyncpg.Connection) -> int | None:
    backend: int = await connection.fetchval("SELECT pg_backend_pid()")
    return cpu.parent(backend) if cpu.name(backend) == "postgres" else None
