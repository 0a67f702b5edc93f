"""What is asked of nodes."""

import pytest
import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import users_of_sum


@pytest.mark.timeout(30)
def test_users_are_found_in_program_order_however_many_ways_lead_to_them() -> None:
    """Each of 60 additions takes the one before twice, so that 2 to the power of 60 ways lead to the last."""
    graph = fx.Graph()
    value = wait = graph.call_function(ops.wait, (graph.placeholder("pending"),), {"bucket": 0, "replica": 0})
    additions = []
    for _ in range(60):
        left, right = (graph.call_function(torch.ops.aten.neg.default, (value,)) for _ in range(2))
        value = graph.call_function(torch.ops.aten.add.Tensor, (left, right))
        additions += [left, right, value]
    update = graph.call_function(ops.update, (value,), {"bucket": 0, "replica": 0})
    behind = graph.call_function(ops.pack, (update,), {"bucket": 0, "replica": 0})
    assert users_of_sum(wait) == [*additions, update] and behind not in users_of_sum(wait)
