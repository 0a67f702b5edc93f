"""What the user, or a library, does with the optimizer between steps counts, or is answered by a warning that says what to do."""

import contextlib
import functools
import re
from typing import Any

import pytest
import torch
from references import assert_same_model, assert_same_state, train_step
from tiny_models import make_mlp, mlp_batch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_ as early_clip_grad_norm_  # before mirrorc is imported
from torch.nn.utils import clip_grad_value_ as early_clip_grad_value_
from twins import MlpTwins, compiled_step


def test_a_step_that_is_patched_on_the_optimizer_is_obeyed() -> None:
    def patched(optimizer: torch.optim.Optimizer, calls: list[int]) -> Any:
        original = optimizer.step

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.5)
            return original(*args, **kwargs)

        return step

    calls: tuple[list[int], list[int]] = ([], [])
    with MlpTwins(functools.partial(torch.optim.AdamW, lr=0.01)) as pair:
        both = pair.optimizer, pair.twin_optimizer
        for number in range(6):
            if number == 2:
                originals = [own.step for own in both]
                for own, its_calls in zip(both, calls, strict=True):
                    own.step = patched(own, its_calls)
            if number == 4:
                for own, original in zip(both, originals, strict=True):
                    own.step = original
            pair.steps(1)
            assert ("step_optimizer" in str(pair.step.programs[-1])) == (2 <= number < 4)
        assert calls == ([1, 1], [1, 1])
        pair.check()


FUSED = functools.partial(torch.optim.AdamW, lr=0.05, fused=True)
EACH_OPTIMIZER = pytest.mark.parametrize("make_optimizer", [FUSED, functools.partial(torch.optim.Adadelta, lr=1.0)])
SHARED, COPIES = {}, {"disable": ("share-parameters",)}


def trained_by_hand(pair: MlpTwins, optimizers: Any = None) -> None:
    """A step of both in plain PyTorch, by their optimizers or others."""
    batch, losses = pair.next_batch(), []
    for (model, own), other in zip(pair.sides, optimizers or (None, None), strict=True):
        losses.append(train_step(model, other or own, batch, F.cross_entropy))
        model.zero_grad()
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


@pytest.mark.parametrize("options", [SHARED, COPIES], ids=["shared", "copies"])
@pytest.mark.parametrize("momentum", [None, 0.9], ids=["adamw", "sgd"])
def test_fused_steps_of_the_user_count(options: dict[str, Any], momentum: float | None) -> None:
    """Fused implementations write parameters, moments and counts without counting a version."""
    make_optimizer = FUSED if momentum is None else functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
    with MlpTwins(make_optimizer, **options) as pair:
        for by_hand in (True, False, False, True, True, False, True, False):
            trained_by_hand(pair) if by_hand else pair.steps(1)
        pair.check()


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, whose groups and state it shares, without calling the constructor of its class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@pytest.mark.parametrize("options", [SHARED, COPIES], ids=["shared", "copies"])
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["adamw", "wrapped"])
def test_fused_steps_of_another_optimizer_over_the_same_parameters_count(
    options: dict[str, Any], is_wrapped: bool
) -> None:
    make = (lambda parameters: Wrapper(FUSED(parameters))) if is_wrapped else FUSED
    with MlpTwins(make, **options) as pair:
        others = [torch.optim.SGD(model.parameters(), lr=0.2, fused=True) for model, _ in pair.sides]
        pair.steps()
        for _ in range(2):
            trained_by_hand(pair, others)
        pair.steps()
        assert_same_model(pair.model, pair.twin, 1e-10)
        states = [getattr(own, "inner", own) for own in (pair.optimizer, pair.twin_optimizer)]
        assert_same_state(*states, 1e-10)


@pytest.mark.parametrize("options", [SHARED, COPIES], ids=["shared", "copies"])
def test_fused_steps_of_another_optimizer_over_what_the_step_does_not_train_count(options: dict[str, Any]) -> None:
    """First over other parameters than the step's optimizer holds, then over its own, as many as it held before."""
    with MlpTwins(FUSED, select=lambda model: model.first.parameters(), **options) as pair:
        others = [torch.optim.SGD(model.second.parameters(), lr=0.2, fused=True) for model, _ in pair.sides]
        for number in range(9):
            if number == 5:
                for model, own in pair.sides:
                    own.param_groups[0]["params"] = list(model.second.parameters())
            if number % 3:
                trained_by_hand(pair, others)
            pair.steps(1)
            pair.twin.zero_grad()
        assert_same_model(pair.model, pair.twin, 1e-10)


def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    early_clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)


