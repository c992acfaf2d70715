"""What the shape of single values cannot say: names, ties, circles, open questions, settings at odds with each other.

Works on the tree as written, after every value of a wrong shape has been cut out of it.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

import msgspec
from pydantic import ValidationError

from gateway.config import layers, match
from gateway.config.layers import BUILT_IN, QUESTIONS, Layer, Merged, as_fields
from gateway.config.match import Pattern, Prefix
from gateway.config.policy import Mode, Policy
from gateway.config.scalars import NOT_BUILT
from gateway.config.source import Document, Fault, Loc
from gateway.config.tree import Limits, Listen, Monitor
from gateway.config.units import duration_text, size_text

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_POLICY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,63}")
_PART_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_NO_KEY = frozenset(
    {"authorization", "connection", "content-length", "cookie", "host", "keep-alive", "te", "transfer-encoding"}
)


class _Checks(msgspec.Struct, frozen=True):
    document: Document
    tree: Mapping[str, Any]
    cut: set[Loc]

    def fault(self, loc: Loc, sentence: str) -> Fault:
        return self.document.fault(loc, sentence)

    def map(self, name: str) -> Mapping[str, Any]:
        found = self.tree.get(name)
        return found if isinstance(found, dict) else {}


def faults(document: Document, tree: Mapping[str, Any], cut: set[Loc]) -> list[Fault]:
    """Every fault that concerns more than one value."""
    at = _Checks(document, tree, cut)
    found = [*_addresses(at), *_names(at), *_extends(at), *_statuses(at), *_serves(at), *_routes(at)]
    for name, fields in at.map("routes").items():
        if isinstance(fields, dict):
            found += _policy(at, name)
    return found


def _written(at: _Checks) -> Iterator[Layer]:
    """Every policy as it is written, named or not."""
    yield Layer(as_fields(at.tree.get("defaults")), ("defaults",))
    for name, fields in at.map("policies").items():
        yield Layer(as_fields(fields), ("policies", name))
    for name, fields in at.map("routes").items():
        yield Layer(as_fields(fields), ("routes", name))
        yield Layer(as_fields(as_fields(fields).get("policy")), ("routes", name, "policy"))


def _addresses(at: _Checks) -> Iterator[Fault]:
    try:
        listen = Listen.model_validate(at.tree.get("listen", {})).address
        monitor = Monitor.model_validate(at.tree.get("monitor", {})).listen
    except ValidationError:
        return
    if listen == monitor and not listen.endswith(":0"):  # port 0: any that is free
        yield at.fault(("monitor", "listen"), f"`{monitor}` is the address of `listen` too; give it another port")


# ---- names ------------------------------------------------------------------------------------------------------


def _names(at: _Checks) -> Iterator[Fault]:
    for section, pattern in (("routes", _NAME), ("upstreams", _NAME), ("policies", _POLICY_NAME)):
        for name in at.map(section):
            if not pattern.fullmatch(name):
                yield at.fault(
                    (section, name), "is not a name: use letters, digits, `-`, `_` and `.`, at most 64 of them"
                )
    for name in at.map("policies"):
        if name in BUILT_IN:
            yield at.fault(("policies", name), "is the name of a built-in policy; choose another and extend it")
    for layer in _written(at):
        scope = layer.fields.get("scope")
        if scope == {} and not any(loc[:-1] == (*layer.loc, "scope") for loc in at.cut):
            yield at.fault((*layer.loc, "scope"), "has no part; write `scope: none` if keys are everybody's")
        for part in scope if isinstance(scope, dict) else ():
            if not _PART_NAME.fullmatch(part):
                sentence = "is not a name for a part: a letter, then letters, digits, `-` and `_`, at most 32"
                yield at.fault((*layer.loc, "scope", part), sentence)


def _extends(at: _Checks) -> Iterator[Fault]:
    own = at.map("policies")
    known = [*own, *BUILT_IN]
    for layer in _written(at):
        name = layer.fields.get("extends")
        if not isinstance(name, str) or name in known:
            continue
        if name.split("/")[0] in layers.LATER:
            sentence = f"the policy `{name}` {NOT_BUILT}; extend {' or '.join(BUILT_IN)}"
        elif ("policies", name) in at.cut:
            continue
        else:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
            sentence = f"the policy `{name}` is unknown; {hint}"
        yield at.document.fault((*layer.loc, "extends"), sentence, exact=False)
    for name in own:
        trail = [name]
        step = as_fields(own[name]).get("extends")
        while isinstance(step, str) and step in own and step not in trail:
            trail.append(step)
            step = as_fields(own[step]).get("extends")
        if step == name:
            way = " -> ".join([*trail, name])
            yield at.fault(("policies", name, "extends"), f"goes in a circle ({way}); remove one `extends`")


def _statuses(at: _Checks) -> Iterator[Fault]:
    for layer in _written(at):
        seen: dict[int | str, str] = {}
        outcomes = layer.fields.get("outcomes")
        for name in ("store", "release", "hold"):
            for place, status in enumerate((outcomes or {}).get(name, ())):
                if status is not None and status in seen:
                    sentence = f"{status} is also under `{seen[status]}`; leave it in one list, once"
                    yield at.fault((*layer.loc, "outcomes", name, place), sentence)
                seen.setdefault(status, name)


# ---- where requests go ------------------------------------------------------------------------------------------


def _serves(at: _Checks) -> Iterator[Fault]:
    upstreams = at.map("upstreams")
    if len(upstreams) > 1:
        for name, fields in upstreams.items():
            if isinstance(fields, dict) and not fields.get("serves") and ("upstreams", name, "serves") not in at.cut:
                sentence = "does not say what it serves; with several upstreams each needs `serves: [/path]`"
                yield at.fault(("upstreams", name), sentence)
    seen: dict[tuple[bytes | None, tuple[bytes, ...]], str] = {}
    for name, place, prefix in _prefixes(upstreams):
        other = seen.setdefault((prefix.host, prefix.segments), f"upstreams.{name}.serves[{place}]")
        if other != f"upstreams.{name}.serves[{place}]":
            sentence = f"`{prefix.text}` is also served by {other}; leave it in one"
            yield at.fault(("upstreams", name, "serves", place), sentence)


def _prefixes(upstreams: Mapping[str, Any]) -> Iterator[tuple[str, int, Prefix]]:
    for name, fields in upstreams.items():
        for place, text in enumerate(as_fields(fields).get("serves") or ()):
            if text is not None:
                yield name, place, match.prefix(text)


def _patterns(name: str, fields: Mapping[str, Any]) -> list[tuple[Loc, Pattern]]:
    written = fields.get("match", [])
    if isinstance(written, list):
        return [
            (("routes", name, "match", place), match.pattern(value))
            for place, value in enumerate(written)
            if value is not None
        ]
    return [(("routes", name, "match"), match.pattern(written))]


def _routes(at: _Checks) -> Iterator[Fault]:
    routes = {name: fields for name, fields in at.map("routes").items() if isinstance(fields, dict)}
    patterns = [found for name, fields in routes.items() for found in _patterns(name, fields)]
    for (loc, one), (other_loc, other) in combinations(patterns, 2):
        if match.ties(one, other):
            where = f"routes.{loc[1]} (line {at.document.lines[at.document.known(loc)]})"
            sentence = f"`{other.text}` ties with `{one.text}` of {where}; make one of them more specific"
            if loc[1] == other_loc[1]:
                sentence = f"`{other.text}` matches what `{one.text}` matches already; remove one of them"
            yield at.fault(other_loc, sentence)
    prefixes = [prefix for _, _, prefix in _prefixes(at.map("upstreams"))]
    complete = all(as_fields(fields).get("serves") for fields in at.map("upstreams").values())
    for loc, pattern in patterns if prefixes and complete else ():
        if not match.reached(pattern, prefixes):
            yield at.fault(loc, f"no upstream serves `{pattern.text}`; add its path to an upstream's `serves`")
    operations: dict[str, str] = {}
    for name, fields in routes.items():
        operation = fields.get("operation", name)
        other_name = operations.setdefault(operation, name)
        if other_name != name:
            sentence = (
                f"has the operation `{operation}`, as routes.{other_name} has: one's keys would be refused as reused "
                "by the other; give it its own, or put both under one `match` list"
            )
            yield at.fault(("routes", name, "operation") if "operation" in fields else ("routes", name), sentence)


# ---- what a route promises --------------------------------------------------------------------------------------


def _policy(at: _Checks, name: str) -> Iterator[Fault]:
    stack = layers.stack(at.tree, name)
    merged = layers.merge(stack)
    if merged.fields.get("mode") == Mode.PASS.value:
        return
    incomplete = any(_unknown(at, layer.fields.get("extends")) for layer in stack)
    for question, answer in QUESTIONS.items():
        # Answered, though wrongly, or perhaps by a policy that is not there: a fault already.
        refused = incomplete or any((*layer.loc, question) in at.cut for layer in stack if layer.loc)
        if question not in merged.fields and not refused:
            yield at.fault(("routes", name, question), f"is not answered: {answer}")
    try:
        policy = layers.resolve(merged)
    except ValidationError:
        return  # a map of which a part was cut out; that part is a fault already
    for fields, sentence in _at_odds(policy):
        yield at.fault(_origin(merged, fields, name), sentence)
    for part in policy.scope:
        if part.trusted_only and not at.tree.get("trusted_proxies") and ("trusted_proxies",) not in at.cut:
            sentence = "has `set_by: trusted_proxies`, but there are none; write `trusted_proxies: [NETWORK]` on top"
            yield at.fault((*merged.origin["scope"], part.name), sentence)
        if part.header == policy.key.header:
            sentence = "takes the key's own header for a scope; a key cannot say whose it is"
            yield at.fault((*merged.origin["scope"], part.name), sentence)
    if policy.key.header.decode() in _NO_KEY:
        yield at.fault((*merged.origin["key"], "header"), f"{policy.key.name} cannot carry a key; name another header")
    yield from _memory(at, name, merged, policy)


def _unknown(at: _Checks, extends: Any) -> bool:
    return isinstance(extends, str) and extends not in BUILT_IN and extends not in at.map("policies")


def _memory(at: _Checks, name: str, merged: Merged, policy: Policy) -> Iterator[Fault]:
    try:
        memory = Limits.model_validate(at.tree.get("limits", {})).buffer_memory_bytes
    except ValidationError:
        return
    needed = policy.max_request_body_bytes + policy.max_response_body_bytes
    if needed > memory:
        sentence = (
            f"a request and its reply may take {size_text(needed)}, more than limits.buffer_memory "
            f"({size_text(memory)}) allows for all; raise that, or lower max_request_body or max_response_body"
        )
        yield at.fault(_origin(merged, ("max_request_body", "max_response_body"), name), sentence)


def _origin(merged: Merged, fields: Iterable[str], route: str) -> Loc:
    """Where the nearest of the fields' last words stands; the route if all are built in."""
    places = [merged.origin[field] for field in fields if len(merged.origin.get(field, ())) > 1]
    return max(places, key=lambda loc: (loc[0] == "routes", loc[0] == "policies"), default=("routes", route))


