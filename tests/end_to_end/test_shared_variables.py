"""Steps over common parameters hold one set of variables, whatever their optimizers and names are; and where that cannot be."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from games import Game
from references import assert_same_model, assert_same_state
from selections import exhaustive
from separate_memories import separate_memories
from small_modules import module_of
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from twins import compiled_step

import mirrorc
from mirrorc import ExecutionError
from mirrorc.compilation.call_kind import Purpose
from mirrorc.options.table import grouped

aten = torch.ops.aten
ADAMW, SGD = partial(torch.optim.AdamW, lr=0.05), partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADADELTA = partial(torch.optim.Adadelta, lr=0.5)  # not element by element, as far as mirrorc knows
COPIES = {"link": "copy", "disable": ("share-parameters",)}
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class Loss(nn.Module):
    def __init__(self, nets: nn.ModuleList, power: int) -> None:
        super().__init__()
        self.add_module(f"net{power}", nets[0])
        self.power = power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (getattr(self, f"net{self.power}")(x) - 1).abs().pow(self.power).mean()


class Stack(nn.Module):
    def __init__(self, nets: nn.ModuleList) -> None:
        super().__init__()
        self.net1, self.inner = nets[1], nets[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net1(self.inner(x)).square().mean()


def games(nets: nn.ModuleList) -> list[tuple[nn.Module, Optimizers]]:
    return [(Game(*nets, bool(i)), ADAMW(nets[i].parameters())) for i in range(2)]


def losses(nets: nn.ModuleList, one: Callable[..., Any], other: Callable[..., Any] | None) -> list[Any]:
    first = one(nets[0].parameters())
    return [(Loss(nets, 1), first), (Loss(nets, 2), other(nets[0].parameters()) if other else first)]


def lists(nets: nn.ModuleList) -> list[Any]:
    weights, biases = ([p for p in nets[0].parameters() if p.dim() == n] for n in (2, 1))
    optimizers = [ADAMW(weights), SGD(biases)]
    return [(Loss(nets, 1), optimizers), (Loss(nets, 2), list(optimizers))]


def stacked(nets: nn.ModuleList) -> list[Any]:
    return [(Loss(nets, 1), ADAMW(nets[0].parameters())), (Stack(nets), SGD(nets[1].parameters()))]


def in_part(nets: nn.ModuleList) -> list[Any]:
    return [(Loss(nets, 1), ADAMW(nets[0].parameters())), (Loss(nets, 2), SGD(list(nets[0].parameters())[2:]))]


def one_model(nets: nn.ModuleList, make: Callable[..., Any] = ADAMW) -> list[Any]:
    return 2 * [(Loss(nets, 1), make(nets[0].parameters()))]


WAYS: dict[str, Callable[[nn.ModuleList], list[Any]]] = {
    "a game": games,
    "one model": one_model,
    "one optimizer, other names": partial(losses, one=ADAMW, other=None),
    "two optimizers": partial(losses, one=ADAMW, other=SGD),
    "one that runs by itself": partial(losses, one=ADADELTA, other=ADAMW),
    "equal lists": lists,
    "names that are taken": stacked,
}


def all_of(optimizers: Optimizers) -> Sequence[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers


class CountedCopies(TorchDispatchMode):
    """Counts what the caller's thread copies, where variables are taken over; within it, a step runs in the devices' threads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (aten.copy_.default, aten.clone.default, aten._to_copy.default)
        return function(*args, **(kwargs or {}))


