"""The command line. Commands import their modules when they run, so that ``mirrorc --help`` needs no torch."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from typing import Annotated

import typer

from mirrorc.cli.doctor import doctor
from mirrorc.cli.listings import explain_error, passes, rules
from mirrorc.cli.programs import diff, opt, report, show, verify

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
for command in (show, opt, diff, report, verify, passes, rules, doctor):
    app.command()(command)
app.command(name="explain-error")(explain_error)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        sys.stdout.write(f"mirrorc {version_of('mirrorc')}, torch {version_of('torch')}\n")
        raise typer.Exit


@app.callback()
def commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="print the versions of mirrorc and torch"
        ),
    ] = False,
) -> None:
    """Shows, compiles, compares, reports and verifies saved programs, and describes the compiler and this machine."""


def main() -> None:
    app()
