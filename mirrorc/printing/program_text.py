"""Prints programs.

The printed form::

    text      = heading [ change ] [ workers ] bucket* optimizer* messages* remark* function+ region*
    heading   = "# mirrorc" [ "· after PASS" ] "· stage STAGE · N devices ·" ( "N buckets" [ "·" CALLS ] | ALONE )
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
    optimizer = "# optimizer RULE: NAME=VALUE, ... (at compilation; a step reads param_groups anew)"
    messages  = "# messages of" UNIT, ... ", by replicas; TEXT" ( "#   round N, KIND: " [ "c" CHUNK ] FROM "→" TO, ... )+
    remark    = "# remark: " [ PASS ": " ] TEXT
    function  = who* "def NAME(" ( NAME: TYPE | N "activations" ), ... "):"
                [ "# as NAME, but for these lines" [ "; " TEXT ] ] ( line | why )+ "return NAME, ..."
    who       = "# DEVICE, ... (replicas N, ...) run this" [ "on N of the batch's N examples each" | "on none of" TEXT ]
                ( "#   " TEXT )*
    line      = [ DEVICE, ... "|" ] [ VALUE, ... "=" ] OPERATION "(" ARGUMENT, ... ")" [ "# " COMMENT ]
    why       = "# -- TEXT" | "# " source
    region    = "region NAME(NAME: TYPE, ...):" statement+ "return [NAME, ...]"
    statement = "# " source | [ NAME ":" TYPE "=" ] OPERATOR "(" ARGUMENT, ... ")"
    source    = FILE ":" LINE "  " CODE | MODULE "(" CLASS ")"
    UNIT      = "b" INDEX [ "_pack" NUMBER ]
    VALUE     = NAME ":" TYPE | NAME | N KIND
    TYPE      = DTYPE "[" SIZE, ... "]" | "pending" TYPE | "share of" TYPE | "(" TYPE, ... ")"
    CALLS     = "accumulating" | "after accumulation" | "gradients alone"
    ALONE     = "evaluation" | "forward of a module" | "backward of a module" [ "· N buckets" ]
    DTYPE     = "f64" | "f32" | "f16" | "bf16" | "i64" | ... | "bool"

An ``evaluation`` is forward alone, and gathers loss and outputs. ``forward of a module`` (`mirrorc.data_parallel`) also
saves activations for ``backward of a module``, which begins with the gradients of outputs, ``d_NAME``. Only files of
``dump=`` have a ``change``; if the pass changed nothing, the file ends there. The program of one worker is printed.
Replica numbers count over all workers, except in ``root``, ``source`` and ``destination``.

Up to OUTLINED, the ``function`` is ``one_device``; up to SCHEDULED, ``all_devices`` with a column of devices; LOWERED
has a function for each device. ``source`` is a line of user code, or a module. Line breaks of a ``remark`` become
``\\n``.

Unless ``fold=False`` or ``slots=True``, repeated parts are printed once, without loss of information:

- Buckets and stretches of a function that repeat from layer to layer: ``… b4 … b30: as b3 (the 3 lines above), for h.29
  … h.3`` stands for 27 stretches; ``… b4 … b30, every 2nd`` for 14 stretches of two buckets each
  (`mirrorc.printing.folding`).
- Messages that sum up a bucket: ``b0_sum: f32[64] = … messages of b0, rounds 1 … 3 (13 lines)``; the table ``messages``
  has the rounds of all devices (`mirrorc.printing.message_folds`).
- Microbatches with equal regions: ``… microbatch 2 … 6: as microbatch 1 (the 9 lines above)``.
- Equal lines of adjacent devices in ``all_devices``: the column says ``each``, or lists the devices.
- Functions that differ only in shapes: ``as cpu_0, but for these lines``. Each line replaces one of the same operation,
  in order. ``bwd_0.shard1`` replaces ``bwd_0``: the same region for the second shard shape.

Comments have a region's first and last module; numbers of gradients of a ``pack`` that are in place, copied and
factored; the factors of a gradient, and the place where it is computed; this device's elements in a ``wait``.

Names of values are the same in every run: ``loss``; ``d(fc1.weight)``, a gradient; ``b0``, a packed bucket;
``b0_pending``, the bucket in flight; ``b0_sum``, reduced (``b0_share``, this device's share), and ``b0_clipped``; of
chunk 1 of an all-reduce by messages, ``b0_c1_own``, this replica's gradients, ``b0_c1_received``, those of others,
``b0_c1_partial``, a partial sum, and ``b0_c1_sum``; ``b0_incoming`` and ``b0_parameters``, parameters in flight and
received; ``updated(b0)``, updated by this device; ``new(bn.running_mean)``; variables by name. Inside regions, values
are named by module and operator (`rewrites.value_names`), with ``d_`` in front in backward. Many values of a kind are
counted: ``93 activations``, ``2 factors``, ``75 variables``, ``4 slots``.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping

from torch import fx

from mirrorc.analysis.communication.worker_meetings import schedule_hash
from mirrorc.ir import ops
from mirrorc.ir.nodes import region_calls, region_of, region_title
from mirrorc.ir.program import Accumulation, Program, Region, Stage
from mirrorc.messages.wording import as_single_line, counted, printable
from mirrorc.printing.bucket_names import BucketNames
from mirrorc.printing.bucket_table import table_lines
from mirrorc.printing.function_text import function_lines, signature
from mirrorc.printing.graph_text import graph_lines, rendered, statements
from mirrorc.printing.message_folds import message_table
from mirrorc.printing.printed_values import range_text, spans

_LISTED = 4  # the most numbers of devices whose workers are listed
_WIDTH = 40  # the longest list of ranks, in characters; the workers of a longer one are counted


def worker_title(program: Program) -> str:
    workers, numbers = program.workers, program.local_replicas
    replicas = f"replica{'s' if len(numbers) > 1 else ''} {range_text(numbers.start, numbers.stop)}"
    return f"worker {workers.rank} of {workers.num_workers}, {replicas} of {workers.num_all_replicas}"


def worker_lines(program: Program) -> list[str]:
    workers = program.workers
    if not workers.are_several:
        return []
    by_number: dict[int, list[int]] = defaultdict(list)
    for rank, number in enumerate(workers.devices_per_worker):
        by_number[number].append(rank)
    if workers.are_alike:
        devices = counted(workers.devices_per_worker[0], "device")
        text = f"all {workers.num_workers} have {devices} and run this program, on examples of their own"
    else:
        groups = sorted(by_number.items())
        parts = [f"{_whose(ranks)} {counted(number, 'device')}" for number, ranks in groups[:_LISTED]]
        more = ["others have more"] if len(groups) > _LISTED else []
        text = f"{', '.join([*parts, *more])}; each runs the program of its devices, on examples of its own"
    if program.stage is Stage.LOWERED and program.buckets:
        text += f"; all exchange the same in the same order, schedule {schedule_hash(program)[:16]}"
    return [f"# workers: {text}"]


def _whose(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"worker {ranks[0]} has"
    named = spans(ranks)
    return f"workers {named} have" if len(named) <= _WIDTH else f"{len(ranks)} workers have"


class ProgramPrinter:
    """Prints a program in several forms; computes the lines of each graph once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._bucket_names = BucketNames(program)
        self._lines_of = functools.cache(lambda graph: graph_lines(program, graph, self._bucket_names))

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
        """For other arguments see `Program.to_text`.

        Args:
            after: the pass named in the heading.
        """
        program, is_folded = self._program, not slots if fold is None else fold
        lines = [
            program_heading(program, after, milliseconds),
            *worker_lines(program),
            *table_lines(program, slots=slots, fold=is_folded),
            *(message_table(self._bucket_names) if is_folded else []),
        ]
        shown = (remark for remark in program.remarks if remark.is_kept and remarks)
        lines += [f"# remark: {as_single_line(str(remark))}" for remark in shown]
        lines += function_lines(program, self._lines_of, self._bucket_names, sources=sources, fold=is_folded)
        for region in program.regions.values() if regions else ():
            lines += ["", *_region_lines(region, sources, _argument_names(program, region))]
        return printable("\n".join(lines) + "\n")


