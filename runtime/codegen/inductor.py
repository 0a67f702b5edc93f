"""The backend with torch's Inductor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from mirrorc.custom_ops import out_products
from mirrorc.custom_ops.eager_calls import OPAQUE
from mirrorc.runtime.codegen.eager import EagerBackend
from mirrorc.runtime.codegen.regions import Backend, RegionFunction
from mirrorc.runtime.codegen.unfolded_dims import unfold_dims
from mirrorc.runtime.devices.events import made_current
from mirrorc.torch_internals import (
    call_directly,
    compile_with_inductor,
    fresh_kernel_files,
    has_cpp_compiler,
    inductor_decompositions,
    keep_small_loops_small,
    kernels_compiled_together,
    prepare_cpp_compiler,
)

_PRODUCTS = {
    out_products.mm_into: "extern_kernels.mm({1}, {2}, out={0})",
    out_products.linear_into: "extern_kernels.addmm({1}, {2}, {3}, alpha=1, beta=1, out={0})",
    out_products.addmm_into: "extern_kernels.addmm({0}, {1}, {2}, alpha=1, beta=1, out={0})",
}
"""Calls in Inductor's code that replace mirrorc's opaque operators."""


class InductorBackend(Backend):
    """Compiles each region to fused kernels: C++ on CPUs, Triton on GPUs."""

    name = "inductor"

    def objection(self, device: torch.device) -> str:
        return "no C++ compiler was found" if device.type == "cpu" and not has_cpp_compiler() else ""

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return inductor_decompositions()

    def preferences(self, device: torch.device) -> dict[str, bool]:
        """oneDNN's convolutions are faster in channels-last format, and Inductor's tanh is slow."""
        is_onednn = device.type == "cpu" and torch.backends.mkldnn.is_available()
        options = {"gelu_by_sigmoid": True, "channels_last": is_onednn, "recomputes": True, "reuses_arguments": True}
        options["pads_products"] = device.type == "cuda"
        return {**super().preferences(device), **options}

    def prepare(self, device: torch.device) -> None:
        if device.type == "cpu":
            prepare_cpp_compiler()

    def together(self) -> contextlib.AbstractContextManager[Any]:
        return kernels_compiled_together()

    def second_try(self, error: Exception) -> contextlib.AbstractContextManager[Any] | None:
        """A context without Inductor's cached files, which may be corrupt; None if memory is exhausted."""
        return None if isinstance(error, MemoryError) else fresh_kernel_files()

    def compile(self, graph_module: fx.GraphModule, name: str, num_threads: int) -> RegionFunction:
        if any(node.target in OPAQUE for node in graph_module.graph.nodes):  # nothing to fuse
            return EagerBackend().compile(graph_module, name, num_threads)
        for operator, call in _PRODUCTS.items():
            call_directly(operator, call)
        if unfold_dims(graph_module.graph):
            graph_module.recompile()
        keep_small_loops_small(graph_module.graph, num_threads)
        examples = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
        tensors = [value for value in examples if isinstance(value, torch.Tensor)]
        devices = {value.device for value in tensors if value.device.type == "cuda"}
        with made_current(next(iter(devices), None)):  # Inductor tunes and loads kernels on the current GPU
            return compile_with_inductor(graph_module, examples, num_threads)
