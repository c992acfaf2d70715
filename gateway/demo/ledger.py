"""A sample legacy service: it writes one row a transfer into its own PostgreSQL table and knows nothing of keys.

Run it as a process of its own: `python -m gateway.demo.ledger --dsn DSN --port 8081`. It stores the client's
reference (`client_ref`), which is not unique: send a transfer twice and there are two rows. That is the point.

    POST /transfers   {"account": "C-4711", "amount": 1250, "client_ref": "anything"}   201, Location
    GET  /transfers?client_ref=anything    200 {"transfers": [...]}, or 404 when there is none
    GET  /transfers/17                     200, or 404
    GET  /healthz                          200

A POST can be told to misbehave by the header `X-Ledger-Fault`, a list such as `sleep-before=2s, status=500`:

    sleep-before=D      wait before the transfer is written            (D: 500ms, 2s)
    sleep-after=D       wait after its commit, before the answer
    status=N            answer N: below 400 after writing (303 and 201 name the transfer), from 400 on without
    commit              write the transfer although the answer is an error
    die-before-commit   the process ends with the row written and not committed
    die-after-commit    the process ends with the row committed, before a byte of the answer
    close-after-commit  the connection ends likewise; the process lives on

It must not import anything of the gateway: a service in the field cannot either.
"""

import argparse
import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import asyncpg
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

FAULT_HEADER = "X-Ledger-Fault"
DIED = 70  # the exit code of a death on request, to be told from a crash

_DURATION = re.compile(r"(\d+)(ms|s)")
_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")

# One statement each; "ledger" is replaced by the schema's name.
_CREATE = """
CREATE SCHEMA IF NOT EXISTS "ledger";
CREATE TABLE IF NOT EXISTS "ledger".transfer (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  client_ref text,                    -- whatever the client sent; not unique
  account text NOT NULL,
  amount bigint NOT NULL,             -- minor units
  created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS transfer_client_ref ON "ledger".transfer (client_ref);
"""
_INSERT = 'INSERT INTO "ledger".transfer (client_ref, account, amount) VALUES ($1, $2, $3) RETURNING *'
_BY_REF = 'SELECT * FROM "ledger".transfer WHERE client_ref = $1 ORDER BY id'
_BY_ID = 'SELECT * FROM "ledger".transfer WHERE id = $1'


class Transfer(msgspec.Struct, frozen=True):
    """The body of `POST /transfers`. `amount` is in minor units and positive."""

    account: str
    amount: int
    client_ref: str | None = None


class Fault(msgspec.Struct, frozen=True):
    """What `X-Ledger-Fault` asks for. Durations in seconds; `status` None is the ordinary 201."""

    sleep_before: float = 0.0
    sleep_after: float = 0.0
    status: int | None = None
    commit: bool = False
    die_before_commit: bool = False
    die_after_commit: bool = False
    close_after_commit: bool = False

    @property
    def writes(self) -> bool:
        """Whether the transfer is written: always, but for an error without a word about a commit."""
        near_commit = self.commit or self.die_before_commit or self.die_after_commit or self.close_after_commit
        return self.status is None or self.status < 400 or near_commit


def parse_fault(text: str) -> Fault | str:
    """Read the header's value. A string is a sentence that says what is wrong with it."""
    fields: dict[str, float | int | bool] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        word, _, value = part.partition("=")
        field = word.replace("-", "_")
        if word in {"sleep-before", "sleep-after"} and (match := _DURATION.fullmatch(value)):
            fields[field] = int(match[1]) / (1000 if match[2] == "ms" else 1)
        elif word == "status" and re.fullmatch(r"[2-5]\d\d", value):
            fields[field] = int(value)
        elif part in {"commit", "die-before-commit", "die-after-commit", "close-after-commit"}:
            fields[field] = True
        else:
            return f"{FAULT_HEADER}: cannot read {part!r}; see the docstring of gateway/demo/ledger.py for the words."
    return msgspec.convert(fields, Fault)


