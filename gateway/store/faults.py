"""What went wrong with a statement: the one place that knows asyncpg's exceptions and PostgreSQL's SQLSTATEs."""

import enum

import asyncpg
import msgspec
from asyncpg.exceptions import InternalClientError

from gateway.errors import GatewayError, SchemaError


class Kind(enum.Enum):
    """What a fault says about the statement, and so what to do next."""

    UNKNOWN = "unknown"  # it may have been written or not: replace the connection, ask again by the same claim id
    LOCKED = "locked"  # not written: a row was locked for too long; each row alone
    DEADLOCK = "deadlock"  # not written: once more
    ROW = "row"  # not written: a row of the batch cannot be; halve it
    REFUSED = "refused"  # not written, and asking again at once will not help


class Fault(msgspec.Struct, frozen=True):
    """`cause` is a word for metrics and `Unavailable`; `sentence` is for people."""

    kind: Kind
    cause: str
    sentence: str


class WarnedError(Exception):
    """A write came back with a WARNING, such as a cancelled wait for the synchronous standby."""


class UnfitError(Exception):
    """The server that answered must not be written to (standby, read-only, an old primary)."""

    def __init__(self, cause: str, sentence: str) -> None:
        super().__init__(sentence)
        self.cause = cause


_BY_STATE = {
    "55P03": (Kind.LOCKED, "locked"),
    "40P01": (Kind.DEADLOCK, "deadlock"),
    "40001": (Kind.DEADLOCK, "serialization"),
    "25006": (Kind.UNKNOWN, "read_only"),
    "57014": (Kind.UNKNOWN, "timeout"),
    "57P01": (Kind.UNKNOWN, "shutdown"),
    "57P02": (Kind.UNKNOWN, "shutdown"),
    "57P03": (Kind.UNKNOWN, "starting"),
    "57P05": (Kind.UNKNOWN, "shutdown"),
    "23514": (Kind.ROW, "no_partition"),
    "53300": (Kind.UNKNOWN, "too_many_connections"),
    "26000": (Kind.UNKNOWN, "prepared_statement_lost"),
    "0A000": (Kind.UNKNOWN, "plan_invalid"),  # a table changed under a prepared statement
    "42501": (Kind.REFUSED, "permission"),
    "42P01": (Kind.REFUSED, "schema"),
    "3F000": (Kind.REFUSED, "schema"),
    "53100": (Kind.REFUSED, "disk_full"),
    "28000": (Kind.REFUSED, "authentication"),
    "28P01": (Kind.REFUSED, "authentication"),
}
_BY_CLASS = {
    "08": (Kind.UNKNOWN, "connection"),
    "22": (Kind.ROW, "invalid_row"),
    "23": (Kind.ROW, "invalid_row"),
    "53": (Kind.REFUSED, "resources"),
    "57": (Kind.UNKNOWN, "shutdown"),
    "58": (Kind.UNKNOWN, "server_io"),
    "XX": (Kind.UNKNOWN, "server_fault"),
}


def classify(error: BaseException) -> Fault:
    """Return what `error`, raised by connecting or by a statement, means."""
    sentence = str(error) or type(error).__name__
    match error:
        case UnfitError():
            return Fault(Kind.UNKNOWN, error.cause, sentence)
        case SchemaError():
            return Fault(Kind.REFUSED, "schema", sentence)
        case WarnedError():
            return Fault(Kind.UNKNOWN, "warning", sentence)
        case TimeoutError():
            return Fault(Kind.UNKNOWN, "timeout", "PostgreSQL did not answer in time.")
        case asyncpg.PostgresError() if "unsupported startup parameter" in sentence:
            return Fault(
                Kind.REFUSED, "pooler", f"A pooler stands before PostgreSQL ({sentence}): set `pool_mode: transaction`."
            )
        case asyncpg.PostgresError():
            state = error.sqlstate or ""
            kind, cause = _BY_STATE.get(state) or _BY_CLASS.get(state[:2]) or (Kind.REFUSED, "refused")
            if cause == "no_partition" and error.constraint_name:
                cause = "invalid_row"
            return Fault(kind, cause, sentence)
        case InternalClientError():
            return Fault(Kind.UNKNOWN, "client_fault", sentence)
        case OSError():  # before ValueError: a certificate that does not fit is both
            return Fault(Kind.UNKNOWN, "connection", sentence)
        case ValueError() | GatewayError():
            return Fault(Kind.REFUSED, "dsn", sentence)
        case asyncpg.InterfaceError():
            return Fault(Kind.UNKNOWN, "connection", sentence)
        case _:
            return Fault(Kind.UNKNOWN, "client_fault", sentence)
