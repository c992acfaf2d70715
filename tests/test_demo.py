"""The proof run: real processes, judged by the ledger's rows; always cleaned up; faults in one sentence."""

import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.demo import proof
from gateway.demo.child import Child, ChildFailedError

PROOF = [sys.executable, "-m", "gateway.demo.proof"]
VERDICT = r"keys, \d+ rows in the ledger"


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder that all of these tests use, so that its PostgreSQL is made once."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture
def ports() -> list[int]:
    return free_ports(3)


@pytest.fixture
def config(tmp_path: Path, ports: list[int]) -> Path:
    """The demo's configuration, on ports of its own."""
    text = proof.CONFIG.read_text("utf-8")
    for old, new in zip(("8080", "9090", "8081"), ports, strict=True):
        assert f"127.0.0.1:{old}" in text
        text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
    path = tmp_path / "demo.yaml"
    path.write_text(text, "utf-8")
    return path


@pytest.fixture
def start(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Child]]:
    """Start a proof run; it is ended afterwards."""
    monkeypatch.chdir(folder)
    running: list[Child] = []

    def one(*arguments: str | Path) -> Child:
        running.append(Child("proof", [*PROOF, *map(str, arguments)], tmp_path / f"proof{len(running)}.log"))
        return running[-1]

    yield one
    for child in running:
        child.stop(30)


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()
    return [one for child in map(int, children) for one in (child, *descendants(child))]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_proves_one_row_per_key_and_leaves_nothing_running(start, config, ports):
    run = start("--config", config)
    assert run.process.wait(90) == 0, run.output()
    assert re.search(r"(\d+) keys, \1 rows in the ledger: one row per key\.", run.output())
    assert "Straight to the ledger: one transfer, sent twice\n    2 rows" in run.output()
    assert re.search(r"\n +1 x 201 executed\n", run.output())
    assert re.search(r"\n +19 x 409 outstanding, Retry-After: \d+\n", run.output())
    assert "NOT" not in run.output()
    assert "\033[" not in run.output()
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_gateway_that_does_not_protect_fails_the_proof(start, config):
    text = config.read_text("utf-8")
    unprotected = re.sub(r"^defaults:\n", "defaults:\n  mode: pass\n", text, flags=re.MULTILINE)
    assert unprotected != text
    config.write_text(unprotected, "utf-8")
    run = start("--config", config)
    assert run.process.wait(90) == 1, run.output()
    assert "NOT one row per key" in run.output()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_staying_it_serves_until_told_to_stop_and_ends_its_children(start, config, ports, number):
    run = start("--stay", "--config", config)
    run.wait_until("Ctrl-C ends everything", 60)
    assert f"curl -i http://127.0.0.1:{ports[0]}/transfers" in run.output()
    children = descendants(run.pid)
    assert len(children) >= 2
    socket.create_connection(("127.0.0.1", ports[0])).close()
    run.process.send_signal(number)
    assert run.process.wait(30) == (0 if number == signal.SIGINT else 143)
    assert [pid for pid in children if alive(pid)] == []
    assert "Traceback" not in run.output()


def test_it_ends_with_a_sentence_when_one_of_its_processes_dies(start, config):
    run = start("--stay", "--config", config)
    run.wait_until("Ctrl-C ends everything", 60)
    children = descendants(run.pid)
    ledger = next(pid for pid in children if b"gateway.demo.ledger" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(ledger, signal.SIGKILL)
    assert run.process.wait(30) == 3
    assert "The ledger ended by itself (exit code -9)." in run.output()
    assert [pid for pid in children if alive(pid)] == []
    assert "Traceback" not in run.output()


@pytest.mark.parametrize(("place", "name"), [(0, "gateway"), (1, "gateway's monitor"), (2, "ledger")])
def test_a_busy_port_is_one_sentence_that_names_it(start, config, ports, place, name):
    with socket.create_server(("127.0.0.1", ports[place])):
        run = start("--config", config)
        assert run.process.wait(30) == 3
    assert run.output().strip().startswith(f"Port {ports[place]} is in use, and the {name} needs it. Stop what")
    assert len(run.output().strip().splitlines()) == 1


def test_a_configuration_it_cannot_read_is_a_sentence(start, tmp_path):
    run = start("--config", tmp_path / "missing.yaml")
    assert run.process.wait(30) == 3
    assert "missing.yaml" in run.output()
    assert "Traceback" not in run.output()


def test_a_child_that_dies_before_it_is_ready_tells_its_last_words(tmp_path):
    child = Child("clerk", [sys.executable, "-c", "print('no ink'); raise SystemExit(4)"], tmp_path / "log")
    with pytest.raises(ChildFailedError, match=r"The clerk ended by itself \(exit code 4\)\. .*\nno ink"):
        child.wait_until("never")
    assert child.stop() == 4


def test_a_child_that_ignores_sigterm_is_killed(tmp_path):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(60)"
    with Child("clerk", [sys.executable, "-c", code], tmp_path / "log") as child:
        child.wait_until("deaf")
        assert child.stop(within_seconds=0.2) == -signal.SIGKILL


def test_a_child_that_is_late_is_told_from_one_that_ended(tmp_path):
    child = Child("clerk", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    with child, pytest.raises(ChildFailedError, match="The clerk was not ready in time"):
        child.wait_until("never", 0.1)