class Ledger:
    """The service's handlers over one pool of connections."""

    def __init__(self, pool: asyncpg.Pool, schema: str) -> None:
        self._pool = pool
        self._sql: Callable[[str], str] = lambda text: text.replace('"ledger"', f'"{schema}"')

    def application(self) -> web.Application:
        """Return the web application; a failing database is answered with 500, as legacy services do."""
        app = web.Application(middlewares=[_database_errors])
        app.router.add_post("/transfers", self._create)
        app.router.add_get("/transfers", self._find)
        app.router.add_get(r"/transfers/{id:\d{1,18}}", self._read)
        app.router.add_get("/healthz", self._health)
        return app

    async def create_tables(self) -> None:
        """Create schema and table where they are missing. Several processes may start at once."""
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(hashtext('gateway.demo.ledger'))")
            await connection.execute(self._sql(_CREATE))

    async def _create(self, request: web.Request) -> web.StreamResponse:
        fault = parse_fault(",".join(request.headers.getall(FAULT_HEADER, [])))
        if isinstance(fault, str):
            return web.json_response({"error": fault}, status=400)
        try:
            transfer = msgspec.json.decode(await request.read(), type=Transfer)
        except msgspec.ValidationError as error:
            return web.json_response({"error": str(error)}, status=422)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return web.json_response({"error": "The body is not JSON."}, status=400)
        if not 0 < transfer.amount < 2**63:
            return web.json_response({"error": "The amount must be positive."}, status=422)

        await asyncio.sleep(fault.sleep_before)
        row = await self._write(transfer, die=fault.die_before_commit) if fault.writes else None
        if fault.die_after_commit:
            os._exit(DIED)
        await asyncio.sleep(fault.sleep_after)
        if fault.close_after_commit and request.transport is not None:
            request.transport.close()
        return _answer(fault.status or 201, row)

    async def _write(self, transfer: Transfer, *, die: bool) -> asyncpg.Record | None:
        async with self._pool.acquire() as connection, connection.transaction():
            row = await connection.fetchrow(self._sql(_INSERT), transfer.client_ref, transfer.account, transfer.amount)
            if die:
                os._exit(DIED)
            return row

    async def _find(self, request: web.Request) -> web.Response:
        if "client_ref" not in request.query:
            return web.json_response({"error": "Name a client_ref."}, status=400)
        rows = await self._pool.fetch(self._sql(_BY_REF), request.query["client_ref"])
        return web.json_response({"transfers": [_shown(row) for row in rows]}, status=200 if rows else 404)

    async def _read(self, request: web.Request) -> web.Response:
        row = await self._pool.fetchrow(self._sql(_BY_ID), int(request.match_info["id"]))
        if row is None:
            return web.json_response({"error": "There is no such transfer."}, status=404)
        return web.json_response(_shown(row))

    async def _health(self, _request: web.Request) -> web.Response:
        await self._pool.fetchval("SELECT 1")
        return web.json_response({"ok": True})


def _shown(row: asyncpg.Record) -> dict[str, object]:
    return {**row, "created_at": row["created_at"].isoformat()}


def _answer(status: int, row: asyncpg.Record | None) -> web.Response:
    """Return the reply: the transfer where one was written and the status is no error, else an error."""
    if status == 204:
        return web.Response(status=204)
    if row is None or status >= 400:
        return web.json_response({"error": f"Told to answer {status}."}, status=status)
    return web.json_response(_shown(row), status=status, headers={"Location": f"/transfers/{row['id']}"})


@web.middleware
async def _database_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        return web.json_response({"error": f"The ledger's database failed: {type(error).__name__}."}, status=500)


async def serve(dsn: str, host: str, port: int, schema: str) -> None:
    """Serve until SIGTERM or SIGINT. Prints `ledger listening on URL` when ready; port 0 picks a free one."""
    try:
        pool = await asyncpg.create_pool(dsn, min_size=1, max_size=10, timeout=10)
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        _end(3, f"ledger: cannot reach its database ({type(error).__name__}); check --dsn or LEDGER_DSN.")
    async with pool:
        ledger = Ledger(pool, schema)
        await ledger.create_tables()
        runner = web.AppRunner(ledger.application(), access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            why = os.strerror(error.errno or 0).lower()
            _end(1, f"ledger: cannot listen on {host}:{port} ({why}); free it or give another --port.")
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        print(f"ledger listening on http://{host}:{runner.addresses[0][1]}", flush=True)  # noqa: T201 -- for people
        await stopped.wait()
        await runner.cleanup()


def _end(code: int, sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr, flush=True)  # noqa: T201 -- for people
    sys.exit(code)


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="ledger", description="A sample legacy service without idempotency.")
    parser.add_argument("--dsn", default=os.environ.get("LEDGER_DSN"), help="its database (default: LEDGER_DSN)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8081, help="0 picks a free one")
    parser.add_argument("--schema", default="ledger", help="where its table lies; created at start")
    given = parser.parse_args()
    if not given.dsn:
        parser.error("give --dsn or set LEDGER_DSN")
    if not _SCHEMA_NAME.fullmatch(given.schema):
        parser.error("--schema: small letters, digits and _, please")
    asyncio.run(serve(given.dsn, given.host, given.port, given.schema))


if __name__ == "__main__":
    main()
