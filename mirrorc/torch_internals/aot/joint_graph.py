"""Result of torch's export of a graph, in mirrorc's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from mirrorc.torch_internals.symbols.symbolic_sizes import SizesOfArguments


class NumberInput(NamedTuple):
    """A Python number that a graph takes.

    Attributes:
        name: the user's name for it, or for its operands.
        text: Python's computation; empty if the user's code has the number itself.
        expression: the exact computation; graphs share the number of equal expressions.
    """

    name: str
    text: str
    kind: type
    expression: str


@dataclass
class JointGraph:
    """AOTAutograd's graph of forward and backward, or of forward alone.

    Attributes:
        leaf_of: placeholder to index of the tensor argument.
        number_of: placeholder to index of its Python number, a scalar tensor.
        variable_of: placeholder (or get_attr node) to name of the parameter, buffer or constant.
        seed: the placeholder of the replica's seed, if an operator takes it.
        tangent: the placeholder of the loss's gradient; None without backward.
        loss: None without backward, where it is an output.
        outputs: nodes of the step's other results by name.
        gradients: parameter name to its gradient's node or None.
        buffer_writes: buffer name to the node of its new value.
        written_inputs: other writes of forward, as ("parameter", name) or ("argument", index), and ("buffer", name) for
            a value with a gradient.
        looked_up: parameters with only lookups for sparse gradients, set by the front end.
        outside: variables outside of model and loss by name in ``variable_of``, set by the front end.
        sizes: None if all sizes are numbers.
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
