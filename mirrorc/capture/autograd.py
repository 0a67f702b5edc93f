"""The front end that leaves forward and backward to PyTorch's autograd: a graph of two operators that run them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from mirrorc.capture.arguments import Constant
from mirrorc.capture.first_runs import first_runs
from mirrorc.capture.front_ends import FrontEnd, Traced
from mirrorc.capture.opaque_call import OpaqueCall
from mirrorc.capture.training_call import TrainingCall
from mirrorc.custom_ops.opaque_calls import register_call, run_backward, run_forward
from mirrorc.errors import CaptureError
from mirrorc.torch_internals import FakeTensorMode, JointGraph

_REMARK = (
    "forward and backward of a replica run as plain PyTorch (capture='autograd'): no pass looks into them, and no figure of "
    "memory has what they keep from forward to backward"
)


_FAKE_MODE = FakeTensorMode()  # one, so that graphs of several sizes of microbatches can be put together


class AutogradFrontEnd(FrontEnd):
    """Captures a step as two operators that run forward and backward as plain PyTorch, whatever Python does in them.

    Runs on the data of all shards tell which parameters get gradients, which buffers are written, and whether random numbers are
    drawn. What a later run does otherwise is an error of its step.
    """

    name = "autograd"
    guards_plain_values = True
    is_rung = True
    words = "forward and backward run as plain PyTorch"
    needs_data = True

    def trace(
        self,
        stack: contextlib.ExitStack,
        call: TrainingCall,
        leaves: Sequence[torch.Tensor],
        decompositions: Mapping[Any, Callable[..., Any]],
    ) -> Traced:
        what = type(call.model).__name__
        if call.keeps_outputs:
            raise CaptureError(
                f"capture='autograd', by which {what} is captured, gives the loss alone: nothing tells how outputs of its "
                "replicas belong together. Remedy: compile without return_outputs, and compute outputs with the model itself, "
                "under torch.no_grad()"
            )
        for module in call.modules():
            if isinstance(module, nn.SyncBatchNorm) and (module.training or module.running_mean is None):
                raise CaptureError(
                    f"{what} has a SyncBatchNorm in train mode, which takes statistics over all replicas, and those that run as "
                    "plain PyTorch have their own alone. Remedy: compile it with capture='dynamo', or use a BatchNorm"
                )
        opaque = OpaqueCall(call, what)
        found = first_runs(opaque, call, call.data or [leaves], what)
        opaque.recorded = found.recorded
        joint = _joint_graph(opaque, leaves)
        joint.written_inputs = found.written_inputs
        return Traced(joint, HeldCall(opaque, call), found.notes, remarks=(_REMARK,))


class HeldCall:
    """Guards that hold the call which a graph's operators run.

    Each run reads what Python has then. Plain arguments and numbers of modules are watched even so, because what a run uses may
    follow from them: first runs with others tell.

    Args:
        call: what runs.
        training_call: with the plain values of first runs; guards are asked about those that it has then.
    """

    numbers: tuple[int | float, ...] = ()
    draws: Sequence[object] = ()

    def __init__(self, call: OpaqueCall, training_call: TrainingCall) -> None:
        self._call, self._training_call = call, training_call
        self._plain = {name: Constant(value) for name, value in training_call.plain.items()}
        self._numbers = [
            (attributes, key, Constant(value))
            for module in training_call.modules()
            for attributes in (vars(module),)
            for key, value in attributes.items()
            if type(value) in (int, float)
        ]

    def use_draws(self) -> Callable[[], None]:
        """Nothing is drawn of Python's random."""
        return lambda: None

    def changed_numbers(self) -> list[str]:
        """No number is a constant of the graph."""
        return []

    def hold(self) -> bool:
        """Whether plain arguments and numbers are those of first runs."""
        return not self.broken()

    def broken(self) -> str:
        """The name of the first that is another; empty if none is."""
        plain = self._training_call.plain
        for name, value in self._plain.items():
            if plain.get(name) is not value.value and Constant(plain.get(name)) != value:
                return name
        for attributes, key, value in self._numbers:
            if attributes.get(key) is not value.value and Constant(attributes.get(key)) != value:
                return f"self.{key}"
        return ""


def _joint_graph(call: OpaqueCall, leaves: Sequence[torch.Tensor]) -> JointGraph:
    """The graph of forward and backward of a call, of which the first run is known."""
    fake_mode, graph, recorded = _FAKE_MODE, fx.Graph(), call.recorded
    device = next(iter(call.parameters.values())).device

    def given(name: str, value: torch.Tensor) -> fx.Node:
        node = graph.placeholder(name)
        with fake_mode:
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        node.meta["val"] = like
        return node

    def call_operator(target: Any, *args: Any) -> list[fx.Node]:
        """The parts of what an operator gives."""
        node = graph.call_function(target, args)
        with fake_mode:
            node.meta["val"] = target(*fx.node.map_arg(args, lambda one: one.meta["val"]))
        parts = [graph.call_function(operator.getitem, (node, i)) for i in range(len(node.meta["val"]))]
        for part, value in zip(parts, node.meta["val"], strict=True):
            part.meta["val"] = value
        return parts

    arguments = [given(f"leaf_{i}", leaf) for i, leaf in enumerate(leaves)]
    parameters = [given(f"parameter_{i}", value) for i, value in enumerate(call.parameters.values())]
    buffers = [given(f"buffer_{i}", value) for i, value in enumerate(call.buffers.values())]
    tangent = given("tangent", torch.empty((), dtype=recorded.loss_dtype, device=device))
    seed = given("seed", torch.empty((), dtype=torch.int64)) if recorded.draws else None
    number = register_call(call)
    loss, token, *written = call_operator(
        run_forward, number, seed, arguments, parameters, buffers, recorded.loss_dtype, list(recorded.written)
    )
    gradients = call_operator(run_backward, number, token, tangent, [parameters[place] for place in recorded.gradients])
    graph.output((loss, *written, *gradients))
    names = [*call.parameters]
    return JointGraph(
        fx.GraphModule({}, graph),
        fake_mode,
        tangent,
        loss,
        leaf_of={node: i for i, node in enumerate(arguments)},
        variable_of=dict(zip([*parameters, *buffers], [*call.parameters, *call.buffers], strict=True)),
        gradients={names[i]: node for i, node in zip(recorded.gradients, gradients, strict=True)},
        buffer_writes={[*call.buffers][i]: node for i, node in zip(recorded.written, written, strict=True)},
        seed=seed,
    )
