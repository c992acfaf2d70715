"""`make demo` and `make run`: start PostgreSQL, the ledger and the gateway as real processes, and prove the promise.

The proof counts rows in the ledger, never statuses alone. What it starts it ends, however it is left itself; the data
and the logs stay in `.demo/` of the working folder.
"""

import argparse
import asyncio
import contextlib
import errno
import re
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

import aiohttp

from gateway.config import Config, load
from gateway.demo.child import Child, ChildFailedError
from gateway.demo.ledger import FAULT_HEADER
from gateway.demo.page import Page
from gateway.errors import GatewayError
from gateway.store import embedded
from gateway.store.migrate import migrate

CONFIG = Path(__file__).parents[2] / "config" / "demo.yaml"
FOLDER = Path(".demo")
AT_ONCE = 20
READY_WITHIN_SECONDS = 30.0
ANSWER_WITHIN_SECONDS = 20.0
SCOPE = {"X-Customer-Id": "C-4711"}


class Proof:
    """The questions that are put to the gateway, and what the ledger holds afterwards."""

    def __init__(self, gateway: str, ledger: str, session: aiohttp.ClientSession, page: Page) -> None:
        self._gateway = gateway
        self._ledger = ledger
        self._session = session
        self._page = page
        self._run = secrets.token_hex(3)
        self._keys: list[str] = []

    async def all(self) -> bool:
        """Ask everything; True if each answer was as promised and the ledger holds one row per key."""
        await self._without_the_gateway()
        first = await self._many_at_once()
        await self._again(first)
        await self._another_amount()
        await self._refused_for_now()
        await self._cut_off_after_the_commit()
        rows = [await self._rows(key) for key in self._keys]
        self._page.verdict(
            f"{len(rows)} keys, {sum(rows)} rows in the ledger: "
            + ("one row per key." if set(rows) == {1} else f"NOT one row per key ({rows})."),
            good=set(rows) == {1},
        )
        return self._page.good

    async def _without_the_gateway(self) -> None:
        key = self._key("direct", counted=False)
        await asyncio.gather(*(self._transfer(key, to=self._ledger) for _ in range(2)))
        rows = await self._rows(key)
        self._page.step("Straight to the ledger: one transfer, sent twice")
        self._page.answer(f"{rows} rows: charged twice")

    async def _many_at_once(self) -> "Answer":
        key = self._key("transfer")
        answers = await asyncio.gather(
            *(self._transfer(key, fault="sleep-before=300ms") for _ in range(AT_ONCE)),
        )
        self._page.step(f"Through the gateway: {AT_ONCE} at once, all with the key {key}")
        for words, count in sorted(Counter(answer.words for answer in answers).items()):
            self._page.answer(f"{count:>2} x {words}")
        executed = [answer for answer in answers if answer.outcome == "executed"]
        self._page.check(
            "one ran; each of the others was told to wait or got its answer",
            good=len(executed) == 1
            and all(one.replays(executed[0]) or one.waits() for one in answers if one is not executed[0]),
        )
        self._page.check("one row in the ledger", good=await self._rows(key) == 1)
        return executed[0] if executed else answers[0]

    async def _again(self, first: "Answer") -> None:
        again = await self._transfer(self._keys[-1])
        self._page.step("The same again, now that it is done")
        self._page.answer(again.words)
        self._page.check("the first answer, byte for byte", good=again.replays(first))

    async def _another_amount(self) -> None:
        other = await self._transfer(self._keys[-1], amount=999_00)
        self._page.step("The same key with another amount")
        self._page.answer(other.words)
        self._page.check("refused as a mistake of the client", good=(other.status, other.outcome) == (422, "mismatch"))

    async def _refused_for_now(self) -> None:
        key = self._key("busy")
        refused = await self._transfer(key, fault="status=503")
        retried = await self._transfer(key)
        self._page.step("The ledger says 503 to the first attempt; the client tries again at once")
        self._page.answer(refused.words)
        self._page.answer(retried.words)
        self._page.check(
            "nothing had happened, so the retry ran",
            good=(refused.status, refused.outcome, retried.status) == (503, "released", 201),
        )

    async def _cut_off_after_the_commit(self) -> None:
        key = self._key("cut")
        cut = await self._transfer(key, fault="close-after-commit")
        retried = await self._transfer(key)
        self._page.step("The ledger commits, then breaks the connection without an answer")
        self._page.answer(cut.words)
        self._page.answer(retried.words)
        self._page.check(
            "nobody can know, and the retry is not run blindly",
            good=(cut.status, cut.outcome, retried.status) == (502, "in-doubt", 409),
        )

    def _key(self, name: str, *, counted: bool = True) -> str:
        key = f"{name}-{self._run}"
        if counted:
            self._keys.append(key)
        return key

    async def _transfer(self, key: str, *, amount: int = 12_50, fault: str = "", to: str = "") -> "Answer":
        headers = {**SCOPE, "Idempotency-Key": key, **({FAULT_HEADER: fault} if fault else {})}
        body = {"account": "C-4711", "amount": amount, "client_ref": key}
        async with self._session.post(f"{to or self._gateway}/transfers", json=body, headers=headers) as reply:
            return Answer(reply.status, reply.headers.copy(), await reply.read())

    async def _rows(self, key: str) -> int:
        async with self._session.get(f"{self._ledger}/transfers", params={"client_ref": key}) as reply:
            return len((await reply.json())["transfers"])


