"""A configuration file as plain values, with the line of each: YAML syntax, duplicates, aliases, variables.

What the keys mean is not known here. Only `true` and `false` are booleans, and `12:30` is not a number: the values
that YAML 1.1 and 1.2 read differently are read as 1.2 does.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import yaml

from gateway.errors import ConfigError

Loc = tuple[str | int, ...]
"""Where a value stands in the tree: keys and list positions, from the top."""

MAX_FILE_BYTES = 512 * 1024  # forty times the largest real file; a larger one is not a configuration
MAX_VALUES = 50_000  # after aliases are expanded: stops nine lines that unfold to a billion values
SHOWN_CHARACTERS = 40

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
_CORE_TAGS = frozenset(_TAG + kind for kind in ("null", "bool", "int", "float", "str", "map", "seq", "merge"))
_VARIABLE = re.compile(r"\$(?:\$|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\{)")


class Fault(msgspec.Struct, frozen=True, order=True):
    """One thing to mend: the line, the path within the file, and a sentence that says what to do."""

    line: int
    path: str
    sentence: str

    def text(self, name: str) -> str:
        """The fault as it is printed: `file:line: path: sentence`."""
        return f"{name}:{self.line}: {self.path}: {self.sentence}"


class Document(msgspec.Struct, frozen=True):
    """The file's values, the line of each path, and the faults that reading alone found."""

    name: str
    value: dict[str, Any]
    lines: dict[Loc, int]
    faults: list[Fault]

    def known(self, loc: Loc) -> Loc:
        """The longest part of a path that is written in the file."""
        while loc and loc not in self.lines:
            loc = loc[:-1]
        return loc

    def fault(self, loc: Loc, sentence: str, *, exact: bool = True) -> Fault:
        """A fault at a path. Unless `exact`, the path shown ends where the file's own does."""
        known = self.known(loc)
        return Fault(self.lines.get(known, 1), path_text(loc if exact else known), sentence)


def path_text(loc: Loc) -> str:
    """A path as people write it: `routes.pay-create.match[1]`; `file` for the whole."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".") or "file"


def shown(value: object) -> str:
    """A value in a sentence, short, on one line."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    text = text if text.isprintable() else repr(text)[1:-1]
    return f"`{text[:SHOWN_CHARACTERS]}…`" if len(text) > SHOWN_CHARACTERS else f"`{text}`"


def read(path: Path, environment: Mapping[str, str]) -> Document:
    """Read a file. Raises ConfigError where nothing further can be said: no file, no YAML, no map."""
    text = _text(path)
    try:
        node = yaml.compose(text, Loader=_Loader)
        reader = _Reader(environment)
        value = reader.value(node, (), ()) if node else None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        _give_up(path, line, f"character U+{_code_point(error.character):04X} may not stand in YAML; remove it")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        _give_up(path, mark.line + 1 if mark else 1, _syntax(error))
    except RecursionError:
        _give_up(path, 1, "is nested too deeply; a configuration needs no more than eight levels")
    except _TooMany:
        _give_up(path, 1, f"unfolds to more than {MAX_VALUES:,} values; use fewer aliases")
    if node is None:
        _give_up(path, 1, "is empty; the least file has service, store, upstreams, defaults and routes")
    if not isinstance(value, dict):
        _give_up(path, node.start_mark.line + 1, "must be a map of keys such as `service:` and `routes:` at the top")
    return Document(str(path), value, reader.lines, reader.faults)


