"""What tests of passes share: a backend that runs the operators that Inductor gets, without compiling them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from mirrorc.runtime.codegen.eager import EagerBackend
from mirrorc.runtime.codegen.regions import register_backend, unregister_backend
from mirrorc.torch_internals import inductor_decompositions


class Decomposed(EagerBackend):
    name = "decomposed"

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return inductor_decompositions()

    def preferences(self, device: torch.device) -> dict[str, bool]:
        return {"recomputes": True}


@pytest.fixture
def decomposed() -> Iterator[None]:
    """Within the test, ``backend="decomposed"`` names that backend."""
    register_backend(Decomposed())
    yield
    unregister_backend(Decomposed.name)