def region_to_text(region: Region) -> str:
    return printable("\n".join(_region_lines(region, True, {})) + "\n")


def _region_lines(region: Region, sources: bool, names: Mapping[str, str]) -> list[str]:
    body = region.graph_module.graph
    title = region_title(region.name)
    return [f"region {title}({signature(body, names)}):", *rendered(statements(body, names), sources)]


def _argument_names(program: Program, region: Region) -> dict[str, str]:
    """Maps arguments that fx has renamed to the step's names, such as ``input_1`` to ``input``."""
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
    parts = ["mirrorc", *([f"after {after}"] if after else []), f"stage {program.stage.name}"]
    parts.append(counted(len(program.devices), "device"))
    parts += _kind(program)
    parts += [worker_title(program)] if program.workers.are_several else []
    parts += [f"{milliseconds:.1f} ms"] if milliseconds is not None else []
    return "# " + " · ".join(parts)


def _kind(program: Program) -> list[str]:
    buckets = [counted(len(program.buckets), "bucket")] if program.trains else []
    if program.takes_tangents:
        return ["backward of a module", *buckets]
    if not program.trains:
        return [program.accumulation.value if program.accumulation is Accumulation.FORWARD else "evaluation"]
    return [*buckets, *([program.accumulation.value] if program.accumulation is not Accumulation.NONE else [])]