def test_clipping_after_a_step_warns_once_whatever_the_import_style(recwarn: pytest.WarningsRecorder) -> None:
    calls = [
        lambda p: early_clip_grad_norm_(p, 0.1),
        lambda p: early_clip_grad_value_(p, 0.1),
        lambda p: torch.nn.utils.clip_grad_norm_(parameters=p, max_norm=0.1),
        lambda p: torch.nn.utils.clip_grad.clip_grad_value_(list(p), clip_value=0.1),
        lambda p: torch.nn.utils.clip_grad_norm_(next(iter(p)), 0.1),
        lambda p: torch.nn.utils.clip_grads_with_norm_((q for q in p), 0.1, torch.ones(())),
        lambda p: functools.partial(early_clip_grad_norm_, max_norm=0.1)(iter(p)),
    ]
    for clip in calls:

        def call(parameters: Any, clip: Any = clip) -> None:
            with contextlib.suppress(RuntimeError):  # clip_grad_value_ fails where there are no gradients
                clip(parameters)

        model = make_mlp()
        with compiled_step(model, F.cross_entropy, optimizer=torch.optim.AdamW) as step:
            call(model.parameters())  # before the first step
            step.prepare(**mlp_batch(6))
            recwarn.clear()
            step(**mlp_batch(6))
            for _ in range(2):
                call(model.parameters())
            call(make_mlp().parameters())
            (warning,) = recwarn.list
            assert warning.filename == __file__
            assert re.search(
                "(?s)MC3203: clip_grad.*_.* found no gradients .*clip_grad_norm=.*register_step_pre_hook",
                str(warning.message),
            )
            recwarn.clear()
        call(model.parameters())
        assert not recwarn.list


def test_clipping_is_as_before_for_those_who_have_gradients(recwarn: pytest.WarningsRecorder) -> None:
    model = make_mlp()
    with compiled_step(model, F.cross_entropy, optimizer=FUSED) as step:
        step(**mlp_batch(6))
        assert all(type(p) is torch.nn.Parameter and p.grad is None for p in model.parameters())
        F.cross_entropy(model(mlp_batch(6)["x"]), mlp_batch(6)["target"]).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        norm = torch.nn.utils.get_total_norm(gradients)
        assert early_clip_grad_norm_(model.parameters(), 1e9) == norm
        recwarn.clear()
        assert early_clip_grad_norm_(model.parameters(), norm.item() / 2) == norm
        assert early_clip_grad_norm_(model.first.weight, 1e-3, norm_type=1.0, foreach=False) > 1e-3
        early_clip_grad_value_((p for p in model.parameters()), 1e-4)
        assert all(p.grad.abs().max() <= 1e-4 for p in model.parameters())
        assert not recwarn.list
        early_clip_grad_norm_((p for p in ()), 1.0)
        assert [str(warning.message) for warning in recwarn.list] == [
            "`parameters` is an empty generator, no gradient clipping will occur."
        ]


