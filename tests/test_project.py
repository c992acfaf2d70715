"""What holds for the repository as a whole: its layers, its targets, its links, its image, its lock files."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def tracked() -> list[Path]:
    """The files that belong to the repository: those git knows, and new ones it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [path for name in names if name and (path := ROOT / name).is_file()]


def texts() -> list[tuple[str, str]]:
    """Name and text of every tracked file."""
    return [(str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in tracked()]


def pages() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    # A make that runs these tests must not hand its flags and variables on.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)


def test_no_file_names_a_path_of_somebodys_machine_or_a_package_host():
    # Built in pieces, so that this file is clean too.
    forbidden = re.compile(
        "|".join(["/home" + r"/\w", "/root" + "/", "/work" + "/", "pypi" + r"\.org", "python" + "hosted"])
    )
    found = [f"{name}: {match[0]}" for name, text in texts() if (match := forbidden.search(text))]
    assert found == []


def test_no_file_is_left_half_merged_or_ends_without_a_line_end():
    found = [
        name
        for name, text in texts()
        if re.search(r"^(<{7} |>{7} )", text, re.MULTILINE) or (text and not text.endswith("\n"))
    ]
    assert found == []


def test_make_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    listed = re.findall(r"^  make (\w+)\s+\S", run("make", "help").stdout, re.MULTILINE)
    assert listed == phony[1].split()
    assert listed == re.findall(r"^([a-z]+):", makefile, re.MULTILINE)


def test_make_without_a_usable_python_says_what_to_do():
    done = run("make", "--always-make", "setup", "PYTHON=no-such-python")
    assert done.returncode != 0
    assert "no-such-python is missing or older than Python 3.11" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_ci_is_a_sound_script():
    script = ROOT / ".ci" / "run"
    assert run("bash", "-n", str(script)).returncode == 0
    assert script.stat().st_mode & 0o111
    assert {"make check", "make test"} <= set(re.findall(r"make (?:check|test)", script.read_text("utf-8")))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_resolve(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        if not other.exists() or (anchor and other.suffix == ".md" and anchor not in anchors(other)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_image_is_lint_clean_and_does_not_run_as_root():
    assert run(str(BIN / "hadolint"), "Dockerfile").stdout == ""
    final = (ROOT / "Dockerfile").read_text("utf-8").rpartition("\nFROM ")[2]
    assert re.search(r"^USER 10001", final, re.MULTILINE)
    assert 'ENTRYPOINT ["idempotency-gateway"]' in final
    assert not re.search(r"gcc|build-essential|HEALTHCHECK", final)


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_a_lock_file_pins_all_with_hashes_and_names_no_index(name):
    text = (ROOT / name).read_text("utf-8")
    entries = re.findall(r"^([a-z0-9][a-z0-9.-]*)(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    assert entries
    assert [package for package, rest in entries if "==" not in rest or "--hash=sha256:" not in rest] == []
    assert re.findall(r"^-.*|https?://\S+", text, re.MULTILINE) == []


def test_the_lock_files_hold_what_the_project_asks_for():
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = asked["optional-dependencies"]
    for name, wanted in {
        "requirements.lock": asked["dependencies"],
        "requirements-dev.lock": [*asked["dependencies"], *extras["embedded"], *extras["dev"]],
    }.items():
        locked = {line.partition("==")[0] for line in (ROOT / name).read_text("utf-8").splitlines() if "==" in line}
        names = {re.split(r"[^A-Za-z0-9._-]", one)[0].lower().replace("_", "-") for one in wanted}
        assert names - locked == set(), f"{name} is behind pyproject.toml: run `make lock`"


def test_every_dependency_has_its_reason():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    assert [line for line in listed[1].splitlines() if not re.search(r"#\s*\S{3}", line)] == []


def test_the_change_log_names_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_every_module_says_what_lives_in_it():
    silent = [
        name
        for name, text in texts()
        if re.match(r"(gateway|bench)/.*\.py$", name) and text.strip() and not ast.get_docstring(ast.parse(text))
    ]
    assert silent == []


def test_the_code_map_names_every_part_of_the_package():
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    parts = {
        Path(name).parts[1].removesuffix(".py")
        for name, _ in texts()
        if name.startswith("gateway/") and name.endswith(".py")
    }
    unnamed = [part for part in sorted(parts - {"__init__", "__main__"}) if f"`{part}" not in page]
    assert unnamed == []
