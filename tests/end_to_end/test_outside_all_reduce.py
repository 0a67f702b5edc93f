"""An algorithm of all-reduce that is not in the package is trained with, proved, printed, measured and chosen like the others."""

from __future__ import annotations

import pytest
import torch
from line import Line
from summed_by_messages import linked, linked_by_shares
from twins import trained_two_layers

from mirrorc.all_reduce_algorithms import AllReduceAlgorithm
from mirrorc.analysis.cost.message_costs import message_costs
from mirrorc.passes import LowerDevices
from mirrorc.verifier.verifier import verify


def trained(algorithm: str | AllReduceAlgorithm) -> torch.Tensor:
    step, found = trained_two_layers(3, algorithm=algorithm, disable=["share-parameters"])
    with step:
        if algorithm != "native":
            assert "line for bucket 0" in str(step.program)
            assert len([bucket for bucket in step.explain().buckets if bucket.kind == "send"]) == 4  # 0→1→2 and back
    return found


def test_one_more_algorithm_takes_one_class() -> None:
    expected = trained("native")  # it adds in the order of replicas, too
    assert torch.equal(trained(Line()), expected) and torch.equal(trained("line:Line"), expected)


@pytest.mark.parametrize("num_devices", [2, 5])
def test_it_is_proved_and_its_costs_are_known(num_devices: int) -> None:
    for make in (linked, linked_by_shares):
        after = Line().run(make(num_devices, 3, 64 * num_devices))
        verify(after)
        verify(LowerDevices().run(after))
    costs = message_costs(Line().run(linked(num_devices, 16)))
    assert (costs.path_messages, costs.path_bytes) == (2 * (num_devices - 1), 2 * (num_devices - 1) * 64)
