"""How a route's policy comes together: built in, then `defaults`, then the named policy with its `extends`, the route.

Each layer is laid over what came before, field by field, and says only what differs:

* maps merge (`key`, `fingerprint`, `on_mismatch`, and `scope` by the names of its parts), lists and words replace;
  a part of a scope is one answer and is replaced whole; `scope: none` clears it;
* `outcomes` are differences: an exact status beats a class in whichever layer it stands, and of two layers that name
  the same status, or the same class, the nearer wins.

A policy's `extends` comes directly under it: `defaults: {extends: at-most-once, retention: 48h}` with a route's
`policy: card`, where `card` extends `partner`, is laid as

    built in < at-most-once < retention: 48h < partner < card < the route's own fields

So a policy that a route names goes *over* `defaults`, with all that it extends, and a field that neither states keeps
what `defaults` says. `policy: NAME` is `policy: {extends: NAME}`, and `extends` beside a route's own fields comes
directly under these, over `policy`. The built-in policies state all that tells them apart, so that laying one over
the other leaves nothing of it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.config import policy
from gateway.config.policy import STATUSES, Policy
from gateway.config.source import Loc
from gateway.config.tree import PolicyFields
from gateway.model import OnInDoubt, Settlement

BASE: Mapping[str, Any] = {
    "mode": "enforce",
    "key": {"header": "Idempotency-Key", "max_length": 255},
    "on_outstanding": "reject",
    "on_mismatch": {"status": 422},
    "on_store_failure": "reject",
    "fingerprint": {"body": "auto", "query": True, "headers": []},
    "outcomes": {
        "store": ["2xx", "3xx", 400, 405, 406, 410, 411, 413, 414, 415, 422],
        "release": ["4xx", "5xx"],
        "hold": [],
    },
    "retention": "24h",
    "lease_ttl": "30s",
    "upstream_timeout": "30s",
    "max_request_body": "1MiB",
    "max_response_body": "1MiB",
    "forward_key": "pass",
}
"""What holds where no layer says otherwise. The three questions are not answered here."""

BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "at-least-once": {"on_in_doubt": "run_again", "outcomes": {"release": [500, 502, 504]}},
    "at-most-once": {"on_in_doubt": "block", "outcomes": {"hold": [500, 502, 504]}},
}
"""Policies that every file may extend."""

LATER = ("webhook",)
"""Families of built-in policies that are not built yet."""

QUESTIONS: Mapping[str, str] = {
    "scope": "whose key is it? Write `scope: {customer: {header: X-Customer-Id}}`, or `scope: none`",
    "on_missing_key": "what if no key is sent? Write `on_missing_key: reject`, or forward",
    "on_in_doubt": "what if nobody can tell whether it ran? Write `on_in_doubt: block`, or run_again; "
    "or extend at-most-once or at-least-once",
}
"""The questions without a default, and how to answer each."""

_NOT_FIELDS = frozenset({"extends", "match", "operation", "policy", "outcomes"})
_SETTLEMENTS = {"store": Settlement.COMPLETE, "release": Settlement.RELEASE, "hold": Settlement.HOLD}


class Layer(msgspec.Struct, frozen=True):
    """Fields as written, and where they stand."""

    fields: Mapping[str, Any]
    loc: Loc


class Merged(msgspec.Struct):
    """What the layers say together. `origin`: where each field's last word stands."""

    fields: dict[str, Any]
    origin: dict[str, Loc]
    exact: dict[int, Settlement]
    classes: dict[str, Settlement]


def as_fields(value: Any) -> Mapping[str, Any]:
    """A policy as fields, where a name alone may stand for them."""
    return {"extends": value} if isinstance(value, str) else value if isinstance(value, dict) else {}


def stack(tree: Mapping[str, Any], route: str) -> list[Layer]:
    """The layers of a route of the file, first the one that all others are laid over."""
    fields = tree["routes"][route]
    named = ("routes", route, "policy")
    return [
        Layer(BASE, ()),
        *chain(as_fields(tree.get("defaults")), ("defaults",), tree),
        *chain(as_fields(fields.get("policy")), named, tree),
        *chain(fields, ("routes", route), tree),
    ]


