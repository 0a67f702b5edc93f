"""What the user, or a library, does with the optimizer between steps counts, or is answered by a warning that says what to do."""

import contextlib
import copy
import functools
import re
from typing import Any

import pytest
import torch
from references import assert_mirrored, assert_same_model, assert_same_state, train_step
from selections import slow, slow_but
from tiny_models import make_mlp, mlp_batch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_ as early_clip_grad_norm_  # before mirrorc is imported
from torch.nn.utils import clip_grad_value_ as early_clip_grad_value_
from twins import compiled_step


@pytest.mark.slow
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

    model = make_mlp()
    twin = copy.deepcopy(model)
    optimizer, of_twin = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, twin))
    calls: tuple[list[int], list[int]] = ([], [])
    with compiled_step(model, F.cross_entropy, optimizer=optimizer) as step:
        for seed in range(6):
            if seed == 2:
                originals = optimizer.step, of_twin.step
                optimizer.step, of_twin.step = patched(optimizer, calls[0]), patched(of_twin, calls[1])
            if seed == 4:
                optimizer.step, of_twin.step = originals
            loss = step(**mlp_batch(6, seed=seed)).item()
            assert loss == pytest.approx(train_step(twin, of_twin, mlp_batch(6, seed=seed), F.cross_entropy))
            assert_mirrored(step, model, 2)
            text = str(step.program)
            assert ("step_optimizer" in text) == (2 <= seed < 4)
    assert calls == ([1, 1], [1, 1])
    assert_same_model(model, twin, 1e-10)
    assert_same_state(optimizer, of_twin, 1e-10)


FUSED = functools.partial(torch.optim.AdamW, lr=0.05, fused=True)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"disable_passes": ("share-parameters",)}], ids=["shared", "copies"])
@pytest.mark.parametrize("momentum", slow_but([None], [None, 0.9]), ids=["adamw", "sgd"])
def test_fused_steps_of_the_user_count(options: dict[str, Any], momentum: float | None) -> None:
    """Fused implementations write parameters, moments and counts without counting a version."""
    make_optimizer = FUSED if momentum is None else functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
    model = make_mlp()
    twin = copy.deepcopy(model)
    optimizer, of_twin = make_optimizer(model.parameters()), make_optimizer(twin.parameters())
    with compiled_step(model, F.cross_entropy, optimizer=optimizer, **options) as step:
        for seed in range(8):
            batch = mlp_batch(6, seed=seed)
            expected = train_step(twin, of_twin, batch, F.cross_entropy)
            if seed in (0, 3, 4, 6):
                found = train_step(model, optimizer, batch, F.cross_entropy)
                optimizer.zero_grad()
            else:
                found = step(**batch).item()
                assert_mirrored(step, model, 2)
            assert found == pytest.approx(expected, rel=1e-10)
    assert_same_model(model, twin, 1e-10)
    assert_same_state(optimizer, of_twin, 1e-10)


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, whose groups and state it shares, without calling the constructor of its class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@pytest.mark.slow
@pytest.mark.parametrize("options", [*slow(({},)), {"disable_passes": ("share-parameters",)}], ids=["shared", "copies"])
@pytest.mark.parametrize("is_wrapped", slow_but([True], [False, True]), ids=["adamw", "wrapped"])
def test_fused_steps_of_another_optimizer_over_the_same_parameters_count(
    options: dict[str, Any], is_wrapped: bool
) -> None:
    model = make_mlp()
    twin = copy.deepcopy(model)
    optimizer, of_twin = FUSED(model.parameters()), FUSED(twin.parameters())
    if is_wrapped:
        optimizer, of_twin = Wrapper(optimizer), Wrapper(of_twin)
    others = [torch.optim.SGD(m.parameters(), lr=0.2, fused=True) for m in (model, twin)]
    with compiled_step(model, F.cross_entropy, optimizer=optimizer, **options) as step:
        for seed in range(6):
            batch = mlp_batch(6, seed=seed)
            if seed in (2, 3):
                expected = train_step(twin, others[1], batch, F.cross_entropy)
                found = train_step(model, others[0], batch, F.cross_entropy)
                others[0].zero_grad()
            else:
                expected = train_step(twin, of_twin, batch, F.cross_entropy)
                found = step(**batch).item()
                assert_mirrored(step, model, 2)
            assert found == pytest.approx(expected, rel=1e-10)
    assert_same_model(model, twin, 1e-10)
    assert_same_state(getattr(optimizer, "inner", optimizer), getattr(of_twin, "inner", of_twin), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, *slow(({"disable_passes": ("share-parameters",)},))], ids=["shared", "copies"])
