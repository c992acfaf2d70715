"""A secret that a file names: written out, in a file, or in a variable. Its value never shows in a repr or a fault."""

import os
from pathlib import Path
from typing import Literal

from gateway.errors import GatewayError

Kind = Literal["text", "file", "env", "embedded"]


class Secret:
    """Where a secret is found. Comparing and printing concern the place, not the value."""

    __slots__ = ("_value", "kind")

    def __init__(self, kind: Kind, value: str) -> None:
        self.kind = kind
        self._value = value

    def read(self) -> str:
        """The secret now: a file is read again each time, so that it may be rotated. Raises GatewayError."""
        if self.kind == "text":
            return self._value
        if self.kind == "file":
            try:
                value = Path(self._value).read_text("utf-8").strip()
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or "not UTF-8"
                raise GatewayError(f"The secret file {self._value} cannot be read ({reason}); put it there.") from None
            if not value:
                raise GatewayError(f"The secret file {self._value} is empty; put the secret in it.")
            return value
        if self.kind == "env":
            value = os.environ.get(self._value, "")
            if not value:
                raise GatewayError(f"The environment variable {self._value} is not set; set it to the secret.")
            return value
        raise GatewayError("`embedded` has no DSN of its own; the process that starts it knows the DSN.")

    @property
    def place(self) -> str:
        """Where it is found, in words that may be logged."""
        return {
            "text": "written in the configuration",
            "file": f"file {self._value}",
            "env": f"environment variable {self._value}",
            "embedded": "embedded",
        }[self.kind]

    def __repr__(self) -> str:
        """Show the place only."""
        return f"Secret({self.place})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and (self.kind, self._value) == (other.kind, other._value)

    def __hash__(self) -> int:
        return hash((self.kind, self._value))
