"""The command line: ``mirrorc show``, ``opt``, ``diff`` and ``verify`` for saved programs; ``mirrorc --help`` explains them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mirrorc.colours import print_coloured
from mirrorc.diff import diff_texts
from mirrorc.errors import MirrorcError, VerifyError
from mirrorc.instruments import instruments_for
from mirrorc.pass_manager import Pass, run_passes
from mirrorc.pass_specs import parse_passes
from mirrorc.passes import PASSES
from mirrorc.program import Program
from mirrorc.verifier import verify

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

SavedProgram = Annotated[Path, typer.Argument(help="a file that program.save() has written")]
Regions = Annotated[bool, typer.Option("--regions", help="print the bodies of the regions, too")]
Slots = Annotated[bool, typer.Option("--slots", help="print every gradient of a bucket on a line of its own")]
NoSources = Annotated[bool, typer.Option("--no-sources", help="leave out the user's source lines")]


@app.command()
def show(program: SavedProgram, regions: Regions = False, slots: Slots = False, no_sources: NoSources = False) -> None:
    """Prints a saved program."""
    print_coloured(_load(program).to_text(regions=regions, slots=slots, sources=not no_sources), sys.stdout)


@app.command()
def opt(
    program: SavedProgram,
    passes: Annotated[
        str, typer.Option(help="as plan-buckets{bucket_cap_mb=5.0},outline-regions; module:Class for one of your own")
    ],
    output: Annotated[Path | None, typer.Option(help="save the resulting program here")] = None,
    dump: Annotated[Path | None, typer.Option(help="write a file per pass into this directory")] = None,
    print_after: Annotated[list[str] | None, typer.Option(help="print the program after this pass; repeatable")] = None,
    print_after_all: Annotated[bool, typer.Option("--print-after-all", help="print it after each pass")] = False,
    regions: Regions = False,
    slots: Slots = False,
) -> None:
    """Runs passes on a saved program, verifies it after each, and prints the result."""
    sys.path.insert(0, "")  # for passes of one's own, as in a script
    try:
        pipeline: list[Pass] = parse_passes(passes, PASSES)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--passes") from None
    instruments = instruments_for(pipeline, dump, print_after or (), print_after_all)
    try:
        result = run_passes(_load(program), pipeline, instruments)
    except MirrorcError as error:
        _fail(error)
    if output is not None:
        result.save(output)
    print_coloured(result.to_text(regions=regions, slots=slots), sys.stdout)


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(help="a saved program, or a printed one (a dump, a snapshot)")],
    new: Annotated[Path, typer.Argument(help="another")],
) -> None:
    """Says in words what differs between two programs, then shows the lines; exits with 1 if anything does."""
    try:
        found = diff_texts(_text(old), _text(new))
    except ValueError as error:
        _fail(error)
    if found:
        sys.stdout.write(found.rstrip("\n") + "\n")
        raise typer.Exit(1)


@app.command(name="verify")
def verify_programs(programs: Annotated[list[Path], typer.Argument(help="saved programs")]) -> None:
    """Checks saved programs against the rules of their stages; exits with 1 if one breaks a rule."""
    broken = False
    for path in programs:
        program = _load(path)
        try:
            verify(program)
            sys.stdout.write(f"{path}: {program.stage.name}, keeps every rule\n")
        except VerifyError as error:
            sys.stdout.write(f"{path}: {error}\n")
            broken = True
    if broken:
        raise typer.Exit(1)


def _load(path: Path) -> Program:
    try:
        return Program.load(path)
    except (ValueError, OSError) as error:
        _fail(error)


def _text(path: Path) -> str:
    """The canonical text of a saved program, or the printed one in the file."""
    try:
        is_printed = path.read_bytes()[:2] == b"# "
        return path.read_text(encoding="utf-8") if is_printed else Program.load(path).to_text(slots=True, sources=False)
    except (ValueError, OSError) as error:
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    sys.stderr.write(f"mirrorc: {error}\n")
    raise typer.Exit(2) from None


def main() -> None:
    """The entry point of the ``mirrorc`` command."""
    app()


if __name__ == "__main__":
    main()
