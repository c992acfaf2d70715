"""The files in `config/`: they load, the schema describes them and is current, the commented one tells the truth."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import Config, load
from gateway.config.schema import text as schema_text
from gateway.config.tree import File, PolicyFields, Section, fields_by_alias

FOLDER = Path(__file__).parents[1] / "config"
FILES = sorted(FOLDER.glob("*.yaml"))
SCHEMA = json.loads((FOLDER / "schema.json").read_text("utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_loads(path: Path) -> None:
    assert load(path, {}).routes


def test_the_checked_in_schema_is_current() -> None:
    assert (FOLDER / "schema.json").read_text("utf-8") == schema_text(), "run python -m gateway.config.schema"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_is_as_the_schema_says(path: Path) -> None:
    assert misfits(yaml.safe_load(path.read_text("utf-8")), SCHEMA) == []


@pytest.mark.parametrize(
    "change",
    [
        {"servce": "x"},
        {"service": 5},
        {"log": {"level": "loud"}},
        {"limits": {"in_flight": 0}},
        {"shutdown": {"delay": 5}},
        {"defaults": {"outcomes": {"hold": ["6xx"]}}},
        {"routes": {"a": {}}},
        {"routes": {"a": {"match": "POST /x", "policy": {"mode": "off"}}}},
        {"upstreams": {"a": {"url": "ftp://h"}}},
    ],
)
def test_the_schema_refuses_what_load_refuses(change: dict[str, Any]) -> None:
    least = yaml.safe_load((FOLDER / "minimal.yaml").read_text("utf-8"))
    assert misfits({**least, **change}, SCHEMA)


def test_the_commented_file_says_the_models_defaults(tmp_path: Path) -> None:
    said = load(FOLDER / "reference.yaml", {})
    tree = yaml.safe_load((FOLDER / "reference.yaml").read_text("utf-8"))
    least = {
        "service": tree["service"],
        "store": {"dsn": tree["store"]["dsn"]},
        "upstreams": {"ledger": {"url": tree["upstreams"]["ledger"]["url"]}},
        "defaults": {name: tree["defaults"][name] for name in ("extends", "scope", "on_missing_key", "longest_retry")},
        "routes": {"create-transfer": {"match": tree["routes"]["create-transfer"]["match"]}},
    }
    path = tmp_path / "least.yaml"
    path.write_text(yaml.safe_dump(least), "utf-8")
    built_in = load(path, {})
    for name in Config.__struct_fields__:
        if name != "path":
            assert getattr(said, name) == getattr(built_in, name), name


def test_the_commented_file_has_every_key_that_is_built() -> None:
    text = (FOLDER / "reference.yaml").read_text("utf-8")
    tree = yaml.safe_load(text)
    assert set(tree) == set(fields_by_alias(File))
    for name, section in {**sections(File), **sections(PolicyFields)}.items():
        written = tree.get(name, tree["defaults"].get(name))
        assert set(written) == set(fields_by_alias(section)), name
    assert set(tree["upstreams"]["ledger"]) == set(
        fields_by_alias(File.model_fields["upstreams"].annotation.__args__[1])
    )
    assert set(tree["defaults"]) == set(fields_by_alias(PolicyFields))
    for word in ("set_by", "authorization", "policy:", "operation:", "extends"):
        assert word in text


def sections(of: type[Section]) -> dict[str, type[Section]]:
    found = {name: info.annotation for name, info in fields_by_alias(of).items()}
    skipped = {"defaults"}
    return {n: a for n, a in found.items() if isinstance(a, type) and issubclass(a, Section) and n not in skipped}


def misfits(value: Any, schema: dict[str, Any], at: str = "") -> list[str]:
    """Where a value is not as a JSON schema says, for the words that ours uses."""
    known = {
        "$ref", "$defs", "$schema", "title", "description", "default", "anyOf", "const", "enum", "type", "pattern",
        "minimum", "maximum", "properties", "required", "additionalProperties", "items", "minItems", "maxItems",
        "minProperties", "maxProperties",
    }  # fmt: skip
    assert set(schema) <= known, set(schema) - known
    if "$ref" in schema:
        return misfits(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], at)
    if "anyOf" in schema:
        tried = [misfits(value, one, at) for one in schema["anyOf"]]
        return [] if [] in tried else [f"{at}: none of {len(tried)}"]
    found = []
    kinds = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}
    kind = kinds.get(schema.get("type", ""), object)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return [f"{at}: not {schema['type']}"]
    if "const" in schema and value != schema["const"]:
        found.append(f"{at}: not {schema['const']}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{at}: not in {schema['enum']}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{at}: not {schema['pattern']}")
    if not schema.get("minimum", float("-inf")) <= (value if kind is int else 0) <= schema.get("maximum", float("inf")):
        found.append(f"{at}: out of range")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        found += [f"{at}.{name}: missing" for name in schema.get("required", ()) if name not in value]
        for name, item in value.items():
            other = schema.get("additionalProperties", True)
            if name not in properties and other is False:
                found.append(f"{at}.{name}: unknown")
            elif name in properties or isinstance(other, dict):
                found += misfits(item, properties.get(name, other), f"{at}.{name}")
    if isinstance(value, list) and "items" in schema:
        found += [fault for item in value for fault in misfits(item, schema["items"], f"{at}[]")]
    return found
