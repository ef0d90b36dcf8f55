"""`dsv4kv check`: every invariant of a saved plan or cache."""

import json
import pathlib

import click

from dsv4kv_jax import invariants
from dsv4kv_jax.errors import PlanError


@click.command("check", help="Check every invariant of a saved plan or cache; exit code 1 if one is violated.")
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(file: str, as_json: bool) -> int:
    kind, found = _check(file)
    if as_json:
        click.echo(json.dumps({"file": file, "kind": kind, "violations": found, "passed": not found}, indent=2))
    elif found:
        for line in found:
            click.echo(f"{file}: {line}")
    else:
        click.echo(f"{file}: a {kind}, every invariant holds")
    return 1 if found else 0


def _check(file: str) -> tuple[str, list[str]]:
    """(what the file is, violations); a JSON file is a plan, anything else a saved cache."""
    try:
        with pathlib.Path(file).open("rb") as handle:
            start = handle.read(64)
    except OSError as error:
        raise PlanError(f"cannot read {file!r}: {error.strerror}") from None
    if start.lstrip().startswith((b"{", b"[")):
        try:
            return "plan", invariants.check_plan(pathlib.Path(file).read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            pass
    return "saved cache", invariants.check_cache(file)