class Turns:
    def __init__(self, way: Callable[[nn.ModuleList], list[Any]], num_devices: int = 2, **options: Any) -> None:
        torch.manual_seed(0)
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, n)).double() for n in (3, 1))
        self.plain_nets = copy.deepcopy(self.nets)
        self.own, self.plain = way(self.nets), way(self.plain_nets)
        self.num_devices, self.options = num_devices, {"backend": "eager", **options}
        self.steps = [self.another_step(turn) for turn in range(len(self.own))]

    def another_step(self, turn: int, **options: Any) -> mirrorc.Step:
        model, optimizer = self.own[turn]
        return mirrorc.compile(model, self.num_devices, optimizer=optimizer, **grouped({**self.options, **options}))

    def follow(self) -> None:
        """The plain nets have what the nets have."""
        self.plain_nets.load_state_dict(self.nets.state_dict())
        for (_, own), (_, plain) in zip(self.own, self.plain, strict=True):
            for one, other in zip(all_of(own), all_of(plain), strict=True):
                other.load_state_dict(copy.deepcopy(one.state_dict()))

    def train(self, *turns: int) -> int:
        counted = CountedCopies()
        for turn in turns:
            x = torch.randn(6, 3).double()
            with counted:
                loss = self.steps[turn](x)
            model, optimizers = self.plain[turn]
            self.plain_nets.zero_grad()
            expected = model(x)
            expected.backward()
            for optimizer in all_of(optimizers):
                optimizer.step()
            torch.testing.assert_close(loss, expected.detach())
        self.check()
        return counted.count

    def check(self) -> None:
        assert_same_model(self.nets, self.plain_nets, 1e-9)
        for (_, own), (_, plain) in zip(self.own, self.plain, strict=True):
            for one, other in zip(all_of(own), all_of(plain), strict=True):
                assert_same_state(one, other, 1e-9)
        for step in self.steps:
            for variable in step.variables.values():
                assert all(torch.equal(value, variable.value) for value in variable.values), variable

    def __enter__(self) -> "Turns":
        return self

    def __exit__(self, *_: object) -> None:
        for step in self.steps:
            step.close()


@pytest.fixture
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    if request.param == "two memories":
        separate_memories(monkeypatch)
    yield {"two memories": COPIES, "one memory": {}, "with Inductor": {"backend": "inductor"}}[request.param]


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("a game", "two memories"),
        ("two optimizers", "one memory"),
        ("one optimizer, other names", "two memories"),
        ("one model", "one memory"),
        ("a game", "one memory"),
        ("two optimizers", "two memories"),
        ("one optimizer, other names", "one memory"),
        *((way, "two memories") for way in list(WAYS)[4:]),
        *exhaustive(*((way, "one memory") for way in list(WAYS)[4:]), ("two optimizers", "with Inductor")),
    ],
    indirect=["options"],
)
def test_nothing_is_copied_and_no_replica_is_stale(way: str, options: dict[str, Any]) -> None:
    with Turns(WAYS[way], **options) as turns:
        assert turns.train(0, 1) > 0, "memory is laid out"
        before = [parameter.data_ptr() for parameter in turns.nets.parameters()]
        assert turns.train(1, 0, 1, 0) == 0
        assert [parameter.data_ptr() for parameter in turns.nets.parameters()] == before
        turns.steps[0].close()
        turns.train(1)


@pytest.mark.parametrize(
    ("way", "num_devices", "options"),
    [
        (WAYS["two optimizers"], 2, {"disable": ("share-parameters",)}),
        (one_model, 2, {}),
        (one_model, 1, {}),
        (partial(one_model, make=SGD), 3, {"disable": ("share-parameters",)}),
        (partial(one_model, make=ADADELTA), 2, {}),
        *exhaustive((one_model, 4, {"link": "copy"}), (partial(one_model, make=SGD), 4, {})),
        *exhaustive((one_model, 2, {"backend": "inductor"})),
    ],
)
def test_what_the_user_does_between_turns_reaches_both(way: Any, num_devices: int, options: dict[str, Any]) -> None:
    def step_of_one(nets: nn.ModuleList, both: list[Any]) -> None:
        model, optimizer = both[0]
        nets.zero_grad()
        model(torch.ones(2, 3).double()).backward()
        optimizer.step()
        nets.zero_grad()

    def load(nets: nn.ModuleList, both: list[Any]) -> None:
        nets.load_state_dict({name: 0.5 * value for name, value in nets.state_dict().items()})
        for optimizer in dict.fromkeys(optimizer for _, optimizer in both):
            state = copy.deepcopy(optimizer.state_dict())
            state["param_groups"][0]["lr"] /= 2
            optimizer.load_state_dict(state)

    def freeze(nets: nn.ModuleList, both: list[Any]) -> None:
        nets[0][2].bias.requires_grad_(not nets[0][2].bias.requires_grad)

    def new_memory(nets: nn.ModuleList, both: list[Any]) -> None:
        nets[0][0].weight.data = 2 * nets[0][0].weight.data

    with Turns(way, num_devices, **options) as turns:
        turns.train(0, 1)
        for change in (step_of_one, load, new_memory, freeze, freeze):
            for nets, both in ((turns.nets, turns.own), (turns.plain_nets, turns.plain)):
                change(nets, both)
            x = torch.randn(4, 3).double()
            torch.testing.assert_close(turns.steps[0].evaluate(x), turns.plain[0][0](x).detach())
            turns.train(1, 0, 1)


