"""`Compiler`: how a step is traced and compiled."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from types import NoneType
from typing import ClassVar, Literal

from mirrorc.capture.front_ends.front_end import ladder_named
from mirrorc.messages.problem import problem
from mirrorc.options.option import WITHOUT_OPTIMIZER, Exclusion, OptionGroup, Request, option
from mirrorc.pipeline.pipeline_edits import Placed
from mirrorc.pipeline.protocol import Pass
from mirrorc.runtime.codegen.regions import backend_named

# Backends and front ends from outside of the package may have any name; these are the package's own.
BackendName = Literal["inductor", "eager"] | str
FrontEndName = Literal["auto", "dynamo", "autograd"] | str


def _over_workers(request: Request) -> str:
    return "a graph does not replay what joins workers" if request.workers.are_several else ""


def _no_gpu(request: Request) -> str:
    return "" if request.device_type == "cuda" else "a graph is of a GPU"


def _several_devices(request: Request) -> str:
    return "" if len(request.devices) == 1 else "devices wait for one another in Python between their calls"


def _finite_check_in_a_graph(request: Request) -> str:
    if not any(entry.name == "check-finite" for entry in request.pipeline):
        return ""
    return "the host looks at what is finite in every step, before anything is written, and a graph runs without it"


@dataclass(frozen=True, kw_only=True)
class Compiler(OptionGroup):
    """How a step is traced and compiled, for ``compiler=`` of `mirrorc.compile`.

    Attributes:
        backend: "inductor" compiles regions; "eager" runs them as they are.
        capture: the front end that traces the model. "dynamo" traces graphs for compiled regions. "autograd" runs
            forward and backward as plain PyTorch, for untraceable Python and control flow that depends on data. "auto"
            tries them in this order; if "dynamo" fails, a warning and a remark give the reason.
        dynamic: None uses symbols for sizes that change: the first training call has its own program, and the second
            size of a dimension compiles another one for all further sizes. True uses symbols from the first program on;
            False compiles each new size. Some sizes are never symbols, such as numbers of examples with microbatches.
        exact_order: leave out passes that change the bits of a step, such as ``factor-gradients``. Gradients are those
            of the model's backward, added in the order of replicas. A remark names the passes.
        cuda_graphs: on one GPU, capture the step as a CUDA graph after a few calls, and replay it. This helps if Python
            launches kernels more slowly than the GPU runs them. Times are not recorded.
        passes: a pipeline of your own, instead of `mirrorc.passes.default_pipeline`. Options of its passes, such as
            buckets and the link, must be set in the passes.
        add: passes of your own, each placed by `mirrorc.before` or `mirrorc.after` a pass of the pipeline.
        disable: names of passes to leave out.

    Raises:
        TypeError, ValueError: a field has another kind or value; names it and the remedy.
    """

    keyword: ClassVar[str] = "compiler"

    backend: BackendName = option("inductor")
    capture: FrontEndName = option("auto")
    dynamic: bool | None = option(
        None,
        "say False, to compile each new size, None, for symbols in place of sizes that change, or True, for symbols from the "
        "first call on",
        kinds=(bool, NoneType),
    )
    exact_order: bool = option(False, "say True, to leave out passes that change bits, or False", kinds=(bool,))
    cuda_graphs: bool = option(
        False,
        "say True, for one GPU, or False",
        kinds=(bool,),
        excludes=(
            WITHOUT_OPTIMIZER,
            Exclusion("over several workers yet", _over_workers),
            Exclusion("on {request.device_names}", _no_gpu),
            Exclusion(
                "on {request.device_names}", _several_devices, "leave cuda_graphs= out, or devices=['cuda:0'], one GPU"
            ),
            Exclusion("check_finite", _finite_check_in_a_graph, needs_pipeline=True),
        ),
    )
    passes: Sequence[Pass] | None = option(
        None, "give a list of passes, or None for mirrorc.passes.default_pipeline()", kinds=(Sequence, NoneType)
    )
    add: Sequence[Placed] = option((), "give a list, such as [mirrorc.after('pack-gradients', it)]", kinds=(Sequence,))
    disable: Sequence[str] = option((), "give a sequence of names, such as ('replicate',)", kinds=(Sequence, Set))

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.capture, str) and self.capture == "trace":
            why = "'auto' falls back to 'autograd' for the models that it took"
            fix = "compiler=mirrorc.Compiler(capture='autograd')"
            raise problem(ValueError, "MC1006: capture='trace' was withdrawn", why, fix)
        backend_named(self.backend)
        ladder_named(self.capture)