def test_fused_steps_of_another_optimizer_over_what_the_step_does_not_train_count(options: dict[str, Any]) -> None:
    """First over other parameters than the step's optimizer holds, then over its own, as many as it held before."""
    model = make_mlp()
    twin = copy.deepcopy(model)
    optimizer, of_twin = FUSED(model.first.parameters()), FUSED(twin.first.parameters())
    others = [torch.optim.SGD(own.second.parameters(), lr=0.2, fused=True) for own in (model, twin)]
    with compiled_step(model, F.cross_entropy, optimizer=optimizer, **options) as step:
        for seed in range(9):
            batch = mlp_batch(6, seed=seed)
            if seed == 5:
                optimizer.param_groups[0]["params"] = list(model.second.parameters())
                of_twin.param_groups[0]["params"] = list(twin.second.parameters())
            if seed % 3:
                for own, other in zip((model, twin), others, strict=True):
                    train_step(own, other, batch, F.cross_entropy)
                    own.zero_grad()
            expected = train_step(twin, of_twin, batch, F.cross_entropy)
            twin.zero_grad()
            assert step(**batch).item() == pytest.approx(expected, rel=1e-10)
            assert_mirrored(step, model, 2)
    assert_same_model(model, twin, 1e-10)


def clipping(maximum: float) -> Any:
    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        early_clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], maximum)

    return clip


@pytest.mark.slow
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
                "clip_grad.*_.* found no gradients .*clip_grad_norm=.*register_step_pre_hook", str(warning.message)
            )
            recwarn.clear()
        call(model.parameters())
        assert not recwarn.list


@pytest.mark.slow
def test_clipping_is_as_before_for_those_who_have_gradients(recwarn: pytest.WarningsRecorder) -> None:
    model = make_mlp()
    with compiled_step(model, F.cross_entropy, optimizer=FUSED) as step:
        step(**mlp_batch(6))
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
        assert "it has made this update already" in str(warning.message)
    recwarn.clear()
    optimizer.step()
    assert not recwarn.list and not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks


def test_the_tail_of_a_librarys_loop_is_answered_by_two_warnings(recwarn: pytest.WarningsRecorder) -> None:
    """As Hugging Face's Trainer ends a step; without a GradScaler, and without backward()."""
    model = make_mlp()
    twin = copy.deepcopy(model)
    (optimizer, scheduler), (of_twin, scheduler_of_twin) = (
        (own, torch.optim.lr_scheduler.LambdaLR(own, lambda i: 0.5**i))
        for own in (FUSED(m.parameters()) for m in (model, twin))
    )
    with compiled_step(model, F.cross_entropy, optimizer=optimizer) as step:
        for seed in range(3):
            batch = mlp_batch(6, seed=seed)
            assert step(**batch).item() == pytest.approx(train_step(twin, of_twin, batch, F.cross_entropy))
            early_clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            scheduler_of_twin.step()
            model.zero_grad()
    assert [str(warning.message).partition(" found no")[0] for warning in recwarn.list] == [
        "clip_grad_norm_()",
        "optimizer.step()",
    ]
    assert_same_model(model, twin, 1e-10)


@pytest.mark.slow
def test_an_enabled_scaler_fails_with_torchs_words_and_changes_nothing(recwarn: pytest.WarningsRecorder) -> None:
    """Its calls lead to no function of mirrorc's; the optimizer's step, to which it gets with a fused optimizer only, does."""
    for make_optimizer in (FUSED, functools.partial(torch.optim.AdamW, lr=0.05)):
        model, scaler = make_mlp(), torch.amp.GradScaler("cpu")
        twin = copy.deepcopy(model)
        optimizer, of_twin = make_optimizer(model.parameters()), make_optimizer(twin.parameters())
        recwarn.clear()
        with compiled_step(model, F.cross_entropy, optimizer=optimizer) as step:
            for seed in range(3):
                batch = mlp_batch(6, seed=seed)
                loss = step(**batch)
                assert loss.item() == pytest.approx(train_step(twin, of_twin, batch, F.cross_entropy))
                for of_user in (loss, scaler.scale(loss)):
                    with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
                        of_user.backward()
                if make_optimizer is FUSED:
                    scaler.step(optimizer)
                    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
                        scaler.update()
                else:
                    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
                        scaler.step(optimizer)
                scaler = torch.amp.GradScaler("cpu")
        told = [str(warning.message).partition(" found no")[0] for warning in recwarn.list]
        assert told == (["optimizer.step()"] if make_optimizer is FUSED else [])
        assert_same_model(model, twin, 1e-10)
        assert_same_state(optimizer, of_twin, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [FUSED, functools.partial(torch.optim.Adadelta, lr=1.0)])
