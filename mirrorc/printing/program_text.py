"""Prints programs.

The printed form::

    text      = heading [ change ] bucket* remark* function+ region*
    heading   = "# mirrorc" [ "· after PASS" ] "· stage STAGE · N devices · N buckets" [ "· MS ms" ]
    change    = "# N nodes" [ "(+N): +N OPERATION, ..." ] ( "# remark of this pass: TEXT" )* [ "# the program is as before" ]
    bucket    = "# bucket INDEX" DTYPE SIZE VARIABLE[SHAPE] ... RULE [ "· shared" ] [ "· ready after REGION" ]
              | "# bucket INDEX" DTYPE SIZE "N gradients" RULE ... ( "#     VARIABLE[SHAPE]" )+
    remark    = "# remark: " [ PASS ": " ] TEXT
    function  = "def DEVICE(NAME: TYPE, ...):" [ "# " who ] line+ "return NAME, ..."
    who       = DEVICE "runs the same as replica N; ..." | "replica N" | "will run on DEVICE, ..."
    line      = [ DEVICE "|" ] [ VALUE, ... "=" ] OPERATION "(" ARGUMENT, ... ")" [ "# " ( source | NOTE ) ]
    region    = "region NAME(NAME: TYPE, ...):" statement+ "return [NAME, ...]"
    statement = "# " source | [ NAME ":" TYPE "=" ] OPERATOR "(" ARGUMENT, ... ")"
    source    = FILE ":" LINE "  " CODE | MODULE "(" CLASS ")"
    VALUE     = NAME ":" TYPE | NAME | N KIND
    TYPE      = DTYPE "[" SIZE, ... "]" | "pending" TYPE | "share of" TYPE | "(" TYPE, ... ")"
    DTYPE     = "f64" | "f32" | "f16" | "bf16" | "i64" | ... | "bool"

``change`` stands in the files of ``dump=``, which end with it where the pass changed nothing. ``function`` is ``one_device``
up to OUTLINED, ``all_devices`` with a column that names the device of every line up to SCHEDULED, and a function for each
device in LOWERED, where devices that run the same program are printed once. ``source`` is the user's line that the operators come
from, or their module where no line is known. A ``remark`` is one line: line breaks in it are written as ``\\n``.

Values have the same names in every run, on every machine: ``loss``; ``d(fc1.weight)``, a gradient, whose type is that of its
slot in the bucket table; ``b0``, a packed bucket; ``b0_pending``, the same in flight; ``b0_sum``, reduced (``b0_share``, this
device's share of it); ``b0_incoming``, parameters in flight to this device, and ``b0_parameters``, received;
``new(bn.running_mean)``; variables by their own names. Inside regions a value is called by the module and the operator that
it comes from (`mirrorc.capture.value_names`), with ``d_`` before it in backward; what is computed between modules, by the last
module that it is made of. Many values of a kind are counted: ``93 saved`` are activations kept for backward, ``75
variables`` are parameters and buffers read. So a line that calls a region lists its arguments, and its results, by kind; the
region itself has them in the order of their first use. Variables are arguments of a region by the names that they have in
its first call, with ``_`` for what is no letter or digit. Bodies of regions are left out unless asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import (
    bucket_of,
    calls_to,
    is_region_call,
    region_of,
)
from mirrorc.ir.program import Program, Region, Stage
from mirrorc.ir.variables import Placement
from mirrorc.printing.graph_text import graph_lines, rendered, statements
from mirrorc.printing.values import dtype_name, size_text, type_of

_LISTED_SLOTS = 4  # so many gradients are listed in a bucket's line


def program_to_text(
    program: Program,
    *,
    regions: bool = False,
    slots: bool = False,
    sources: bool = True,
    after: str = "",
    milliseconds: float | None = None,
) -> str:
    """A program as text, in the form above.

    Args:
        program: at any stage.
        regions: print the bodies of the regions, too.
        slots: print every gradient of a bucket, each on a line of its own.
        sources: print the user's source lines. Without them, the text stays the same when code moves in its file.
        after: the pass that the heading names.
        milliseconds: the time that the heading gives.
    """
    lines = [_heading(program, after, milliseconds)]
    ready = _ready_after(program)
    for bucket in program.buckets:
        lines += _bucket_lines(bucket, slots, ready.get(bucket.index, ""))
    lines += [f"# remark: {on_one_line(str(remark))}" for remark in program.remarks if remark.is_kept]
    for shard, graph in enumerate(program.shard_graphs):
        users = [str(d) for d, s in zip(program.devices, program.shard_of_replica, strict=True) if s == shard]
        lines += ["", f"def one_device({_signature(graph)}):  # will run on {', '.join(users)}"]
        lines += rendered(graph_lines(program, graph), sources)
    if program.graph is not None:
        lines += ["", "def all_devices():", *rendered(graph_lines(program, program.graph), sources)]
    lines += _device_functions(program, sources)
    for region in program.regions.values() if regions else ():
        lines += ["", *_region_lines(region, sources, _argument_names(program, region))]
    return "\n".join(lines) + "\n"


def region_to_text(region: Region, *, sources: bool = True) -> str:
    """A region's body as text."""
    return "\n".join(_region_lines(region, sources, {})) + "\n"


