"""Makes regions executable: as they are, or compiled by Inductor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from mirrorc.ir.program import Region
from mirrorc.runtime.codegen.graph_function import generate
from mirrorc.torch_internals import (
    compile_with_inductor,
    inductor_decompositions,
    kernels_compiled_together,
    lazy_graph_module,
    prepare_cpp_compiler,
)

BACKENDS = ("inductor", "eager")
RegionFunction = Callable[[list[Any]], Any]


def decompositions_for(backend: str) -> Mapping[Any, Callable[..., Any]]:
    """The decompositions to capture with."""
    return inductor_decompositions() if backend == "inductor" else {}


def preferences(backend: str, device: torch.device) -> dict[str, bool]:
    """What the code of a backend is faster with, as options of `mirrorc.passes.default_pipeline`.

    Inductor's convolutions on CPUs are oneDNN's, which are faster in channels-last format; its tanh is slow. An eager GELU is one
    operator, whose tanh costs little.
    """
    is_onednn = device.type == "cpu" and torch.backends.mkldnn.is_available()
    return {
        "gelu_by_sigmoid": backend == "inductor",
        "channels_last": backend == "inductor" and is_onednn,
    }


class RegionCompiler:
    """Compiles regions, each once for every torch device: logical devices on one processor share the code.

    Args:
        backend: one of BACKENDS.
        num_threads: threads that a region may use on the CPU.
    """

    def __init__(self, backend: str, num_threads: int) -> None:
        self.backend = backend
        self.num_threads = num_threads
        self._compiled: dict[tuple[int, torch.device], tuple[Region, RegionFunction]] = {}

    def prepare(self, device: torch.device) -> None:
        """Begins in the background what the first region has to wait for; to be called before a program is captured."""
        if self.backend == "inductor" and device.type == "cpu":
            prepare_cpp_compiler()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within, regions are compiled side by side; their functions can be called from its end on."""
        before = dict(self._compiled)
        try:
            with kernels_compiled_together() if self.backend == "inductor" else contextlib.nullcontext():
                yield
        except BaseException:
            self._compiled = before  # the others have no kernels
            raise

    def compile(self, region: Region, device: torch.device) -> RegionFunction:
        """The region as a function of a list of arguments, which it empties, to a sequence of outputs."""
        key = (id(region), device)
        if key not in self._compiled:
            graph_module = retarget(region.graph_module, device)
            if self.backend == "eager":
                function = generate(region.name, graph_module.graph, lambda node: node.target).call
            else:
                placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
                examples = [node.meta["val"] for node in placeholders]
                function = compile_with_inductor(graph_module, examples, self.num_threads)
            self._compiled[key] = (region, function)
        return self._compiled[key][1]


def retarget(graph_module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy of a region for another device of its kind: device arguments and (fake) values are made anew."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, values))
    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, lambda a: _moved(a, device))
        node.kwargs = fx.node.map_aggregate(node.kwargs, lambda a: _moved(a, device))
        if "val" in node.meta:
            node.meta["val"] = fx.node.map_aggregate(node.meta["val"], lambda a: _moved(a, device))
    return lazy_graph_module({}, graph, type(graph_module).__name__)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.device) and value.type == device.type:
        return device
    if isinstance(value, torch.Tensor) and value.device.type == device.type and value.device != device:
        with value.fake_mode:  # type: ignore[attr-defined]
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return value
