import inspect
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mirrorc.ir.variables import Role, UpdateRule, Variable
from mirrorc.torch_internals import adagrad_is_fused_on_gpus
from mirrorc.user.optimizer_groups import (
    OptimizerGroups,
    check_capturable,
    check_optimizers,
    hyperparameters_by_label,
    update_rules,
)
from mirrorc.user.optimizer_kinds import (
    ELEMENTWISE,
    check_state,
    is_elementwise,
    is_fused,
    required_state,
    sparse_gradient,
    state_signature,
    writes_rows,
)


def model_and_parameters() -> tuple[nn.Module, dict[str, nn.Parameter]]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    return model, dict(model.named_parameters())


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_known_classes_are_elementwise(kind: type[torch.optim.Optimizer]) -> None:
    model, parameters = model_and_parameters()
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    check_optimizers(optimizer, parameters)
    assert is_elementwise(optimizer)


def test_an_elementwise_optimizer_gives_a_bucket_what_it_gives_its_parts() -> None:
    """The claim that ELEMENTWISE makes, for each class in it."""
    for kind in ELEMENTWISE:
        torch.manual_seed(0)
        parts = [nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3))]
        whole = nn.Parameter(torch.cat([part.detach() for part in parts]))
        by_part, by_whole = kind(parts, lr=0.1), kind([whole], lr=0.1)  # type: ignore[call-arg]
        for _ in range(3):
            whole.grad = torch.randn(8)
            parts[0].grad, parts[1].grad = whole.grad[:5].clone(), whole.grad[5:].clone()
            by_part.step()
            by_whole.step()
        torch.testing.assert_close(torch.cat([p.detach() for p in parts]), whole.detach(), msg=kind.__name__)


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "more", [{}, {"weight_decay": 0.1}, {"maximize": True}, {"momentum": 0.9, "nesterov": True}], ids=str
)
def test_an_elementwise_optimizer_leaves_gradients_as_they_are(
    kind: type[torch.optim.Optimizer], more: dict[str, Any]
) -> None:
    """Unless it is told to work on lists of tensors: shares of tables' gradients stay zero from step to step."""
    parameter = nn.Parameter(torch.randn(70))
    known = {key: value for key, value in more.items() if key in inspect.signature(kind).parameters}
    fused = [{}] + [{"fused": True}] * ("fused" in inspect.signature(kind).parameters)
    for implementation in fused:
        optimizer = kind([parameter], lr=0.1, **known, **implementation)  # type: ignore[call-arg]
        for _ in range(3):
            gradient = torch.randn(70)
            parameter.grad = gradient.clone()
            optimizer.step()
            assert torch.equal(parameter.grad, gradient)


def test_torchs_fused_kernels_are_chosen_by_dtype_and_device() -> None:
    """A CPU's fused SGD leaves 16-bit parameters as they are; GPUs' kernels know them."""
    open_, chosen, foreach = {"fused": None}, {"fused": True}, {"fused": None, "foreach": True}
    for dtype, on_cpu, on_gpu in (
        (torch.float32, True, True),
        (torch.float64, True, True),
        (torch.bfloat16, False, True),
        (torch.float16, False, True),
        (torch.complex64, False, False),
    ):
        adam, adagrad = torch.optim.Adam, torch.optim.Adagrad
        assert [is_fused(adam, open_, dtype, where) for where in ("cpu", "cuda")] == [on_cpu, on_gpu], dtype
        assert is_fused(adam, chosen, dtype, "cpu") and is_fused(adam, chosen, dtype, "cuda")
        assert not any(is_fused(adam, group, dtype, "cuda") for group in (foreach, {}, {"fused": False}))
        assert is_fused(adagrad, open_, dtype, "cpu") == on_cpu
        assert is_fused(adagrad, open_, dtype, "cuda") == (on_gpu and adagrad_is_fused_on_gpus())


