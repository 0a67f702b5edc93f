"""The command line: ``mirrorc show``, ``opt``, ``diff``, ``report`` and ``verify`` for saved programs."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer

from mirrorc.comparison.diff import diff_files, printed
from mirrorc.compilation.instruments import instruments_for
from mirrorc.errors import MirrorcError, VerifyError
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.wording import printable
from mirrorc.options.step_options import checked_directory
from mirrorc.passes import PASSES
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.pipeline_edits import check_pass_names
from mirrorc.pipeline.pipeline_text import import_module, parse_passes
from mirrorc.pipeline.protocol import Pass, traits_of
from mirrorc.printing.colors import print_colored
from mirrorc.report.saved import report_file
from mirrorc.verifier.verifier import verify

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _import_modules(names: list[str] | None) -> list[str] | None:
    for name in names or ():
        _search_this_folder()
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            raise typer.BadParameter(f"{error}: run from where it is found") from None
        except ImportError as error:
            raise typer.BadParameter(str(error)) from None
    return names


@contextmanager
def _blamed_on(option: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _search_this_folder() -> None:
    """Lets Python import modules from the working folder."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        sys.stdout.write(f"mirrorc {importlib.metadata.version('mirrorc')}, torch {torch.__version__}\n")
        raise typer.Exit


SavedProgram = Annotated[Path, typer.Argument(help="a file that program.save() has written")]
Regions = Annotated[bool, typer.Option("--regions", help="print the bodies of the regions, too")]
Slots = Annotated[bool, typer.Option("--slots", help="print every gradient of a bucket on a line of its own")]
NoFold = Annotated[bool, typer.Option("--no-fold", help="print every line of what repeats")]
NoSources = Annotated[bool, typer.Option("--no-sources", help="leave out the user's source lines")]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        callback=_import_modules,
        help="import this module first: it registers operators that the program calls; repeatable",
    ),
]
Version = Annotated[
    bool,
    typer.Option("--version", is_eager=True, callback=_print_version, help="print the versions of mirrorc and torch"),
]


@app.callback()
def commands(version: Version = False) -> None:
    """Shows, compiles, compares, reports and verifies saved programs."""


@app.command()
def show(
    program: SavedProgram,
    regions: Regions = False,
    slots: Slots = False,
    no_sources: NoSources = False,
    no_fold: NoFold = False,
    imports: Imports = None,
) -> None:
    """Prints a saved program."""
    loaded = _load(program)
    fold = False if no_fold else None
    try:
        text = printed(loaded, program, regions=regions, slots=slots, sources=not no_sources, fold=fold)
    except ValueError as error:
        _fail(error)
    print_colored(text, sys.stdout)


@app.command()
def opt(
    program: SavedProgram,
    passes: Annotated[
        str, typer.Option(help="as plan-buckets{buckets=5.0},outline-regions; module:Class for one of your own")
    ],
    output: Annotated[Path | None, typer.Option(help="save the resulting program here")] = None,
    dump: Annotated[Path | None, typer.Option(help="write a file per pass into this directory")] = None,
    print_after: Annotated[list[str] | None, typer.Option(help="print the program after this pass; repeatable")] = None,
    print_after_all: Annotated[bool, typer.Option("--print-after-all", help="print it after each pass")] = False,
    regions: Regions = False,
    slots: Slots = False,
    imports: Imports = None,
) -> None:
    """Runs passes on a saved program.

    Verifies it after each, and prints the result.
    """
    _search_this_folder()  # for the user's own passes
    with _blamed_on("--passes"):
        pipeline: list[Pass] = parse_passes(passes, PASSES)
    with _blamed_on("--print-after"):
        check_pass_names("it", print_after or (), pipeline)
    with _blamed_on("--dump"):
        directory = checked_directory("it", dump) if dump is not None else None
    loaded = _load(program)
    if loaded.stage is Stage.LOWERED and all(traits_of(entry).latest_input_stage < Stage.LOWERED for entry in pipeline):
        _fail(f"{program} is LOWERED already, and no pass runs on it: give 00-capture.json.gz of a dump")
    try:
        result = run_passes(
            loaded, pipeline, instruments_for(pipeline, directory, "all" if print_after_all else print_after or ())
        )
    except (MirrorcError, OSError) as error:
        _fail(error)
    if output is not None:
        _save(result, output)
    print_colored(result.to_text(regions=regions, slots=slots), sys.stdout)


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(help="a saved program, or a printed one (a dump, a snapshot)")],
    new: Annotated[Path, typer.Argument(help="another")],
    imports: Imports = None,
) -> None:
    """Compares two programs.

    Describes their differences, then prints the differing lines. Exits with 1 if there are any.
    """
    try:
        differences = diff_files(old, new)
    except (ValueError, OSError) as error:
        _fail(error)
    if differences:
        sys.stdout.write(printable(differences.rstrip("\n") + "\n"))
        raise typer.Exit(1)


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="a saved program, or an earlier report of step.report()")],
    output: Annotated[Path, typer.Argument(help="write the report here, as HTML")],
    compare: Annotated[Path | None, typer.Option(help="compare with this earlier report or saved program")] = None,
    imports: Imports = None,
) -> None:
    """Writes a report of a training step as one HTML file.

    The step of a saved program is predicted.
    """
    try:
        report_file(file, output, compare)
    except (ValueError, OSError) as error:
        _fail(error)


@app.command(name="verify")
def verify_programs(
    programs: Annotated[list[Path], typer.Argument(help="saved programs")], imports: Imports = None
) -> None:
    """Checks saved programs against the rules of their stages.

    Exits with 1 if one breaks a rule or cannot be loaded.
    """
    broken = False
    for path in programs:
        try:
            program = Program.load(path)
            verify(program)
            sys.stdout.write(f"{path}: {program.stage.name}, keeps every rule\n")
        except VerifyError as error:
            sys.stdout.write(f"{path}: {error}\n")
            broken = True
        except (ValueError, OSError) as error:
            _complain(error)
            broken = True
    if broken:
        raise typer.Exit(1)


def _load(path: Path) -> Program:
    try:
        return Program.load(path)
    except (ValueError, OSError) as error:
        _fail(error)


def _save(program: Program, path: Path) -> None:
    try:
        program.save(path)
    except OSError as error:
        _fail(f"cannot write {path}: {error.strerror}")
    except ValueError as error:
        _fail(error)


def _fail(reason: Exception | str) -> NoReturn:
    _complain(reason)
    raise typer.Exit(2) from None


def _complain(reason: Exception | str) -> None:
    if isinstance(reason, FileNotFoundError):
        reason = f"there is no file {reason.filename}"
    elif isinstance(reason, OSError) and reason.filename is not None:
        reason = f"{reason.filename}: {reason.strerror}"
    sys.stderr.write(printable(f"mirrorc: {reason}\n"))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
