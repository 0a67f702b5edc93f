"""Each habit of docs/migrate/from-pytorch-loop.md by a test of its name. It is long because it is one list, as the page is."""

import ast
import contextlib
import copy
import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import module_twins
import pytest
import torch
from references import assert_same_model, assert_same_state, train_step, unchanged
from selections import slow, slow_but
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc import CaptureError
from mirrorc.compilation import progress
from mirrorc.ir.buckets import Elements
from mirrorc.runtime.state.optimizers.user_optimizers import DealtState, InternalSteps, watch_dealt_state

PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "from-pytorch-loop.md"
KINDS = {"Same", "Changed", "Leave out", "Other", "Refused", "Warned"}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


def rows() -> dict[str, list[str]]:
    """The name of each habit, what a loop has, what it has with mirrorc, and what happens."""
    found: dict[str, list[str]] = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n### ")[1:]:
        name, code, effect = (" ".join(text.split()) for text in part.split("\n\n")[:3])
        assert name not in found, f"{name} stands twice"
        found[name] = [name, *code.split(" → "), effect]
    return found


def quoted(row: str) -> str:
    sentence = re.findall(r'"(.+?)"', rows()[row][3])[0]
    return ".*".join(re.escape(part) for part in sentence.split("…"))


COVERED = {
    "training-step": "parity training_agrees_with_one_device",
    "dict-batch": "parity training_agrees_with_one_device",
    "whole-tensor": "inputs replicated_arguments",
    "other-shape": "symbolic_sizes sizes_are_symbols_of_few_programs",
    "changing-number": "changing_numbers forty_values_of_five_numbers_are_three_programs",
    "sum-loss": "ragged_batches a_sum_over_examples",
    "distributions": "asserts losses_of_distributions_are_captured",
    "accuracy": "outputs outputs_are_those_of_one_device",
    "loss-and-metrics": "outputs what_loss_fn_returns_beside_the_loss",
    "read-gradients": "random_decisions hooks_of_one_see_what_they_see_in_a_loop",
    "clip-grad-norm": "clipping the_norm_is_that_of_one_device",
    "clip-grad-value": "clipping elements_are_bounded_after_the_norm",
    "log-grad-norm": "clipping a_norm_is_measured_without_a_bound",
    "change-gradients": "steps_of_the_user hooks_of_the_optimizer_may_clip_gradients_and_use_autograd",
    "microbatches": "microbatches training_equals_one_device_on_the_whole_batch",
    "accumulation": "accumulation a_step_updates_with_the_mean_over_all_examples_since_the_last_update",
    "drop-accumulated": "accumulation zero_grad_drops_what_is_kept",
    "groups": "parity parameter_groups_and_a_scheduler",
    "add-group": "optimizer_state a_group_added_later_is_trained",
    "scheduler": "parity parameter_groups_and_a_scheduler",
    "plateau": "optimizer_state hyperparameters_change_between_steps",
    "write-lr": "optimizer_state hyperparameters_change_between_steps",
    "own-optimizer": "parity training_agrees_with_one_device",
    "several-optimizers": "random_decisions a_step_is_one_of_each",
    "two-losses-in-turn": "shared_variables what_the_user_does_between_turns_reaches_both",
    "autocast-context": "mixed_precision autocast_by_name_and_by_context_are_the_same",
    "autocast-option": "mixed_precision forward_runs_under_autocast",
    "scaler-option": "mixed_precision a_scaled_step_is_that_of_one_device_also_where_it_is_skipped",
    "batch-norm": "parity batch_norms_statistics_are_each_replicas_own",
    "sync-batch-norm": "replica_values synchronized_statistics_are_those_of_the_whole_batch",
    "manual-seed": "parity two_runs_are_equal_bit_for_bit",
    "count-in-forward": "python_state a_counter_advances_once_a_step_wherever_it_is_kept",
    "cached-mask": "python_state a_cached_mask_is_kept_as_in_plain_pytorch",
    "loss-in-an-attribute": "python_state attributes_that_are_assigned_before_they_are_read_are_values_of_the_call",
    "python-random": "random_decisions layers_are_left_out_as_on_one_device",
    "layerdrop": "random_decisions answers_of_comparisons_with_tensors_are_those_of_one_device",
    "load-state-dict": "optimizer_state what_is_written_between_steps_is_honored",
    "ema": "guides averages_of_weights_and_evaluation",
    "freeze": "optimizer_state unfreezing_and_freezing_between_steps",
    "tie-weights": "optimizer_state tied_weights_are_one_variable",
    "clamp-weights": "optimizer_state what_is_written_between_steps_is_honored",
    "reset-a-layer": "optimizer_state what_is_written_between_steps_is_honored",
    "evaluate-on-all-devices": "evaluation an_evaluation_is_that_of_one_device",
    "best-weights": "optimizer_state what_is_written_between_steps_is_honored",
    "resume": "resuming a_resumed_run_has_the_bits_of_one_in_one_go",
    "data-loader": "ragged_batches a_data_loader_needs_no_drop_last",
    "pack-padded-sequence": "packed_sequences ragged_sequences_train_as_on_one_device",
    "packed-sequence": "packed_sequences packed_sequences_are_split_by_sequences",
    "forward-hook": "respecialization a_forward_hook_that_comes_later_is_not_ignored",
    "profiler": "explain regions_collectives_and_operators_of_all_devices_are_seen",
    "activation-checkpointing": "resuming training_is_that_of_one_device",
    "assert-in-forward": "asserts a_failed_assert_raises_with_its_line_and_changes_nothing",
    "skip-a-nan": "check_finite a_skipped_step_returns_its_loss_and_changes_the_random_stream_alone",
    "ctrl-c": "lifecycle ctrl_c_during_a_step",
}
"""The file and the test that has the property of a row, where it is none here."""


