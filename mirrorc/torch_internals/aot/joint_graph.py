"""The result of torch's export of a graph, with mirrorc's own names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from mirrorc.torch_internals.symbols.symbolic_sizes import SizesOfArguments


class NumberInput(NamedTuple):
    """A Python number that a graph takes.

    Attributes:
        name: the user's name for it, or for what it is computed of.
        text: how Python computes it; empty if the user's code has the very number.
        kind: its type.
        expression: what computes it, exactly; graphs that have the same one take the same number.
    """

    name: str
    text: str
    kind: type
    expression: str


@dataclass
class JointGraph:
    """The graph of forward and backward, or of forward alone, that AOTAutograd returns, with plain names for its descriptors.

    Attributes:
        graph_module: the functional graph.
        leaf_of: placeholder to index of the tensor argument.
        number_of: placeholder to index of the Python number that it takes as a scalar tensor.
        numbers: what the user calls these numbers, and how Python computes those that it computes.
        variable_of: placeholder (or get_attr node) to name of the parameter, buffer or constant.
        seed: the placeholder for the replica's seed, if an operator takes it already.
        tangent: the placeholder for the gradient of the loss; None in a graph of forward alone.
        loss: the node of the loss; None in a graph of forward alone, where it is one of the outputs.
        outputs: what the step returns beside the loss: the nodes by name.
        gradients: parameter name to the node of its gradient; None if it has no gradient.
        buffer_writes: buffer name to the node of its new value.
        written_inputs: other inputs that the forward writes, as ("parameter", name) or ("argument", index); and buffers to
            which it writes a value with a gradient, as ("buffer", name).
        fake_mode: the mode of the graph's fake tensors.
        looked_up: the names of parameters with lookups for sparse gradients alone, set by the front end.
        outside: the variables of modules that neither model nor loss holds, by their names in ``variable_of``, likewise.
        sizes: its symbols; None if all sizes are numbers.
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
        """A fake tensor like a replica's seed."""
        with self.fake_mode:
            return torch.empty((), dtype=torch.int64)

    def constant(self, node: fx.Node) -> torch.Tensor:
        """The tensor that a get_attr node names."""
        return _attribute(self.graph_module, str(node.target))


def _attribute(module: nn.Module, path: str) -> torch.Tensor:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value
