"""Reading YAML: what is refused before its meaning is looked at, and what the environment puts in."""

from pathlib import Path

import pytest

from gateway.config import load
from gateway.config.source import MAX_FILE_BYTES, read
from gateway.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def fault(folder: Path, data: bytes) -> str:
    path = folder / "gateway.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    return "\n".join(text.removeprefix(f"{path}:") for text in caught.value.faults)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "1: file: is empty"),
        (b"# nothing\n\n", "1: file: is empty"),
        (b"- a\n- b\n", "1: file: must be a map"),
        (b"hello\n", "1: file: must be a map"),
        (b"a: \xff\n", "1: file: is not UTF-8; save it as UTF-8"),
        (b"a: 1\n\tb: 2\n", "2: file: a tab stands where YAML wants spaces"),
        (b"a: 1\n---\nb: 2\n", "2: file: holds several YAML documents"),
        (b"a: [1\n", "file: is not YAML here"),
        (b"a: 'x\n", "file: is not YAML here"),
        (b"a: \x00\n", "1: file: character U+0000 may not stand in YAML"),
        (b"a: *b\n", "undefined alias"),
        (b"a: &x [*x]\n", "a[0]: is an alias of a value that it is part of"),
        (b"a: &x {<<: *x}\n", "a.<<: can merge maps only"),
        (b"a: !!python/object:os.system {}\n", "a: has the tag"),
        (b"a: !secret x\n", "a: has the tag `!secret`"),
        (b"? [a, b]\n: c\n", "has a key that is a list or a map"),
        (b"<<: 5\n", "<<: can merge maps only"),
        (b"a: !!int x\n", "`x` is not of the type int"),
        (b"a: " + b"9" * 5000 + b"\n", "is not of the type int"),
        (b"a: " + b"[" * 3000 + b"]" * 3000 + b"\n", "is nested too deeply"),
        (b"a: x\n" * 200_000, f"is larger than {MAX_FILE_BYTES // 1024}KiB"),
    ],
    ids=range(21),
)
def test_what_is_no_configuration_is_one_sentence(folder: Path, data: bytes, sentence: str) -> None:
    assert sentence in fault(folder, data)


def test_aliases_that_unfold_to_billions_are_stopped(folder: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    assert "unfolds to more than" in fault(folder, "\n".join(lines).encode())
    maps = ["a0: &a0 {x: 1}"]
    maps += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 10)]
    assert "unfolds to more than" in fault(folder, "\n".join(maps).encode())


def test_a_missing_file_and_a_folder_are_sentences(folder: Path) -> None:
    for path, sentence in ((folder / "none.yaml", "does not exist"), (folder, "is a folder")):
        with pytest.raises(ConfigError, match=sentence):
            load(path)


@pytest.mark.parametrize("value", [".nan", ".inf", "2024-01-01", "12:30:00", "0o17", "on", "no", "Yes"])
def test_words_that_yaml_versions_disagree_about_are_refused_where_a_number_or_flag_is_wanted(
    folder: Path, value: str
) -> None:
    path = folder / "gateway.yaml"
    path.write_text(f"store: {{dsn: embedded, pool_size: {value}, janitor: {{enabled: {value}}}}}\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    text = str(caught.value)
    assert "store.pool_size: must be a whole number" in text
    assert "store.janitor.enabled: must be true or false" in text


def values(folder: Path, text: str, **environment: str) -> dict[str, object]:
    path = folder / "gateway.yaml"
    path.write_text(text, "utf-8")
    document = read(path, environment)
    assert not document.faults
    return document.value


def test_variables_are_put_in_after_parsing_and_never_looked_at_again(folder: Path) -> None:
    text = 'a: "${A}"\nb: ${N}\nc: x${M:-y}z\nd: $$5 $${A}\ne: "${E:-d}"\nf: "${N}"\n"${A}": 1\ng: cost $5\n'
    found = values(folder, text, A="x: [1, ${N}]\n#", N="4", E="")
    assert found == {
        "a": "x: [1, ${N}]\n#",
        "b": 4,
        "c": "xyz",
        "d": "$5 ${A}",
        "e": "d",
        "f": "4",
        "${A}": 1,
        "g": "cost $5",
    }


def test_a_variable_that_is_not_set_is_one_fault_and_hides_no_other(folder: Path) -> None:
    path = folder / "gateway.yaml"
    path.write_text("service: ${MISSING}\nstore: {dsn: embedded}\nlog:\n  level: ${bad-name}\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    found = [text.removeprefix(f"{path}:") for text in caught.value.faults]
    assert found[0].startswith("1: routes: is missing")
    assert "1: service: the environment variable MISSING is not set; set it, or write ${MISSING:-...}" in found
    assert any(text.startswith("4: log.level: has a `${` that is not") for text in found)
    assert len([text for text in found if ": service:" in text]) == 1


def test_anchors_and_merge_keys_work_and_still_do_not_hide_duplicates(folder: Path) -> None:
    text = "x: &x {a: 1, b: 2}\ny: &y {b: 3}\nz: {<<: [*x, *y], a: 4}\n"
    assert values(folder, text)["z"] == {"a": 4, "b": 2}
    assert "z.a: is written twice (first on line 2)" in fault(folder, b"x: &x {a: 1}\nz: {<<: *x, a: 2, a: 3}\n")


def test_a_byte_order_mark_is_no_fault(folder: Path) -> None:
    path = folder / "gateway.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read(path, {}).value == {"a": 1}
