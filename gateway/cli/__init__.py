"""The command line: reads arguments, calls, prints. No logic.

Exit codes: 0 fine, 1 faults, 2 risks (with `check --strict`; click's own for a command that is written wrongly),
3 cannot reach. What a command needs is imported when it runs, so that `check` works where there is no PostgreSQL.
"""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from gateway.errors import ConfigError, GatewayError, SchemaError, StoreError

FAULTS, RISKS, CANNOT_REACH = 1, 2, 3


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    """End with a sentence and an exit code where an operator has something to mend."""
    try:
        yield
    except GatewayError as error:
        click.echo(str(error), err=True)
        reach = isinstance(error, StoreError) and not isinstance(error, SchemaError)
        if isinstance(error, ConfigError):
            count = len(error.faults)
            click.echo(f"{count} fault{'s' if count > 1 else ''}; nothing was started.", err=True)
        sys.exit(CANNOT_REACH if reach else FAULTS)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="idempotency-gateway", prog_name="idempotency-gateway")
def main() -> None:
    """Make unsafe HTTP requests safe to retry."""


@main.command()
@click.argument("file")
def serve(file: str) -> None:
    """Run the gateway until TERM or Ctrl-C."""
    with _sentences():
        from gateway.config import load  # noqa: PLC0415
        from gateway.server import serve as run  # noqa: PLC0415

        config = load(file)
        sys.exit(run(config, lambda sentence: click.echo(sentence, err=True)))


@main.command()
@click.argument("file")
@click.option("--rps", type=click.FloatRange(min=0, min_open=True), help="Say what each route stores at this rate.")
@click.option("--strict", is_flag=True, help="Exit with 2 if there is any risk.")
def check(file: str, rps: float | None, *, strict: bool) -> None:
    """Validate FILE, and say what each route promises, what the deployment needs, and what is risky."""
    with _sentences():
        from gateway.config import load, promise  # noqa: PLC0415

        config = load(file)
        click.echo(promise.report(config, rps))
        risks = promise.risks(config)
        for risk in risks:
            click.echo(f"risk: {risk.path}: {risk.sentence}")
        sys.exit(RISKS if risks and strict else 0)


@main.command()
@click.argument("file")
@click.argument("method")
@click.argument("url", required=False)
@click.option("-H", "--header", "headers", multiple=True, help="A header line, such as 'X-Customer-Id: C-4711'.")
@click.option("--trusted", is_flag=True, help="As if it came from one of trusted_proxies.")
def explain(file: str, method: str, url: str | None, headers: tuple[str, ...], *, trusted: bool) -> None:
    """Say which route, scope and record a request meets; or `explain policy NAME`: print a built-in policy."""
    with _sentences():
        from gateway.config import load, promise  # noqa: PLC0415

        if url is None and file == "policy":
            click.echo(promise.built_in(method))
            return
        if url is None:
            raise click.UsageError("Write FILE METHOD URL, or: policy NAME.")
        from gateway.cli.explain import explain as say  # noqa: PLC0415

        click.echo(say(load(file), method, url, headers, peer_trusted=trusted))


@main.command()
@click.argument("file", required=False)
@click.option("--dsn", envvar="GATEWAY_DSN", show_envvar=True, help="The database.")
@click.option("--dsn-file", type=click.Path(path_type=Path), help="A file that holds the DSN.")
@click.option("--schema", help="[default: idempotency, or what FILE says]")
@click.option("--sql", "only_sql", is_flag=True, help="Print the SQL and connect to nothing.")
@click.option("--status", "only_status", is_flag=True, help="Print what was applied and what is due.")
def migrate(
    file: str | None, dsn: str | None, dsn_file: Path | None, schema: str | None, *, only_sql: bool, only_status: bool
) -> None:
    """Bring the database's schema up to date; the database of FILE, or a DSN alone. Safe to run at any time, from many
    places at once.
    """
    with _sentences():
        from gateway import store  # noqa: PLC0415
        from gateway.config import Secret, load  # noqa: PLC0415

        if file is not None:
            settings = load(file).store
            dsn, schema = settings.read_dsn(), schema or settings.schema_name
        schema = schema or "idempotency"
        if only_sql:
            click.echo(store.script(schema), nl=False)
            return
        if dsn_file is not None:
            dsn = Secret("file", str(dsn_file)).read()
        if not dsn:
            raise click.UsageError(
                "Name the database: FILE, --dsn, --dsn-file, or the environment variable GATEWAY_DSN."
            )
        if only_status:
            for migration in asyncio.run(store.status(dsn, schema)):
                when = f"applied {migration.applied_at:%Y-%m-%d %H:%M:%S %Z}" if migration.applied_at else "due"
                click.echo(f"{migration.version:04d}_{migration.name}: {when}")
            return
        applied = asyncio.run(store.migrate(dsn, schema))
        click.echo("\n".join(f"applied {name}" for name in applied) or f"schema {schema} is up to date")


@main.command()
@click.option("--stay", is_flag=True, help="Serve until Ctrl-C afterwards.")
def demo(*, stay: bool) -> None:
    """Start a sample service and the gateway, and prove that duplicates are stopped."""
    with _sentences():
        from gateway.demo.proof import run  # noqa: PLC0415

        sys.exit(run(stay=stay))


__all__ = ["main"]
