"""Leases are kept, lost and trusted: rules 2, 4 and 29 as the holder lives them."""

import asyncio

import asyncpg
import pytest

from gateway.model import Acquired, Lease, SettleOutcome
from gateway.store import clock
from gateway.store.clock import Anchor, boot, margin_seconds

from .conftest import Asking, MakeStore, claim_request, settle_request
from .relay import Relay


async def acquired(asking: Asking, lease_ms: int = 600, key: str = "k") -> Lease:
    found = await asking.claim(claim_request(key, lease_ms=lease_ms))
    assert isinstance(found, Acquired)
    return found.lease


def renewals(asking: Asking) -> int:
    return sum(name == "renew" for name, _ in asking.watch.statements)


async def test_c02_a_slow_request_keeps_its_lease_far_beyond_its_length(
    asking: Asking, database: asyncpg.Connection
) -> None:
    lease = await acquired(asking)
    first_end = await database.fetchval("SELECT locked_until FROM idempotency_record")
    trusted = lease.trusted_until
    await asking.watch.until(lambda: renewals(asking) >= 4)
    row = await database.fetchrow(
        "SELECT locked_until, locked_until > clock_timestamp() AS held FROM idempotency_record"
    )
    assert row["locked_until"] > first_end
    assert row["held"]
    assert lease.trusted_until > trusted
    assert not lease.lost


async def test_a_lease_that_is_anothers_is_lost_and_told_once(asking: Asking, database: asyncpg.Connection) -> None:
    lease = await acquired(asking)
    await database.execute("UPDATE idempotency_record SET claim = gen_random_uuid()")
    await asking.watch.until(lambda: bool(asking.watch.lost))
    assert asking.watch.lost == [lease]
    assert lease.lost
    assert lease.trusted_until == 0.0
    assert asking.store.leases_held == 0


async def test_a_settled_lease_is_not_renewed_and_not_lost(asking: Asking) -> None:
    request = claim_request(lease_ms=300)
    await asking.claim(request)
    await asking.watch.until(lambda: renewals(asking) >= 1)
    assert await asking.settle(settle_request(request)) is SettleOutcome.DONE
    assert asking.store.leases_held == 0
    other = await acquired(asking, key="other")
    await asking.watch.until(lambda: renewals(asking) >= 4)
    assert not asking.watch.lost
    assert not other.lost


async def test_many_leases_are_renewed_by_one_statement(asking: Asking) -> None:
    requests = [claim_request(f"k{n}", lease_ms=900) for n in range(50)]
    await asyncio.gather(*(asking.claim(request) for request in requests))
    asking.watch.statements.clear()
    await asking.watch.until(lambda: ("renew", 50) in asking.watch.statements)


async def test_a_long_lease_beside_a_short_one_is_left_alone_until_its_own_third(asking: Asking) -> None:
    await asking.claim(claim_request("long", lease_ms=60_000))
    await asking.claim(claim_request("short", lease_ms=300))
    await asking.watch.until(lambda: renewals(asking) >= 1)  # the first takes along what it finds
    asking.watch.statements.clear()
    await asking.watch.until(lambda: renewals(asking) >= 4)
    assert {rows for name, rows in asking.watch.statements if name == "renew"} == {1}


async def test_a_lease_outlives_a_store_that_was_gone_for_less_than_it(
    make_store: MakeStore, relay: Relay, database: asyncpg.Connection
) -> None:
    asking = await make_store(relay.dsn)
    lease = await acquired(asking, 3000)
    await relay.close()
    await asking.watch.until(lambda: not asking.store.state.up)
    await relay.open()
    asking.watch.statements.clear()
    await asking.watch.until(lambda: renewals(asking) >= 1)
    assert not lease.lost
    assert lease.trusted_until > boot()
    assert asking.store.leases_held == 1


async def test_rule_2_trust_is_anchored_before_the_sending_and_ends_a_margin_early(asking: Asking) -> None:
    before = boot()
    lease = await acquired(asking, 30_000)
    assert before + 29.0 <= lease.trusted_until <= boot() + 29.0
    assert margin_seconds(5_000) == 0.5


async def test_rule_2_trust_is_void_when_the_clocks_drift_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    anchor = Anchor()
    assert anchor.trusted_until(30_000) == pytest.approx(anchor.boot + 29)
    ahead = clock.wall_less_boot() + 1.5
    monkeypatch.setattr(clock, "wall_less_boot", lambda: ahead)  # a virtual machine restored, or a clock set by hand
    assert anchor.trusted_until(30_000) == 0.0


async def test_rule_2_the_heartbeat_voids_the_trust_of_leases_held_across_a_drift(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await acquired(asking, 600)
    steps = iter(range(1, 1_000_000))
    monkeypatch.setattr(clock, "wall_less_boot", lambda: next(steps) * 10.0)  # every look finds them apart
    asking.watch.statements.clear()
    await asking.watch.until(lambda: renewals(asking) >= 1)
    assert lease.trusted_until == 0.0
    assert not lease.lost
