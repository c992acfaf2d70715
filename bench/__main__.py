"""`python -m bench`: the command line, the order of the rounds, the verdict."""

import argparse
import contextlib
import json
import os
import secrets
import sys
import tempfile
from pathlib import Path

from bench import cpu, report, servers
from bench.load import drive
from bench.scenarios import Scenario, at
from gateway.store import embedded

WANTED = 0.75
"""The most CPU that the protected path may use per request, over the plain proxy's (32 connections, unique keys)."""


def measure(scenario: Scenario, up: servers.Servers, seconds: int, cores: set[int]) -> report.Round:
    """Drive one scenario once and read the clocks around it."""
    url = up.urls[scenario.server] + scenario.path
    seed = secrets.token_hex(8)
    if scenario.keys == "one":
        drive(
            url, "one", seed, connections=1, seconds=1, cores=cores
        )  # the first one executes; what is measured are replays
    trees = {"server": up.pids[scenario.server], "postgres": up.pids.get("postgres")}
    used = {name: cpu.cpu_seconds(pid) for name, pid in trees.items() if pid is not None}
    rows, claims = servers.batches(up.metrics) if "gateway" in up.pids else (0.0, 0.0)
    load = drive(url, scenario.keys, seed, connections=scenario.connections, seconds=seconds, cores=cores)
    used = {name: cpu.cpu_seconds(pid) - used[name] for name, pid in trees.items() if pid is not None}
    if "gateway" in up.pids:
        rows, claims = (now - then for now, then in zip(servers.batches(up.metrics), (rows, claims), strict=True))
    works = scenario.server == "gateway"
    return report.Round(
        load,
        server_cpu=used["server"],
        postgres_cpu=used.get("postgres") if works else None,
        batch_rows=rows / claims if works and claims else None,
    )


def main() -> int:
    """Run all rounds and print the table. 0: within the wish and nothing refused; 1: not."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=5, help="of each burst")
    parser.add_argument("--connections", type=int, nargs="+", default=[32])
    parser.add_argument("--only", default="", help="scenarios whose name has this in it, beside the plain proxy")
    parser.add_argument("--dsn", default=os.environ.get("GATEWAY_TEST_DSN"), help="default: an embedded PostgreSQL")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args()

    servers.need_programs()
    scenarios = [
        one for count in given.connections for one in at(count) if one.server == "plain" or given.only in one.name
    ]
    cores = sorted(os.sched_getaffinity(0))
    server_core, rest = {cores[0]}, set(cores[1:]) or {cores[0]}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        dsn = None
        if any(one.server == "gateway" for one in scenarios):
            dsn = given.dsn or stack.enter_context(embedded.running(folder / "postgres"))
            servers.fresh_schema(dsn)
        up = stack.enter_context(servers.running(folder, dsn, server_core, rest))
        results: dict[Scenario, list[report.Round]] = {one: [] for one in scenarios}
        for one in scenarios:
            measure(one, up, 3, rest)  # warm up: connections, plans, caches, the interpreter's own specialisation
        for number in range(given.rounds):
            for one in scenarios:
                print(f"\rround {number + 1} of {given.rounds}: {one.name:<30}", end="", file=sys.stderr, flush=True)
                results[one].append(measure(one, up, given.seconds, rest))
        print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)

    found = report.lines(results)
    if given.json:
        print(json.dumps(report.as_json(found), indent=2))
    else:
        print(report.table(found))
    return verdict(found, quiet=given.json)


def verdict(found: list[report.Line], *, quiet: bool) -> int:
    """Judge the protected path at 32 connections, and that every request was answered well."""
    fault = 0
    for one in found:
        if one.broken or one.refused:
            print(
                f"{one.name}: {one.broken} broken and {one.refused} refused; the numbers mean little.", file=sys.stderr
            )
            fault = 1
        if one.name == "gateway, first time" and one.connections == 32:
            good = one.ratio <= WANTED
            fault |= not good
            if not quiet:
                print(
                    f"\nThe protected path uses {one.ratio:.2f} of the plain proxy's CPU per request"
                    f" (wanted: at most {WANTED}): {'yes' if good else 'no'}."
                )
    return fault


if __name__ == "__main__":
    sys.exit(main())