@pytest.mark.fast
def test_page_each_row_has_a_test_and_each_test_a_row() -> None:
    tests = [name.removeprefix("test_") for name in globals() if name.startswith("test_")]
    tests = [name.replace("_", "-") for name in tests if not name.startswith("page_")]
    assert sorted(rows()) == sorted([*tests, *COVERED, *TRAINED, *WARNED, *BETWEEN, *REFUSED])
    for row, place in COVERED.items():
        file, test = place.split()
        assert f"def test_{test}(" in (Path(__file__).parent / f"test_{file}.py").read_text(encoding="utf-8"), row


@pytest.mark.fast
def test_page_each_row_is_whole() -> None:
    for row, cells in rows().items():
        assert len(cells) == 4, row
        kind = re.match(r"\*\*(.+?)[.:]\*\*", cells[3])
        assert kind is not None and kind[1] in KINDS, row
        assert ('"' in cells[3]) or kind[1] not in ("Refused", "Warned"), f"{row} quotes no sentence"


@pytest.mark.fast
def test_page_its_code_is_python() -> None:
    for row, cells in rows().items():
        for code in re.findall(r"`(.+?)`", cells[1] + " " + cells[2]):
            source = code.replace(", ...)", ")").replace("(..., ", "(") + (" pass" if code.endswith(":") else "")
            before = (
                "try: pass\n" if source.startswith("except") else "def f(): " if source.startswith("return") else ""
            )
            try:
                ast.parse(before + source)
            except SyntaxError as error:
                raise AssertionError(f"{row}: {code}") from error


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def batch(size: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return module_twins.batch(size, seed, features=3, classes=2)


X, Y = batch()


def compiled(model: nn.Module, optimizer: Any = SGD, loss_fn: Any = F.cross_entropy, **options: Any) -> mirrorc.Step:
    return compiled_step(model, loss_fn, optimizer=optimizer, **options)


class Pair(Twins):
    def __init__(
        self, model: nn.Module | None = None, make: Any = SGD, loss_fn: Any = F.cross_entropy, **options: Any
    ) -> None:
        super().__init__(net() if model is None else model, make, loss_fn, **options)

    def backward(self, x: torch.Tensor = X, target: torch.Tensor = Y) -> torch.Tensor:
        self.twin_optimizer.zero_grad()
        return super().backward(x, target=target)

    def train(self, times: int = 1, after: Callable[[], Any] = lambda: None, size: int = 4) -> torch.Tensor:
        """Trains both, and compares them; ``after`` is what the plain loop does between backward and its update."""
        for seed in range(times):
            x, y = batch(size, seed)
            own, expected = self.step(x, target=y), self.backward(x, y)
            after()
            self.twin_optimizer.step()
            torch.testing.assert_close(own, expected)
        self.check()
        return own


@contextmanager
def refused(row: str, model: nn.Module, kind: type[BaseException] = CaptureError) -> Iterator[None]:
    with unchanged(model), pytest.raises(kind, match=f"(?s){quoted(row)}"):
        yield


@contextmanager
def warned(row: str) -> Iterator[None]:
    """Checks that a block warns of the row's sentence, once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(w.message) for w in caught if w.category is UserWarning]
    assert len(said) == 1 and re.search(quoted(row), said[0]), said


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


class Around(nn.Module):
    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.does, self.count = net(), does, 0
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return self.does(self, x, **kwargs)


# The batch and its arguments


def loss_with_a_square(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(o, y, label_smoothing=0.1) + 0.1 * o.square().mean()


def hooked() -> nn.Sequential:
    model = net()
    model[-1].register_full_backward_hook(lambda module, given, output: tuple(2 * gradient for gradient in given))
    return model


def branches(own: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([2 * row if row.sum() > 0 else row for row in own.net(x)])


def reads_a_number(own: Any, x: torch.Tensor) -> torch.Tensor:
    return own.net(x) / next(own.net.parameters()).abs().max().item()


def clamp(model: Any, turn: int) -> None:
    model[0].weight.data.clamp_(-0.1, 0.1)


def other_count(model: Any, turn: int) -> None:
    model.count = (1, 2, 1)[turn]


TRAINED: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[Any, int], Any]]] = {
    "auxiliary-loss": (net, loss_with_a_square, lambda model, turn: None),
    "module-attribute": (partial(Around, lambda own, x: own.net(x) * own.count), F.cross_entropy, other_count),
    "clamp-data": (net, F.cross_entropy, clamp),
    "backward-hook": (hooked, F.cross_entropy, lambda model, turn: None),
    "branch-on-a-tensor": (partial(Around, branches), F.cross_entropy, lambda model, turn: None),
    "item-in-forward": (partial(Around, reads_a_number), F.cross_entropy, lambda model, turn: None),
}
"""The model, the loss, and what happens before each step; all train as in plain PyTorch."""


@pytest.mark.parametrize("row", TRAINED)
def test_page_what_trains(row: str) -> None:
    make, loss_fn, change = TRAINED[row]
    is_warned = "**Warned" in rows()[row][3]
    with (
        Pair(make(), loss_fn=loss_fn) as pair,
        pytest.warns(UserWarning, match=quoted(row)) if is_warned else contextlib.nullcontext(),
    ):
        for turn in range(3):
            for model, _ in pair.sides:
                change(model, turn)
            pair.train()


WARNED: dict[str, tuple[dict[str, Any], torch.Tensor]] = {
    "loss-backward": ({}, Y),
    "sum-loss-unsaid": ({"loss_fn": nn.CrossEntropyLoss(reduction="sum")}, Y),
    "class-weights": ({"loss_fn": nn.CrossEntropyLoss(torch.tensor([1.0, 3.0], dtype=torch.float64))}, Y),
    "ignore-index": ({}, torch.tensor([-100, -100, 0, 1])),
    "early-state-dict": ({}, Y),
}


@pytest.mark.parametrize("row", WARNED)
def test_page_what_is_warned_of(row: str) -> None:
    (options, target), model = WARNED[row], net()
    state = model.state_dict() if row == "early-state-dict" else None
    with compiled(model, **options) as step, warned(row):
        loss = step(X, target=target)
        if row == "loss-backward":
            loss.backward()
    assert state is None or not torch.equal(state["0.weight"], model[0].weight)


BETWEEN: dict[str, Callable[[Pair], Any]] = {
    "clip-after-the-step": lambda pair: nn.utils.clip_grad_norm_(pair.model.parameters(), 0.1),
    "own-backward": lambda pair: F.cross_entropy(pair.model(X), Y).backward(),
    "optimizer-step": lambda pair: pair.optimizer.step(),
}


@pytest.mark.parametrize("row", BETWEEN)
def test_page_what_between_steps_is_warned_of(row: str) -> None:
    with Pair() as pair, warned(row):
        pair.train()
        BETWEEN[row](pair)
        pair.train()


def averages(own: Any, x: torch.Tensor) -> torch.Tensor:
    own.count = 0.9 * own.count + 0.1 * x.mean(0)
    return own.net(x - own.count)


def of_an_iterator() -> nn.Module:
    model = Around(lambda own, x: own.net(x) * next(own.noise))
    model.noise = (0.5 for _ in range(9))
    return model


Refusal = tuple[Callable[[], nn.Module], dict[str, Any], Any, type[Exception]]
REFUSED: dict[str, Refusal] = {
    "numpy-batch": (net, {}, (X.numpy(), Y), TypeError),
    "loss-of-each-example": (net, {"loss_fn": nn.CrossEntropyLoss(reduction="none")}, (X, Y), CaptureError),
    "running-mean-in-python": (partial(Around, averages), {}, (X, Y), CaptureError),
    "iterator-in-forward": (of_an_iterator, {}, (X, Y), CaptureError),
    "inference-mode": (net, {}, (X, Y), mirrorc.ExecutionError),
    "empty-batch": (net, {}, (X[:0], Y[:0]), ValueError),
    "stop-at-a-nan": (net, {"check_finite": True}, (X * math.nan, Y), mirrorc.NonFiniteError),
}


@pytest.mark.fast
@pytest.mark.parametrize("row", slow_but(set(REFUSED) - {"stop-at-a-nan"}, REFUSED))
def test_page_what_is_refused(row: str) -> None:
    make, options, (x, target), error = REFUSED[row]
    model = make()
    with compiled(model, **options) as step, torch.inference_mode(row == "inference-mode"), refused(row, model, error):
        step(x, target=target)
    assert row != "iterator-in-forward" or len([*model.noise]) == 9


def test_to_device() -> None:
    with Pair() as pair:
        assert pair.step(X.to("cpu"), target=Y.to("cpu")).device == torch.device("cpu")


def test_data_parallel() -> None:
    with Pair(nn.DataParallel(net())) as pair:
        pair.train(2)
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        wrapped = nn.parallel.DistributedDataParallel(net())
        with pytest.raises(ValueError, match=quoted("data-parallel")):
            compiled(wrapped, SGD(wrapped.parameters()))
    finally:
        torch.distributed.destroy_process_group()


def test_process_group() -> None:
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=torch.distributed.HashStore())
    try:
        model = net()
        with pytest.raises(mirrorc.CommunicationError, match=quoted("process-group")):
            compiled(model, SGD(model.parameters()), timeout=0.2)
        compiled(model, SGD(model.parameters()), distributed=False).close()
    finally:
        torch.distributed.destroy_process_group()


def test_sharded_optimizer() -> None:
    model = net()
    program = mirrorc.plan(
        model, ((X,), {"target": Y}), world=mirrorc.World(2, 2), rank=1, optimizer=ADAMW(model.parameters()),
        loss_fn=F.cross_entropy, memory=mirrorc.Memory(shard_optimizer=True), compiler=mirrorc.Compiler(backend="eager"),
    )  # fmt: skip
    (bucket,) = program.buckets
    assert bucket.part == Elements(bucket.num_elements // 2, bucket.num_elements)
    optimizer = ADAMW(model.parameters())
    optimizer.state[model[0].weight] = {"exp_avg": DealtState(torch.float64)}  # as the step of a worker leaves it
    internal_steps = InternalSteps()
    watch_dealt_state(optimizer, internal_steps)
    with pytest.raises(mirrorc.ExecutionError, match=quoted("sharded-optimizer")):
        optimizer.state_dict()
    with Pair(make=ADAMW, shard_optimizer=True) as pair:  # in a process on its own it changes nothing
        pair.train(2)
        pair.step.gather_optimizer_state()
        assert pair.optimizer.state_dict()["state"].keys() == pair.twin_optimizer.state_dict()["state"].keys()


@pytest.mark.fast
def test_torch_compile() -> None:
    model = net()
    before = model[0].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with compiled(torch.compile(model), SGD(model.parameters())) as step:
            loss = step(X, target=Y)
    torch.testing.assert_close(loss, F.cross_entropy(net()(X), Y).detach())
    assert not torch.equal(before, model[0].weight)


def test_several_targets() -> None:
    def loss_fn(output: torch.Tensor, target: Any) -> torch.Tensor:
        return (F.cross_entropy(output, target[0], reduction="none") * target[1]).mean()

    w = torch.rand(4, dtype=torch.float64)
    with compiled(net(), loss_fn=loss_fn) as step:
        torch.testing.assert_close(step(X, target=(Y, w)), loss_fn(net()(X), (Y, w)).detach())


@pytest.mark.fast
def test_positional_target() -> None:
    model = net()
    with compiled(model) as step:
        expected = F.cross_entropy(model(X), Y).detach()
        torch.testing.assert_close(step(X, Y), expected)


def test_sequence_first() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x.transpose(0, 1))[0].transpose(0, 1)

    model = First()
    x, y = torch.randn(4, 6, 3, dtype=torch.float64), torch.randn(4, 6, 2, dtype=torch.float64)
    lstm = copy.deepcopy(model.lstm)
    expected = F.mse_loss(lstm(x.transpose(0, 1))[0].transpose(0, 1), y).detach()
    with compiled(model, loss_fn=F.mse_loss) as step:
        torch.testing.assert_close(step(x, target=y), expected)
    check = mirrorc.check_loss(
        lstm, x.transpose(0, 1), target=y.transpose(0, 1), loss_fn=lambda o, t: F.mse_loss(o[0], t)
    )
    assert not check.same


# The loss and the outputs


def test_loss_item() -> None:
    with compiled(net()) as step:
        losses = [step(X, target=Y) for _ in range(3)]
        assert losses[0].item() > losses[2].item() and not losses[0].requires_grad


def test_penalty() -> None:
    def loss_fn(own: nn.Module, o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(o, y) + 1e-2 * sum(p.square().sum() for p in own.parameters())

    model, plain = net(), net()
    train_step(plain, SGD(plain.parameters()), {"input": X, "target": Y}, partial(loss_fn, plain))
    with compiled(model, loss_fn=partial(loss_fn, model)) as step:
        step(X, target=Y)
    assert_same_model(model, plain, 1e-10)


def test_contrastive_loss() -> None:
    def loss_fn(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(o @ o.T, torch.arange(len(o)))

    found = mirrorc.check_loss(net(), X, target=Y, loss_fn=loss_fn)
    assert not found.same
    with compiled(net(), loss_fn=loss_fn) as step:
        output = net()(X)
        shards = [loss_fn(part, Y) for part in output.split(2)]
        torch.testing.assert_close(step(X, target=Y), ((shards[0] + shards[1]) / 2).detach())


def test_gradient_penalty() -> None:
    def penalty(own: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(own.net(x).sum(), x, create_graph=True)
        return gradient.square().sum(1).mean()

    def functional(own: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda inner: own.net(inner).sum())(x).square().sum(1).mean()

    plain = Around(penalty)
    optimizer = SGD(plain.parameters())
    plain(X).backward()
    optimizer.step()
    same, own = Around(penalty), Around(functional)
    with compiled(same, loss_fn=None) as step, pytest.warns(UserWarning, match=quoted("gradient-penalty")):
        step(X)
    with compiled(own, loss_fn=None) as step:
        step(X)
    assert_same_model(same, plain, 1e-10)
    assert_same_model(own, plain, 1e-10)


# Gradients and clipping


def test_zero_grad() -> None:
    with Pair() as pair:
        for _ in range(3):
            pair.optimizer.zero_grad(set_to_none=True)
            pair.train()


@pytest.mark.fast
def test_hook_on_a_gradient() -> None:
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    with unchanged(model), pytest.raises(ValueError, match=quoted("hook-on-a-gradient")):
        compiled(model)(X, target=Y)


# The optimizer, its groups and schedulers


@pytest.mark.fast
def test_closure() -> None:
    model = net()
    with unchanged(model), pytest.raises(TypeError, match=quoted("closure")):
        compiled(model, torch.optim.LBFGS(model.parameters()))
    plain, (x, y) = net(), batch()

    def train(model: nn.Module, gradients: Callable[[], torch.Tensor]) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            return gradients()

        optimizer.step(closure)  # type: ignore[arg-type]

    def backward() -> torch.Tensor:
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        return loss

    with compiled(model, None) as step:
        train(model, lambda: step.gradients(x, y))
    train(plain, backward)
    assert_same_model(model, plain, 1e-10)


class Up(torch.optim.Optimizer):
    """The first half of SAM: climbs along the gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})

    def step(self, closure: Any = None) -> None:
        own = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in own if p.grad is not None]).norm()
        with torch.no_grad():
            for p in own:
                assert p.grad is not None
                self.state[p]["by"] = p.grad * (0.05 / norm)
                p.add_(self.state[p]["by"])


