"""Prints programs.

The printed form::

    text      = heading [ change ] [ workers ] bucket* optimizer* remark* function+ region*
    heading   = "# mirrorc" [ "· after PASS" ] "· stage STAGE · N devices ·" ( "N buckets" [ "·" CALLS ] | "evaluation" )
                [ "· worker N of N, replicas N … N of N" ] [ "· MS ms" ]
    workers   = "# workers: " TEXT
    change    = "# N nodes" [ "(+N): +N OPERATION, ..." ] ( "# remark of this pass: TEXT" )* [ "# the program is as before" ]
    bucket    = "# bucket INDEX" DTYPE SIZE "N gradients" RULE [ placement ] [ "· ready after d(VARIABLE) in REGION" ]
                member+ [ packs ] [ share ]
    placement = "· shared" | "· to be owned by DEVICE" | "· owned by DEVICE"
    member    = "#     VARIABLE[SHAPE]"
              | "#   " [ LAYER [ "… LAYER" ] ":" ] VARIABLE[SHAPE] ...
    packs     = "#   packs, of elements 0 … N:" "p" NUMBER FIRST "…" LAST [ "after" REGION ], ...
    share     = "#   shares, of elements 0 … N:" DEVICE FIRST "…" LAST, ...
    optimizer = "# optimizer RULE: NAME=VALUE, ... (at compilation; read anew in each step)"
    remark    = "# remark: " [ PASS ": " ] TEXT
    function  = who* "def NAME(NAME: TYPE, ...):" [ "# as NAME, but for these lines" [ "; " TEXT ] ] ( line | why )+
                "return NAME, ..."
    who       = "# DEVICE, ... (replicas N, ...) run this" [ "on N of the batch's N examples each" | "on none of" TEXT ]
                ( "#   " TEXT )*
    line      = [ DEVICE, ... "|" ] [ VALUE, ... "=" ] OPERATION "(" ARGUMENT, ... ")" [ "# " COMMENT ]
    why       = "# -- TEXT" | "# " source
    region    = "region NAME(NAME: TYPE, ...):" statement+ "return [NAME, ...]"
    statement = "# " source | [ NAME ":" TYPE "=" ] OPERATOR "(" ARGUMENT, ... ")"
    source    = FILE ":" LINE "  " CODE | MODULE "(" CLASS ")"
    VALUE     = NAME ":" TYPE | NAME | N KIND
    TYPE      = DTYPE "[" SIZE, ... "]" | "pending" TYPE | "share of" TYPE | "(" TYPE, ... ")"
    CALLS     = "accumulating" | "after accumulation"
    DTYPE     = "f64" | "f32" | "f16" | "bf16" | "i64" | ... | "bool"

An ``evaluation`` has forward alone, and its functions return nothing: loss and outputs are gathered. An ``accumulating`` program
adds its gradients to those that are kept, and one ``after accumulation`` updates with these, too. ``change`` stands in the
files of ``dump=``, which end with it where the pass changed nothing. A program of several workers is that of one of them, whose
devices it has; ``workers`` says what the others have, and the hash of the exchanges that all of them make alike. Replicas are
numbered over all workers, but for ``root``, ``source`` and ``destination``, which are replicas of this one.

``function`` is ``one_device`` up to OUTLINED, ``all_devices`` with a column that names the devices of every line up to
SCHEDULED, and in LOWERED a function for each device; devices that run the same are printed together. The lines above it say
which devices run it, on which examples, with which weight of the loss and from which random stream. ``source`` is the user's
line that the operators come from, or their module where no line is known. A ``remark`` is one line: line breaks in it are
written as ``\\n``.

Unless ``fold=False`` or ``slots=True`` is given, repeated parts are printed once, without any loss of information:

- Buckets and stretches of a function that repeat from layer to layer: ``… b4 … b30: as b3 (the 3 lines above), for h.29 … h.2``
  stands for 27 stretches, in which the numbers of buckets, and the first number of each dotted name, move on evenly;
  ``… b4 … b30, every 2nd`` for 14 stretches of two buckets each (`mirrorc.printing.folding`).
- Microbatches that run the same: ``… microbatch 2 … 6: as microbatch 1 (the 9 lines above)``, in which the numbers of
  microbatches move on by one.
- Lines that several devices have next to each other in ``all_devices``: the column says ``each``, or lists the devices.
- A function that is another up to shapes: ``as cpu_0, but for these lines``. Its lines replace those of the same operation, in
  order, where ``bwd_0.shard1`` replaces ``bwd_0``: the same region for the second shape of a shard.

A comment says: beside a region, the first and the last module that it covers; beside ``pack``, how many gradients backward has
written in place, how many are copied and how many are left as factors, unless all are of one kind; beside a
factored gradient, the types of its factors and where it is made; beside ``wait``, which elements of the bucket this device gets;
beside ``update``, the rule.

Values have the same names in every run, on every machine: ``loss``; ``d(fc1.weight)``, a gradient, whose type is that of its
slot in the bucket table; ``b0``, a packed bucket; ``b0_pending``, the same in flight; ``b0_sum``, reduced (``b0_share``, this
device's share of it); ``b0_incoming``, parameters in flight to this device, and ``b0_parameters``, received;
``updated(b0)``, parameters that this device has updated;
``new(bn.running_mean)``; variables by their own names. Inside regions a value is called by the module and the operator that
it comes from (`rewrites.value_names`), with ``d_`` before it in backward; what is computed between modules, by the last
module that it is made of. Many values of a kind are counted: ``93 activations`` are kept for backward, ``3 d(activations)`` are
gradients of activations for the next region of backward, ``2 factors`` are what factored gradients are made of, ``75 variables``
are parameters and buffers read, ``4 slots`` are places in buckets to be written. So a line that calls a region lists its
arguments, and its results, by kind; the region itself has them in the order of their first use. Variables are arguments of a
region by the names that they have in its first call, with ``_`` for what is no letter or digit. Bodies of regions are left out
unless asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import fx

from mirrorc.analysis.communication.worker_schedule import schedule_hash
from mirrorc.ir import ops
from mirrorc.ir.nodes import region_calls, region_of, region_title
from mirrorc.ir.program import Accumulation, Program, Region, Stage
from mirrorc.messages.wording import counted, on_one_line, printable
from mirrorc.printing.bucket_table import table_lines
from mirrorc.printing.function_text import function_lines, signature
from mirrorc.printing.graph_text import Line, graph_lines, rendered, statements
from mirrorc.printing.spans import range_text, spans

_LISTED = 4  # the most numbers of devices that are told one by one
_WIDTH = 40  # of the ranks of workers that have equal numbers of devices; more are counted


def worker_title(program: Program) -> str:
    """Which worker this is, of how many, and the numbers of its replicas."""
    workers, own = program.workers, program.local_replicas
    replicas = f"replica{'s' if len(own) > 1 else ''} {range_text(own.start, own.stop)}"
    return f"worker {workers.rank} of {workers.num_workers}, {replicas} of {workers.num_all_replicas}"


def worker_lines(program: Program) -> list[str]:
    """The line below the heading of a program of several workers."""
    workers = program.workers
    if not workers.are_several:
        return []
    by_number: dict[int, list[int]] = defaultdict(list)
    for rank, number in enumerate(workers.devices_per_worker):
        by_number[number].append(rank)
    if workers.are_alike:
        devices = counted(workers.devices_per_worker[0], "device")
        told = f"all {workers.num_workers} have {devices} and run this program, on examples of their own"
    else:
        groups = sorted(by_number.items())
        said = [f"{_whose(ranks)} {counted(number, 'device')}" for number, ranks in groups[:_LISTED]]
        more = ["others have more"] if len(groups) > _LISTED else []
        told = f"{', '.join([*said, *more])}; each runs the program of its devices, on examples of its own"
    if program.stage is Stage.LOWERED and program.buckets:
        told += f"; all exchange the same in the same order, schedule {schedule_hash(program)[:16]}"
    return [f"# workers: {told}"]


def _whose(ranks: list[int]) -> str:
    """The subject of a sentence: some workers by their ranks, or how many they are."""
    if len(ranks) == 1:
        return f"worker {ranks[0]} has"
    named = spans(ranks)
    return f"workers {named} have" if len(named) <= _WIDTH else f"{len(ranks)} workers have"


class ProgramPrinter:
    """Prints a program in several forms; the lines of its graphs are found once for all of them."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._lines: dict[fx.Graph, list[Line]] = {}

    def text(
        self,
        *,
        regions: bool = False,
        slots: bool = False,
        sources: bool = True,
        fold: bool | None = None,
        remarks: bool = True,
        after: str = "",
        milliseconds: float | None = None,
    ) -> str:
        """Prints the program as text, in the form above.

        Args:
            regions: print the bodies of the regions, too.
            slots: print every gradient of a bucket, each on a line of its own.
            sources: print the user's source lines. Without them, the text stays the same when code moves in its file.
            fold: print repeated parts once; None means True unless ``slots`` is set.
            remarks: print the remarks that are kept.
            after: the pass that the heading names.
            milliseconds: the time that the heading gives.
        """
        program, is_folded = self._program, not slots if fold is None else fold
        lines = [
            program_heading(program, after, milliseconds),
            *worker_lines(program),
            *table_lines(program, slots=slots, fold=is_folded),
        ]
        kept = (remark for remark in program.remarks if remark.is_kept and remarks)
        lines += [f"# remark: {on_one_line(str(remark))}" for remark in kept]
        lines += function_lines(program, self._lines_of, sources=sources, fold=is_folded)
        for region in program.regions.values() if regions else ():
            lines += ["", *_region_lines(region, sources, _argument_names(program, region))]
        return printable("\n".join(lines) + "\n")

    def _lines_of(self, graph: fx.Graph) -> list[Line]:
        if graph not in self._lines:
            self._lines[graph] = graph_lines(self._program, graph)
        return self._lines[graph]


