"""Compiles regions, once per torch device. Interface and registry of the backends."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from mirrorc.ir.program import Region
from mirrorc.torch_internals import lazy_graph_module

RegionFunction = Callable[[list[Any]], Any]
"""A function that takes a list of arguments, empties it, and returns a sequence of outputs."""


class Backend(ABC):
    """A compiler of regions. A user's backend overrides `compile`, and other methods as needed.

    Attributes:
        name: the name in ``mirrorc.Compiler(backend=name)``.
    """

    name: ClassVar[str]

    def objection(self, device: torch.device) -> str:
        """Why the backend does not support a device; empty if it does."""
        return ""

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Decompositions of ATen operators during capture."""
        return {}

    def preferences(self, device: torch.device) -> dict[str, bool]:
        """Options of `mirrorc.passes.default_pipeline` that suit the backend's code on a device."""
        return {"reserves_memory": device.type == "cpu"}

    def prepare(self, device: torch.device) -> None:  # noqa: B027 - there need be nothing to wait for
        """Starts background work for the first region, before capture."""

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which regions compile in parallel. The compiled functions must not be called inside it."""
        return contextlib.nullcontext()

    def second_try(self, error: Exception) -> contextlib.AbstractContextManager[Any] | None:
        """A context in which to compile again after an error; None if that would not help."""
        return None

    @abstractmethod
    def compile(self, graph_module: fx.GraphModule, name: str, num_threads: int) -> RegionFunction:
        """Compiles a region.

        Args:
            graph_module: the region's body on its device; placeholders and results have fake values.
        """


_backends: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Registers a backend under its name.

    Raises:
        ValueError: another backend has this name.
    """
    if backend.name in _backends:
        raise ValueError(f"MC4005: there is a backend {backend.name!r} already: give this one another name")
    _backends[backend.name] = backend


def unregister_backend(name: str) -> None:
    del _backends[name]


def backend_named(name: object) -> Backend:
    backend = _backends.get(name) if isinstance(name, str) else None
    if backend is None:
        raise ValueError(f"MC1002: backend is {name!r}: choose one of {', '.join(_backends)}")
    return backend


logger = logging.getLogger(__name__)


class RegionCompiler:
    def __init__(self, backend: Backend, num_threads: int) -> None:
        self.backend = backend
        self.num_threads = num_threads
        self._compiled: dict[tuple[int, torch.device], tuple[Region, RegionFunction]] = {}

    def prepare(self, device: torch.device) -> None:
        self.backend.prepare(device)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        before = dict(self._compiled)
        try:
            with self.backend.together():
                yield
        except BaseException:
            self._compiled = before  # the others have no kernels
            raise

    def compile_all(
        self, wanted: Sequence[tuple[Region, torch.device]], on_compiled: Callable[[], object] = lambda: None
    ) -> list[RegionFunction]:
        """Compiles regions in parallel; ``on_compiled`` is called after each.

        After a failure, compiles all regions again if the backend has a `second_try`.

        Raises:
            Exception: the error of the first attempt.
        """
        try:
            with self.together():
                functions = []
                for region, device in wanted:
                    functions.append(self.compile(region, device))
                    on_compiled()
                return functions
        except Exception as error:
            again = self.backend.second_try(error)
            if again is None:
                raise
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            logger.warning(
                "regions could not be compiled (%s); trying without the files of earlier compilations", reason
            )
            logger.debug("the first try has failed", exc_info=error)
            try:
                with again, self.together():
                    return [self.compile(region, device) for region, device in wanted]
            except Exception as other:
                logger.debug("the second try has failed, too", exc_info=other)
                raise error from None

    def keep_only(self, regions: Iterable[Region]) -> None:
        ids = {id(region) for region in regions}
        self._compiled = {key: value for key, value in self._compiled.items() if key[0] in ids}

    def compile(self, region: Region, device: torch.device) -> RegionFunction:
        key = (id(region), device)
        if key not in self._compiled:
            graph_module = retarget(region.graph_module, device)
            self._compiled[key] = (region, self.backend.compile(graph_module, region.name, self.num_threads))
        return self._compiled[key][1]


def retarget(graph_module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Copies a region for another device of the same kind."""
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