class MySGD(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.SparseAdam(p, lr=0.1), True),
        (lambda p: torch.optim.SparseAdam(p, lr=0.1, maximize=True), True),
        (lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5), True),
        (lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True), True),
        (lambda p: torch.optim.SGD(p, lr=0.1), True),
        (lambda p: torch.optim.SGD(p, lr=0.1, dampening=0.5, maximize=True), True),
        (lambda p: torch.optim.SGD(p, lr=0.1, foreach=True), True),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False),
    ],
)
def test_a_step_of_which_it_is_said_writes_the_rows_of_its_gradient_alone(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], expected: bool
) -> None:
    table = nn.Parameter(torch.randn(9, 3))
    optimizer = make([table])
    assert writes_rows(optimizer, 0) is expected
    touched: list[int] = []
    for rows in ([0, 4], [7], [4, 8], []):
        before = table.detach().clone()
        table.grad = sparse_gradient(torch.tensor(rows, dtype=torch.int64), torch.randn(len(rows) * 3), (9, 3))
        optimizer.step()
        touched += rows
        written = (table != before).any(1).nonzero().squeeze(1).tolist()
        assert written == (rows if expected else sorted({*touched}))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: MySGD(p, lr=0.1),
        lambda p: hooked(p, "register_step_pre_hook"),
        lambda p: hooked(p, "register_step_post_hook"),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=torch.tensor(0.0)),  # type: ignore[arg-type]
    ],
    ids=["subclass", "pre-hook", "post-hook", "adafactor", "tensor"],
)
def test_of_others_it_is_not_said_which_rows_they_write(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    optimizer = make([nn.Parameter(torch.randn(3, 2))])
    assert not writes_rows(optimizer, 0)


def test_a_hook_of_one_of_several_optimizers_may_write_the_tables_of_all() -> None:
    one, other = (torch.optim.SGD([nn.Parameter(torch.randn(3, 2))], lr=0.1) for _ in range(2))
    other.add_param_group({"params": [nn.Parameter(torch.randn(3, 2))], "momentum": 0.9})
    groups = OptimizerGroups([one, other])
    assert groups.write_rows() == (True, True, False)
    hook = other.register_step_post_hook(lambda *_: None)
    assert groups.write_rows() == (False, False, False)
    hook.remove()
    assert groups.write_rows() == (True, True, False)


def hooked(parameters: list[nn.Parameter], register: str) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    getattr(optimizer, register)(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda p: MySGD(p, lr=0.1),
        lambda p: hooked(p, "register_step_pre_hook"),
        lambda p: hooked(p, "register_step_post_hook"),
        lambda p: torch.optim.Adam(p, differentiable=True),
        lambda p: torch.optim.Adam(p, capturable=True),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.Rprop(p),
    ],
    ids=["subclass", "pre-hook", "post-hook", "differentiable", "capturable", "adafactor", "rprop"],
)
def test_others_run_by_themselves(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    model, parameters = model_and_parameters()
    optimizer = make(list(model.parameters()))
    check_optimizers(optimizer, parameters)
    assert not is_elementwise(optimizer)
    rules = update_rules(OptimizerGroups([optimizer]), parameters, list(parameters))
    assert not any(rule.elementwise for rule in rules.values())


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"optimizer is a str\n  fix:  optimizer=torch.optim.AdamW\(model.parameters"):
        check_optimizers("sgd", {})


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model, parameters = model_and_parameters()
    with pytest.raises(TypeError, match=r"(?s)LBFGS needs a closure .*such as AdamW"):
        check_optimizers(torch.optim.LBFGS(model.parameters()), parameters)


def test_parameters_of_another_model_are_refused() -> None:
    model, parameters = model_and_parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7, 2))]})
    with pytest.raises(ValueError, match=r"(?s)parameter 0 of group 1, \[7, 2\], is none of the model's.*deepcopy"):
        check_optimizers(optimizer, parameters)


