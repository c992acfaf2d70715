"""The benchmark's own parts: an honest yardstick, CPU time counted right, numbers compared round by round."""

import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench import __main__ as bench
from bench import cpu, report, servers
from bench.load import Load
from bench.scenarios import SCENARIOS, Scenario, at
from gateway.demo.child import Child

ROOT = Path(__file__).parents[1]


@pytest.fixture
async def through_plain_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The plain proxy's URL, before an upstream that tells what it got."""
    monkeypatch.chdir(ROOT)

    async def tell(request: web.Request) -> web.Response:
        body = await request.read()
        headers = {"X-Target": request.raw_path, "X-Saw": ",".join(sorted(request.headers)), "Location": "/t/17"}
        return web.Response(status=201, body=body[::-1], headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", tell)
    async with TestServer(app) as upstream:
        (port,) = servers.free_ports(1)
        command = [sys.executable, "-m", "bench.plain_proxy", str(port), f"http://127.0.0.1:{upstream.port}"]
        with Child("plain proxy", command, tmp_path / "log") as child:
            child.wait_until("listening")
            yield f"http://127.0.0.1:{port}"


async def test_the_yardstick_relays_requests_and_answers_as_a_proxy_should(through_plain_proxy):
    async with (
        aiohttp.ClientSession() as client,
        client.post(
            f"{through_plain_proxy}/a%2Fb?x=1", data=b"abc", headers={"X-Mine": "1", "TE": "trailers"}
        ) as reply,
    ):
        assert (reply.status, await reply.read()) == (201, b"cba")
        assert reply.headers["Location"] == "/t/17"
        assert reply.headers["X-Target"] == "/a%2Fb?x=1"
        saw = reply.headers["X-Saw"].split(",")
        assert ("X-Mine" in saw, "TE" in saw, "Content-Length" in saw, "Transfer-Encoding" in saw) == (
            True, False, True, False,
        )  # fmt: skip


def test_cpu_time_counts_the_whole_family_also_when_a_child_has_ended(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "burn = 'import time\\nwhile time.process_time() < 0.2: pass'\n"
        "subprocess.run([sys.executable, '-c', burn])\n"
        "print('burnt', flush=True)\n"
        "time.sleep(60)"
    )
    with Child("family", [sys.executable, "-c", code], tmp_path / "log") as child:
        child.wait_until("burnt")
        assert 0.2 <= cpu.cpu_seconds(child.pid) < 5
        assert cpu.parent(child.pid) == os.getpid()
        assert child.pid in cpu.family(os.getpid())
    assert cpu.name(child.pid) is None


def one_round(requests: int, cpu_seconds: float, **more: object) -> report.Round:
    load = Load(requests, seconds=2.0, p50_ms=1.0, p99_ms=2.0, broken=0, refused=0)
    return report.Round(load, server_cpu=cpu_seconds, postgres_cpu=None, batch_rows=None, **more)


def test_each_round_is_compared_with_the_plain_proxy_of_the_same_round():
    plain, mine = (
        Scenario("plain proxy", "plain", "/t", "unique"),
        Scenario("gateway, first time", "gateway", "/t", "unique"),
    )
    found = report.lines(
        {
            plain: [one_round(1000, 0.1), one_round(1000, 0.2), one_round(1000, 0.4)],
            mine: [one_round(1000, 0.05), one_round(1000, 0.1), one_round(1000, 0.8)],
        }
    )
    assert [line.ratio for line in found] == [1.0, 0.5]
    assert (found[1].ratio_least, found[1].ratio_most) == (0.5, 2.0)
    assert found[1].server_us == pytest.approx(100)
    assert found[1].per_second == 500
    assert "0.50  0.50-2.00" in report.table(found)


@pytest.mark.parametrize(("ratio", "refused", "fault"), [(0.75, 0, 0), (0.76, 0, 1), (0.5, 1, 1)])
def test_the_verdict_wants_the_ratio_and_no_refusals(ratio, refused, fault, capsys):
    line = report.Line(
        "gateway, first time", 32, 1.0, 1.0, 1.0, 1.0, None, ratio, ratio, ratio, None, broken=0, refused=refused
    )
    assert bench.verdict([line], quiet=False) == fault
    assert f"{ratio:.2f} of the plain proxy's CPU" in capsys.readouterr().out


def test_every_scenario_exists_at_any_number_of_connections():
    assert [one.name for one in at(4)] == [one.name for one in SCENARIOS]
    assert {one.connections for one in at(4)} == {4}


def test_missing_programs_without_the_right_to_install_them_are_a_sentence(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _program: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        SystemExit, match=r"The benchmark needs wrk and nginx-light\. Install them: sudo apt-get install"
    ):
        servers.need_programs()
