"""All-reduce on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mirrorc.passes.all_reduce.algorithm import AllReduceAlgorithm
from mirrorc.passes.all_reduce.traffic import Held, Traffic


@dataclass(frozen=True)
class ReduceToOne(AllReduceAlgorithm):
    """Sends all replicas' buckets to one device, which adds them and returns the sum.

    The critical path has two messages for any N, but one device receives and sends N - 1 buckets.

    Attributes:
        order: all devices in the order of addition; None for 0, 1, 2, ..., with the bits of native sums.
        dtype: a floating-point dtype to add in, if wider than the bucket's.

    Source: TensorFlow's ``ReductionToOneDevice``.
    """

    device: int = 0
    order: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    name: str = field(default="reduce-to-one", init=False)

    def __post_init__(self) -> None:
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ValueError(
                f"MC1002: dtype is {self.dtype!r}: give a floating-point dtype such as torch.float64, or None"
            )

    @property
    def changes_bits(self) -> str:
        changed = [
            *(["replicas' gradients are added up in another order"] if self.order is not None else []),
            *(["sums are rounded from another dtype"] if self.dtype is not None else []),
        ]
        return ", and ".join(changed)

    def objection(self, num_replicas: int) -> str:
        if isinstance(self.device, bool) or not isinstance(self.device, int) or not 0 <= self.device < num_replicas:
            return f"device is {self.device!r}: give a number from 0 to {num_replicas - 1}"
        if self.order is not None and not _is_order(self.order, num_replicas):
            return f"order is {self.order!r}: name each device from 0 to {num_replicas - 1} once"
        return ""

    def add_up(self, traffic: Traffic) -> Sequence[Held]:
        return [reduced_on(traffic, self.device, self.order, self.dtype)]


def reduced_on(
    traffic: Traffic, device: int, order: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
) -> Held:
    replicas = order if order is not None else range(traffic.num_replicas)
    gradients = [traffic.own(replica) for replica in replicas]
    held = [gradient if gradient.replica == device else traffic.send(gradient, device) for gradient in gradients]
    of_bucket = traffic.dtype_of(gradients[0])
    wide = of_bucket if dtype is None else torch.promote_types(of_bucket, dtype)
    return traffic.cast(traffic.add_all([traffic.cast(value, wide) for value in held]), of_bucket)


def _is_order(order: object, num_replicas: int) -> bool:
    if not isinstance(order, Sequence) or any(type(number) is not int for number in order):
        return False
    return sorted(order) == list(range(num_replicas))