def _give_up(path: Path, line: int, sentence: str) -> NoReturn:
    raise ConfigError([Fault(line, "file", sentence).text(str(path))])


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        _give_up(path, 1, "does not exist; name a configuration file")
    except IsADirectoryError:
        _give_up(path, 1, "is a folder; name a file in it")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _give_up(path, 1, f"cannot be read ({reason}); check its name and permissions")
    if len(data) > MAX_FILE_BYTES:
        _give_up(path, 1, f"is larger than {MAX_FILE_BYTES // 1024}KiB, which is no configuration; name another file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        _give_up(path, line, "is not UTF-8; save it as UTF-8")


def _code_point(character: object) -> int:
    return ord(character) if isinstance(character, str) else int(str(character))


def _syntax(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "it cannot be parsed"
    if "\\t" in problem:
        return "a tab stands where YAML wants spaces; indent with spaces"
    if "single document" in (error.context or "") + problem:
        return "holds several YAML documents; remove the `---` between them"
    if "undefined alias" in problem:
        return f"{problem}; write the anchor before the alias"
    return f"is not YAML here: {problem}; check indentation, quotes and brackets"


class _TooMany(Exception):  # noqa: N818 -- an unwinding, not an error that anybody sees
    pass


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 -- replaces YAML 1.1's, filled below


_Loader.add_implicit_resolver(_TAG + "bool", re.compile(r"^(?:true|false)$"), list("tf"))
_Loader.add_implicit_resolver(_TAG + "int", re.compile(r"^[-+]?[0-9]+$|^0x[0-9a-fA-F]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _TAG + "float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.inf$|^\.nan$"),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver(_TAG + "null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""])
_Loader.add_implicit_resolver(_MERGE, re.compile(r"^<<$"), ["<"])


class _Reader:
    """Turns the node graph into values, once, bounded."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.lines: dict[Loc, int] = {}
        self.faults: list[Fault] = []
        self.count = 0
        self.resolver = _Loader("")

    def value(self, node: yaml.Node, loc: Loc, inside: tuple[yaml.Node, ...]) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise _TooMany
        self.lines.setdefault(loc, node.start_mark.line + 1)
        if any(node is outer for outer in inside):
            self.fault(node, loc, "is an alias of a value that it is part of; write it out")
            return None
        if node.tag not in _CORE_TAGS:
            self.fault(node, loc, f"has the tag {shown(node.tag)}; remove it, tags mean nothing here")
            return None
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, loc, (*inside, node))
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*loc, at), (*inside, node)) for at, item in enumerate(node.value)]
        return self.scalar(node, loc)

    def fault(self, node: yaml.Node, loc: Loc, sentence: str) -> None:
        self.faults.append(Fault(node.start_mark.line + 1, path_text(loc), sentence))

    def mapping(self, node: yaml.MappingNode, loc: Loc, inside: tuple[yaml.Node, ...]) -> dict[str, Any]:
        entries = self.entries(node, loc, inside)
        for key, (key_node, _) in entries.items():
            self.lines[(*loc, key)] = key_node.start_mark.line + 1
        return {key: self.value(value, (*loc, key), inside) for key, (_, value) in entries.items()}

    def entries(
        self, node: yaml.MappingNode, loc: Loc, inside: tuple[yaml.Node, ...]
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """The entries of a map, what `<<` merges included; its own keys win."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: list[yaml.Node] = []
        seen: dict[str, int] = {}
        for key, value in node.value:
            self.count += 1
            if not isinstance(key, yaml.ScalarNode):
                self.fault(key, loc, "has a key that is a list or a map; a key is one word")
                continue
            name = key.value
            if name in seen:
                self.fault(key, (*loc, name), f"is written twice (first on line {seen[name]}); keep one of them")
                continue
            seen[name] = key.start_mark.line + 1
            if key.tag == _MERGE:
                merged.extend(value.value if isinstance(value, yaml.SequenceNode) else [value])
            else:
                own[name] = (key, value)
        for source in merged:
            if not isinstance(source, yaml.MappingNode) or any(source is outer for outer in inside):
                self.fault(source, (*loc, "<<"), "can merge maps only; name the anchor of a map")
                continue
            if self.count > MAX_VALUES:
                raise _TooMany
            for name, entry in self.entries(source, loc, (*inside, source)).items():
                own.setdefault(name, entry)
        return own

    def scalar(self, node: yaml.Node, loc: Loc) -> Any:
        text, tag = node.value, node.tag
        if "$" in text:
            text = self.substitute(node, loc)
            if isinstance(node, yaml.ScalarNode) and node.style is None and tag == _TAG + "str":
                # Written bare, so `${POOL_SIZE}` is the number it stands for.
                tag = self.resolver.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        try:
            if tag == _TAG + "null":
                return None
            if tag == _TAG + "bool":
                return {"true": True, "false": False}[text]
            if tag == _TAG + "int":
                return int(text, 16) if text.startswith("0x") else int(text)
            if tag == _TAG + "float":
                return float(text.replace(".inf", "inf").replace(".nan", "nan"))
        except (ValueError, KeyError):
            self.fault(node, loc, f"{shown(text)} is not of the type {tag.removeprefix(_TAG)}; write it plainly")
            return None
        return text

    def substitute(self, node: yaml.Node, loc: Loc) -> str:
        """Put variables in. What is put in is never looked at again."""

        def replaced(found: re.Match[str]) -> str:
            if found[0] == "$$":
                return "$"
            name, default = found[1], found[2]
            if name is None:
                self.fault(node, loc, "has a `${` that is not `${NAME}` or `${NAME:-default}`; `$${` is the text")
                return ""
            value = self.environment.get(name)
            if value is None and default is None:
                self.fault(node, loc, f"the environment variable {name} is not set; set it, or write ${{{name}:-...}}")
                return ""
            return default if default is not None and not value else value or ""

        return _VARIABLE.sub(replaced, node.value)
