"""Computes loss and gradients without side effects, and compares those of a whole batch with sums over its shards."""

from __future__ import annotations

import contextlib
import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mirrorc.capture.call.call_arguments import Call
from mirrorc.capture.call.shards import Shards
from mirrorc.capture.call.signature import Signature
from mirrorc.capture.call.traced_loss import TracedLoss
from mirrorc.capture.diagnostics.loss_means import WeightedMean, weighted_mean
from mirrorc.capture.dynamo.traced_substitutes import synchronizes
from mirrorc.capture.eager.python_state import restored_state
from mirrorc.capture.model.model_state import ModelState
from mirrorc.capture.model.refused_models import check_model
from mirrorc.capture.rewrites.seed_random_ops import draws_now
from mirrorc.custom_ops.replica_collectives import exchanging, refused_exchange
from mirrorc.errors import MirrorcError
from mirrorc.messages.problem import message, problem
from mirrorc.torch_internals import replaced_operators


class ObservedCalls(TorchFunctionMode):
    """Calls that couple examples, in an evaluation of a loss.

    Attributes:
        weighted: means over targets, with the numbers of ignored and of all targets.
        unequal_draws: operators whose random numbers differ between runs.
    """

    def __init__(self, by_running_statistics: bool = False) -> None:
        super().__init__()
        self.num_batch_norms = 0
        self.weighted: list[tuple[WeightedMean, int, int]] = []
        self.unequal_draws: set[str] = set()
        self._by_running_statistics = by_running_statistics

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mean = weighted_mean(func, args, kwargs)
        if mean is not None and isinstance(mean.target, torch.Tensor) and not mean.target.is_floating_point():
            left_out = int((mean.target == mean.ignore_index).sum())
            self.weighted.append((mean, left_out, mean.target.numel()))
        if func in _BATCH_NORMS:
            bound = _BATCH_NORMS[func].bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["training"]:
                self.num_batch_norms += 1
                if self._by_running_statistics:
                    _use_running_statistics(bound.arguments)
                    return func(*bound.args, **bound.kwargs)
        return func(*args, **kwargs)


_BATCH_NORMS = {F.batch_norm: inspect.signature(F.batch_norm)}


def _use_running_statistics(arguments: dict[str, Any]) -> None:
    x = arguments["input"]
    arguments["training"] = False
    if arguments["running_mean"] is None:
        arguments["running_mean"], arguments["running_var"] = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])


@dataclass(frozen=True)
class Evaluated:
    """Loss and gradients in 64 bits. ``scale`` is the loss's largest summand, in absolute value."""

    loss: float
    gradients: dict[str, torch.Tensor]
    scale: float
    observed: ObservedCalls = field(default_factory=ObservedCalls)


class Evaluation:
    """Evaluates batches of one structure, with equal random numbers for each example."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, call: Call) -> None:
        self._call = TracedLoss(model, loss_fn, call.structure, call.plain)
        parameters = ModelState(model, loss_fn).parameters
        self._trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._device = next(iter(self._trainable.values())).device
        self._draws = _EqualDraws()

    def run(self, leaves: Sequence[torch.Tensor], *, by_running_statistics: bool = False) -> Evaluated:
        """With ``by_running_statistics``, BatchNorm does not use the batch's statistics."""
        copies = [leaf.to(self._device, copy=True) for leaf in leaves]  # forward may write them
        observed = ObservedCalls(by_running_statistics)
        with contextlib.ExitStack() as stack:
            stack.enter_context(restored_state(self._call))
            stack.enter_context(_restored_random_streams(self._device))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            _replace_buffers(self._call)
            with observed, self._draws.replacing():
                loss = self._call(*copies)
            if loss.numel() != 1 or not loss.requires_grad:
                raise problem(
                    ValueError,
                    f"MC2202: the loss is a tensor {list(loss.shape)}"
                    if loss.requires_grad
                    else "MC2202: the loss does not depend on the parameters",
                    "a step needs one number with a gradient",
                    "loss.mean()" if loss.requires_grad else "compute it without detach(), item() and torch.no_grad()",
                )
            computed = torch.autograd.grad(loss.reshape(()), list(self._trainable.values()), allow_unused=True)
        observed.unequal_draws = self._draws.unequal
        value = loss.item()
        gradients = {
            name: (torch.zeros_like(parameter) if gradient is None else gradient.to_dense()).detach().double()
            for (name, parameter), gradient in zip(self._trainable.items(), computed, strict=True)
        }
        return Evaluated(value, gradients, abs(value), observed)


def _replace_buffers(call: nn.Module) -> None:
    """`restored` removes the copies."""
    copies: dict[int, torch.Tensor] = {}
    for module in call.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())


