"""What a traced graph gives, as the user's objects and as values."""

import dataclasses
from typing import Any

import torch
from torch import nn

from mirrorc import torch_internals as internals


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    more: dict[str, Any]


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.changed = nn.Parameter(torch.ones(3)), [1]

    def forward(self, *leaves: torch.Tensor) -> Result:
        rows = leaves[0] * self.weight
        result = Result(rows.sum(), {"rows": rows, "x": leaves[0], "n": len(rows), "weight": self.weight})
        result.more["mean"] = rows.mean()
        return result


def test_results_are_put_together_of_stand_ins_and_given_as_values() -> None:
    module, x = Returns(), torch.ones(2, 3)
    traced = internals.trace_full_graph(module, (x,))
    result, stand_ins = internals.results_with_stand_ins(traced, (x,))
    nodes = {id(v): stand_ins.node_of(v) for v in (result.loss, result.more["rows"], result.more["mean"])}
    assert stand_ins.node_of(x) is None
    assert not stand_ins.any_held_beyond(nodes) and stand_ins.any_held_beyond([*nodes][:2])
    assert type(result) is Result and list(result.more) == ["rows", "x", "n", "weight", "mean"]
    assert result.more["x"] is x and result.more["n"] == 2 and result.more["weight"] is module.weight
    shapes = [nodes[id(v)].meta["example_value"].shape for v in (result.loss, result.more["rows"], result.more["mean"])]
    assert shapes == [(), (2, 3), ()]
    internals.give_values(traced, [nodes[id(result.loss)], nodes[id(result.more["rows"])]])
    total, rows = traced(x)
    assert total.item() == 6 and torch.equal(rows, x)
