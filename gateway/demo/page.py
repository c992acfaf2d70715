"""What the proof prints: plain lines for a newcomer, in colour on a terminal (unless NO_COLOR is set)."""

import os
from pathlib import Path
from typing import TextIO

GREEN, RED, BOLD, FAINT = "32", "31", "1", "2"


class Page:
    """Prints steps, answers and checks. `good` is False once a check failed."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._colour = output.isatty() and "NO_COLOR" not in os.environ
        self.good = True

    def title(self, text: str) -> None:
        """Print the first line."""
        self._print(f"\n{self._in(BOLD, text)}")

    def note(self, text: str) -> None:
        """Print something that is not part of the proof."""
        self._print(f"  {self._in(FAINT, text)}")

    def step(self, text: str) -> None:
        """Print what was done."""
        self._print(f"\n{text}")

    def answer(self, text: str) -> None:
        """Print what came back."""
        self._print(f"    {text}")

    def check(self, text: str, *, good: bool) -> None:
        """Print a promise and whether it was kept."""
        self.good &= good
        self._print(f"  {self._in(GREEN, 'ok ') if good else self._in(RED, 'NOT')} {text}")

    def verdict(self, text: str, *, good: bool) -> None:
        """Print the last line of the proof."""
        self.good &= good
        self._print(f"\n{self._in(GREEN if self.good else RED, text)}\n")

    def fault(self, text: str) -> None:
        """Print why it could not go on."""
        self._print(f"\n{self._in(RED, text)}\n")

    def invitation(self, gateway: str, ledger: str, monitor: str, folder: Path) -> None:
        """Print what to try by hand."""
        transfer = '{"account": "C-4711", "amount": 1250, "client_ref": "my-first-key"}'
        self._print(
            f"""{self._in(BOLD, "Try it yourself")} (in another terminal)

  curl -i {gateway}/transfers -H 'X-Customer-Id: C-4711' -H 'Idempotency-Key: my-first-key' \\
       -H 'Content-Type: application/json' -d '{transfer}'

  Send it again: the same answer, with Idempotent-Replayed: true. Change the amount: 422.
  Add -H 'X-Ledger-Fault: sleep-before=5s', take a new key, and send it from two terminals: 409.

  What the ledger holds:     curl '{ledger}/transfers?client_ref=my-first-key'
  What the gateway counted:  curl -s {monitor}/metrics | grep requests_total
  One line per request:      tail -f {folder}/gateway.log

Ctrl-C ends everything.
"""
        )

    def _in(self, colour: str, text: str) -> str:
        return f"\033[{colour}m{text}\033[0m" if self._colour else text

    def _print(self, text: str) -> None:
        print(text, file=self._output, flush=True)