@contextlib.contextmanager
def _restored_random_streams(device: torch.device) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


_DRAWS = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential", "exponential_", "geometric_", "log_normal_", "multinomial",
    "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_",
    "uniform", "uniform_",
)  # fmt: skip
"""ATen operators whose results are only random numbers."""


class _EqualDraws:
    """Gives every example in all runs the random numbers of the first example in the first run."""

    def __init__(self) -> None:
        self.unequal: set[str] = set()
        self._first: list[torch.Tensor] = []
        self._place = 0

    def replacing(self) -> contextlib.AbstractContextManager[Any]:
        self._place = 0
        return replaced_operators(self._replace)

    def _replace(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = operator.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in operator.tags or not draws_now(operator, args, kwargs):
            return NotImplemented
        if operator is torch.ops.aten.native_dropout.default:
            return self._dropout(*args, **kwargs)
        drawn = operator(*args, **kwargs)
        if name not in _DRAWS or not isinstance(drawn, torch.Tensor):
            self.unequal.add(name)
            return drawn
        return self._made_equal(drawn, name)

    def _dropout(self, x: torch.Tensor, p: float, train: bool | None = True) -> tuple[torch.Tensor, torch.Tensor]:
        keep = 1.0 - p if train is not False else 1.0
        mask = self._made_equal(torch.empty_like(x, dtype=torch.bool).bernoulli_(keep), "native_dropout")
        return x * mask * (1.0 / keep if keep > 0.0 else 0.0), mask

    def _made_equal(self, drawn: torch.Tensor, name: str) -> torch.Tensor:
        example = drawn[0] if drawn.dim() and len(drawn) else drawn
        if self._place == len(self._first):
            self._first.append(example.clone())
        first = self._first[self._place]
        self._place += 1
        if first.shape == example.shape and first.dtype == example.dtype:
            drawn.copy_(first.expand_as(drawn))
        else:
            self.unequal.add(name)
        return drawn


_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3}
_COARSE = 5e-2  # for 16-bit parameters, and under autocast
_ASKS = message(
    "MC3103: check_loss cannot compare a model or loss that uses collectives",
    "it computes one shard after the other, where mirrorc.all_reduce or SyncBatchNorm finds no other replica",
    "compare step.evaluate(x, y) with loss_fn(model(x), y) on the whole batch",
)
_REMEDY = ("losses.mean(), a loss that is a mean over examples", "loss_reduction='sum', for one that is a sum")
_SHOWN = 5  # gradients in the printed form
_SMALLEST_SCALE = 1e-2  # of the largest gradient: rounding errors in a gradient of zero do not count


@dataclass(frozen=True, repr=False)
class LossCheck:
    """The result of `check_loss`. Printed, it shows the differences and known reasons.

    Attributes:
        same: loss and gradients agree.
        loss: of the whole batch.
        sharded_loss: the weighted sum over the shards, as in a step.
        num_examples: of each shard.
        differences: by variable, the largest difference of gradients relative to their largest entry, in descending
            order.
        reasons: sentences on coupled examples; empty if ``same``.
    """

    same: bool
    loss: float
    sharded_loss: float
    num_examples: tuple[int, ...]
    differences: Mapping[str, float]
    tolerance: float
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        num_replicas, shards = len(self.num_examples), " + ".join(map(str, self.num_examples))
        if self.same:
            return (
                f"the same on {num_replicas} replicas: loss {self.loss:.6g}, and all gradients agree to "
                f"{max(self.differences.values(), default=0.0):.1e} of their largest entry ({sum(self.num_examples)} examples as "
                f"{shards})"
            )
        lines = [
            f"not the same on {num_replicas} replicas: the loss is {self.loss:.6g}, and that of shards of {shards} examples is "
            f"{self.sharded_loss:.6g}",
            "largest differences of gradients, in parts of their largest entry:",
            *(f"  {name}: {difference:.2g}" for name, difference in list(self.differences.items())[:_SHOWN]),
        ]
        left_out = len(self.differences) - _SHOWN
        lines += [f"  ({left_out} more)"] if left_out > 0 else []
        return "\n".join([*lines, *(f"why: {reason}" for reason in self.reasons)])

    __repr__ = __str__


