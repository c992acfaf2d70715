"""What the store tells whoever counts."""

from typing import Protocol

from gateway.model import Lease


class StoreObserver(Protocol):
    """Called from the event loop; must return at once and never raise."""

    def statement(self, name: str, rows: int, seconds: float) -> None:
        """A statement of `rows` entries was answered after `seconds`."""

    def error(self, statement: str, cause: str) -> None:
        """A statement, or `connect`, failed. `cause` is one of a small closed set of words."""

    def lease_lost(self, lease: Lease) -> None:
        """A renewal found that the lease is another's. `lease.lost` is set already."""

    def up(self, up: bool) -> None:
        """The store became usable for claims, or stopped being so."""


class Silent:
    """An observer that counts nothing."""

    def statement(self, name: str, rows: int, seconds: float) -> None:
        pass

    def error(self, statement: str, cause: str) -> None:
        pass

    def lease_lost(self, lease: Lease) -> None:
        pass

    def up(self, up: bool) -> None:
        pass