class Down(torch.optim.SGD):
    """The second half: goes back, and updates with the gradient that it has found above."""

    def __init__(self, parameters: Any, up: Up) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.up = up

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(self.up.state[p]["by"])
        super().step()


def test_two_evaluations() -> None:
    model, plain = net(), net()
    up, plain_up = Up(model.parameters()), Up(plain.parameters())
    down, plain_down = Down(model.parameters(), up), Down(plain.parameters(), plain_up)
    with compiled(model, up) as up_step, compiled(model, down) as down_step:
        for seed in range(3):
            x, y = batch(seed=seed)
            up_step(x, target=y)
            down_step(x, target=y)
            for optimizer in (plain_up, plain_down):
                train_step(plain, optimizer, {"input": x, "target": y}, F.cross_entropy)
    assert_same_model(model, plain, 1e-10)


def test_gan() -> None:
    def make() -> tuple[Any, ...]:
        generator, critic = net()[0].double(), net()
        head = nn.Linear(4, 3).double()
        with torch.no_grad():
            head.weight.fill_(0.1)
        generator = nn.Sequential(generator, head)
        one = Around(
            lambda own, z, real: F.softplus(-critic(real)).mean() + F.softplus(critic(generator(z).detach())).mean()
        )
        other = Around(lambda own, z: F.softplus(-critic(generator(z))).mean())
        for model in (one, other):
            model.net, model.critic = generator, critic
        return one, other, ADAMW(critic.parameters()), ADAMW(generator.parameters())

    one, other, for_critic, for_generator = make()
    plain, plain_other, plain_critic, plain_generator = make()
    with compiled(one, for_critic, None) as train_critic, compiled(other, for_generator, None) as train_generator:
        for seed in range(3):
            z, real = batch(4, seed)[0], batch(4, seed + 9)[0]
            train_critic(z, real=real)
            train_generator(z)
            plain_critic.zero_grad()
            plain(z, real=real).backward()
            plain_critic.step()
            plain_generator.zero_grad()
            plain_other(z).backward()
            plain_generator.step()
    assert_same_model(one, plain, 1e-10)
    assert_same_state(for_critic, plain_critic, 1e-10)
    assert_same_state(for_generator, plain_generator, 1e-10)