def check_loss(
    model: nn.Module,
    /,
    *args: Any,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    loss_reduction: str = "mean",
    num_replicas: int = 2,
    tolerance: float | None = None,
    raises: bool = False,
    **kwargs: Any,
) -> LossCheck:
    """Checks on one batch that a step on several devices and a step on one device make the same update.

    It computes loss and gradients of the whole batch, and of its shards in turn, on the model's device. Model,
    gradients, random streams and the Python state of model and loss do not change, except for globals, classes,
    iterators, Python generators and queues. Random numbers are the same for each example, so dropout makes no
    difference.

    Example:
        >>> mirrorc.check_loss(model, x, y, loss_fn=F.cross_entropy, num_replicas=2)  # doctest: +SKIP
        the same on 2 replicas: loss 2.30259, and all gradients agree to 3.1e-07 of their largest entry (32 examples as
            16 + 16)

    Args:
        model: the model, before or after its compilation.
        *args: arguments as for the step: tensors are split along dim 0, see `mirrorc.replicated` and
            `mirrorc.PerReplica`; with a loss_fn, the last one is the target.
        loss_fn: as for `mirrorc.compile`.
        loss_reduction: as for `mirrorc.compile`.
        num_replicas: the number of shards.
        tolerance: the largest relative difference due to rounding; None for 1e-7 with parameters of 64 bits, 1e-3 with
            32 bits and 0.05 with 16 bits or autocast.
        raises: raise an error if they differ.
        **kwargs: as for the step.

    Raises:
        TypeError, ValueError: a wrong argument, or a model without a loss.
        MirrorcError: they differ and ``raises`` is True, or the model needs values of other replicas.
    """
    check_model(model)
    _check_options(loss_reduction, num_replicas)
    if any(isinstance(root, nn.Module) and synchronizes(root) for root in (model, loss_fn)):
        raise MirrorcError(_ASKS)
    call, split = Signature(model, loss_fn, num_replicas).split(args, kwargs)
    present = [tensors for tensors, size in zip(split.tensors, split.num_examples, strict=True) if size]
    shards = Shards(tuple(present), tuple(size for size in split.num_examples if size))
    evaluation = Evaluation(model, loss_fn, call)
    whole = evaluation.run(_joined(call))
    with exchanging(refused_exchange(MirrorcError(_ASKS))) if len(shards.tensors) > 1 else contextlib.nullcontext():
        parts = [evaluation.run(leaves) for leaves in shards.tensors]
    weights = {
        "mean": [n / sum(shards.num_examples) for n in shards.num_examples],
        "sum": [1.0 for _ in shards.num_examples],
    }
    allowed = _tolerance(model) if tolerance is None else tolerance
    by_shards = _summed(parts, weights[loss_reduction])
    differences = _differences(whole, by_shards)
    is_same = _agree(whole, by_shards, allowed)
    reasons: tuple[str, ...] = ()
    if not is_same:
        other = "sum" if loss_reduction == "mean" else "mean"
        fits_other = _agree(whole, _summed(parts, weights[other]), allowed)
        normalized = [evaluation.run(batch, by_running_statistics=True) for batch in (_joined(call), *shards.tensors)]
        is_normalization = _agree(normalized[0], _summed(normalized[1:], weights[loss_reduction]), allowed)
        is_repeatable = not math.isfinite(whole.loss) or _agree(whole, evaluation.run(_joined(call)), allowed)
        reasons = _reasons_for(whole, parts, other if fits_other else None, is_normalization, is_repeatable)
    result = LossCheck(is_same, whole.loss, by_shards.loss, shards.num_examples, differences, allowed, reasons)
    if raises and not is_same:
        what, _, figures = str(replace(result, reasons=())).partition("\n")
        raise MirrorcError(f"{message(f'MC3103: {what}', '; '.join(reasons), _REMEDY)}\n\n{figures}")
    return result


def _check_options(loss_reduction: str, num_replicas: int) -> None:
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(
            f"MC1002: loss_reduction is {loss_reduction!r}: say 'mean' or 'sum', as the loss does over its examples"
        )
    if not isinstance(num_replicas, int) or num_replicas < 1:
        raise ValueError(f"MC1002: num_replicas is {num_replicas!r}: give the number of shards, such as 2")


def _joined(call: Call) -> list[torch.Tensor]:
    joined = []
    for leaf in call.leaves:
        if leaf.tensor is not None:
            joined.append(leaf.tensor.detach())
            continue
        try:
            if not leaf.split:
                raise RuntimeError("their dim 0 does not count examples")
            joined.append(torch.cat(leaf.per_replica).detach())
        except RuntimeError as error:
            raise problem(
                ValueError,
                f"MC1307: argument {leaf.path!r}: the values of its PerReplica make no whole batch",
                str(error),
                "mirrorc.check_loss(model, x, ...), with whole tensors in place of PerReplica",
            ) from error
    return joined


def _tolerance(model: nn.Module) -> float:
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    device = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device):
        return _COARSE
    return max((_TOLERANCES.get(kind, _COARSE) for kind in kinds), default=_COARSE)


