"""The commands on saved programs: ``show``, ``opt``, ``diff``, ``report`` and ``verify``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mirrorc.cli.failures import blamed_on, complain, fail
from mirrorc.errors import MirrorcError, VerifyError
from mirrorc.messages.wording import printable

if TYPE_CHECKING:
    from mirrorc.ir.program import Program


def _import_modules(names: list[str] | None) -> list[str] | None:
    for name in names or ():
        from mirrorc.pipeline.pipeline_text import import_module

        _search_this_folder()
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            raise typer.BadParameter(f"{error}: run from where it is found") from None
        except ImportError as error:
            raise typer.BadParameter(str(error)) from None
    return names


def _search_this_folder() -> None:
    if "" not in sys.path:
        sys.path.insert(0, "")


SavedProgram = Annotated[Path, typer.Argument(help="a file that program.save() has written, or - for standard input")]
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


def show(
    program: SavedProgram,
    regions: Regions = False,
    slots: Slots = False,
    no_sources: NoSources = False,
    no_fold: NoFold = False,
    complete: Annotated[bool, typer.Option("--complete", help="print all of it, as it is saved")] = False,
    imports: Imports = None,
) -> None:
    """Prints a saved program."""
    from mirrorc.comparison.diff import printed
    from mirrorc.printing.colors import print_colored

    loaded = _load(program)
    fold = False if no_fold else None
    try:
        if complete:
            print_colored(loaded.to_text(complete=True), sys.stdout)
            return
        text = printed(loaded, program, regions=regions, slots=slots, sources=not no_sources, fold=fold)
    except ValueError as error:
        fail(error)
    print_colored(text, sys.stdout)


def opt(
    program: SavedProgram,
    passes: Annotated[
        str, typer.Option(help="as plan-buckets{buckets=5.0},outline-regions; module:Class for one of your own")
    ],
    output: Annotated[Path | None, typer.Option(help="save the resulting program here")] = None,
    dump: Annotated[
        Path | None, typer.Option(help="write a file per pass, and a failing one's reproducer, here")
    ] = None,
    print_after: Annotated[list[str] | None, typer.Option(help="print the program after this pass; repeatable")] = None,
    print_after_all: Annotated[bool, typer.Option("--print-after-all", help="print it after each pass")] = False,
    regions: Regions = False,
    slots: Slots = False,
    imports: Imports = None,
) -> None:
    """Runs passes on a saved program.

    Verifies it after each, and prints the result.
    """
    from mirrorc.compilation.instruments import instruments_for
    from mirrorc.ir.program import Stage
    from mirrorc.options.step_options import checked_directory
    from mirrorc.passes import PASSES
    from mirrorc.pipeline.pass_manager import run_passes
    from mirrorc.pipeline.pipeline_edits import check_pass_names
    from mirrorc.pipeline.pipeline_text import parse_passes
    from mirrorc.pipeline.protocol import traits_of
    from mirrorc.printing.colors import print_colored

    _search_this_folder()  # for the user's own passes
    with blamed_on("--passes"):
        pipeline = parse_passes(passes, PASSES)
    with blamed_on("--print-after"):
        check_pass_names("it", print_after or (), pipeline)
    with blamed_on("--dump"):
        directory = checked_directory("it", dump) if dump is not None else None
    loaded = _load(program)
    if loaded.stage is Stage.LOWERED and all(traits_of(entry).latest_input_stage < Stage.LOWERED for entry in pipeline):
        fail(f"{program} is LOWERED already, and no pass runs on it: give 00-capture.mirror.gz of a dump")
    printed_after = "all" if print_after_all else print_after or ()
    try:
        result = run_passes(
            loaded, pipeline, instruments_for(pipeline, directory, printed_after, reproduces=directory is not None)
        )
    except (MirrorcError, OSError) as error:
        keeps = directory is not None or isinstance(error, OSError)
        fail(error if keeps else f"{error}\n\n--dump DIRECTORY keeps what the failing pass was given.")
    if output is not None:
        _save(result, output)
    print_colored(result.to_text(regions=regions, slots=slots), sys.stdout)


def diff(
    old: Annotated[Path, typer.Argument(help="a saved program, or a printed one (a dump, a snapshot)")],
    new: Annotated[Path, typer.Argument(help="another")],
    imports: Imports = None,
) -> None:
    """Compares two programs.

    Prints the lines that differ, by bucket, function and region. Exits with 1 if there are any.
    """
    from mirrorc.comparison.diff import diff_files

    try:
        differences = diff_files(old, new)
    except (ValueError, OSError) as error:
        fail(error)
    if differences:
        sys.stdout.write(printable(differences.rstrip("\n") + "\n"))
        raise typer.Exit(1)


def report(
    file: Annotated[Path, typer.Argument(help="a saved program, or an earlier report of step.report()")],
    output: Annotated[Path, typer.Argument(help="write the report here, as HTML")],
    compare: Annotated[Path | None, typer.Option(help="compare with this earlier report or saved program")] = None,
    imports: Imports = None,
) -> None:
    """Writes a report of a training step as one HTML file.

    The step of a saved program is predicted.
    """
    from mirrorc.report.page import report_file

    try:
        report_file(file, output, compare)
    except (ValueError, OSError) as error:
        fail(error)


def verify(programs: Annotated[list[Path], typer.Argument(help="saved programs")], imports: Imports = None) -> None:
    """Checks saved programs against the rules of their stages.

    Exits with 1 if one breaks a rule or cannot be loaded.
    """
    from mirrorc.ir.program import Program
    from mirrorc.verifier.verifier import verify as verify_program

    broken = False
    for path in programs:
        try:
            program = Program.load(path)
            verify_program(program)
            sys.stdout.write(f"{path}: {program.stage.name}, keeps every rule\n")
        except VerifyError as error:
            sys.stdout.write(f"{path}: {error}\n")
            broken = True
        except (ValueError, OSError) as error:
            complain(error)
            broken = True
    if broken:
        raise typer.Exit(1)


def _load(path: Path) -> Program:
    from mirrorc.ir.program import Program

    try:
        return Program.load(path)
    except (ValueError, OSError) as error:
        fail(error)


def _save(program: Program, path: Path) -> None:
    try:
        program.save(path)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")
    except ValueError as error:
        fail(error)