# Mixed precision and scaling


def test_grad_scaler() -> None:
    model = net()
    with compiled(model) as step:
        loss = step(X, target=Y)
        with refused("grad-scaler", model, RuntimeError):
            torch.amp.GradScaler("cpu").scale(loss).backward()


@pytest.mark.fast
def test_scaler_of_two() -> None:
    scaler, models = torch.amp.GradScaler("cpu"), [net(), net()]
    with compiled(models[0], scaler=scaler), refused("scaler-of-two", models[1], ValueError):
        compiled(models[1], scaler=scaler)


def test_bfloat16_model() -> None:
    model = net(torch.bfloat16)
    with compiled(model, ADAMW(model.parameters())) as step:
        before = model[0].weight.detach().clone()
        assert step(X.bfloat16(), target=Y).dtype == torch.bfloat16 and not torch.equal(before, model[0].weight)


# Buffers, dropout and random numbers


def test_write_a_buffer() -> None:
    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            own.mean.mul_(0.9).add_(x.mean(), alpha=0.1)
        return own.net(x)

    model, plain = Around(forward), Around(forward)
    with compiled(model) as step:
        step(X[:4], target=Y[:4])
    plain(X[:4])
    torch.testing.assert_close(model.mean, plain.mean)


# Between steps


@pytest.mark.fast
@pytest.mark.parametrize("devices", [1, *slow((2,), (3,))])
def test_freeze_with_zeros(devices: Any) -> None:
    with Pair(devices=devices) as pair:
        pair.train()
        for model, optimizer in pair.sides:
            optimizer.zero_grad(set_to_none=False)
            model[0].requires_grad_(False)
        before = pair.model[0].weight.detach().clone()
        pair.step(X, target=Y)
        F.cross_entropy(pair.twin(X), Y).backward()
        pair.twin_optimizer.step()
        assert torch.equal(pair.model[0].weight, before)
        assert not torch.allclose(pair.twin[0].weight, before), "momentum goes on"
        torch.testing.assert_close(pair.model[2].state_dict(), pair.twin[2].state_dict())


