"""A module to trace, and a graph to compile, for tests of what torch does with them."""

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        self.count.add_(1.0)
        return (x * self.weight + self.frozen).sum()


def sine_of(rows: int) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.sin.default, (x,))
    graph.output((y,))
    with FakeTensorMode():
        x.meta["val"], y.meta["val"] = torch.empty(rows, 3), torch.empty(rows, 3)
    return fx.GraphModule({}, graph), [x.meta["val"]]
