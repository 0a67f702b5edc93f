"""Modules that forward or the loss reach, and that the model does not hold, are variables: a critic, a teacher, features."""

import copy
import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from games import Turns
from references import assert_same_model, assert_same_state, refused, unchanged
from selections import exhaustive, slow
from separate_memories import separate_memories
from torch import nn
from torch.nn import functional as F
from twins import compiled_step

import mirrorc
from mirrorc.runtime.state.shared import shared_state

COPIES = {"link": "copy", "disable": ("share-parameters",)}
ADAMW, SGD = functools.partial(torch.optim.AdamW, lr=0.05), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
in_global: dict[str, nn.Module] = {}


def net(width: int, *, normalizes: bool = False) -> nn.Sequential:
    norm = nn.BatchNorm1d(4) if normalizes else nn.Identity()
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, width)).double()


@pytest.fixture
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    if request.param == "two memories":
        separate_memories(monkeypatch)
    yield {"two memories": COPIES, "one memory": {}, "with Inductor": {"backend": "inductor"}}[request.param]


class Game(Turns):
    def __init__(self, num_devices: int = 0, *, normalizes: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.generator, self.critic = generator, critic = net(3), net(1, normalizes=normalizes)

        def made_well(made: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            return -critic(made).mean()

        def told_apart(judged: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                made = generator(noise)
            return (critic(made) - judged).mean()

        optimizers = ADAMW(generator.parameters()), SGD(critic.parameters())
        super().__init__((generator, critic), optimizers, (made_well, told_apart), num_devices, **options)


def take_turns(own: Game, plain: Game, *turns: int) -> None:
    for turn in turns:
        x = torch.randn(6, 3).double()
        torch.testing.assert_close(own.train(turn, x), plain.train(turn, x))
    assert_same(own, plain)


def assert_same(own: Game, plain: Game) -> None:
    assert_same_model(own.nets, plain.nets, 1e-9)
    for one, other in zip(own.optimizers, plain.optimizers, strict=True):
        assert_same_state(one, other, 1e-9)
    for step in own.steps:
        for variable in step.variables.values() if step._runs.last is not None else ():
            if variable.aggregation.value == "none":
                assert all(torch.equal(value, variable.value) for value in variable.values), variable


@pytest.mark.parametrize(
    ("num_devices", "options"),
    [(2, "two memories"), (1, "one memory"), (3, "one memory"), *exhaustive((4, "two memories"), (2, "with Inductor"))],
    indirect=["options"],
)
def test_a_game_over_closures_has_one_set_of_variables(num_devices: int, options: dict[str, Any]) -> None:
    own, plain = Game(num_devices, **options if num_devices > 1 else {}), Game()
    take_turns(own, plain, 0, 1, 1, 0, 0, 1)
    assert own.steps[0]._state.optimizers is not own.steps[1]._state.optimizers
    assert own.steps[0]._state._held is own.steps[1]._state._held
    variables = own.steps[0].variables
    critic = variables["outside.critic.0.weight"]
    trained = own.steps[1].variables["0.weight"]
    assert [v.data_ptr() for v in critic.values] == [v.data_ptr() for v in trained.values], "a copy of its own"
    assert critic.value.data_ptr() == own.critic[0].weight.data_ptr() and not own.critic[0].weight.grad
    own.steps[1].close()
    with torch.no_grad():
        for game in (own, plain):
            game.critic[0].weight.mul_(0.5)
    take_turns(own, plain, 0, 0)
    own.close()


def test_what_is_done_to_a_critic_between_turns_is_seen_by_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    separate_memories(monkeypatch)
    own, plain = Game(2, **COPIES), Game()
    take_turns(own, plain, 0, 1, 0)

    def of_a_plain_loop(game: Game) -> None:
        game.critic.zero_grad()
        game.critic(torch.ones(2, 3).double()).mean().backward()
        game.optimizers[1].step()
        game.critic.zero_grad()

    def loaded(game: Game) -> None:
        game.critic.load_state_dict({name: value * 0.5 for name, value in game.critic.state_dict().items()})

    def other_memory(game: Game) -> None:
        game.critic[0].weight.data = game.critic[0].weight.data * 2

    def frozen(game: Game) -> None:
        game.critic[3].bias.requires_grad_(False)

    def hooked(game: Game) -> None:
        game.critic[0].register_forward_hook(lambda module, args, output: output * 2)

    for change in (of_a_plain_loop, loaded, other_memory, frozen, hooked):
        for game in (own, plain):
            change(game)
        take_turns(own, plain, 0, 0, 1, 0)
    own.close()


@pytest.mark.parametrize("options", ["two memories", "one memory"], indirect=True)
def test_a_critic_that_normalizes_by_its_batch_keeps_statistics_of_each_replica(options: dict[str, Any]) -> None:
    """The generator's step writes them, and the critic's own; in eval mode none does. One device has those of PyTorch."""
    one, plain = Game(1, normalizes=True), Game(normalizes=True)
    take_turns(one, plain, 0, 1, 0)
    for game in (one, plain):
        game.critic.eval()
    take_turns(one, plain, 0, 1)
    for game in (one, plain):
        game.critic.train()
    take_turns(one, plain, 0, 1)
    one.close()

    own = Game(2, normalizes=True, **options)
    expected = [torch.zeros(4).double() for _ in range(2)]
    for turn in (0, 1, 0):
        x = torch.randn(6, 3).double()
        fed = [
            [own.generator(part).detach()] if turn == 0 else [part, own.generator(part).detach()] for part in x.chunk(2)
        ]
        for replica, parts in enumerate(fed):
            for part in parts:
                expected[replica] = 0.9 * expected[replica] + 0.1 * own.critic[0](part).detach().mean(0)
        own.train(turn, x)
        name = "outside.critic.1.running_mean" if turn == 0 else "1.running_mean"
        torch.testing.assert_close(list(own.steps[turn].variables[name].values), expected)
        torch.testing.assert_close(own.critic[1].running_mean, sum(expected) / 2)
    own.close()


def through_partial(teacher: nn.Module) -> Loss:
    return functools.partial(lambda model, y, x: F.mse_loss(y, model(x)), teacher)


def through_keyword(teacher: nn.Module) -> Loss:
    return functools.partial(lambda y, x, model: F.mse_loss(y, model(x)), model=teacher)


def through_default(teacher: nn.Module) -> Loss:
    def loss(y: torch.Tensor, x: torch.Tensor, model: nn.Module = teacher) -> torch.Tensor:
        return F.mse_loss(y, model(x))

    return loss


def through_global(teacher: nn.Module) -> Loss:
    in_global["teacher"] = teacher
    return lambda y, x: F.mse_loss(y, in_global["teacher"](x))


class Distilled:
    def __init__(self, teacher: nn.Module) -> None:
        self.teachers, self.part = [teacher], SimpleNamespace(first=teacher[0])

    def loss(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(y, self.teachers[0](x)) + 0.1 * self.part.first(x).mean()

    def __call__(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.loss(y, x)


WAYS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a closure": (lambda teacher: lambda y, x: F.mse_loss(y, teacher(x)), "teacher"),
    "a partial": (through_partial, "model"),
    "a keyword of a partial": (through_keyword, "model"),
    "a default": (through_default, "model"),
    "a global": (through_global, r"in_global\.teacher"),
    "a bound method": (lambda teacher: Distilled(teacher).loss, r"self\.teachers\.0|self\.part\.first"),
    "an object": (Distilled, r"loss_fn\.teachers\.0|loss_fn\.part\.first"),
}


@pytest.mark.fast
@pytest.mark.parametrize(("way",), [("a closure",), *slow(*((way,) for way in list(WAYS)[1:]))])
def test_a_teacher_is_a_variable_by_whatever_path_it_is_reached(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    separate_memories(monkeypatch)
    make, words = WAYS[way]
    x = torch.randn(6, 3).double()

    def made() -> tuple[nn.Module, nn.Module, Loss, torch.optim.Optimizer]:
        torch.manual_seed(1)
        student = net(3)
        teacher = copy.deepcopy(student).requires_grad_(False).eval()
        return student, teacher, make(teacher), SGD(student.parameters())

    def averaged(student: nn.Module, teacher: nn.Module) -> None:
        with torch.no_grad():
            for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
                own.lerp_(other, 0.5)

    losses = []
    student, teacher, loss, optimizer = made()
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(student(x + 1), x)
        value.backward()
        optimizer.step()
        averaged(student, teacher)
        losses.append(value.item())
    own, own_teacher, loss, optimizer = made()
    with compiled_step(own, loss, optimizer=optimizer, **COPIES) as step:
        for value in losses:
            torch.testing.assert_close(step(x + 1, target=x).item(), value)
            averaged(own, own_teacher)
        outside = [name for name in step.programs[-1].variables if name.startswith("outside.")]
        assert len(outside) == 4 and all(re.match(rf"outside\.({words})\.", name) for name in outside), outside
        assert not any(variable.update for name, variable in step.programs[-1].variables.items() if name in outside)
        evaluated = step.evaluate(x + 1, target=x)
        torch.testing.assert_close(evaluated, loss(own(x + 1), x).detach())


def test_features_in_a_list_of_the_model_are_read_and_one_that_has_changed_its_type_is_read_anew() -> None:
    class Perceptual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.features = nn.Linear(3, 3).double(), [net(2, normalizes=True).eval().requires_grad_(False)]

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            dtype = self.features[0][0].weight.dtype
            return F.mse_loss(self.features[0](self.body(x).to(dtype)), self.features[0](y.to(dtype)))

    model, (x, y) = Perceptual(), torch.randn(2, 6, 3).double()
    with compiled_step(model, devices=3, optimizer=SGD(model.parameters(), lr=0.0)) as step:
        for change in ("none", "float", "double"):
            getattr(model.features[0], change, lambda: None)()
            torch.testing.assert_close(step(x, y).double(), model(x, y).detach().double())
        assert {f"outside.features.0.{name}" for name in ("0.weight", "1.running_mean_3")} <= step.variables.keys()


def test_students_of_one_teacher_are_free_of_each_other() -> None:
    teacher, x = net(3, normalizes=True).requires_grad_(False).eval(), torch.randn(6, 3).double()

    def compiled(num_devices: int) -> mirrorc.Step:
        own = net(3)
        loss = lambda y, target: F.mse_loss(y, teacher(target))  # noqa: E731
        return compiled_step(own, loss, num_devices, optimizer=SGD)

    steps = [compiled(number) for number in (1, 2, 2)]
    for step in steps:
        step(x, target=x)
    assert len({id(step._state.callers.now) for step in steps}) == 3
    teacher.train()
    with pytest.raises(
        mirrorc.ExecutionError,
        match=r"another open step or module has .*running_mean' on cpu:0, and this one runs on cpu:0 and",
    ):
        steps[1](x, target=x)
    steps[0].close()
    for step in steps[1:]:
        step(x, target=x)
    assert steps[1]._state._held is steps[2]._state._held
    for step in steps:
        step.close()


def test_steps_that_have_run_become_one_when_a_loss_reaches_both() -> None:
    def made(num_devices: int) -> tuple[list[nn.Module], list[Any], Callable[[int, torch.Tensor], torch.Tensor]]:
        torch.manual_seed(3)
        nets, read = [net(3, normalizes=True) for _ in range(3)], []
        optimizers = [SGD(own.parameters()) for own in nets]

        def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            for other in read:
                y = other(y)
            return F.mse_loss(y, target)

        if num_devices:
            losses = [F.mse_loss, F.mse_loss, loss]
            steps = [
                compiled_step(own, own_loss, num_devices, optimizer=optimizer)
                for own, optimizer, own_loss in zip(nets, optimizers, losses, strict=True)
            ]

        def train(turn: int, x: torch.Tensor) -> torch.Tensor:
            if turn == 2 and not read:
                read.extend(nets[:2] if x.sum() > 0 else ())
            if num_devices:
                return steps[turn](x, target=x)
            for own in nets:
                own.zero_grad()
            value = (loss if turn == 2 else F.mse_loss)(nets[turn](x), x)
            value.backward()
            optimizers[turn].step()
            return value.detach()

        return nets, steps if num_devices else optimizers, train

    (plain, _, train_plain), (own, steps, train) = made(0), made(1)
    for turn, sign in ((2, -1), (0, 1), (1, 1), (2, -1), (2, 1), (0, 1), (1, 1), (2, 1)):
        x = sign * torch.rand(6, 3).double()
        torch.testing.assert_close(train(turn, x), train_plain(turn, x))
    for one, other in zip(own, plain, strict=True):
        assert_same_model(one, other, 1e-9)
    assert len({id(step._state._held) for step in steps}) == 1
    for step in steps:
        step.close()
    nets, steps, train = made(2)
    for turn, sign in ((0, 1), (1, 1), (2, -1)):
        train(turn, sign * torch.rand(6, 3).double())
    before = [[v.clone() for v in step.variables["1.running_mean"].values] for step in steps]
    for own_net in nets:
        own_net.eval()
    train(2, torch.rand(6, 3).double())
    after = [list(step.variables["1.running_mean"].values) for step in steps]
    assert len({id(step._state._held) for step in steps}) == 1 and not torch.equal(*before[0])
    assert all(
        torch.equal(a, b)
        for one, other in zip(before[:2], after[:2], strict=True)
        for a, b in zip(one, other, strict=True)
    )
    for step in steps:
        step.close()


def test_what_another_step_trains_is_not_warned_of() -> None:
    x = torch.randn(4, 3).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = Game(2)
        for turn in (0, 1):
            own.train(turn, x)
    own.close()
    with pytest.warns(UserWarning, match=r"depends on critic\.0\.weight, .* and 1 other, to which"):
        alone = Game(2)
        alone.steps[1].close()
        alone.train(0, x)
    alone.close()


@pytest.mark.fast
def test_modules_outside_that_no_step_can_run_are_refused() -> None:
    x, own = torch.randn(4, 3).double(), net(3)

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3).double(), requires_grad=False)

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            self.weight.add_(1.0)
            return y * self.weight

    class Shares(nn.Linear):
        def __init__(self, other: nn.Module) -> None:
            super().__init__(3, 4, dtype=torch.float64)
            self.weight.data = next(iter(other.parameters())).data

    outside = {
        r"writes the parameter 'outside\.other\.weight' in place": Writes(),
        r"(?s)share memory.*\.clone\(\)": Shares(own),
    }
    for text, other in outside.items():
        loss = lambda y, target, other=other: other(y).mean()  # noqa: E731
        with (
            warnings.catch_warnings(),
            compiled_step(own, loss, optimizer=SGD) as step,
            refused((mirrorc.CaptureError, ValueError), text, other),
        ):
            warnings.simplefilter("ignore")
            step(x, target=x)


@pytest.mark.parametrize("num_teachers", [1, 2])
def test_statistics_that_a_forward_of_the_user_writes_are_read_in_all_memories(
    num_teachers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No version tells, and in eval mode no program reads the counter; two modules with one name have a counter each."""
    separate_memories(monkeypatch)
    teachers, own, x = [net(3, normalizes=True).eval() for _ in range(num_teachers)], net(3), torch.randn(6, 3).double()
    now = SimpleNamespace(teacher=teachers[0])
    loss = lambda y, target: F.mse_loss(y, now.teacher(target))  # noqa: E731
    with warnings.catch_warnings(), compiled_step(own, loss, optimizer=SGD(own.parameters(), lr=0.0), **COPIES) as step:
        warnings.simplefilter("ignore")
        for _ in range(3):
            for now.teacher in teachers:
                torch.testing.assert_close(step(x, target=x), loss(own(x), x).detach())
            for teacher in teachers:
                teacher.train()(3 * torch.randn(6, 3).double() + 1)
                teacher.eval()
        assert "outside.now.teacher.1.num_batches_tracked" not in step.programs[-1].variables


def test_statistics_that_another_step_writes_are_read_in_all_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    separate_memories(monkeypatch)
    first, second, reader, x = net(3, normalizes=True), net(3), net(3), torch.randn(6, 3).double()
    both = nn.Sequential(first, second)
    loss = lambda y, target: F.mse_loss(y, first(target))  # noqa: E731
    one, other, reading = (
        compiled_step(own, loss_fn, optimizer=SGD, **COPIES)
        for own, loss_fn in ((first, F.mse_loss), (both, F.mse_loss), (reader, loss))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for write in (one, other, other.evaluate, other.evaluate, one):
            first.train()
            write(3 * torch.randn(6, 3).double() + 1, target=x)
            first.eval()
            torch.testing.assert_close(reading.evaluate(x, target=x), loss(reader(x), x).detach())
    assert len({id(step._state._held) for step in (one, other, reading)}) > 1
    for step in (one, other, reading):
        step.close()


def interrupted_in_state(number: int) -> Callable[..., Any]:
    """A trace function that interrupts the so manieth line of those that make held states one."""
    count, is_begun = 0, False

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count, is_begun
        code = frame.f_code
        is_begun = is_begun or code.co_qualname == "HeldState.absorb"
        if not is_begun or not code.co_filename.endswith(("_state.py", "variables.py", "layout.py", "members.py")):
            return None
        count += event == "line"
        if count == number:
            raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize("number", [30, 70, 130, 210, *exhaustive(*((number,) for number in range(10, 250, 20)))])
def test_steps_that_are_interrupted_while_they_become_one_go_on(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own, plain = Game(2), Game()
    reaches = [False]
    for game in (own, plain):
        critic = game.critic
        game.losses[0] = lambda y, target, critic=critic: critic(y).mean() if reaches[0] else y.square().mean()
    own.close()
    own.steps = [
        compiled_step(net, loss, optimizer=optimizer)
        for net, optimizer, loss in zip(
            own.nets, own.optimizers, (own.losses[0], lambda y, target: y.mean()), strict=True
        )
    ]
    plain.losses[1] = lambda y, target: y.mean()
    take_turns(own, plain, 0, 1)
    reaches[0] = True
    take_in = shared_state.take_in

    def interrupted(*args: Any) -> None:
        monkeypatch.undo()
        before = sys.gettrace()
        sys.settrace(interrupted_in_state(number))
        try:
            take_in(*args)
        finally:
            sys.settrace(before)
        raise KeyboardInterrupt

    monkeypatch.setattr(shared_state, "take_in", interrupted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with unchanged(own.nets), pytest.raises(KeyboardInterrupt):
            own.train(0, torch.randn(6, 3).double())
        take_turns(own, plain, 1, 0, 0, 1)
    assert own.steps[0]._state._held is own.steps[1]._state._held
    own.close()


@pytest.mark.parametrize("turns", [(0, 1), (1, 0)])
def test_what_holds_the_critics_memory_is_warned_of_in_any_order(turns: tuple[int, ...]) -> None:
    game, x = Game(2), torch.randn(4, 3).double()
    taken = game.critic.state_dict()
    with pytest.warns(
        UserWarning, match=r"MC3207: a state_dict\(\) or view .* does not follow training \(4 parameters, such as"
    ):
        for turn in turns:
            game.train(turn, x)
    game.close()
    assert not torch.equal(taken["0.weight"], game.critic[0].weight)
