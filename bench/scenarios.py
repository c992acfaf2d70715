"""What is measured: each line of the table is one of these."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scenario:
    """`server`: which one answers; `path`: protected or not; `keys`: a new key each time, or one that has a reply."""

    name: str
    server: str
    path: str
    keys: str
    connections: int = 32


SCENARIOS = [
    Scenario("plain proxy", "plain", "/transfers", "unique"),
    Scenario("gateway, pass-through", "gateway", "/unprotected", "unique"),
    Scenario("gateway, first time", "gateway", "/transfers", "unique"),
    Scenario("gateway, replay", "gateway", "/transfers", "one"),
]


def at(connections: int) -> list[Scenario]:
    """Return the scenarios for another number of connections."""
    return [Scenario(one.name, one.server, one.path, one.keys, connections) for one in SCENARIOS]
