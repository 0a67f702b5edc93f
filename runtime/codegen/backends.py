"""Interface and registry of the backends that compile regions."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import fx

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
