"""Forward decides by numbers that Python or numpy draw: a step draws them once for all replicas, as one device would."""

import io
import math
import operator
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from references import assert_same_model, assert_same_parameters, assert_same_state
from selections import exhaustive, slow
from small_modules import Parts
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc import ClipGradNorm, NonFiniteError
from mirrorc.capture.dynamo.drawn_branches import DrawnScalar
from mirrorc.errors import CaptureError, ExecutionError
from mirrorc.packing import ByBytes


class LeavesOutLayers(Parts):
    def __init__(self) -> None:
        super().__init__(layers=nn.ModuleList(nn.Linear(3, 3) for _ in range(2)), head=nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if self.training and (random.random() if i else np.random.rand()) < 0.5:
                continue
            x = x + layer(x).tanh()
        torch._assert_async((x < 1e9).all(), "too large")
        return self.head(x) * random.uniform(0.5, 1.0) + np.random.randint(3)


class Does(Parts):
    def __init__(self, does: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(layer=nn.Linear(3, 3), does=does)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.does(self.layer(x))


def compiled(model: nn.Module) -> mirrorc.Step:
    return compiled_step(model, F.mse_loss)


def seed_all() -> None:
    random.seed(5)
    np.random.seed(6)


def states() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state())


@pytest.mark.parametrize(
    ("num_devices", "backend"), [(2, "eager"), (4, "eager"), *exhaustive((1, "eager"), (2, "inductor"))]
)
def test_layers_are_left_out_as_on_one_device(num_devices: int, backend: str) -> None:
    torch.manual_seed(0)
    target = torch.zeros(5, 3, dtype=torch.float64)
    batches = [{"x": torch.randn(5, 3, dtype=torch.float64), "target": target} for _ in range(9)]
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with Twins(LeavesOutLayers().double(), sgd, F.mse_loss, num_devices, backend=backend) as pair:
        seed_all()
        expected = [pair.plain(**batch).item() for batch in batches]
        wanted = states()
        seed_all()
        losses = [pair.step(**batch).item() for batch in batches]
        assert states() == wanted
        assert repr(pair.step).endswith("4 compiled programs>"), "each way through two layers is one"
        pair.model.eval()
        pair.step.evaluate(batches[0]["x"])
        assert losses == pytest.approx(expected, abs=1e-12)
        assert_same_model(pair.model, pair.twin, 1e-12)


COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.7, 0.3, 1 / 3, 0.0])
def test_scalars_are_compared_as_a_tensor_is(dtype: torch.dtype, value: float) -> None:
    numbers = [value, 0.7, value + 1e-9, value - 1e-9, -1, 0, 1, True, 1e-300, 1e308, math.inf, -math.inf, math.nan]
    others = [torch.tensor(number, dtype=own) for number in numbers for own in (torch.float32, torch.float64)]
    others += [torch.tensor([0.2, value, 0.9]), torch.arange(3), torch.full((2, 1), value, dtype=torch.float64)]
    for shape in ((), (1,), (1, 1)):
        tensor = torch.full(shape, value, dtype=dtype)
        drawn = DrawnScalar(tensor.item(), shape, dtype)
        for compare in COMPARISONS:
            for number in numbers:
                assert bool(compare(drawn, number)) == bool(compare(tensor, number)), (compare, number)
            for other in others:
                assert torch.equal(compare(drawn, other), compare(tensor, other)), (compare, other)
                assert torch.equal(compare(other, drawn), compare(other, tensor)), (compare, other)