@pytest.mark.parametrize("options", ["two memories", "one memory"], indirect=True)
def test_optimizers_over_a_part_of_the_same_parameters_keep_memory_of_their_own(options: dict[str, Any]) -> None:
    with Turns(in_part, **options) as turns:
        turns.train(0, 1, 1, 0, 1)
        assert turns.steps[0]._state.callers.now is turns.steps[1]._state.callers.now
        told = [
            [str(remark) for remark in step.program.remarks if "each turn copies" in str(remark)]
            for step in turns.steps
        ]
        assert not told[0] and len(told[1]) == 1 and "a part of their parameters in common" in told[1][0]


@pytest.mark.fast
@pytest.mark.parametrize("way", [partial(losses, one=ADADELTA, other=SGD), one_model])
def test_a_failure_in_one_leaves_the_optimizer_of_the_other_whole(way: Any) -> None:
    """Before the commit nothing has changed; after it, the next step of either has the same parameters on all replicas."""
    with Turns(way, disable=("share-parameters",)) as turns:
        turns.train(0, 1)
        with pytest.raises((ExecutionError, mirrorc.CaptureError, RuntimeError)):
            turns.steps[0](torch.randn(6, 5).double())
        turns.train(1, 0)

        def fail(*_: Any) -> None:
            raise RuntimeError("a hook fails")

        hook = turns.own[0][1].register_step_post_hook(fail)
        with pytest.raises(ExecutionError, match="The update had begun"):
            turns.steps[0](torch.randn(6, 3).double())
        hook.remove()
        turns.follow()
        turns.train(1, 0, 1)


@pytest.mark.parametrize("way", [games, in_part, one_model])
def test_two_threads_cannot_run_them_at_once(way: Callable[[nn.ModuleList], list[Any]]) -> None:
    with Turns(way) as turns:
        third = turns.another_step(1)
        third.prepare(torch.randn(6, 3).double())
        assert_one_at_a_time(*turns.steps, turns.own[0][1], torch.randn(6, 3).double(), meanwhile=third.close)


def test_closing_one_leaves_the_other() -> None:
    with Turns(one_model) as turns:
        turns.train(0, 1)
        turns.steps[0].close()
        turns.steps[0].close()
        turns.train(1)
        turns.steps[0] = turns.another_step(0)
        turns.train(0, 1)
        with pytest.warns(UserWarning, match="found no gradients and did nothing") as caught:
            turns.own[0][1].step()
        assert len(caught) == 1
        for step in turns.steps:
            step.close()
        turns.own[0][0](torch.ones(2, 3).double()).backward()
        turns.own[0][1].step()
        turns.own[0][1].zero_grad()
        turns.steps = [turns.another_step(turn) for turn in (0, 1)]
        turns.follow()
        turns.train(0, 1)


