"""What regions do with memory, on graphs written by hand and on what Inductor makes of them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mirrorc.ir.program import Region
from mirrorc.runtime.codegen import inductor
from mirrorc.runtime.codegen.regions import RegionCompiler, backend_named
from mirrorc.runtime.memory.dry_run import Block, DryRun, dry_run

aten = torch.ops.aten
CPU = torch.device("cpu")
ROW = 4 * 100  # bytes of a row


def region_of(build: Callable[..., Any], *rows: int) -> Region:
    graph, mode = fx.Graph(), FakeTensorMode()
    placeholders = [graph.placeholder(f"x{i}") for i in range(len(rows))]
    with mode:
        for placeholder, n in zip(placeholders, rows, strict=True):
            placeholder.meta["val"] = torch.empty(n, 100)
    graph.output(tuple(build(graph, *placeholders)))
    with mode:
        for node in graph.nodes:
            if node.op == "call_function":
                node.meta["val"] = node.target(*fx.node.map_arg(node.args, lambda n: n.meta["val"]))
    return Region("fwd_0", "forward", fx.GraphModule({}, graph))


def ran(region: Region, backend: str = "eager") -> DryRun:
    return dry_run(region, RegionCompiler(backend_named(backend), 1).compile(region, CPU), CPU)


def lives(found: DryRun) -> dict[str, tuple[int, str, str]]:
    """For each allocation by name: its bytes, what was called when it was taken, and before which call it was dropped."""
    taken = {own: step.call for step in found.steps for own in step.taken}
    dropped = {own: step.call for step in found.steps for own in step.dropped if isinstance(own, Block)}
    return {own.name: (own.num_bytes, call, dropped.get(own, "")) for own, call in taken.items()}


def test_the_users_current_gpu_stays_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's code for a GPU makes it current, and not all of that code takes it back."""
    current, asked = [0], []

    @contextlib.contextmanager
    def device(own: torch.device) -> Iterator[None]:
        before, current[0] = current[0], own.index
        yield
        current[0] = before

    def set_device(index: int) -> None:
        asked.append((index, current[0]))
        current[0] = index

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)

    def function(box: list[Any]) -> Any:
        pass

    function.source_code = (  # type: ignore[attr-defined]
        "import torch\ndef call(self, args):\n    arg0, = args\n    args.clear()\n    torch.cuda.set_device(1)\n"
        "    buf0 = torch.exp(arg0)\n    return (buf0,)\n"
    )
    found = dry_run(region_of(chain, 10), function, torch.device("cuda", 1))
    assert not found.remark and asked == [(1, 1)] and current == [0]


def test_regions_are_compiled_while_their_gpu_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []

    @contextlib.contextmanager
    def device(own: torch.device) -> Iterator[None]:
        current.append(own)
        yield
        current.pop()

    seen: list[list[torch.device]] = []
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(inductor, "compile_with_inductor", lambda *_: seen.append(list(current)))
    region = region_of(chain, 10)
    for own in (CPU, torch.device("cuda", 1)):
        with FakeTensorMode():
            placeholder = next(iter(region.graph_module.graph.nodes))
            placeholder.meta["val"] = torch.empty(10, 100, device=own)
        inductor.InductorBackend().compile(region.graph_module, "fwd_0", 1)
    assert seen == [[], [torch.device("cuda", 1)]] and current == []


