"""What the user, or a library, does with the optimizer between steps counts, or is answered by a warning that says what to do."""

import copy
import functools
from typing import Any

import pytest
import torch
from references import assert_mirrored, assert_same_model, assert_same_state, train_step
from tiny_models import make_mlp, mlp_batch
from torch.nn import functional as F

import mirrorc


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
    with mirrorc.compile(model, 2, optimizer=optimizer, loss_fn=F.cross_entropy, backend="eager") as step:
        for seed in range(6):
            if seed == 2:
                originals = optimizer.step, of_twin.step
                optimizer.step, of_twin.step = patched(optimizer, calls[0]), patched(of_twin, calls[1])
            if seed == 4:
                optimizer.step, of_twin.step = originals
            loss = step(**mlp_batch(5, seed=seed)).item()
            assert loss == pytest.approx(train_step(twin, of_twin, mlp_batch(5, seed=seed), F.cross_entropy))
            assert_mirrored(step, model, 2)
            text = str(step.program)
            assert ("step_optimizer" in text) == (2 <= seed < 4)
    assert calls == ([1, 1], [1, 1])
    assert_same_model(model, twin, 1e-10)
    assert_same_state(optimizer, of_twin, 1e-10)