class Answer:
    """What came back for one transfer."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def outcome(self) -> str:
        """The gateway's own word for it; empty when the gateway was not asked."""
        return self.headers.get("Idempotency-Status", "")

    @property
    def words(self) -> str:
        """Status, outcome and the header that tells when to come back."""
        wait = f", Retry-After: {self.headers['Retry-After']}" if "Retry-After" in self.headers else ""
        return f"{self.status} {self.outcome}{wait}"

    def replays(self, first: "Answer") -> bool:
        """Whether this is the stored reply of `first`."""
        return (
            self.headers.get("Idempotent-Replayed") == "true"
            and (self.status, self.body) == (first.status, first.body)
            and self.headers.get("Location") == first.headers.get("Location")
        )

    def waits(self) -> bool:
        """Whether the client was told that the first one still runs, and when to come back."""
        return (self.status, self.outcome) == (409, "outstanding") and "Retry-After" in self.headers


def run(*, stay: bool = False, path: Path = CONFIG) -> int:
    """Start everything, prove, and serve on if `stay`. Returns 0 if all was as promised, 1 if not, 3 if not started."""
    page = Page(sys.stdout)
    try:
        config = _loaded(path)
        with _ended_always() as stack:
            return _run(config, stack, page, stay=stay)
    except (GatewayError, ChildFailedError) as error:
        page.fault(str(error))
        return 3
    except (aiohttp.ClientError, TimeoutError) as error:
        page.fault(f"The proof broke off ({str(error) or type(error).__name__}); the logs in {FOLDER}/ say more.")
        return 3
    except KeyboardInterrupt:
        page.note("Stopped.")
        return 130


def _run(config: Config, stack: contextlib.ExitStack, page: Page, *, stay: bool) -> int:
    gateway, ledger = f"http://{config.listen}", _ledger(config)
    page.title("Idempotency gateway: one effect per key, and every retry gets the first answer")
    page.note("starting PostgreSQL, the ledger and the gateway ...")
    dsn, stop = embedded.start(FOLDER / "postgres")
    stack.callback(stop)
    children = [
        Child(
            "ledger",
            [sys.executable, "-m", "gateway.demo.ledger", "--port", ledger.rpartition(":")[2]],
            FOLDER / "ledger.log",
            {"LEDGER_DSN": dsn},
        ),
    ]
    stack.callback(children[0].stop)
    children[0].wait_until("ledger listening")
    asyncio.run(migrate(dsn, config.store.schema_name))
    program = str(Path(sys.executable).with_name("idempotency-gateway"))
    children.append(
        Child("gateway", [program, "serve", str(config.path)], FOLDER / "gateway.log", {"GATEWAY_DSN": dsn})
    )
    stack.callback(children[1].stop)
    host, _, port = config.listen.rpartition(":")
    children[1].wait_until_listening(host, int(port))
    good = asyncio.run(_prove(config, children[1], gateway, ledger, page))
    if stay:
        page.invitation(gateway, ledger, f"http://{config.monitor}", FOLDER)
        _serve_until_stopped(children)
    return 0 if good else 1


async def _prove(config: Config, child: Child, gateway: str, ledger: str, page: Page) -> bool:
    connector = aiohttp.TCPConnector(limit=AT_ONCE)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=ANSWER_WITHIN_SECONDS)
    ) as session:
        await _ready(session, f"http://{config.monitor}/readyz", child)
        page.note(f"gateway {gateway}, before the ledger {ledger}")
        return await Proof(gateway, ledger, session, page).all()


async def _ready(session: aiohttp.ClientSession, url: str, child: Child) -> None:
    """Wait until the gateway says so. Raises ChildFailedError when it ends or takes too long."""
    deadline = time.monotonic() + READY_WITHIN_SECONDS
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(url) as reply:
                if reply.status == 200:
                    return
        child.check(late=time.monotonic() > deadline)
        await asyncio.sleep(0.05)


def _serve_until_stopped(children: list[Child]) -> None:
    """Return at Ctrl-C. Raises ChildFailedError when one of the processes ends by itself."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            for child in children:
                child.check()
            time.sleep(0.5)


@contextlib.contextmanager
def _ended_always() -> Iterator[contextlib.ExitStack]:
    """A stack that is unwound at SIGTERM too, and whose unwinding a second Ctrl-C does not break off."""

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)  # the terminal was closed
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born ignoring it
    try:
        with contextlib.ExitStack() as stack:
            try:
                yield stack
            finally:
                for number in before:
                    signal.signal(number, signal.SIG_IGN)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _loaded(path: Path) -> Config:
    """Read the configuration and see that its ports are free. Raises GatewayError with what to do."""
    if not path.exists():
        raise GatewayError(f"There is no {path}: run the demo in a clone of the repository, or give --config FILE.")
    config = load(path)
    _refuse_busy_ports(config, path)
    return config


def _refuse_busy_ports(config: Config, path: Path) -> None:
    """Raise GatewayError when somebody listens where one of ours is to."""
    wanted = {"gateway": config.listen, "gateway's monitor": config.monitor, "ledger": _ledger(config)}
    for name, address in wanted.items():
        host, _, port = re.sub(r"^http://", "", address).rpartition(":")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, int(port)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise GatewayError(f"The {name} cannot listen on {host}:{port}: {error.strerror}.") from None
                raise GatewayError(
                    f"Port {port} is in use, and the {name} needs it. Stop what listens there "
                    f"(ss -ltnp 'sport = :{port}' names it), or change the port in {path}."
                ) from None


def _ledger(config: Config) -> str:
    """Where the configuration expects the ledger."""
    return next(iter(config.upstreams.values())).url.rstrip("/")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="demo", description="Prove that duplicates are stopped.")
    parser.add_argument("--stay", action="store_true", help="serve until Ctrl-C afterwards")
    parser.add_argument("--config", type=Path, default=CONFIG, help="a configuration with one upstream, the ledger")
    given = parser.parse_args()
    sys.exit(run(stay=given.stay, path=given.config))


if __name__ == "__main__":
    main()