def chain(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
    exp = graph.call_function(aten.exp.default, (x,))
    view = graph.call_function(aten.view.default, (exp, [-1]))
    total = graph.call_function(aten.sum.default, (view,))
    return [graph.call_function(aten.sin.default, (total,))]


def test_values_are_dropped_after_their_last_use_and_views_hold_their_memory() -> None:
    found = ran(region_of(chain, 10))
    assert lives(found) == {
        "exp_default": (10 * ROW, "exp_default", "sin_default"),  # the view of it is used by the sum
        "sum_default": (4, "sum_default", "return"),
        "sin_default": (4, "sin_default", ""),
    }
    assert [place for step in found.steps for place in step.dropped if place == 0] == [0]
    assert [getattr(result, "name", None) for result in found.results] == ["sin_default"] and not found.remark


def test_results_may_be_arguments_their_views_or_the_same_memory_twice() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        written = graph.call_function(aten.copy_.default, (x, y))
        one = graph.call_function(aten.neg.default, (y,))
        return [
            written,
            graph.call_function(aten.t.default, (y,)),
            one,
            graph.call_function(aten.detach.default, (one,)),
        ]

    first, second, *same = ran(region_of(build, 3, 3)).results
    assert (first, second) == (0, 1)
    assert isinstance(same[0], Block) and same[0] is same[1] and same[0].num_bytes == 3 * ROW


@pytest.mark.slow
def test_inductors_code_takes_only_what_is_not_fused() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        for target in (aten.exp.default, aten.sin.default, aten.relu.default):
            x = graph.call_function(target, (x,))
        return [graph.call_function(aten.mm.default, (x, y))]

    region = region_of(build, 10, 100)
    fused, plain = (lives(ran(region, backend)) for backend in ("inductor", "eager"))
    assert sorted(num_bytes for num_bytes, *_ in fused.values()) == [10 * ROW] * 2
    assert sorted(num_bytes for num_bytes, *_ in plain.values()) == [10 * ROW] * 4
    assert any(call.startswith("cpp_fused") for _, call, _ in fused.values())
    assert any(call == "extern_kernels.mm" for _, call, _ in fused.values())


def test_a_convolution_has_a_workspace() -> None:
    graph, mode = fx.Graph(), FakeTensorMode()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    made = graph.call_function(aten.convolution.default, (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1))
    graph.output((made,))
    with mode:
        x.meta["val"], weight.meta["val"] = torch.empty(2, 32, 8, 8), torch.empty(32, 32, 3, 3)
        made.meta["val"] = torch.empty(2, 32, 8, 8)
    found = ran(Region("fwd_0", "forward", fx.GraphModule({}, graph)))
    (step,) = [step for step in found.steps if step.taken]
    assert step.workspace >= 2 * 32 * 8 * 8 * 4


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1", "has 0 functions of the name 'call'"),
        (
            "def call(self, args):\n    x, = args\n    args.clear()\n    y = unheard_of(x)\n    return (y, )",
            "unheard_of",
        ),
        ("def call(self, args):\n    while True: break\n    return ()", "a statement of a kind that is not followed"),
    ],
)
def test_code_that_cannot_be_followed_is_said_and_counted_as_if_not_fused(source: str, reason: str) -> None:
    class Compiled:
        source_code = source

        def __call__(self, args: list[Any]) -> Any:
            raise AssertionError("nothing is run")

    region = region_of(chain, 10)
    found = dry_run(region, Compiled(), CPU)
    assert found.remark.startswith("fwd_0 is counted as if it were not fused") and reason in found.remark
    assert lives(found) == lives(ran(region))


@pytest.mark.slow
def test_a_deep_region_is_followed_in_one_go() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        for _ in range(3000):
            x = graph.call_function(aten.neg.default, (x,))
        return [x]

    found = ran(region_of(build, 1))
    assert len(lives(found)) == 3000 and sum(len(step.dropped) for step in found.steps) == 3000


@pytest.mark.slow
def test_arguments_that_share_memory_are_all_dropped() -> None:
    """A value and a view of it, both saved for backward."""

    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        return [graph.call_function(aten.sin.default, (graph.call_function(aten.add.Tensor, (x, y)),))]

    region = region_of(build, 3, 3)
    one, other = [node for node in region.graph_module.graph.nodes if node.op == "placeholder"]
    other.meta["val"] = one.meta["val"].detach()
    assert (0, 1) in [step.dropped for step in ran(region).steps]