def program_to_text(
    program: Program,
    *,
    regions: bool = False,
    slots: bool = False,
    sources: bool = True,
    fold: bool | None = None,
    after: str = "",
    milliseconds: float | None = None,
) -> str:
    """Prints a program at any stage as text, in the form above; for the arguments see `ProgramPrinter.text`."""
    printer = ProgramPrinter(program)
    return printer.text(
        regions=regions, slots=slots, sources=sources, fold=fold, after=after, milliseconds=milliseconds
    )


def region_to_text(region: Region, *, sources: bool = True) -> str:
    """Prints a region's body as text."""
    return printable("\n".join(_region_lines(region, sources, {})) + "\n")


def _region_lines(region: Region, sources: bool, names: Mapping[str, str]) -> list[str]:
    body = region.graph_module.graph
    title = region_title(region.name)
    return [f"region {title}({signature(body, names)}):", *rendered(statements(body, names), sources)]


def _argument_names(program: Program, region: Region) -> dict[str, str]:
    """The printed names of a region's arguments that are arguments of the step, because fx renames ``input`` to ``input_1``."""
    calls = (n for graph in program.graphs() for n in region_calls(graph) if region_of(n) == region.name)
    call = next(calls, None)
    if call is None:
        return {}
    placeholders = [str(node.target) for node in region.graph_module.graph.nodes if node.op == "placeholder"]
    taken = {node.name for node in region.graph_module.graph.nodes}
    names: dict[str, str] = {}
    for placeholder, value in zip(placeholders, call.args, strict=False):
        if isinstance(value, fx.Node) and (value.op == "placeholder" or value.target is ops.argument):
            name = str(value.kwargs.get("name", value.target))
            names |= {placeholder: name} if name not in taken else {}
    return names


def program_heading(program: Program, after: str = "", milliseconds: float | None = None) -> str:
    """The first line of a program's text."""
    parts = ["mirrorc", *([f"after {after}"] if after else []), f"stage {program.stage.name}"]
    parts.append(_count(len(program.devices), "device"))
    parts.append(_count(len(program.buckets), "bucket") if program.trains else "evaluation")
    parts += [program.accumulation.value] if program.accumulation is not Accumulation.NONE else []
    parts += [worker_title(program)] if program.workers.are_several else []
    parts += [f"{milliseconds:.1f} ms"] if milliseconds is not None else []
    return "# " + " · ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
