"""The front end of plain PyTorch."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn

from mirrorc.capture.call.call_arguments import Constant
from mirrorc.capture.call.traced_loss import TracedLoss
from mirrorc.capture.call.traced_outputs import TracedOutputs
from mirrorc.capture.dynamo.traced_substitutes import has_substitute, synchronizes
from mirrorc.capture.eager.eager_call import OpaqueCall
from mirrorc.capture.eager.trial_run import first_runs
from mirrorc.capture.front_ends.front_end import FrontEnd, Traced
from mirrorc.capture.model.transient_attributes import CARRIED
from mirrorc.custom_ops.eager_calls import register_call, run_evaluation, run_forward, sizes_of, take_gradient
from mirrorc.custom_ops.output_tangents import output_tangent
from mirrorc.errors import CaptureError
from mirrorc.ir.program import LOSS_OUTPUT
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import Decompositions, FakeTensorMode, JointGraph

_REMARK = (
    "forward and backward of a replica run as plain PyTorch (capture='autograd'): no pass looks into them, and no figure of "
    "memory has what they keep from forward to backward. A region of backward takes its gradients when all of them are there, "
    "while backward goes on"
)


_REMARK_ON_EVALUATION = (
    "forward of a replica runs as plain PyTorch (capture='autograd'): no pass looks into it, and no figure of memory has what it "
    "takes meanwhile"
)

_ON_EXCHANGES = "replicas wait for each other wherever forward or backward asks for values of all replicas"

logger = logging.getLogger(__name__)


@functools.cache
def _fake_mode() -> FakeTensorMode:
    """Shared, so that graphs of microbatches of several sizes can be joined. Created late, because this imports Dynamo."""
    return FakeTensorMode()


class AutogradFrontEnd(FrontEnd):
    """Captures a step as operators that run forward and backward as plain PyTorch.

    One operator runs forward. One operator per parameter returns its gradient, so that backward can be split between
    buckets. First runs on the data of all shards show the order of gradients, written buffers and random draws.
    """

    name = "autograd"
    words = "forward and backward run as plain PyTorch"
    needs_data = True

    def trace(
        self, stack: ExitStack, call: TracedLoss, leaves: Sequence[torch.Tensor], decompositions: Decompositions
    ) -> Traced:
        _refuse_other_norms(call)
        opaque = OpaqueCall(call)
        trials = first_runs(opaque, call.data or [leaves], leaves)
        opaque.recorded = trials.recorded
        joint = _joint_graph(opaque, leaves) if call.trains else _forward_graph(opaque, leaves)
        joint.written_inputs = trials.written_inputs
        remarks = (
            _REMARK if call.trains else _REMARK_ON_EVALUATION,
            *([_ON_EXCHANGES] if opaque.recorded.exchanges else []),
        )
        buffers = [*opaque.buffers]
        alike = [buffers[place] for place in sorted(trials.recorded.alike)]
        return Traced(
            joint,
            EagerGuards(opaque, call),
            trials.notes,
            opaque.recorded.outputs,
            remarks,
            alike,
            undefined=trials.undefined,
            written_rows=trials.rows,
            means_of_shards=tuple(map(tuple, trials.means)),
        )

    def trace_outputs(self, call: TracedLoss, leaves: Sequence[torch.Tensor]) -> TracedOutputs | None:
        """Runs the first shard with its first example repeated. None if the run fails."""
        shard = (call.data or [()])[0]
        grown = [
            leaf if leaf.shape == like.shape else torch.cat([leaf, leaf[:1]])
            for leaf, like in zip(shard, leaves, strict=False)
        ]
        if [leaf.shape for leaf in grown] != [like.shape for like in leaves]:
            return None
        try:
            return first_runs(OpaqueCall(call), [grown], grown).recorded.outputs
        except CaptureError as error:
            logger.debug("no run of another number of examples", exc_info=error)
            return None


def _refuse_other_norms(call: TracedLoss) -> None:
    norms = [module for module in call.modules() if isinstance(module, nn.SyncBatchNorm) and synchronizes(module)]
    if not all(map(has_substitute, norms)):
        raise problem(
            CaptureError,
            f"MC2503: {type(call.model).__name__} has a SyncBatchNorm with a forward of its own, in train mode",
            "as plain PyTorch, it would take the statistics of a replica alone",
            ("compiler=mirrorc.Compiler(capture='dynamo')", "nn.SyncBatchNorm.convert_sync_batchnorm(model)"),
        )


class EagerGuards:
    """Guards for operators that run plain PyTorch. Most state needs no guard, because each run reads it anew.

    Plain arguments and numbers of modules are guarded, because the set of used parameters may depend on them.
    """

    numbers: tuple[int | float, ...] = ()
    draws: Sequence[object] = ()

    def __init__(self, call: OpaqueCall, traced_loss: TracedLoss) -> None:
        self._call, self._training_call, self._num_settled = call, traced_loss, call.state.num_settled
        self._plain = {name: Constant(value) for name, value in traced_loss.plain.items()}
        self._numbers = [
            (module, key, Constant(value))
            for module in traced_loss.modules()
            for key, value in vars(module).items()
            if type(value) in (int, float)
        ]

    def begin_step(self) -> Callable[[], None]:
        self._call.state.begin_step(self._training_call)
        return self._call.state.undo_step

    def changed_numbers(self) -> list[str]:
        return []

    def hold(self) -> bool:
        return not self.broken()

    def broken(self) -> str:
        if self._num_settled != self._call.state.count_settled():
            return "what forward keeps from call to call, which the last call has not changed"
        plain = self._training_call.plain
        for name, value in self._plain.items():
            if plain.get(name) is not value.value and Constant(plain.get(name)) != value:
                return name
        for module, key, value in self._numbers:
            number = vars(module).get(key)
            is_same = number is value.value or Constant(number) == value
            if not is_same and key not in CARRIED.of(module):
                return f"self.{key}"
        return ""


class _GraphBuilder:
    def __init__(self, call: OpaqueCall, leaves: Sequence[torch.Tensor]) -> None:
        self.call, self.graph = call, fx.Graph()
        self.arguments = [self.placeholder_like(f"leaf_{i}", leaf) for i, leaf in enumerate(leaves)]
        self.parameters = [
            self.placeholder_like(f"parameter_{i}", variable) for i, variable in enumerate(call.parameters.values())
        ]
        self.buffers = [self.placeholder_like(f"buffer_{i}", value) for i, value in enumerate(call.buffers.values())]
        self.seed = self.placeholder_like("seed", torch.empty((), dtype=torch.int64)) if call.recorded.draws else None
        self.number = register_call(call)

    def placeholder_like(self, name: str, value: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        with _fake_mode():
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        node.meta["val"] = like
        return node

    def result_of(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        with _fake_mode():
            node.meta["val"] = target(*fx.node.map_arg(args, lambda source: source.meta["val"]))
        return node

    def parts_of(self, target: Any, *args: Any, **kwargs: Any) -> list[fx.Node]:
        node = self.result_of(target, *args, **kwargs)
        parts = [self.graph.call_function(operator.getitem, (node, i)) for i in range(len(node.meta["val"]))]
        for part, value in zip(parts, node.meta["val"], strict=True):
            part.meta["val"] = value
        return parts

    def parts_of_forward(self, target: Any) -> list[fx.Node]:
        recorded = self.call.recorded
        outputs = recorded.outputs.types.values() if recorded.outputs is not None else ()
        types = [dtype for _, dtype in outputs], sizes_of([shape for shape, _ in outputs])
        inputs = (self.number, self.seed, self.arguments, self.parameters, self.buffers)
        exchanges = {"exchanges": True} if recorded.exchanges else {}
        return self.parts_of(target, *inputs, recorded.loss_dtype, list(recorded.written), *types, **exchanges)

    def joint(self, results: Sequence[fx.Node], **about: Any) -> JointGraph:
        self.graph.output(tuple(results))
        names = [*self.call.parameters, *self.call.buffers]
        variables = zip([*self.parameters, *self.buffers], names, strict=True)
        return JointGraph(
            fx.GraphModule({}, self.graph),
            _fake_mode(),
            leaf_of={node: i for i, node in enumerate(self.arguments)},
            variable_of=dict(variables),
            seed=self.seed,
            **about,
        )

    def writes_and_outputs(self, nodes: Sequence[fx.Node]) -> dict[str, dict[str, fx.Node]]:
        names, recorded = [*self.call.buffers], self.call.recorded
        written = nodes[: len(recorded.written)]
        outputs = recorded.outputs.types if recorded.outputs is not None else ()
        return {
            "buffer_writes": {names[place]: node for place, node in zip(recorded.written, written, strict=True)},
            "outputs": dict(zip(outputs, nodes[len(written) :], strict=True)),
        }


def _joint_graph(call: OpaqueCall, leaves: Sequence[torch.Tensor]) -> JointGraph:
    built, recorded = _GraphBuilder(call, leaves), call.recorded
    device = next(iter(call.parameters.values())).device
    tangent = built.placeholder_like("tangent", torch.empty((), dtype=recorded.loss_dtype, device=device))
    loss, token, *others = built.parts_of_forward(run_forward)
    about = built.writes_and_outputs(others)
    tangents = [built.result_of(output_tangent, about["outputs"][name], name) for name in recorded.differentiable]
    of_outputs = [tangents] if tangents else []
    inputs = [*built.parameters, *built.arguments]
    gradients = {
        place: built.result_of(take_gradient, built.number, token, tangent, inputs[place], place, *of_outputs)
        for place in recorded.gradients
    }
    names = [*call.parameters]
    return built.joint(
        (loss, *others, *gradients.values()),
        tangent=tangent,
        loss=loss,
        gradients={names[place]: node for place, node in gradients.items() if place < len(names)},
        gradients_of_leaves={place - len(names): node for place, node in gradients.items() if place >= len(names)},
        **about,
    )


def _forward_graph(call: OpaqueCall, leaves: Sequence[torch.Tensor]) -> JointGraph:
    built = _GraphBuilder(call, leaves)
    nodes = built.parts_of_forward(run_evaluation)
    losses, others = (nodes[:1], nodes[1:]) if call.recorded.loss_dtype is not None else ([], nodes)
    about = built.writes_and_outputs(others)
    if losses:
        about["outputs"] = {LOSS_OUTPUT: losses[0], **about["outputs"]}
    return built.joint(nodes, **about)
