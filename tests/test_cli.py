"""The command line as a user meets it: sentences, exit codes, no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main

CONFIG = Path(__file__).parents[1] / "config"


def run(*arguments: str, **environment: str) -> Result:
    result = CliRunner().invoke(main, arguments, env={"GATEWAY_DSN": None, **environment})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_check_prints_promises_needs_and_risks_and_ends_with_0() -> None:
    result = run("check", str(CONFIG / "demo.yaml"))
    assert result.exit_code == 0
    assert "  create-transfer  POST /transfers\n      at least once within 24h" in result.stdout
    assert "for the deployment: terminationGracePeriodSeconds >= 15" in result.stdout
    assert "risk: routes.create-transfer: on_in_doubt is run_again" in result.stdout


def test_strict_check_ends_with_2_when_there_are_risks() -> None:
    assert run("check", "--strict", str(CONFIG / "demo.yaml")).exit_code == 2
    assert run("check", "--strict", str(CONFIG / "minimal.yaml")).exit_code == 0


def test_check_says_what_is_stored_at_a_rate() -> None:
    assert "At 50 requests/s it stores about" in run("check", str(CONFIG / "minimal.yaml"), "--rps", "50").stdout


def test_faults_are_printed_one_a_line_and_end_with_1(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("service: x\nadmin: {}\nlog: {level: loud}\n", "utf-8")
    for command in ("check", "serve"):
        result = run(command, str(path))
        assert result.exit_code == 1
        assert f"{path}:2: admin: is not built yet; remove it\n" in result.stderr
        assert f"{path}:3: log.level: must be debug or info or warning or error, not `loud`\n" in result.stderr
        assert result.stderr.endswith("faults; nothing was started.\n")
        assert result.stdout == ""


def test_a_file_that_is_not_there_is_a_sentence() -> None:
    result = run("check", "nowhere.yaml")
    assert (result.exit_code, "nowhere.yaml:1: file: does not exist" in result.stderr) == (1, True)


REFERENCE = str(CONFIG / "reference.yaml")
KEY = ("-H", "Idempotency-Key: 8e03978e-40d5")
CUSTOMER = ("-H", "X-Customer-Id: C-4711")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("POST", "http://ledger/ledger/v1/transfers", *KEY, *CUSTOMER),
            "route create-transfer · scope customer=C-4711 · ",
        ),
        (("POST", "/ledger/v1/transfers", *CUSTOMER), "route create-transfer · refused: key-missing"),
        (
            ("POST", "/ledger/v1/transfers", *KEY),
            "route create-transfer · refused: scope-missing (part customer, header X-Customer-Id)",
        ),
        (("POST", "/ledger/v1/transfers", *KEY, *KEY), "refused: key-invalid (reason repeated)"),
        (("GET", "https://ledger"), "no route matches: passes through to upstream ledger, unprotected"),
        (("POST", "/x/../ledger/v1/transfers"), "refused: 400 path-ambiguous (the path has a dot segment)"),
    ],
)
def test_explain_says_what_a_request_meets(arguments: tuple[str, ...], said: str) -> None:
    result = run("explain", REFERENCE, *arguments)
    assert (result.exit_code, said in result.stdout) == (0, True), result.output


def test_explain_names_one_record_for_one_identity_and_another_for_another() -> None:
    first, again, other = (
        run("explain", REFERENCE, "POST", "/ledger/v1/transfers", *customer, *KEY).stdout.split("record ")[1][:12]
        for customer in (CUSTOMER, CUSTOMER, ("-H", "X-Customer-Id: C-1"))
    )
    assert first == again != other
    assert int(first, 16)


def test_explain_prints_a_built_in_policy() -> None:
    assert "on_in_doubt: block" in run("explain", "policy", "at-most-once").stdout
    result = run("explain", "policy", "nothing")
    assert (result.exit_code, result.stderr) == (
        1,
        "No built-in policy has the name 'nothing'; built in are at-least-once and at-most-once.\n",
    )


@pytest.mark.parametrize(
    "arguments",
    [("explain", REFERENCE, "POST", "ledger"), ("explain", REFERENCE, "POST", "/x", "-H", "no colon")],
)
def test_what_is_no_url_and_no_header_is_a_sentence(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert "write it like" in result.stderr


def test_migrate_prints_its_sql_without_a_database() -> None:
    result = run("migrate", "--sql", "--schema", "other")
    assert (result.exit_code, 'CREATE SCHEMA IF NOT EXISTS "other"' in result.stdout) == (0, True)


def test_migrate_ends_with_3_when_it_cannot_reach_the_database(tmp_path: Path) -> None:
    secret = tmp_path / "dsn"
    secret.write_text("postgresql://127.0.0.1:1/x", "utf-8")
    result = run("migrate", "--dsn-file", str(secret))
    assert (result.exit_code, "cannot be reached" in result.stderr) == (3, True)
    assert run("migrate", "--dsn-file", str(tmp_path / "none")).exit_code == 1
    assert "Name the database" in run("migrate").stderr


def test_migrate_applies_once_and_tells_the_status(dsn: str, schema: str) -> None:
    assert ": due" in run("migrate", "--status", "--schema", schema, GATEWAY_DSN=dsn).stdout
    assert run("migrate", "--schema", schema, GATEWAY_DSN=dsn).stdout.startswith("applied 0001_")
    assert run("migrate", "--schema", schema, "--dsn", dsn).stdout == f"schema {schema} is up to date\n"
    status = run("migrate", "--status", "--schema", schema, "--dsn", dsn).stdout
    assert "0001_initial: applied 20" in status


def test_python_m_gateway_is_the_same_program() -> None:
    found = subprocess.run([sys.executable, "-m", "gateway", "--version"], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("idempotency-gateway, version ")