@pytest.mark.fast
def test_each_has_its_own_counts_and_losses() -> None:
    """A skipped step counts where it was skipped, and a loss with parameters that are not trained joins the variables."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.tensor(2.0).double())

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.weight * output

    with Turns(one_model) as turns:
        weighted = turns.another_step(0, loss_fn=Weighted(), check_finite="skip")
        x = torch.randn(4, 3).double()
        expected = 2 * turns.own[0][0](x).detach()
        torch.testing.assert_close(weighted(x, target=x), expected)
        weighted(x / 0, target=x)
        assert (weighted.num_skipped, turns.steps[0].num_skipped) == (1, 0)
        turns.follow()
        turns.train(0, 1)
        weighted.close()


def test_what_a_loss_reads_in_its_closure_is_not_trained_meanwhile() -> None:
    """Whichever step is compiled first, and whichever is called first."""
    nets = [nn.Linear(3, 3).double() for _ in range(2)]
    optimizers = [ADAMW(net.parameters()) for net in nets]
    nets[0].requires_grad_(True)
    x, target = torch.randn(6, 3).double(), torch.randn(6, 3).double()

    def compiled(index: int, *read: nn.Module) -> mirrorc.Step:
        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for net in read:
                    target = net(target)
            return F.mse_loss(output, target)

        return compiled_step(nets[index], loss_fn, optimizer=optimizers[index])

    with compiled(0) as trained, compiled(1, nets[0]) as reader:
        reader(x, target=target)
        assert_one_at_a_time(trained, reader, optimizers[0], x, target=target)
        trained.close()
        with compiled(0) as again:
            assert_one_at_a_time(again, reader, optimizers[0], x, target=target)


def test_parameters_that_nobody_trains_bind_no_steps_together() -> None:
    """Such as those of a teacher: its students train at once, and on other devices."""
    teacher, x = nn.Linear(3, 2).requires_grad_(False), torch.randn(6, 3)

    students = [
        module_of(lambda self, x: F.mse_loss(self.own(x), self.teacher(x)), own=nn.Linear(3, 2), teacher=teacher)
        for _ in range(2)
    ]
    one, other = (
        compiled_step(student, devices=number, optimizer=SGD(student.own.parameters()))
        for number, student in enumerate(students, 1)
    )
    losses = [[step(x).item(), step(x).item()] for step in (one, other)]
    assert all(second < first for first, second in losses) and one._state.callers.now is not other._state.callers.now
    one.close()
    other.close()


def assert_one_at_a_time(
    one: mirrorc.Step,
    other: mirrorc.Step,
    optimizer: Any,
    x: torch.Tensor,
    meanwhile: Callable[[], object] = lambda: None,
    **more: Any,
) -> None:
    entered, released = threading.Event(), threading.Event()

    def hook(*_: Any) -> None:
        entered.set()
        released.wait(30)

    handle = optimizer.register_step_pre_hook(hook)
    thread = threading.Thread(target=lambda: one(x, **more))
    thread.start()
    try:
        assert entered.wait(30)
        with pytest.raises(
            ExecutionError, match="another step or module over the same parameters is running in another thread"
        ):
            other(x, **more)
        meanwhile()  # waits for nothing
    finally:
        released.set()
        thread.join(30)
        handle.remove()
    other(x, **more)


def test_each_replica_keeps_statistics_of_its_own_over_the_turns() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    optimizers = [SGD(net.parameters(), lr=0.0), ADAMW(net.parameters(), lr=0.0)]
    steps = [compiled_step(net, F.mse_loss, optimizer=o) for o in optimizers]
    expected = [torch.zeros(2).double() for _ in range(2)]
    for turn in range(4):
        x = torch.randn(6, 3).double()
        steps[turn % 2](x, target=torch.zeros(6, 2).double())
        expected = [
            0.9 * kept + 0.1 * net[0](part).mean(0).detach() for kept, part in zip(expected, x.chunk(2), strict=True)
        ]
        for step in steps[: turn + 1]:
            torch.testing.assert_close(list(step.variables["1.running_mean"].values), expected)
    for step in steps:
        step.close()


def test_steps_on_other_devices_are_refused_while_one_is_open() -> None:
    net, x = nn.Linear(3, 2), torch.randn(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def compiled(num_devices: int) -> mirrorc.Step:
        return compiled_step(net, lambda y, _: y.mean(), num_devices, optimizer=optimizer)

    def step_once(step: mirrorc.Step) -> None:
        step(x, target=x)

    first, second = compiled(2), compiled(3)
    before = net.weight.detach().clone()
    step_once(second)  # whichever comes first
    for call in (step_once, lambda step: step.evaluate(x), lambda step: step.prepare(x, target=x)):
        with pytest.raises(
            ExecutionError, match=r"'weight' on cpu:0, cpu:1 and cpu:2, and this one runs on cpu:0 and cpu:1"
        ):
            call(first)
    assert not torch.equal(net.weight, before)
    second.close()
    step_once(first)
    first.close()
    for num_devices in (1, 2):  # what nobody has any more holds nothing
        step = compiled(num_devices)
        step_once(step)
    step.close()


def test_steps_that_nobody_closed_hold_nothing() -> None:
    """As when a cell of a notebook is run again: each step joins the last one, which is dropped then."""
    net, x = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), torch.randn(6, 3)

    def compiled(num_devices: int, optimizer: torch.optim.Optimizer) -> mirrorc.Step:
        step = compiled_step(net, F.mse_loss, num_devices, optimizer=optimizer)
        step(x, target=torch.ones(6, 2))
        return step

    one, kept = SGD(net.parameters()), []
    for optimizer in (one, one, ADAMW(net.parameters()), ADAMW(net.parameters())):
        step = compiled(2, optimizer)
        kept.append(weakref.ref(step._state.optimizers))
        variable = step.variables["0.weight"]  # it needs the variables, not the step
        gc.collect()
    step(x, target=torch.ones(6, 2))
    gc.collect()
    assert [optimizers() is not None for optimizers in kept] == [False, False, False, True]
    assert all(torch.equal(value, net[0].weight) for value in variable.values)
    step.close()
    step = compiled(3, SGD(net[0].parameters()))
    with compiled(3, SGD(net[1].parameters())) as other:
        del step
        gc.collect()
        with compiled(3, SGD([net[0].weight])) as joined:
            assert joined._state.reserved is other._state.reserved


@pytest.mark.fast
def test_a_forgotten_step_keeps_no_gradients() -> None:
    """Those that its `accumulate` has kept are in nobody's way, also if another step has its optimizer."""
    net, x = nn.Linear(3, 2), torch.randn(6, 3)
    optimizer = SGD(net.parameters())

    def compiled() -> mirrorc.Step:
        return compiled_step(net, F.mse_loss, optimizer=optimizer)

    step = compiled()
    step.accumulate(x, target=torch.ones(6, 2))
    with compiled() as other:
        del step
        other(x, target=torch.ones(6, 2))