def on_one_line(text: str) -> str:
    """A text whose line breaks are written as in a Python string."""
    return "".join(repr(char)[1:-1] if char.splitlines() == [""] else char for char in text)


def _region_lines(region: Region, sources: bool, names: Mapping[str, str]) -> list[str]:
    body = region.graph_module.graph
    return [f"region {region.name}({_signature(body, names)}):", *rendered(statements(body, names), sources)]


def _argument_names(program: Program, region: Region) -> dict[str, str]:
    """What a region's arguments are called that are arguments of the step, too: fx calls ``input`` ``input_1``."""
    graphs = program.graphs()
    calls = (n for graph in graphs for n in graph.nodes if is_region_call(n) and region_of(n) == region.name)
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


def _heading(program: Program, after: str, milliseconds: float | None) -> str:
    parts = ["mirrorc", *([f"after {after}"] if after else []), f"stage {program.stage.name}"]
    parts += [_count(len(program.devices), "device"), _count(len(program.buckets), "bucket")]
    parts += [f"{milliseconds:.1f} ms"] if milliseconds is not None else []
    return "# " + " · ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _bucket_lines(bucket: Bucket, full: bool, ready_after: str) -> list[str]:
    slots = [f"{slot.variable}{list(slot.shape)}" for slot in bucket.slots]
    rule = bucket.rule.label + (" · shared" if bucket.placement is Placement.SHARED else "")
    rule += f" · ready after {ready_after}" if ready_after else ""
    head = f"# bucket {bucket.index}  {dtype_name(bucket.dtype)}  {size_text(bucket.num_bytes):>9}"
    if full:
        return [f"{head}  {_count(len(slots), 'gradient')}  {rule}", *(f"#     {slot}" for slot in slots)]
    if len(slots) > _LISTED_SLOTS:
        slots = [slots[0], slots[1], f"… {len(slots) - 3} more …", slots[-1]]
    return [f"{head}  {' '.join(slots)}  {rule}"]


def _ready_after(program: Program) -> dict[int, str]:
    """The region that gives the last gradient of each bucket on the first device, once buckets are packed."""
    found: dict[int, str] = {}
    graphs = program.graphs() if program.stage >= Stage.PACKED else []
    for node in calls_to(graphs[0], ops.pack) if graphs else ():
        parts = [part for gradient in node.all_input_nodes for part in _made_of(gradient)]
        calls = [part.args[0] for part in parts if part.args]
        regions = [call for call in calls if isinstance(call, fx.Node) and is_region_call(call)]
        found.setdefault(bucket_of(node), region_of(max(regions)) if regions else "")
    return found


def _made_of(gradient: fx.Node) -> list[fx.Node]:
    return gradient.all_input_nodes if gradient.target in ops.FACTORED else [gradient]


def _signature(graph: fx.Graph, names: Mapping[str, str] = MappingProxyType({})) -> str:
    placeholders = [(str(node.target), node.meta.get("val")) for node in graph.nodes if node.op == "placeholder"]
    return ", ".join(f"{names.get(name, name)}: {type_of(value)}" for name, value in placeholders)


def _device_functions(program: Program, sources: bool) -> list[str]:
    """The devices' programs; those that run the same are printed once."""
    printed: dict[str, list[int]] = {}
    for replica, module in enumerate(program.device_graphs.values()):
        text = "\n".join([_signature(module.graph), *rendered(graph_lines(program, module.graph), sources)])
        printed.setdefault(text, []).append(replica)
    lines = []
    for text, replicas in printed.items():
        signature, *body = text.split("\n")
        names = [program.devices[replica].name for replica in replicas]
        same = [f"{name} runs the same as replica {r}" for name, r in zip(names[1:], replicas[1:], strict=True)]
        comment = f"  # {'; '.join(same)}" if same else f"  # replica {replicas[0]}"
        lines += ["", f"def {re.sub(r'[^0-9A-Za-z]', '_', names[0])}({signature}):{comment}", *body]
    return lines