@pytest.mark.fast
def test_tie_by_data() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model[1].weight.data = model[0].weight.data
    with unchanged(model), pytest.raises(ValueError, match=quoted("tie-by-data")):
        compiled(model)


def test_new_head() -> None:
    model = net()
    with compiled(model) as step:
        step(X, target=Y)
        model[2] = nn.Linear(4, 2).double()
        with refused("new-head", model, ValueError):
            step(X, target=Y)


def test_deepcopy() -> None:
    with Pair() as pair:
        pair.train()
        snapshot = copy.deepcopy(pair.model)
        before = copy.deepcopy(pair.twin)
        pair.train()
        assert_same_model(snapshot, before, 1e-10)


# Evaluation


def test_evaluate() -> None:
    with Pair(nn.Sequential(net(), nn.Dropout(0.0))) as pair:
        pair.train()
        for model, _ in pair.sides:
            model.eval()
        with torch.no_grad():
            torch.testing.assert_close(pair.model(X), pair.twin(X))
        for model, _ in pair.sides:
            model.train()
        pair.train()


# Checkpoints and resuming


def test_save_a_part() -> None:
    def size_of(state: Any) -> int:
        torch.save(state, file := io.BytesIO())
        return len(file.getvalue())

    model = nn.Sequential(nn.Linear(3, 1000), nn.Linear(1000, 2)).double()
    with compiled(model) as step:
        step(X, target=Y)
        head = model[1].bias.detach()
        assert size_of(head) > 30_000 > size_of(head.clone())


