"""What the store believes of its server: which one it is, since when contact is undisturbed, what its clock does."""

import asyncpg
import pytest

from gateway.errors import GatewayError
from gateway.model import Acquired
from gateway.store.clock import boot
from gateway.store.faults import Kind, UnfitError, classify
from gateway.store.link import Link, LinkSettings
from gateway.store.session import Server

from .conftest import Asking, MakeStore, Watch, claim_request


def server(system: int = 1, timeline: int = 1) -> Server:
    return Server(version=180000, system_identifier=system, timeline=timeline, epoch=0, warnings=())


@pytest.fixture
async def link() -> Link:
    return Link(LinkSettings(lambda: "", "s", False, 2000), Watch())


async def test_rule_33_the_old_primary_of_a_split_brain_is_refused(link: Link) -> None:
    link._meet(server(timeline=3))
    with pytest.raises(UnfitError, match="old primary"):
        link._meet(server(timeline=2))
    link._meet(server(timeline=3))


async def test_rule_5_a_failover_makes_careful(link: Link) -> None:
    link._meet(server(timeline=1))
    assert link.calm_ms() is None
    link._meet(server(timeline=1))
    assert link.calm_ms() is None
    link._meet(server(timeline=2))
    assert link.calm_ms() == 0
    link.answered(boot(), 1000.0, 0)
    assert (link.calm_ms() or 0) < 1000


async def test_rule_5_a_jump_of_the_databases_clock_makes_careful(link: Link) -> None:
    at = boot()
    link.answered(at, 1000.0 + at, 0)
    link.answered(boot(), 1000.1 + boot(), 0)
    assert link.calm_ms() is None
    link.answered(boot(), 1002.0 + boot(), 0)
    assert link.calm_ms() is not None
    assert ("clock", "database_clock_jumped") in link.observer.errors


async def test_rule_5_a_lost_connection_makes_careful_until_a_lease_has_passed(
    asking: Asking, database: asyncpg.Connection
) -> None:
    assert asking.store._link.calm_ms() is None
    await database.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'idempotency-gateway'"
    )
    await asking.watch.until(lambda: asking.store._link.calm_ms() is not None)
    await asking.claim(claim_request())
    assert asking.store._link.calm_ms() is not None


async def test_a_server_with_weak_durability_is_told(database: asyncpg.Connection, asking: Asking) -> None:
    fsync = await database.fetchval("SELECT current_setting('fsync')::bool")
    assert bool(asking.store.state.warnings) == (not fsync)


@pytest.mark.parametrize(
    ("error", "kind", "cause"),
    [
        (TimeoutError(), Kind.UNKNOWN, "timeout"),
        (ConnectionRefusedError(), Kind.UNKNOWN, "connection"),
        (asyncpg.ReadOnlySQLTransactionError("x"), Kind.UNKNOWN, "read_only"),
        (asyncpg.LockNotAvailableError("x"), Kind.LOCKED, "locked"),
        (asyncpg.DeadlockDetectedError("x"), Kind.DEADLOCK, "deadlock"),
        (asyncpg.CheckViolationError("no partition"), Kind.ROW, "no_partition"),
        (asyncpg.DataError("x"), Kind.ROW, "invalid_row"),
        (asyncpg.InternalClientError("x"), Kind.UNKNOWN, "client_fault"),
        (asyncpg.InterfaceError("connection is closed"), Kind.UNKNOWN, "connection"),
        (asyncpg.InvalidCachedStatementError("x"), Kind.UNKNOWN, "plan_invalid"),
        (asyncpg.DiskFullError("x"), Kind.REFUSED, "disk_full"),
        (asyncpg.CannotConnectNowError("x"), Kind.UNKNOWN, "starting"),
        (asyncpg.ClientConfigurationError("x"), Kind.REFUSED, "dsn"),
        (GatewayError("no such file"), Kind.REFUSED, "dsn"),
        (RuntimeError("x"), Kind.UNKNOWN, "client_fault"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_every_failure_has_a_meaning_and_a_word(error: Exception, kind: Kind, cause: str) -> None:
    fault = classify(error)
    assert (fault.kind, fault.cause) == (kind, cause)


def test_a_pooler_that_was_not_configured_is_told_with_what_to_set() -> None:
    fault = classify(asyncpg.ProtocolViolationError("unsupported startup parameter: jit"))
    assert fault.cause == "pooler"
    assert "pool_mode: transaction" in fault.sentence


async def test_a_role_that_may_not_read_the_timeline_works_and_is_told(
    dsn: str, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetchrow = asyncpg.Connection.fetchrow

    async def refused(self: asyncpg.Connection, text: str, *given: object) -> object:
        if "pg_control_system" in text:
            raise asyncpg.InsufficientPrivilegeError("permission denied for function pg_control_system")
        return await fetchrow(self, text, *given)

    monkeypatch.setattr(asyncpg.Connection, "fetchrow", refused)
    asking = await make_store()
    assert isinstance(await asking.claim(claim_request()), Acquired)
    assert any("timeline" in warning for warning in asking.store.state.warnings)
