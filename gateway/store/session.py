"""One connection to PostgreSQL: opened, checked, its statements prepared, given up at the first doubt. No protocol."""

import asyncio
import enum
import socket
from collections.abc import Callable, Sequence
from typing import Any

import asyncpg
import msgspec

from gateway.store import schema as schemas
from gateway.store.faults import UnfitError, WarnedError
from gateway.store.sql import query


class Role(enum.Enum):
    """What a connection is for: the statements it prepares."""

    CLAIM = "claim"
    SETTLE = "settle"
    RENEW = "renew"
    READ = "read"


_STATEMENTS = {
    Role.CLAIM: ("claim",),
    Role.SETTLE: ("settle", "abandon"),
    Role.RENEW: ("renew",),
    Role.READ: ("reply", "look"),
}


class Server(msgspec.Struct, frozen=True):
    """What a new connection met. `warnings`: what is below that which the guarantees assume, as sentences.

    `system_identifier` and `timeline` are None where the role may not read them.
    """

    version: int
    system_identifier: int | None
    timeline: int | None
    epoch: int
    warnings: tuple[str, ...]


class Session:
    """A connection and its statements. Used by one task at a time."""

    def __init__(self, connection: asyncpg.Connection, schema: str, server: Server, prepares: bool) -> None:
        self.server = server
        self.lost: Callable[[], None] | None = None
        self._connection = connection
        self._schema = schema
        self._prepares = prepares
        self._prepared: dict[str, Any] = {}
        self._warned = ""
        connection.add_log_listener(self._on_message)
        connection.add_termination_listener(self._on_lost)

    @property
    def closed(self) -> bool:
        """Whether it cannot be used any more."""
        return self._connection.is_closed()

    async def prepare(self, name: str, seconds: float) -> None:
        """Prepare a statement ahead of its first use; nothing behind a pooler, where it would be another's."""
        if self._prepares and name not in self._prepared:
            text = query(name, self._schema)
            self._prepared[name] = await self._connection.prepare(text, timeout=seconds)

    async def fetch(self, name: str, arguments: Sequence[Any], seconds: float) -> list[asyncpg.Record]:
        """Run a statement and return its rows. Raises what `faults.classify` knows.

        After anything that is classified as unknown the session must be discarded.
        """
        if self._prepares:
            statement = self._prepared.get(name)
            if statement is None:
                await self.prepare(name, seconds)
                statement = self._prepared[name]
            rows: list[asyncpg.Record] = await statement.fetch(*arguments, timeout=seconds)
        else:
            rows = await self._connection.fetch(query(name, self._schema), *arguments, timeout=seconds)
        if self._warned:
            raise WarnedError(self._warned)
        return rows

    async def close(self) -> None:
        """Close, waiting at most a second for a cancel request that is under way, and never raise."""
        self.lost = None
        try:
            await self._connection.close(timeout=1.0)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            self._connection.terminate()

    def _on_message(self, _: object, message: Any) -> None:
        if message.severity_en == "WARNING":
            self._warned = str(message.message)

    def _on_lost(self, _: object) -> None:
        if self.lost is not None:
            self.lost()


async def open_session(dsn: str, schema: str, role: Role, *, transaction_pooled: bool, timeout_ms: int) -> Session:
    """Connect, check what answered, and prepare the role's statements, all within `timeout_ms`.

    `transaction_pooled`: behind a pooler in transaction mode; then nothing of a session is relied on: no prepared
    statements, no start-up parameters. Raises what `faults.classify` knows, among them `UnfitError` and `SchemaError`.
    """
    settings = None if transaction_pooled else _settings(role, timeout_ms)
    async with asyncio.timeout(timeout_ms / 1000):
        connection = await asyncpg.connect(
            dsn,
            server_settings=settings,
            statement_cache_size=0 if transaction_pooled else 100,  # at 0 even `prepare` parses anew each time
            max_cached_statement_lifetime=0,
        )
        try:
            _keep_alive(connection, timeout_ms)
            server = await _inspect(connection, schema)
            session = Session(connection, schema, server, prepares=not transaction_pooled)
            for name in _STATEMENTS[role]:
                await session.prepare(name, timeout_ms / 1000)
            if not transaction_pooled:
                # asyncpg ends a prepare with Flush, not Sync: a transaction would stay open, with the locks of parsing.
                await connection.execute("SELECT")
        except BaseException:
            connection.terminate()
            raise
    return session


def _settings(role: Role, timeout_ms: int) -> dict[str, str]:
    """Index plans only, and one plan for all: a plan made while the table was small stays a sequential scan.

    Reads plan each time instead, so that only the partition of the reply is planned and locked.
    """
    return {
        "application_name": "idempotency-gateway",
        "default_transaction_isolation": "read committed",
        "enable_seqscan": "off",
        "jit": "off",
        "plan_cache_mode": "force_custom_plan" if role is Role.READ else "force_generic_plan",
        "statement_timeout": str(timeout_ms),
    }


def _keep_alive(connection: asyncpg.Connection, timeout_ms: int) -> None:
    """Let the kernel find out that the other end is gone, while nothing is being asked."""
    transport = getattr(connection, "_transport", None)
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 2 * timeout_ms),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _inspect(connection: asyncpg.Connection, schema: str) -> Server:
    row = await connection.fetchrow(query("server", schema))
    assert row is not None  # noqa: S101 -- a SELECT without FROM has one row
    if row["read_only"]:
        raise UnfitError("read_only", "This PostgreSQL takes no writes: it is a standby, or set to read-only.")
    if row["isolation"] != "read committed":
        raise UnfitError(
            "isolation",
            f"Transactions of the store's role start as {row['isolation']}: set default_transaction_isolation to "
            "'read committed' for it.",
        )
    warnings = _warnings(row)
    try:
        which = await connection.fetchrow(query("timeline", schema))
    except (asyncpg.InsufficientPrivilegeError, asyncpg.FeatureNotSupportedError, asyncpg.UndefinedFunctionError):
        which = None
        warnings = (*warnings, "The store's role may not read the timeline: an old primary cannot be recognised.")
    return Server(
        version=row["version"],
        system_identifier=None if which is None else which["system_identifier"],
        timeline=None if which is None else which["timeline"],
        epoch=await schemas.check(connection, schema),
        warnings=warnings,
    )


def _warnings(row: asyncpg.Record) -> tuple[str, ...]:
    found = []
    if not row["fsync"]:
        found.append("fsync is off: a crash of the database's machine can forget acknowledged leases.")
    if row["synchronous_commit"] in ("off", "local"):
        found.append(
            f"synchronous_commit is {row['synchronous_commit']}: the gateway raises it for its own writes only."
        )
    return tuple(found)