def _summed(parts: Sequence[Evaluated], weights: Sequence[float]) -> Evaluated:
    loss = sum(part.loss * weight for part, weight in zip(parts, weights, strict=True))
    gradients = {}
    for name in parts[0].gradients:
        terms = [part.gradients[name] * weight for part, weight in zip(parts, weights, strict=True)]
        gradients[name] = torch.stack(terms).sum(0)
    return Evaluated(loss, gradients, max(abs(part.loss) for part in parts))


def _differences(whole: Evaluated, by_shards: Evaluated) -> dict[str, float]:
    largest = {name: _largest(gradient) for name, gradient in whole.gradients.items()}
    floor = _SMALLEST_SCALE * max(largest.values(), default=0.0)
    differences = {}
    for name, gradient in whole.gradients.items():
        difference, scale = _largest(gradient - by_shards.gradients[name]), max(largest[name], floor)
        differences[name] = difference / scale if scale > 0.0 else difference
    return dict(sorted(differences.items(), key=lambda item: (math.isnan(item[1]), item[1]), reverse=True))


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _agree(whole: Evaluated, by_shards: Evaluated, tolerance: float) -> bool:
    scale = max(abs(whole.loss), by_shards.scale)
    is_same_loss = abs(whole.loss - by_shards.loss) <= tolerance * scale
    return is_same_loss and all(d <= tolerance for d in _differences(whole, by_shards).values())


def _reasons_for(
    whole: Evaluated,
    parts: Sequence[Evaluated],
    fitting_reduction: str | None,
    is_normalization: bool,
    is_repeatable: bool,
) -> tuple[str, ...]:
    """``fitting_reduction``: the ``loss_reduction`` with which batch and shards would agree, or None."""
    if fitting_reduction is not None:
        return (
            f"with loss_reduction={fitting_reduction!r} they are the same: the loss is a {fitting_reduction} over its examples",
        )
    reasons = [
        *_normalizations(whole, is_normalization),
        *_weighted_means(whole, parts),
        *_means_of_nothing(whole, parts),
    ]
    if not is_repeatable:
        reasons.append(
            "the loss of the same batch changes from call to call: forward or the loss reads Python state that it changes where "
            "check_loss cannot put it back, such as an iterator or a queue; compare with that held fixed"
        )
    if whole.observed.unequal_draws:
        names = ", ".join(sorted(whole.observed.unequal_draws))
        reasons.append(
            f"random numbers of {names} differ from run to run: compare with them switched off to see what else differs"
        )
    if not reasons:
        reasons.append(
            "something compares or normalizes examples across the batch (a contrastive term, a statistic over dim 0), or a term "
            "that does not depend on the examples is added once for each replica (with loss_reduction='sum')"
        )
    return tuple(reasons)


def _means_of_nothing(whole: Evaluated, parts: Sequence[Evaluated]) -> list[str]:
    places = [str(i) for i, part in enumerate(parts) if math.isnan(part.loss)]
    if not places or math.isnan(whole.loss):
        return []
    shards = f"shard {places[0]} is" if len(places) == 1 else f"shards {', '.join(places)} is"
    return [
        f"the loss of {shards} not a number, as a mean of nothing is: look for a shard whose examples are all left out, as "
        "padding or by a mask, and divide by a number that is at least 1"
    ]


def _normalizations(whole: Evaluated, is_normalization: bool) -> list[str]:
    num = whole.observed.num_batch_norms
    if not num:
        return []
    calls = "one BatchNorm normalizes" if num == 1 else f"{num} calls of BatchNorm normalize"
    alone = "this is all: with running statistics they are the same" if is_normalization else "this is not all"
    return [
        f"{calls} by the statistics of each replica's shard, not of the whole batch, as in DistributedDataParallel ({alone}); "
        "GroupNorm and LayerNorm do not look at other examples"
    ]


def _weighted_means(whole: Evaluated, parts: Sequence[Evaluated]) -> list[str]:
    reasons: list[str] = []
    for i, (mean, left_out, num_targets) in enumerate(whole.observed.weighted):
        if mean.is_weighted:
            reasons.append(
                f"{mean.function} is a mean weighted by class: a replica divides by the weights of its own targets"
            )
        counts = [part.observed.weighted[i][1:] for part in parts if i < len(part.observed.weighted)]
        if left_out and len({few / many for few, many in counts}) > 1:
            reasons.append(
                f"{mean.function} leaves out the {left_out} of {num_targets} targets that are {mean.ignore_index}, and a replica "
                f"divides by the number that its shard keeps: {', '.join(str(many - few) for few, many in counts)}"
            )
    remedy = "use reduction='sum', and divide by a number that is the same for all shards"
    return [f"{text}; {remedy}" for text in dict.fromkeys(reasons)]