@pytest.mark.fast
def test_a_step_without_gradients_warns_once(recwarn: pytest.WarningsRecorder) -> None:
    model = make_mlp()
    optimizer = FUSED(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with compiled_step(model, F.cross_entropy, optimizer=optimizer) as step:
        optimizer.step()
        step.prepare(**mlp_batch(6))
        recwarn.clear()
        for _ in range(3):
            step(**mlp_batch(6))
            scaler.step(optimizer)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        (warning,) = recwarn.list
        assert warning.filename == __file__ and "optimizer.step() found no gradients" in str(warning.message)
        assert "it has made its update already" in str(warning.message)
    recwarn.clear()
    optimizer.step()
    assert not recwarn.list and not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks


@pytest.mark.fast
def test_the_tail_of_a_librarys_loop_is_answered_by_two_warnings(recwarn: pytest.WarningsRecorder) -> None:
    """As Hugging Face's Trainer ends a step; without a GradScaler, and without backward()."""
    with MlpTwins(FUSED) as pair:
        schedulers = [torch.optim.lr_scheduler.LambdaLR(own, lambda i: 0.5**i) for _, own in pair.sides]
        for _ in range(3):
            pair.train(**pair.next_batch())
            early_clip_grad_norm_(pair.model.parameters(), 1.0)
            pair.optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            pair.model.zero_grad()
        said = [str(warning.message).partition(" found no")[0] for warning in recwarn.list]
        assert said == ["MC3203: clip_grad_norm_()", "MC3202: optimizer.step()"]
        assert_same_model(pair.model, pair.twin, 1e-10)


def test_an_enabled_scaler_fails_with_torchs_words_and_changes_nothing(recwarn: pytest.WarningsRecorder) -> None:
    """Its calls lead to no function of mirrorc's; the optimizer's step, to which it gets with a fused optimizer only, does."""
    for make_optimizer in (FUSED, functools.partial(torch.optim.AdamW, lr=0.05)):
        recwarn.clear()
        with MlpTwins(make_optimizer) as pair:
            for _ in range(3):
                scaler, loss = torch.amp.GradScaler("cpu"), pair.train(**pair.next_batch())
                with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
                    scaler.scale(loss).backward()
                if make_optimizer is FUSED:
                    scaler.step(pair.optimizer)
                    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
                        scaler.update()
                else:
                    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
                        scaler.step(pair.optimizer)
            told = [str(warning.message).partition(" found no")[0] for warning in recwarn.list]
            assert told == (["MC3202: optimizer.step()"] if make_optimizer is FUSED else [])
            pair.check()


@EACH_OPTIMIZER
def test_gradients_of_the_users_are_dropped_and_that_is_said_once(
    make_optimizer: Any, recwarn: pytest.WarningsRecorder
) -> None:
    """A loop of one's own would add them up, unless it begins with zero_grad()."""

    def backward(of: torch.nn.Module) -> None:
        F.cross_entropy(of(mlp_batch(4)["x"]), mlp_batch(4)["target"]).backward()

    def backward_and_step(of: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(of)
        optimizer.step()

    with MlpTwins(make_optimizer) as pair:
        model = pair.model

        def check() -> None:
            batch = pair.next_batch()
            loss = pair.step(**batch)
            assert loss.item() == pytest.approx(pair.plain(**batch).item(), rel=1e-10)
            assert_same_model(model, pair.twin, 1e-10)
            assert all(parameter.grad is None for parameter in model.parameters())

        backward(model)  # before the first step they may be left over from training without mirrorc
        check()
        pair.on_both(backward_and_step)  # used, and left as loops do
        check()
        recwarn.clear()
        for _ in range(2):
            backward(model)
            check()
        (warning,) = recwarn.list
        assert warning.filename == __file__
        assert "6 parameters had gradients from a backward()" in str(warning.message)
        backward(model)
        kept = [parameter.grad for parameter in model.parameters()]
        with pytest.raises(ValueError):
            pair.step(torch.ones(0, 6).double(), target=torch.ones(0).long())
        assert all(own.grad is one for own, one in zip(model.parameters(), kept, strict=True))


@EACH_OPTIMIZER
def test_gradients_of_parameters_that_the_optimizer_does_not_hold_are_the_users_own(
    make_optimizer: Any, recwarn: pytest.WarningsRecorder
) -> None:
    """Another optimizer of the user's may wait for them; zero_grad() of the step's optimizer leaves them, too."""
    model = make_mlp()
    head, body = list(model.second.parameters()), list(model.first.parameters())
    own = torch.optim.SGD(body, lr=0.1)
    with compiled_step(model, F.cross_entropy, optimizer=make_optimizer(head)) as step:
        for seed in range(3):
            F.cross_entropy(model(mlp_batch(4, seed=seed)["x"]), mlp_batch(4, seed=seed)["target"]).backward()
            kept = [parameter.grad for parameter in body]
            expected = [torch.add(p.detach(), p.grad, alpha=-0.1) for p in body]
            for parameter in head:
                parameter.grad = None
            step(**mlp_batch(6, seed=seed))
            assert all(p.grad is gradient for p, gradient in zip(body, kept, strict=True))
            own.step()
            own.zero_grad()
            assert all(torch.equal(p, to) for p, to in zip(body, expected, strict=True))
    assert not recwarn.list


def penalize(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    assert torch.is_grad_enabled()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    penalty = sum((p**4).sum() for p in parameters)
    for p, gradient in zip(parameters, torch.autograd.grad(penalty, parameters), strict=True):
        p.grad.add_(gradient)


@pytest.mark.parametrize("hook", [clip, penalize])
@EACH_OPTIMIZER
def test_hooks_of_the_optimizer_may_clip_gradients_and_use_autograd(
    make_optimizer: Any, hook: Any, recwarn: pytest.WarningsRecorder
) -> None:
    """The way that the warnings and the README recommend."""
    with MlpTwins(make_optimizer) as pair:
        pair.on_both(lambda _, own: own.register_step_pre_hook(hook))
        pair.steps(4)
        assert_same_model(pair.model, pair.twin, 1e-10)
    assert not [w for w in recwarn.list if "found no gradients" in str(w.message)]
