"""The result of torch's export of a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from mirrorc.torch_internals.symbols.symbolic_sizes import SizesOfArguments


class NumberInput(NamedTuple):
    """A Python number among a graph's inputs. ``text`` is the code that computes it."""

    name: str
    text: str
    kind: type
    expression: str


@dataclass
class JointGraph:
    """AOTAutograd's graph of forward and backward, or of forward alone.

    Attributes:
        leaf_of, number_of: indices of tensor arguments and Python numbers, by placeholder.
        variable_of: names of variables, by placeholder or get_attr node.
        seed: the replica's seed; None if unused.
        tangent, loss: None without backward; an evaluation's loss is in ``outputs``.
        gradients: by parameter; None if the parameter gets no gradient.
        gradients_of_leaves: by the index of the tensor argument; None if it gets no gradient.
        buffer_writes: the new value, by buffer.
        written_inputs: other writes of forward: ("parameter", name), ("argument", index), or ("buffer", name) if the
            new value has a gradient.
        looked_up: parameters with only ``sparse=True`` lookups.
        sizes: None if all sizes are constants.
    """

    graph_module: fx.GraphModule
    fake_mode: Any
    tangent: fx.Node | None = None
    loss: fx.Node | None = None
    outputs: dict[str, fx.Node] = field(default_factory=dict)
    leaf_of: dict[fx.Node, int] = field(default_factory=dict)
    number_of: dict[fx.Node, int] = field(default_factory=dict)
    numbers: tuple[NumberInput, ...] = ()
    variable_of: dict[fx.Node, str] = field(default_factory=dict)
    gradients: dict[str, fx.Node | None] = field(default_factory=dict)
    gradients_of_leaves: dict[int, fx.Node | None] = field(default_factory=dict)
    buffer_writes: dict[str, fx.Node] = field(default_factory=dict)
    written_inputs: list[tuple[str, str]] = field(default_factory=list)
    looked_up: frozenset[str] = frozenset()
    outside: dict[str, Any] = field(default_factory=dict)
    seed: fx.Node | None = None
    sizes: SizesOfArguments | None = None

    def fake_seed(self) -> torch.Tensor:
        with self.fake_mode:
            return torch.empty((), dtype=torch.int64)

    def constant(self, node: fx.Node) -> torch.Tensor:
        return _attribute(self.graph_module, str(node.target))


def _attribute(module: nn.Module, path: str) -> torch.Tensor:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value
