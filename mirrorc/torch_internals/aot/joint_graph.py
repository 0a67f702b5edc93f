"""The result of torch's export of a graph, without effect tokens and states of GPU generators."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

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
        written_inputs: other writes: ("parameter", name), ("argument", index), or ("buffer", name) with a gradient.
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
        tensor: torch.Tensor = operator.attrgetter(str(node.target))(self.graph_module)
        return tensor


_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_KEPT = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def checkpoint_tag(node: fx.Node) -> tuple[int, bool] | None:
    """The number of an operator's checkpoint, and True if its result is saved; None outside of checkpoints.

    Raises:
        ValueError: the policy neither saves nor recomputes the result.
    """
    policy = node.meta.get("recompute")
    if policy is None:
        return None
    if policy not in (*_RECOMPUTED, *_KEPT):
        raise ValueError(str(policy))
    return int(node.meta.get("ac_graph_id", 0)), policy in _KEPT


@contextlib.contextmanager
def ordered_linalg_checks() -> Iterator[None]:
    """Registers checks of ``torch.linalg`` results as side effects, because torch 2.11 would drop them."""
    from torch._higher_order_ops import effects

    name = "aten::_linalg_check_errors"
    if effects._get_effect(name) is not None:
        yield
        return
    handle = effects._register_effectful_op(name, effects._EffectType.ORDERED)
    try:
        yield
    finally:
        handle.destroy()


def remove_effect_tokens(graph_module: fx.GraphModule) -> None:
    """Also turns checks of ``torch.linalg`` results into asserts."""
    from torch._functorch._aot_autograd import descriptors as d
    from torch._higher_order_ops.effects import with_effects

    graph = graph_module.graph
    for node in graph.find_nodes(op="call_function", target=with_effects):
        called: Any = node.args
        token, target, *args = called
        with graph.inserting_before(node):
            if target is torch.ops.aten._linalg_check_errors.default:
                _assert_is_computed(graph, node, args[0], str(args[1]))
                result = None
            else:
                result = graph.call_function(target, tuple(args), dict(node.kwargs))
                result.meta = {**node.meta, "val": _part(node.meta["val"], 1)}
        for user in list(node.users):
            user.replace_all_uses_with(token if user.args[1] == 0 else result)
            graph.erase_node(user)
        graph.erase_node(node)
    output = graph.output_node()
    results: Any = output.args[0]
    tokens = d.ForwardTokenAOTOutput | d.BackwardTokenAOTOutput
    plain = [pair for pair in zip(results, output.meta["desc"], strict=True) if not isinstance(pair[1], tokens)]
    output.args = (tuple(value for value, _ in plain),)
    output.meta["desc"] = [kind for _, kind in plain]
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["desc"], d.ForwardTokenAOTInput | d.BackwardTokenAOTInput):
            graph.erase_node(node)


def _part(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list | tuple) and len(value) > index else None


def _assert_is_computed(graph: fx.Graph, like: fx.Node, info: fx.Node, name: str) -> None:
    aten = torch.ops.aten
    text = f"{name} failed: a matrix is singular, not positive definite, or has entries that are not finite"
    node, value = info, info.meta["val"]
    for target, constants in ((aten.ne.Scalar, (0,)), (aten.any.default, ()), (aten.logical_not.default, ())):
        node = graph.call_function(target, (node, *constants))  # Inductor has no aten.all
        with value.fake_mode:
            value = target(value, *constants)
        node.meta = {**like.meta, "val": value}
    graph.call_function(aten._assert_async.msg, (node, text)).meta = {**like.meta, "val": None}


@contextlib.contextmanager
def no_states_of_gpus() -> Iterator[None]:
    from torch._decomp.decompositions_for_rng import PhiloxState
    from torch._functorch import config

    def reset(self: Any) -> None:
        self.seed = self.base_offset = None
        self.relative_offset, self.offset_advanced_at_least_once = 0, False

    if config.functionalize_rng_ops:
        yield
        return
    with patch.object(PhiloxState, "reset", reset):
        yield
