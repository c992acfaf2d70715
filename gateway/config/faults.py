"""Pydantic's errors as our faults: a line, a path, and a sentence that says what to do."""

import difflib
import typing
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.config.scalars import NOT_BUILT, SENTENCE
from gateway.config.source import Document, Fault, Loc
from gateway.config.tree import File, Section, fields_by_alias

_REQUIRED = {
    "service": "the name under which records are kept, such as `service: ledger`",
    "store": "the PostgreSQL that keeps the records, such as `store: {dsn: {env: GATEWAY_DSN}}`",
    "dsn": "a DSN, {file: PATH}, {env: NAME}, or embedded",
    "upstreams": 'the services behind, such as `upstreams: {ledger: {url: "http://127.0.0.1:8081"}}`',
    "url": "the service's address, such as `url: http://127.0.0.1:8081`",
    "routes": "what is protected, such as `routes: {create: {match: POST /transfers}}`",
    "match": "what it protects, such as `match: POST /transfers`",
}


def faults_of(error: ValidationError, document: Document) -> list[tuple[Loc | None, Fault]]:
    """Each error with the path of the value at fault, None where one is missing."""
    found = []
    details = error.errors(include_url=False)
    for detail in details:
        place = detail["loc"]
        inside = any(other["loc"][: len(place)] == place != other["loc"] for other in details)
        if detail["type"] == "too_short" and inside:
            continue  # pydantic counts only the items that are well
        loc = tuple(part for part in detail["loc"] if part != "[key]")
        exact = detail["type"] in {"missing", "extra_forbidden"}
        found.append(
            (None if detail["type"] == "missing" else loc, document.fault(loc, _sentence(detail, loc), exact=exact))
        )
    return found


def _sentence(detail: ErrorDetails, loc: Loc) -> str:
    kind = detail["type"]
    if kind == SENTENCE:
        return str(detail["ctx"]["sentence"])
    if kind == "missing":
        return f"is missing; write {_REQUIRED[str(loc[-1])]}"
    if kind == "extra_forbidden":
        return _unknown(loc)
    if detail["input"] is None:
        return "has no value; write one, or remove the key"
    if kind in {"dict_type", "model_type", "model_attributes_type"}:
        return "must be a map of keys and values"
    if kind in {"tuple_type", "list_type"}:
        return "must be a list, such as [a, b]"
    if kind == "too_short":
        return "is empty; write at least one"
    return f"is wrong: {detail['msg']}"


def _unknown(loc: Loc) -> str:
    key, section = str(loc[-1]), _section(loc[:-1])
    if section is None:
        return "is unknown; remove it"
    if key in section.later:
        return f"{NOT_BUILT}; remove it"
    near = difflib.get_close_matches(key, fields_by_alias(section), n=1)
    return f"is unknown; did you mean `{near[0]}`?" if near else f"is unknown; known here: {_known(section)}"


def _known(section: type[Section]) -> str:
    return ", ".join(fields_by_alias(section))


def _section(loc: Loc) -> type[Section] | None:
    """The section that stands at a path."""
    here: Any = File
    for part in loc:
        if isinstance(here, type) and issubclass(here, Section):
            field = fields_by_alias(here).get(str(part))
            here = field.annotation if field else None
        else:
            here = (typing.get_args(here) or (None,))[-1]
    return here if isinstance(here, type) and issubclass(here, Section) else None