def test_parameters_of_two_groups_follow_two_rules() -> None:
    model, parameters = model_and_parameters()
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]
    rules = update_rules(OptimizerGroups([torch.optim.AdamW(groups)]), parameters, ["1.bias", "0.weight", "0.bias"])
    assert {name: rule.group for name, rule in rules.items()} == {"1.bias": 1, "0.weight": 0, "0.bias": 0}
    assert rules["0.weight"] == rules["0.bias"] and rules["1.bias"].label == "AdamW group 1"


def test_state_that_cannot_be_flat_separates_rules() -> None:
    model, parameters = model_and_parameters()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    names = list(parameters)
    assert {rule.state_class for rule in update_rules(OptimizerGroups([optimizer]), parameters, names).values()} == {0}
    optimizer.state[parameters["0.bias"]]["step"] += 1
    del optimizer.state[parameters["1.bias"]]
    classes = {
        name: rule.state_class for name, rule in update_rules(OptimizerGroups([optimizer]), parameters, names).items()
    }
    assert classes == {"0.weight": 0, "0.bias": 1, "1.weight": 0, "1.bias": 2}


def test_state_signatures() -> None:
    moment = torch.zeros(3)
    assert state_signature({"step": torch.tensor(2.0), "exp_avg": moment}) == (
        ("exp_avg", torch.float32),
        ("step", 2.0),
    )
    assert state_signature({"momentum_buffer": None}) == state_signature({}) == ()


@pytest.mark.parametrize("register", ["register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"])
def test_hooks_on_all_optimizers_are_seen(register: str) -> None:
    """They would work on buckets, not on parameters."""
    from torch.optim import optimizer as of_all

    _, parameters = model_and_parameters()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    assert is_elementwise(optimizer)
    handle = getattr(of_all, register)(lambda *_: None)
    try:
        assert not is_elementwise(optimizer)
    finally:
        handle.remove()
    assert is_elementwise(optimizer)


def test_required_state_is_what_torch_looks_for() -> None:
    switches: list[dict[str, Any]] = [{}, {"amsgrad": True}, {"centered": True}, {"momentum": 0.5}]
    tried = 0
    for kind in ELEMENTWISE:
        known = inspect.signature(kind).parameters
        for switch in switches:
            if not switch.keys() <= known.keys() or (kind is torch.optim.SGD and switch):
                continue
            parameter = nn.Parameter(torch.zeros(3))
            parameter.grad = torch.ones(3)
            optimizer = kind([parameter], **switch)
            optimizer.step()
            required = required_state(kind, optimizer.param_groups[0])
            assert set(required) == set(optimizer.state[parameter]), (kind, switch)
            for entry in required:
                check_state(optimizer, 0, "it", parameter)
                kept = optimizer.state[parameter].pop(entry)
                with pytest.raises(KeyError, match=entry):
                    optimizer.step()
                with pytest.raises(ValueError, match=f"'it' has no '{entry}'"):
                    check_state(optimizer, 0, "it", parameter)
                optimizer.state[parameter][entry] = kept
                tried += 1
    assert tried > 30


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, Fraction, lambda value: torch.tensor([value, 1.0])])
def test_what_groups_hold_is_told_by_value(kind: Callable[[float], Any]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    told = []
    for value in (0.25, 0.5, 0.25):
        optimizer.param_groups[0]["own"] = kind(value)
        told.append(hyperparameters_by_label(OptimizerGroups([optimizer])))
    assert told[0] == told[2] != told[1]


def test_a_tensor_in_a_pair_of_hyperparameters_is_not_said_to_be_the_pair() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    groups = OptimizerGroups([torch.optim.AdamW([weight], fused=True)])
    rule = UpdateRule("AdamW group 0", 0)
    variables = {"weight": Variable("weight", (3,), (1,), torch.float32, Role.PARAMETER, update=rule)}
    check_capturable(groups, variables)
    groups[0][0].param_groups[0]["betas"] = (torch.tensor(0.9), torch.tensor(0.99))
    message = r"AdamW with a tensor in 'betas' of group 0\n.*\n  fix:  optimizer\.param_groups\[0\]\['betas'\] = float"
    with pytest.raises(ValueError, match=message):
        check_capturable(groups, variables)