@pytest.mark.fast
def test_save_the_step() -> None:
    with compiled(net()) as step, pytest.raises(TypeError, match=quoted("save-the-step")):
        torch.save(step, io.BytesIO())


# DataLoader and ragged batches


# Progress, printing, logging, profiling and hooks


def test_progress(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert progress.PATIENCE_SECONDS == 2.0
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "free_terminal", lambda: None)
    caplog.set_level(logging.INFO, "mirrorc.compilation.progress")
    with compiled(net(), progress=False) as step:
        step(X, target=Y)
    assert not [record for record in caplog.records if record.name == "mirrorc.compilation.progress"]
    with compiled(net()) as step:
        step(X, target=Y)
        step(X, target=Y)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "mirrorc.compilation.progress"]
    assert line.startswith("compiling Sequential for cpu:0, cpu:1: ") and "(the first call)" in line


def test_print_in_forward() -> None:
    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        print("shape", x.shape)  # noqa: T201
        return own.net(x)

    with compiled(Around(forward)) as step, warned("print-in-forward"):
        step(X, target=Y)


def test_self_log() -> None:
    class Logging(Around):
        """What Lightning's module does in `log` before it has a Trainer; test_lightning.py has the real one."""

        _trainer = None

        def log(self, name: str, value: torch.Tensor) -> None:
            if self._trainer is None:
                warnings.warn(
                    "You are trying to `self.log()` but the `self.trainer` reference is not registered on the model yet.",
                    stacklevel=2,
                )

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = own.net(x)
        own.log("mean", y.mean())
        return y

    def storing(own: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = own.net(x)
        own.logged["mean"] = y.mean().detach()
        return y

    model, plain = Logging(forward), net()
    optimizer = SGD(plain.parameters())
    with compiled(model) as step, warned("self-log"):
        found = [step(X, target=Y).item() for _ in range(3)]
    expected = [train_step(plain, optimizer, {"input": X, "target": Y}, F.cross_entropy) for _ in range(3)]
    assert found == pytest.approx(expected)
    assert_same_model(model.net, plain, 1e-10)
    model = Around(storing)
    model.logged = {}
    with compiled(model) as step, warned("store-activations"):
        step(X, target=Y)
    assert not model.logged


def test_store_activations() -> None:
    model, stored = net(), []
    model[0].register_forward_hook(lambda module, given, output: stored.append(output))
    with compiled(model) as step, warned("store-activations"):
        step(X, target=Y)
    assert not stored


def test_activation_memory_budget() -> None:
    def memory(bound: str | None) -> int:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh(), nn.Sigmoid())]
        model = nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 2)).double()
        with compiled(model, activations=bound) as step:
            step(X, target=Y)
            return max(device.own.activations for device in step.memory().devices)

    whole = memory(None)
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert memory(None) == whole
    assert memory("80%") <= 0.8 * whole


# Errors, numbers that are not finite, Ctrl-C
