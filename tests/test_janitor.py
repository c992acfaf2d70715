"""The order of upkeep, its keyset and its pace, against a scripted store."""

import datetime as dt
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.errors import StoreError
from gateway.janitor import Closed, Counts, Deleted, Janitor, Work

NOON = dt.datetime(2026, 11, 30, 12, tzinfo=dt.UTC)


class Script:
    """A store that does what it is told: `broken` steps fail, `batches` are what deletions find."""

    def __init__(self, batches: list[int] | None = None, broken: tuple[str, ...] = (), busy: bool = False) -> None:
        self.batches = batches or []
        self.broken = broken
        self.busy = busy
        self.calls: list[str] = []
        self.asked: list[dt.datetime | None] = []
        self.graces: list[int] = []

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[Work | None]:
        self._call("alone")
        yield None if self.busy else self

    async def open_partitions(self, horizon_ms, t):
        self._call("open")
        return 3

    async def partition_headroom_seconds(self, horizon_ms, t):
        self._call("headroom")
        return 7.0

    async def close_partitions(self, grace_ms, t):
        self._call("close")
        self.graces.append(grace_ms)
        return Closed(dropped=1, postponed=2)

    async def delete_forgotten(self, limit, after, t):
        self._call("delete")
        self.asked.append(after)
        count = self.batches.pop(0) if self.batches else 0
        return Deleted(count, NOON + dt.timedelta(seconds=len(self.asked)) if count else None)

    async def oldest_forgotten_seconds(self, after, t):
        self._call("oldest")
        return 9.0

    def _call(self, step: str) -> None:
        self.calls.append(step)
        if step in self.broken:
            raise StoreError(f"{step} is broken.")


class Told:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.removals: list[int] = []
        self.gauges: dict[str, float] = {}
        self.successes = 0
        self.faults: list[str] = []

    def removed(self, records):
        self.removals.append(records)

    def partition_headroom(self, seconds):
        self.gauges["headroom"] = seconds

    def oldest_expired_record(self, seconds):
        self.gauges["oldest"] = seconds

    def succeeded(self):
        self.successes += 1

    def failed(self, fault):
        self.faults.append(fault)


def janitor_of(script: Script, told: Told) -> Janitor:
    return Janitor(script, told, horizon_ms=86_400_000, lease_ms=30_000, batch=10)


async def test_a_run_opens_measures_deletes_and_closes_last():
    script, told = Script(batches=[10, 10, 4]), Told()
    counts = await janitor_of(script, told).run_once()
    assert script.calls == ["alone", "open", "headroom", "delete", "delete", "delete", "oldest", "close"]
    assert script.graces == [30_000 + 3_600_000]
    assert counts == Counts(opened=3, dropped=1, postponed=2, deleted=24)
    assert told.removals == [10, 10, 4]
    assert told.gauges == {"headroom": 7.0, "oldest": 9.0}
    assert (told.successes, told.faults) == (1, [])


async def test_a_busy_store_is_left_to_the_other_janitor_and_no_success_is_told():
    script, told = Script(busy=True), Told()
    assert await janitor_of(script, told).run_once() == Counts(busy=True)
    assert script.calls == ["alone"]
    assert (told.successes, told.faults) == (0, [])


@pytest.mark.parametrize("step", ["open", "headroom", "delete", "oldest", "close"])
async def test_c52_one_failed_step_does_not_stop_the_others(step):
    script, told = Script(broken=(step,)), Told()
    counts = await janitor_of(script, told).run_once()
    assert script.calls == ["alone", "open", "headroom", "delete", "oldest", "close"]
    assert counts.faults == (f"{step} is broken.",)
    assert told.faults == [f"{step} is broken."]
    assert told.successes == 0


async def test_an_unreachable_store_is_a_fault_and_no_exception():
    script, told = Script(broken=("alone",)), Told()
    assert await janitor_of(script, told).run_once() == Counts(faults=("alone is broken.",))
    assert told.faults == ["alone is broken."]


async def test_c52_batches_that_were_deleted_before_a_failure_are_counted():
    script, told = Script(batches=[10]), Told()
    janitor = janitor_of(script, told)
    original = script.delete_forgotten

    async def fails_second(limit, after, t):
        script.broken = ("delete",) if script.asked else ()
        return await original(limit, after, t)

    script.delete_forgotten = fails_second
    assert (await janitor.run_once()).deleted == 10
    assert told.removals == [10]


async def test_each_batch_starts_from_the_expiry_that_the_last_one_reached_across_runs_too():
    script, told = Script(batches=[10, 3]), Told()
    janitor = janitor_of(script, told)
    await janitor.run_once()
    await janitor.run_once()
    assert script.asked == [None, NOON + dt.timedelta(seconds=1), NOON + dt.timedelta(seconds=2)]


async def test_every_sixtieth_run_starts_from_the_oldest_expiry_for_what_was_skipped():
    script, told = Script(batches=[1]), Told()
    janitor = janitor_of(script, told)
    for _ in range(61):
        await janitor.run_once()
    assert [number for number, after in enumerate(script.asked) if after is None] == [0, 60]


async def test_a_sweep_that_fails_is_not_all_that_is_tried_again():
    script, told = Script(batches=[1]), Told()
    janitor = janitor_of(script, told)
    for _ in range(60):
        await janitor.run_once()
    script.broken = ("delete",)
    await janitor.run_once()
    script.broken = ()
    await janitor.run_once()
    assert script.asked[-1] == NOON + dt.timedelta(seconds=1)


async def test_one_run_is_bounded_and_says_that_more_remains():
    script, told = Script(batches=[10] * 150), Told()
    janitor = janitor_of(script, told)
    assert await janitor.run_once() == Counts(opened=3, dropped=1, postponed=2, deleted=1000, more=True)
    counts = await janitor.run_once()
    assert (counts.deleted, counts.more) == (500, False)


class Enough(BaseException):
    """Ends an endless loop."""


async def paces(janitor: Janitor, rounds: int) -> list[float]:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == rounds:
            raise Enough

    with pytest.raises(Enough):
        await janitor.run(60, sleep)
    return pauses


async def test_the_loop_goes_on_through_faults_of_the_store_and_through_defects():
    script, told = Script(broken=("alone",)), Told()
    janitor = janitor_of(script, told)
    await paces(janitor, 3)
    assert told.faults == ["alone is broken."] * 3

    async def defect(limit, after, t):
        raise ZeroDivisionError

    script.broken, script.delete_forgotten = (), defect
    await paces(janitor, 2)
    assert told.faults[3:] == ["A run of the janitor broke off: ZeroDivisionError(); it is repeated."] * 2


async def test_the_loop_jitters_its_pauses_and_hurries_while_records_remain():
    script, told = Script(batches=[10] * 100), Told()
    pauses = await paces(janitor_of(script, told), 40)
    assert 0.8 <= pauses[0] <= 1.2
    assert all(48 <= pause <= 72 for pause in pauses[1:])
    assert len(set(pauses)) > 30
