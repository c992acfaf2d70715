"""JSON schema of a configuration file, for editors. `python -m gateway.config.schema` prints it."""

import json
import sys
from typing import Any

from gateway.config.layers import BASE
from gateway.config.tree import File

ID = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """The schema, with the default of each key and of each field of a policy."""
    made = File.model_json_schema(by_alias=True, mode="validation")
    _tidy(made)
    for name, default in BASE.items():
        for fields in ("PolicyFields", "PolicyOrName", "RouteFields"):
            shape = made["$defs"][fields]
            shape = next((part for part in shape.get("anyOf", ()) if "properties" in part), shape)
            prop = shape["properties"][name]
            if not isinstance(default, dict):
                prop["default"] = default
    for section, name in (("Key", "key"), ("OnMismatch", "on_mismatch"), ("Fingerprint", "fingerprint"),
                          ("Outcomes", "outcomes")):  # fmt: skip
        for key, default in BASE[name].items():
            made["$defs"][section]["properties"][key]["default"] = default
    return {"$schema": ID, **made, "title": "idempotency-gateway"}


def text() -> str:
    """The schema as the file `config/schema.json` holds it."""
    return json.dumps(schema(), indent=2, sort_keys=True) + "\n"


def _tidy(node: Any) -> None:
    """Remove the titles that repeat names, and the defaults of fields that have none."""
    if isinstance(node, dict):
        for prop in node.get("properties", {}).values():
            prop.pop("title", None)
            if "default" in prop and prop["default"] is None:
                del prop["default"]
        if isinstance(node.get("title"), str):
            del node["title"]
        for value in node.values():
            _tidy(value)
    elif isinstance(node, list):
        for value in node:
            _tidy(value)


if __name__ == "__main__":
    sys.stdout.write(text())
