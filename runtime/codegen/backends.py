"""The interface and the registry of backends, which make regions executable."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import fx

RegionFunction = Callable[[list[Any]], Any]
"""A function that takes a list of arguments, which it empties, and returns a sequence of outputs."""


class Backend(ABC):
    """Makes the bodies of regions executable. A backend of your own overrides `compile`, and other methods where it differs.

    Attributes:
        name: the name that users write in ``mirrorc.compile(..., backend=name)``.
    """

    name: ClassVar[str]

    def objection(self, device: torch.device) -> str:
        """Says why the backend cannot compile for a device on this machine; an empty text if it can."""
        return ""

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """The decompositions of ATen operators that are applied during capture."""
        return {}

    def preferences(self, device: torch.device) -> dict[str, bool]:
        """The options of `mirrorc.passes.default_pipeline` that make the backend's code faster on a device, or keep its bits."""
        return {"reserves_memory": device.type == "cpu"}

    def prepare(self, device: torch.device) -> None:  # noqa: B027 - there need be nothing to wait for
        """Starts background work that the first region waits for; called before a program is captured."""

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which regions may be compiled in parallel; their functions must not be called before its end."""
        return contextlib.nullcontext()

    def second_try(self, error: Exception) -> contextlib.AbstractContextManager[Any] | None:
        """A context in which regions are compiled again after an error; None if that would change nothing."""
        return None

    @abstractmethod
    def compile(self, graph_module: fx.GraphModule, name: str, num_threads: int) -> RegionFunction:
        """Makes a region executable.

        Args:
            graph_module: the region's body on its device; placeholders and results have fake values.
            name: the name of the region.
            num_threads: the number of threads that the region may use on the CPU.
        """


_backends: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Makes a backend known by its name.

    Raises:
        ValueError: another backend has this name.
    """
    if backend.name in _backends:
        raise ValueError(f"there is a backend {backend.name!r} already: give this one another name")
    _backends[backend.name] = backend


def unregister_backend(name: str) -> None:
    """Makes a backend unknown, so that its name is free again."""
    del _backends[name]


def backend_named(name: object) -> Backend:
    """The backend of this name.

    Raises:
        ValueError: there is none; lists those that there are.
    """
    backend = _backends.get(name) if isinstance(name, str) else None
    if backend is None:
        raise ValueError(f"backend is {name!r}: choose one of {', '.join(_backends)}")
    return backend
