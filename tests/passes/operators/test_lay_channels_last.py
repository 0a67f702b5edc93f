import copy
from collections.abc import Callable

import pytest
import torch
from memory_order import first_in_memory
from tiny_programs import captured_call, sgd_step, targets
from torch import fx, nn
from torch.nn import functional as F

import mirrorc
from mirrorc.ir.program import Program
from mirrorc.options.table import grouped
from mirrorc.passes import LayChannelsLast, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.runtime.codegen.regions import backend_named
from mirrorc.torch_internals import has_cpp_compiler
from mirrorc.verifier.verifier import Verify

aten = torch.ops.aten


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.twice = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm, self.weight = nn.BatchNorm2d(8), nn.Parameter(torch.randn(8, 4, 3, 3) / 6)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.stem(x))
        h = h + self.twice(torch.relu(self.twice(h)))
        return self.head(F.conv2d(h, self.weight, groups=2).relu().mean((2, 3)))


def captured(model: nn.Module, x: torch.Tensor) -> Program:
    return captured_call(model, F.cross_entropy, (x,), {"target": torch.arange(len(x)) % 5})


def laid(model: nn.Module, x: torch.Tensor) -> fx.Graph:
    return run_passes(captured(model, x), [LayChannelsLast()], [Verify()]).shard_graphs[0]


def is_channels_last(node: fx.Node) -> bool:
    return node.meta["val"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_convolutions_and_what_is_made_of_them_lie_channels_last() -> None:
    graph = laid(Convolutions(), torch.randn(4, 3, 6, 6))
    convolutions = targets(graph, aten.convolution.default)
    assert len(convolutions) == 4
    others = [node for node in targets(graph, aten.relu.default, aten.add.Tensor) if node.meta["val"].dim() == 4]
    for node in (*convolutions, *others):
        assert is_channels_last(node), node
    for node in convolutions:
        assert all(is_channels_last(given) for given in node.args[:2])
    for node in targets(graph, aten.convolution_backward.default):
        assert all(is_channels_last(given) for given in node.args[1:3])


def test_parameters_and_arguments_keep_their_strides_and_each_is_copied_once() -> None:
    graph = laid(Convolutions(), torch.randn(4, 3, 6, 6))
    sources = [node.args[0] for node in targets(graph, aten.clone.default) if node.kwargs.get("memory_format")]
    names = [str(node.kwargs.get("variable", node.target)) for node in sources if not node.args]
    assert sorted(names) == ["stem.weight", "twice.weight", "weight", "x"]
    assert all(node.meta["val"].is_contiguous() for node in sources)


@pytest.mark.slow
def test_what_lies_so_already_is_not_copied() -> None:
    model = Convolutions().to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    assert targets(laid(model, x), aten.clone.default) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "x"),
    [
        (Convolutions, torch.randn(4, 3, 6, 6, dtype=torch.float64)),
        (lambda: nn.Sequential(nn.Conv1d(3, 5, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()), torch.randn(4, 3, 8)),
    ],
    ids=["float64", "conv1d"],
)
def test_what_onednn_does_not_know_is_left_alone(make: Callable[[], nn.Module], x: torch.Tensor) -> None:
    program = captured(make().to(x.dtype), x)
    after = LayChannelsLast().run(program)
    assert after.shard_graphs == program.shard_graphs
    assert after.remarks[-1].text == "there is no convolution that channels-last format makes faster"


def test_only_compiled_cpu_code_gets_it() -> None:
    wanted = backend_named("inductor").preferences(torch.device("cpu"))
    assert wanted["channels_last"] == torch.backends.mkldnn.is_available()
    assert "channels_last" not in backend_named("eager").preferences(torch.device("cpu"))
    assert not backend_named("inductor").preferences(torch.device("cuda"))["channels_last"]
    program = captured(Convolutions(), torch.randn(4, 3, 6, 6))
    after = LayChannelsLast(wanted=False).run(program)
    assert after.shard_graphs == program.shard_graphs and "keep their memory format" in after.remarks[-1].text


class Convolution(nn.Module):
    def __init__(self, num_features: int = 4) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(num_features, 5)


class PseudoLabels(Convolution):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.conv(x)
        return self.head((self.conv(1.5 * x) * target.sigmoid()).mean((2, 3)))


class WritesBetween(Convolution):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.0
        with torch.no_grad():
            before = self.before(x)
        x.mul_(2.0)
        return self.head((before + self.conv(x)).mean((2, 3)))


class Flattens(Convolution):
    def __init__(self) -> None:
        super().__init__(4 * 4 * 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv(x)).view(x.size(0), -1))


class LooksAtStrides(Convolution):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.as_strided(self.conv(x), (x.size(0), 4), (64, 1)))


class DrawsLike(Convolution):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x)
        return self.head(F.dropout(h * torch.rand_like(h) + h * torch.bernoulli(h.sigmoid())).mean((2, 3)))


class HasAnOperatorOfItsOwn(Convolution):
    """One that reads memory in order, whatever the strides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = first_in_memory(self.conv(x).detach(), 4)
        return self.head(self.conv(x).mean((2, 3)) * weight)


MODELS = [
    Convolutions, PseudoLabels, WritesBetween, Flattens, LooksAtStrides, DrawsLike, HasAnOperatorOfItsOwn,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_the_format_changes_no_number(make: Callable[[], nn.Module]) -> None:
    """Trained with it and without: whatever a model does with what convolutions give."""
    trained = []
    for channels_last in (False, True):
        torch.manual_seed(0)
        model = make()
        passes = default_pipeline(channels_last=channels_last)
        with sgd_step(model, 2, loss_fn=F.cross_entropy, passes=passes) as step:
            losses = [step(torch.randn(6, 3, 6, 6), target=torch.arange(6) % 5).item() for _ in range(3)]
            said = any("not laid channels-last: " in remark.text for remark in step.program.remarks)
            assert said == (channels_last and make is LooksAtStrides)
        trained.append((losses, list(model.parameters())))
    (losses, parameters), (same_losses, same_parameters) = trained
    assert losses == pytest.approx(same_losses, rel=1e-5)
    for one, other in zip(parameters, same_parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert one.stride() == other.stride()


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler")
def test_a_compiled_convolutional_net_trains_as_on_one_device() -> None:
    torch.manual_seed(0)
    model = Convolutions().eval()  # statistics of a batch are those of its shards
    model.head.train()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (model, twin)]
    with mirrorc.compile(model, 2, optimizer=optimizers[0], loss_fn=F.cross_entropy) as step:
        for _ in range(3):
            x, y = torch.randn(6, 3, 6, 6), torch.randint(0, 5, (6,))
            loss = step(x, target=y)
            optimizers[1].zero_grad()
            expected = F.cross_entropy(twin(x), y)
            expected.backward()
            optimizers[1].step()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class GivesFeatures(Convolution):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.conv(x)
        return self.head(h.relu().mean((2, 3))), h


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
def test_outputs_lie_as_in_pytorch(num_devices: int) -> None:
    torch.manual_seed(0)
    model = GivesFeatures()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"backend": "eager", "passes": default_pipeline(channels_last=True), "return_outputs": True}
    with mirrorc.compile(
        model,
        num_devices,
        optimizer=optimizer,
        loss_fn=lambda given, target: F.cross_entropy(given[0], target),
        **grouped(options),
    ) as step:
        x = torch.randn(5, 3, 6, 6)
        expected = model(x)[1].detach()
        _, (_, features) = step(x, target=torch.arange(5))
        torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-6)
        assert features.is_contiguous()
        assert any("work in channels-last format" in remark.text for remark in step.program.remarks)