def test_variables_that_no_open_step_has_any_more_are_let_go() -> None:
    """Those of a closed step or a forgotten one, and teachers whose program was dropped; the model keeps what they were."""
    nets = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(3)]
    teachers = [nn.Linear(3, 3).requires_grad_(False)]
    optimizers = [SGD(net.parameters()) for net in nets]
    x = torch.randn(6, 3)

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(nets[0](nets[1](y)), teachers[0](target))

    steps = [
        compiled_step(net, loss_fn, optimizer=optimizer)
        for net, optimizer, loss_fn in zip(nets, optimizers, (F.mse_loss, F.mse_loss, loss), strict=True)
    ]
    for step in steps:
        step(x, target=x)
    store = steps[0]._state._held.store
    assert len(store.tensors) == 7 + 7 + 7 + 2 and steps[2]._state._held.store is store
    variable = steps[2].variables["1.running_mean"]
    steps[2].close()
    steps[0](x, target=x)
    assert len(store.tensors) == len(store.names) == 7 + 7
    assert all(torch.equal(value, nets[2][1].running_mean) for value in variable.values)
    del steps[1]
    gc.collect()
    steps[0](x, target=x)
    assert len(store.tensors) == 7
    with compiled_step(nets[2], loss, optimizer=optimizers[2]) as again:
        for _ in range(2):
            again(x, target=x)
            teachers[0] = nn.Linear(3, 3).requires_grad_(False)
        assert len(store.tensors) == 7 + 7 + 7 + 2 * 2
        again._specializer._caches[Purpose.STEP]._by_key.clear()
        again(x, target=x)
        assert len(store.tensors) == 7 + 7 + 7 + 2
    steps[0].close()


def test_what_is_kept_when_a_step_is_closed_is_followed_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics that a program reads and does not write have a copy on each other device."""
    separate_memories(monkeypatch)
    net, critic = (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double() for _ in range(2))
    x = torch.randn(6, 3).double()
    steps = [
        compiled_step(own, loss, optimizer=SGD(own.parameters(), lr=0.0), **COPIES)
        for own, loss in ((net, F.mse_loss), (critic, lambda y, target: F.mse_loss(net(y), target)))
    ]
    for step in (*steps, steps[0]):
        step(x, target=x)
    net.eval()
    steps[0](x, target=x)
    steps[1].close()
    net[0].running_mean.fill_(2.0)
    torch.testing.assert_close(steps[0](x, target=x), F.mse_loss(net(x), x).detach())
    steps[0].close()