def _at_odds(policy: Policy) -> Iterator[tuple[tuple[str, str], str]]:
    """Times that contradict each other: the fields, and what to do."""
    text = duration_text
    lease, kept, waited = policy.lease_ttl_ms, policy.retention_ms, policy.upstream_timeout_ms
    if lease > kept:
        sentence = (
            f"lease_ttl ({text(lease)}) is longer than retention ({text(kept)}): shorten the lease, or keep longer"
        )
        yield ("lease_ttl", "retention"), sentence
    if policy.respond_within_ms > waited:
        sentence = (
            f"respond_within ({text(policy.respond_within_ms)}) is longer than upstream_timeout ({text(waited)}), "
            "after which no answer can come: lower it, or leave it out"
        )
        yield ("respond_within", "upstream_timeout"), sentence
    if policy.effect_deadline_ms < waited:
        sentence = (
            f"effect_deadline ({text(policy.effect_deadline_ms)}) is shorter than upstream_timeout ({text(waited)}), "
            "while the service may still be working: raise it, or leave it out for twice the timeout"
        )
        yield ("effect_deadline", "upstream_timeout"), sentence
    if kept < waited:
        sentence = (
            f"retention ({text(kept)}) is shorter than upstream_timeout ({text(waited)}): keep records for longer than "
            "a request may run"
        )
        yield ("retention", "upstream_timeout"), sentence
