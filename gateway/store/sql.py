"""Loads the SQL files: one statement each in `queries/`, forward-only migrations in `migrations/`.

The files use psql's own variable `:"schema"`, so a person can run them with `psql -v schema=idempotency -f FILE`.
"""

from functools import cache
from importlib.resources import files


def quoted(identifier: str) -> str:
    """Return `identifier` as a quoted SQL identifier."""
    return '"' + identifier.replace('"', '""') + '"'


@cache
def query(name: str, schema: str) -> str:
    """Return the statement `queries/<name>.sql` for `schema`."""
    text = files("gateway.store").joinpath("queries", f"{name}.sql").read_text(encoding="utf-8")
    return text.replace(':"schema"', quoted(schema))