def chain(fields: Mapping[str, Any], loc: Loc, tree: Mapping[str, Any]) -> list[Layer]:
    """A policy under what it extends, furthest first. Unknown names and circles end it; they are found elsewhere."""
    layers = [Layer(fields, loc)]
    seen = set()
    name = fields.get("extends")
    while isinstance(name, str) and name not in seen:
        seen.add(name)
        if name in BUILT_IN:
            layers.append(Layer(BUILT_IN[name], ()))
            break
        fields = as_fields((tree.get("policies") or {}).get(name))
        layers.append(Layer(fields, ("policies", name)))
        name = fields.get("extends")
    return layers[::-1]


def merge(layers: list[Layer]) -> Merged:
    """Lay each over what came before."""
    merged = Merged({}, {}, {}, {})
    for layer in layers:
        for name, value in layer.fields.items():
            if name not in _NOT_FIELDS:
                merged.fields[name] = _laid_over(merged.fields.get(name), value)
                merged.origin[name] = (*layer.loc, name)
        for list_name, settlement in _SETTLEMENTS.items():
            for status in layer.fields.get("outcomes", {}).get(list_name, ()):
                if isinstance(status, int):
                    merged.exact[status] = settlement
                elif isinstance(status, str):
                    merged.classes[status] = settlement
    return merged


def _laid_over(under: Any, over: Any) -> Any:
    # Of a scope, whose parts are maps too, only the first level merges: a part is one answer.
    return {**under, **over} if isinstance(under, dict) and isinstance(over, dict) else over


def resolve(merged: Merged) -> Policy:
    """The complete policy. Open questions get harmless answers: the caller has refused them unless `mode: pass`."""
    fields = PolicyFields.model_validate(merged.fields)
    upstream_timeout_ms = fields.upstream_timeout_ms
    said = fields.model_fields_set
    return Policy(
        mode=fields.mode,
        scope=_scope(fields) if "scope" in said else (),
        key=policy.KeySource(fields.key.header.lower().encode(), fields.key.header, fields.key.max_length),
        on_missing_key=fields.on_missing_key if "on_missing_key" in said else policy.OnMissingKey.REJECT,
        on_outstanding=fields.on_outstanding,
        on_mismatch=policy.OnMismatch(fields.on_mismatch.status),
        on_in_doubt=fields.on_in_doubt if "on_in_doubt" in said else OnInDoubt.BLOCK,
        on_store_failure=fields.on_store_failure,
        fingerprint=policy.FingerprintSettings(
            fields.fingerprint.body,
            fields.fingerprint.query,
            tuple(sorted({name.lower().encode() for name in fields.fingerprint.headers})),
        ),
        outcomes=_outcomes(merged),
        retention_ms=fields.retention_ms,
        longest_retry_ms=fields.longest_retry_ms if "longest_retry_ms" in said else None,
        lease_ttl_ms=fields.lease_ttl_ms,
        upstream_timeout_ms=upstream_timeout_ms,
        respond_within_ms=fields.respond_within_ms if "respond_within_ms" in said else upstream_timeout_ms,
        effect_deadline_ms=fields.effect_deadline_ms if "effect_deadline_ms" in said else 2 * upstream_timeout_ms,
        max_request_body_bytes=fields.max_request_body_bytes,
        max_response_body_bytes=fields.max_response_body_bytes,
        forward_key=fields.forward_key,
    )


def _scope(fields: PolicyFields) -> tuple[policy.ScopePart, ...]:
    """Sorted by name: the order of a map never counts."""
    parts = []
    for name, part in sorted(fields.scope.items()):
        if "header" in part.model_fields_set:
            trusted_only = "set_by" in part.model_fields_set
            parts.append(policy.ScopePart(name, "header", part.header.lower().encode(), trusted_only))
        else:
            parts.append(policy.ScopePart(name, "authorization", b"authorization", trusted_only=False))
    return tuple(parts)


def _outcomes(merged: Merged) -> policy.Outcomes:
    table = [Settlement.RELEASE] * STATUSES.stop
    for status in STATUSES:
        by_class = merged.classes.get(f"{status // 100}xx", Settlement.RELEASE)
        table[status] = merged.exact.get(status, by_class)
    return policy.Outcomes(tuple(table))