def test_gradients_of_the_users_are_dropped_and_that_is_said_once(
    make_optimizer: Any, recwarn: pytest.WarningsRecorder
) -> None:
    """A loop of one's own would add them up, unless it begins with zero_grad()."""
    model = make_mlp()
    twin = copy.deepcopy(model)
    optimizer, of_twin = make_optimizer(model.parameters()), make_optimizer(twin.parameters())
    batches = iter([mlp_batch(6, seed=seed) for seed in range(9)])

    def check() -> None:
        batch = next(batches)
        assert step(**batch).item() == pytest.approx(train_step(twin, of_twin, batch, F.cross_entropy), rel=1e-10)
        assert_same_model(model, twin, 1e-10)
        assert all(parameter.grad is None for parameter in model.parameters())

    def backward(of: torch.nn.Module) -> None:
        F.cross_entropy(of(mlp_batch(4)["x"]), mlp_batch(4)["target"]).backward()

    with compiled_step(model, F.cross_entropy, optimizer=optimizer) as step:
        backward(model)  # before the first step they may be left over from training without mirrorc
        check()
        for own, its_optimizer in ((model, optimizer), (twin, of_twin)):  # used, and left as loops do
            backward(own)
            its_optimizer.step()
        check()
        recwarn.clear()
        for _ in range(2):
            backward(model)
            check()
        (warning,) = recwarn.list
        assert warning.filename == __file__ and "6 of the parameters had gradients from a backward()" in str(
            warning.message
        )
        backward(model)
        kept = [parameter.grad for parameter in model.parameters()]
        with pytest.raises(ValueError):
            step(torch.ones(0, 6).double(), target=torch.ones(0).long())
        assert all(own.grad is one for own, one in zip(model.parameters(), kept, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [FUSED, functools.partial(torch.optim.Adadelta, lr=1.0)])
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


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [FUSED, functools.partial(torch.optim.Adadelta, lr=1.0)])
def test_gradients_are_clipped_by_a_hook_of_the_optimizer(
    make_optimizer: Any, recwarn: pytest.WarningsRecorder
) -> None:
    """The way that the warnings and the README recommend."""
    model = make_mlp()
    twin = copy.deepcopy(model)
    optimizer, of_twin = make_optimizer(model.parameters()), make_optimizer(twin.parameters())
    for own in (optimizer, of_twin):
        own.register_step_pre_hook(clipping(0.05))
    with compiled_step(model, F.cross_entropy, optimizer=optimizer) as step:
        for seed in range(4):
            batch = mlp_batch(6, seed=seed)
            assert step(**batch).item() == pytest.approx(train_step(twin, of_twin, batch, F.cross_entropy), rel=1e-10)
            assert_mirrored(step, model, 2)
    assert_same_model(model, twin, 1e-10)
    assert not [w for w in recwarn.list if "found no gradients" in str(w.message)]


def penalize(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    assert torch.is_grad_enabled()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    penalty = sum((p**4).sum() for p in parameters)
    for p, gradient in zip(parameters, torch.autograd.grad(penalty, parameters), strict=True):
        p.grad.add_(gradient)


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [FUSED, functools.partial(torch.optim.Adadelta, lr=1.0)])
def test_hooks_of_the_optimizer_may_use_autograd(make_optimizer: Any) -> None:
    model = make_mlp()
    twin = copy.deepcopy(model)
    optimizer, of_twin = make_optimizer(model.parameters()), make_optimizer(twin.parameters())
    for own in (optimizer, of_twin):
        own.register_step_pre_hook(penalize)
    with compiled_step(model, F.cross_entropy, optimizer=optimizer) as step:
        for seed in range(3):
            batch = mlp_batch(6, seed=seed)
            assert step(**batch).item() == pytest.approx(train_step(twin, of_twin, batch, F.cross_entropy), rel=1e-10)
    assert_same_model(model, twin, 1e-10)


@pytest.mark.slow
def test_parameters_stay_plain() -> None:
    model = make_mlp()
    with compiled_step(model, F.cross_entropy, optimizer=FUSED) as step:
        step(**mlp_batch(6))
        assert all(type(p) is torch.nn.Parameter and p.grad is None for p in model.parameters())
