"""A backend that is declared outside of the package works like those within it."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from references import train_mirrored, train_on_one_device
from tiny_models import make_mlp, mlp_batch
from torch import fx
from torch.nn import functional as F

import mirrorc
from mirrorc.runtime.codegen.regions import Backend, RegionFunction, register_backend, unregister_backend


class InterpretingBackend(Backend):
    name = "interpreting"

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, graph_module: fx.GraphModule, name: str, num_threads: int) -> RegionFunction:
        self.compiled.append(name)

        def run(arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            given = list(arguments)
            arguments.clear()
            return tuple(fx.Interpreter(graph_module).run(*given))

        return run


@pytest.fixture
def backend() -> Iterator[InterpretingBackend]:
    own = InterpretingBackend()
    register_backend(own)
    yield own
    unregister_backend(own.name)


@pytest.mark.slow
def test_a_backend_from_outside_trains_as_one_device_does(backend: InterpretingBackend) -> None:
    batches = [mlp_batch(6, seed=seed) for seed in range(3)]
    make_optimizer = partial(torch.optim.SGD, lr=0.1)
    expected = train_on_one_device(make_mlp(), make_optimizer, batches, F.cross_entropy)
    found = train_mirrored(make_mlp(), make_optimizer, batches, 2, F.cross_entropy, backend="interpreting")
    assert {name.partition("_")[0] for name in backend.compiled} == {"fwd", "bwd"}
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-10, atol=0.0)
    for mine, theirs in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_a_name_is_taken_once(backend: InterpretingBackend) -> None:
    with pytest.raises(ValueError, match="there is a backend 'interpreting' already: give this one another name"):
        register_backend(InterpretingBackend())


def test_an_unknown_backend_is_refused() -> None:
    model = make_mlp()
    with pytest.raises(ValueError, match="backend is 'interpreting': choose one of inductor, eager"):
        mirrorc.compile(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            compiler=mirrorc.Compiler(backend="interpreting"),
        )