class ComparesScalars(Parts):
    def __init__(self) -> None:
        super().__init__(layer=nn.Linear(3, 3))
        self.register_buffer("p", torch.tensor(0.6))
        self.register_buffer("wide", torch.tensor(0.4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answers = [
            (torch.rand(()) < self.p) * 1.0,
            torch.where(torch.rand(1) < self.p, 1.0, 0.0),
            (torch.rand([]) <= self.wide) * 1.0,
            (self.p > torch.rand(1)) * 1.0,
            (torch.rand(()) < x[:, :1]) * 1.0,
        ]
        if torch.rand(()) < 0.5 and torch.rand(1) < math.inf and not torch.rand(1) > math.nan:
            x = self.layer(x)
        return self.layer(x) * sum(2.0**i * answer for i, answer in enumerate(answers))


def test_answers_of_comparisons_with_tensors_are_those_of_one_device() -> None:
    torch.manual_seed(0)
    target, batches = torch.zeros(5, 3), [torch.rand(5, 3) for _ in range(5)]
    with Twins(ComparesScalars(), partial(torch.optim.SGD, lr=0.0), F.mse_loss) as pair:
        torch.manual_seed(1)
        expected = [pair.plain(x, target=target).item() for x in batches]
        torch.manual_seed(1)
        losses = [pair.step(x, target=target).item() for x in batches]
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.fast
@pytest.mark.parametrize(
    "asked",
    [lambda: torch.rand([]), lambda: ~(torch.rand([]) < 0.5), lambda: (torch.rand(1) < 0.9) == (torch.rand(1) < 0.9)],
)
def test_a_scalar_that_does_more_than_decide_is_no_number(asked: Callable[[], Any]) -> None:
    model = Does(lambda y: (y if torch.rand([]) < 0.5 else 2 * y) * asked())
    refused = pytest.raises(CaptureError, match="MC2102")
    with compiled_step(model, F.mse_loss, capture="dynamo") as step, refused:
        step(torch.ones(4, 3), target=torch.zeros(4, 3))


@pytest.mark.fast
def test_a_scalar_that_decides_is_a_tensor() -> None:
    def does(y: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(())
        decided = drawn < 2.0
        kinds = [isinstance(one, torch.Tensor) and isinstance(one, (torch.Tensor, int)) for one in (drawn, decided)]
        are_tensors = all(kinds) and torch.is_tensor(drawn) and torch.is_tensor(decided) and torch.is_tensor(y)
        is_other = isinstance(drawn, (float, nn.Parameter)) or isinstance(decided, bool) or torch.is_tensor(0.5)
        if decided and are_tensors and not is_other:
            return y
        return y + 100

    model = Does(does)
    expected = F.mse_loss(model(torch.ones(4, 3)), torch.zeros(4, 3)).item()
    with compiled(model) as step:
        assert step(torch.ones(4, 3), target=torch.zeros(4, 3)).item() == pytest.approx(expected)


def test_a_step_that_fails_leaves_the_generators_as_they_were() -> None:
    model = LeavesOutLayers()
    with compiled(model) as step:
        for x in (torch.ones(4, 3), torch.full((4, 3), 1e10)):
            before = states()
            if x[0, 0] == 1:
                step(x, target=torch.zeros(4, 3))
                assert states() != before
            else:
                with pytest.raises(ExecutionError, match="too large"):
                    step(x, target=torch.zeros(4, 3))
                assert states() == before


def test_draws_that_cannot_be_the_same_for_all_replicas_are_refused() -> None:
    cases: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        r"(?s)MC2303: .*because dropout\(\) takes it as a number that does not change\n  fix:  torch\.rand": lambda y: (
            F.dropout(y, random.random())
        ),
        r"(?s)MC2303: .* draws other numbers .* for a shard of another size\n.*torch\.rand": lambda y: (
            y * sum(random.random() for _ in range(len(y)))
        ),
    }
    for text, does in cases.items():
        model, before = Does(does), states()
        with compiled(model) as step, pytest.raises(CaptureError, match=text):
            step(torch.ones(5, 3), target=torch.zeros(5, 3))
        assert states() == before


# A step with a list of optimizers does what a step of each does, in their order.


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.02)
ADAMW = partial(torch.optim.AdamW, lr=0.02)
ADADELTA = partial(torch.optim.Adadelta, lr=0.5)  # not element by element, as far as mirrorc knows
SMALL = {"buckets": ByBytes(1e-4, 1e-4)}
UNSHARED = {"disable": ["share-parameters"]}

Makes = Sequence[Callable[..., torch.optim.Optimizer]]


class Several(list[torch.optim.Optimizer]):
    def step(self) -> None:
        for optimizer in self:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self:
            optimizer.zero_grad()


class Pair(Twins):
    def __init__(self, makes: Makes, num_devices: int, **options: Any) -> None:
        def make(net: nn.Module) -> Any:
            return Several([make(own) for make, own in zip(makes, self.parts(net), strict=True)])

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        super().__init__(net, make, F.mse_loss, num_devices, select=lambda model: model, **options)

    @staticmethod
    def parts(net: nn.Module) -> list[list[nn.Parameter]]:
        named = dict(net.named_parameters())
        return [[p for name, p in named.items() if kind in name] for kind in ("weight", "bias")]

    @staticmethod
    def batch(num_examples: int = 5) -> dict[str, torch.Tensor]:
        torch.manual_seed(num_examples)
        return {"input": torch.randn(num_examples, 5).double(), "target": torch.randn(num_examples, 3).double()}

    def train(self, num_examples: int = 6, clip: Callable[[], Any] = lambda: None) -> None:
        batch = self.batch(num_examples)
        loss, expected = self.step(**batch), self.backward(**batch)
        clip()
        self.update()
        self.twin.zero_grad()  # also of what no optimizer holds
        torch.testing.assert_close(loss, expected)
        self.compare()

    def compare(self) -> None:
        assert_same_parameters(self.model, self.twin, 1e-7)
        for own, other in zip(self.optimizer, self.twin_optimizer, strict=True):
            assert_same_state(own, other, 1e-9)


@pytest.mark.parametrize(
    ("makes", "num_devices", "options"),
    [
        ((torch.optim.Muon, ADAMW), 3, UNSHARED), ((ADAMW, ADADELTA), 4, SMALL),
        *slow(
            ((SGD, ADAM), 1, {}), ((ADAMW, ADAMW), 4, {}), ((torch.optim.Muon, ADAMW), 2, {"microbatches": 2}),
            ((ADAM, ADADELTA), 2, {"link": "copy"} | UNSHARED), ((torch.optim.Muon, ADAMW), 2, {"backend": "inductor"}),
            ((ADADELTA, SGD), 3, {"exact_order": True}),
        ),
        *exhaustive(
            ((SGD, ADAM), 3, SMALL), ((SGD, ADAM), 2, {}), ((torch.optim.Muon, ADADELTA), 2, {}),
            ((ADAMW, ADADELTA), 1, {}), ((torch.optim.Muon, ADAMW), 4, SMALL), ((SGD, ADAM), 2, UNSHARED | SMALL),
        ),
    ],
)  # fmt: skip
def test_a_step_is_one_of_each(makes: Makes, num_devices: int, options: dict[str, Any]) -> None:
    with (pair := Pair(makes, num_devices, **options)).step:
        schedulers = [
            [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in own] for own in (pair.optimizer, pair.twin_optimizer)
        ]
        for num_examples in (7, 2, 7):
            pair.train(num_examples)
            for own in schedulers:
                own[1].step()


def load(net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    file = io.BytesIO()
    torch.save(optimizers[0].state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()))
    state["param_groups"][0]["lr"] *= 2
    optimizers[0].load_state_dict(state)


def freeze(net: Any, optimizers: list[torch.optim.Optimizer]) -> None:
    net[2].bias.requires_grad_(not net[2].bias.requires_grad)


def own_step(which: int, net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    net.requires_grad_(True)
    batch = Pair.batch()
    F.mse_loss(net(batch["input"]), batch["target"]).backward()
    optimizers[which].step()
    net.zero_grad()


def clear(net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    optimizers[1].state.clear()


@pytest.mark.parametrize(
    "makes", [(torch.optim.Muon, ADAMW), *slow(((SGD, ADAM),), ((ADAMW, ADADELTA),))], ids=["muon", "flat", "mixed"]
)
def test_what_the_user_does_to_one_of_them_is_seen(makes: Makes) -> None:
    with (pair := Pair(makes, 2)).step:
        for change in (load, freeze, partial(own_step, 0), partial(own_step, 1), clear, load, freeze):
            pair.train()
            pair.on_both(change)
        pair.train(3)


def test_groups_that_are_added_keep_the_numbers_of_others() -> None:
    def leave_out(net: Any, optimizers: list[torch.optim.Optimizer]) -> None:
        optimizers[0].param_groups[0]["params"].pop()

    def add(net: Any, optimizers: list[torch.optim.Optimizer]) -> None:
        optimizers[0].add_param_group({"params": [net[2].weight], "lr": 0.3})

    with (pair := Pair((SGD, ADAM), 3)).step as step:
        pair.on_both(leave_out)
        for _ in range(2):
            pair.train()
            assert {bucket.rule.label for bucket in step.programs[-1].buckets} == {"SGD group 0", "Adam group 1"}
        pair.on_both(add)
        for _ in range(2):
            pair.train()
        assert {bucket.rule.label for bucket in step.programs[-1].buckets} == {
            "SGD group 0",
            "Adam group 1",
            "SGD group 2",
        }
        assert "# optimizer SGD group 2: lr=0.3" in str(step.programs[-1])
        step.memory()
    with (pair := Pair((SGD, ADAM), 2, clip_grad_norm=(1.0, None))).step as step:
        pair.on_both(leave_out)
        step(torch.ones(2, 5).double(), target=torch.ones(2, 3).double())
        pair.on_both(add)
        with pytest.raises(ValueError, match=r"clip_grad_norm has 2 bounds, but the optimizers have 3 groups now"):
            step(torch.ones(2, 5).double(), target=torch.ones(2, 3).double())


@pytest.mark.parametrize(
    ("makes", "num_devices", "options"),
    [
        ((torch.optim.Muon, ADAMW), 3, {}),
        *slow(
            ((ADAMW, ADADELTA), 4, {"scaler": True}),
            ((SGD, ADAM), 2, {}), ((ADADELTA, SGD), 2, UNSHARED), ((torch.optim.Muon, ADADELTA), 3, {"scaler": True}),
        ),
    ],
)  # fmt: skip
def test_clipping_is_that_of_all_gradients_or_of_each_group(
    makes: Makes, num_devices: int, options: dict[str, Any]
) -> None:
    """Also where shares of a small bucket are empty: such a replica counts no gradient that another one has whole."""
    options = dict(options)
    if options.pop("scaler", False):
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    with (pair := Pair(makes, num_devices, clip_grad_norm=0.05, **options)).step as step:
        norms: list[Any] = []
        for num_examples in (7, 3):
            pair.train(num_examples, lambda: norms.append(nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.05)))
            torch.testing.assert_close(step.grad_norm, norms[-1])
    options.pop("scaler", None)
    bounds = (0.02, ClipGradNorm(0.01, 1))
    with (pair := Pair(makes, num_devices, clip_grad_norm=bounds, **options)).step as step:

        def clip() -> None:
            first, second = Pair.parts(pair.twin)
            norms[:] = nn.utils.clip_grad_norm_(first, 0.02), nn.utils.clip_grad_norm_(second, 0.01, 1)

        pair.train(7, clip)
        torch.testing.assert_close(step.grad_norm, tuple(norms))


@pytest.mark.parametrize("makes", [(torch.optim.Muon, ADAMW), (SGD, ADAM)], ids=["muon", "flat"])
def test_a_step_that_is_not_finite_leaves_all_of_them_alone(makes: Makes) -> None:
    bad, target = torch.full((4, 5), torch.inf).double(), torch.ones(4, 3).double()
    with (pair := Pair(makes, 2, check_finite=True)).step as step:
        pair.train()
        with pytest.raises(NonFiniteError):
            step(bad, target=target)
        pair.compare()
        pair.train()
    with (pair := Pair(makes, 2, scaler=torch.amp.GradScaler("cpu", init_scale=2.0))).step as step:
        pair.train()
        step(bad, target=target)
        assert step.num_skipped == 1
        pair.compare()
        pair.train()


@pytest.mark.fast
def test_hooks_of_one_see_what_they_see_in_a_loop() -> None:
    """The gradients of all optimizers before the first steps, and the first one's new parameters before the second one steps."""
    seen: dict[int, list[torch.Tensor]] = {}

    def hook(net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        def halve(*_: Any) -> None:
            for parameter in net.parameters():
                parameter.grad.mul_(0.5)

        def note(*_: Any) -> None:
            seen.setdefault(id(net), []).extend(p.detach().clone() for p in net.parameters())

        optimizers[0].register_step_pre_hook(halve)
        optimizers[1].register_step_pre_hook(note)

    with (pair := Pair((SGD, ADAM), 2)).step as step:
        pair.train()
        pair.on_both(hook)
        pair.train()
        assert not any(bucket.rule.elementwise for bucket in step.programs[-1].buckets)
        pair.train()
    for own, other in zip(seen[id(pair.model)], seen[id(pair.twin)], strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.fast
def test_each_keeps_its_state_in_its_own_object() -> None:
    with (pair := Pair((torch.optim.Muon, ADAMW), 2)).step as step:
        pair.train()
        weights, biases = Pair.parts(pair.model)
        assert [set(own.state) for own in pair.optimizer] == [set(weights), set(biases)]
        assert set(pair.optimizer[0].state[weights[0]]) == {"momentum_buffer"}
        text = str(step.programs[-1])
        assert "Muon's own step, once for all replicas" in text and "AdamW group 1, this device's share of 2" in text
        assert "# optimizer Muon group 0: lr=0.001" in text and "# optimizer AdamW group 1: lr=0.02" in text
        assert "Muon runs by itself" in str(step.memory())


def test_lists_that_are_no_several_optimizers_are_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, both = SGD(net[0].parameters()), ADAM(net.parameters())
    for given, kind, message in (
        ([], ValueError, r"optimizer is an empty list\n  fix:  optimizer=torch.optim"),
        ((), ValueError, r"optimizer is an empty tuple"),
        (
            [first, "adam"],
            TypeError,
            r"optimizer is a list whose item 1 is a str\n  fix:  optimizer=torch.optim.AdamW\(model.par",
        ),
        (
            [first, first],
            ValueError,
            r"optimizer\[0\] and optimizer\[1\] are the same SGD, which steps once\n  fix:  optimizer=\[first, second\]",
        ),
        (
            [first, both],
            ValueError,
            r"parameter '0.weight' is in optimizer\[0\] and in optimizer\[1\]\n  why:  SGD and Adam of one step",
        ),
        (
            [first, SGD(nn.Linear(1, 1).parameters())],
            ValueError,
            r"optimizer\[1\]'s parameter 0 of group 0, \[1, 1\], is none",
        ),
        ({"a": first}, TypeError, r"optimizer is a dict\n  fix:  optimizer=torch.optim.AdamW.*, or a list of several"),
    ):
        with pytest.raises(kind, match=message):
            mirrorc.compile(net, 2, optimizer=given, loss_fn=F.mse_loss)
    with compiled_step(net, F.mse_loss, optimizer=[both]) as step:
        step(torch.ones(2, 2), target=torch.ones(2, 2))
        assert "# optimizer Adam group 0" in str(step.programs[-1])
    second = ADAM([net[1].weight])
    with compiled_step(net, F.mse_loss, optimizer=[first, second]) as step:
        step(torch.ones(2, 2), target=torch.ones(2, 2))
        second.add_param_group({"params": [net[0].bias]})
        with pytest.raises(ValueError, match=r"parameter '0.bias' is in optimizer\[0\]"):
            step(torch.ones(2, 2), target=torch.ones(2, 2))
