"""The backend that runs the captured operators as they are."""

from __future__ import annotations

from torch import fx

from mirrorc.runtime.codegen.backends import Backend, RegionFunction
from mirrorc.runtime.codegen.graph_function import generate


class EagerBackend(Backend):
    """Calls one operator after the other. Compiling takes no time, and an error names the operator that has failed."""

    name = "eager"

    def compile(self, graph_module: fx.GraphModule, name: str, num_threads: int) -> RegionFunction:
        return generate(name, graph_module.graph, lambda node: node.target).call
