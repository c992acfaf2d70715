"""`load(path)`: a file as a complete, checked configuration, or one error that lists every fault.

A fault in one place hides none in another: what is wrong is cut out, and the rest is checked as if it were not there.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from gateway.config import checks, layers, match, source
from gateway.config.faults import faults_of
from gateway.config.match import Pattern
from gateway.config.policy import Policy
from gateway.config.scalars import IPNetwork
from gateway.config.source import Document, Fault, Loc
from gateway.config.tree import File, Limits, Log, Problems, Shutdown, Store, Upstream
from gateway.errors import ConfigError


class RouteConfig(msgspec.Struct, frozen=True):
    """A route: what it matches, under which operation its records stand, and what it promises."""

    name: str
    operation: str
    matches: tuple[Pattern, ...]
    policy: Policy


class Config(msgspec.Struct, frozen=True):
    """The whole configuration, complete and checked."""

    path: Path
    service: str
    listen: str
    monitor: str
    shutdown: Shutdown
    log: Log
    trusted_proxies: tuple[IPNetwork, ...]
    limits: Limits
    problems: Problems
    store: Store
    upstreams: dict[str, Upstream]
    unmatched: str
    routes: dict[str, RouteConfig]


def load(path: Path | str, environment: Mapping[str, str] | None = None) -> Config:
    """Read and check a file. Raises ConfigError with every fault, each `file:line: path: sentence`, by line.

    `environment` is where `${NAME}` is looked up, the process's own unless given.
    """
    path = Path(path)
    document = source.read(path, os.environ if environment is None else environment)
    file, tree, cut, faults = _validate(document)
    unread = {fault.path for fault in document.faults}
    faults = [fault for fault in faults if fault.path not in unread]  # what follows from a value that was not read
    faults += document.faults
    faults += checks.faults(document, tree, cut)
    if faults or file is None:
        # Several routes may stand on one faulty layer: once is enough.
        raise ConfigError([fault.text(document.name) for fault in sorted(set(faults))])
    return _config(path, file, document.value)


def _config(path: Path, file: File, tree: Mapping[str, Any]) -> Config:
    upstreams = dict(file.upstreams)
    for name, upstream in upstreams.items():
        if not upstream.serves:
            upstreams[name] = upstream.model_copy(update={"serves": (match.prefix("/"),)})
    return Config(
        path=path,
        service=file.service,
        listen=file.listen.address,
        monitor=file.monitor.listen,
        shutdown=file.shutdown,
        log=file.log,
        trusted_proxies=file.trusted_proxies,
        limits=file.limits,
        problems=file.problems,
        store=file.store,
        upstreams=upstreams,
        unmatched=file.unmatched,
        routes={
            name: RouteConfig(
                name, route.operation or name, route.match, layers.resolve(layers.merge(layers.stack(tree, name)))
            )
            for name, route in file.routes.items()
        },
    )


def _validate(document: Document) -> tuple[File | None, dict[str, Any], set[Loc], list[Fault]]:
    """The file if all of it has the right shape; the tree without what has not, and the paths so cut out."""
    try:
        return File.model_validate(document.value), document.value, set(), []
    except ValidationError as error:
        found = faults_of(error, document)
    tree = _copied(document.value)
    cut = set()
    for loc, _ in found:
        if here := document.known(loc or ()):
            cut.add(here)
    for loc in cut:
        parent = _at(tree, loc[:-1])
        if isinstance(parent, dict):
            parent.pop(loc[-1], None)
        elif isinstance(parent, list) and isinstance(loc[-1], int):
            parent[loc[-1]] = None  # the others keep their positions
    return None, tree, cut, [fault for _, fault in found]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _at(tree: Any, loc: Loc) -> Any:
    for part in loc:
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
        else:
            return None
    return tree
