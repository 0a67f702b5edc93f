"""Messages of a module of `mirrorc.data_parallel` are in its words: its user has no step, and has called no `mirrorc.compile`."""

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mirrorc

X = torch.ones(4, 3)
_WORDS_OF_STEPS = re.compile(r"\bsteps?\b|mirrorc\.compile\(")


class Watches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def within_a_mode(model: nn.Module) -> None:
    with Watches(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)


def with_another_parameter(model: Any) -> None:
    model.module.weight = nn.Parameter(torch.ones(2, 3))
    model(X)


def closed(model: Any) -> None:
    model.close()
    model(X)


CASES: dict[str, Callable[[Any], object]] = {
    "MC5005": lambda model: model.explain(),
    "MC1206": with_another_parameter,
    "MC1301": lambda model: model(X, X),
    "MC1302": lambda model: model(np.ones((4, 3))),
    "MC1303": lambda model: model(X.to_sparse()),
    "MC1305": lambda model: model(X[:0]),
    "MC1306": lambda model: model(mirrorc.replicated(X)),
    "MC1604": lambda model: model.half(),
    "MC3208": within_a_mode,
    "MC5003": closed,
}


def message_of(act: Callable[[Any], object]) -> str:
    model = mirrorc.data_parallel(nn.Linear(3, 2), devices=2, compiler=mirrorc.Compiler(backend="eager"))
    with pytest.raises(Exception, match=r"MC\d{4}: ") as caught, model:
        act(model)
    return str(caught.value)


@pytest.mark.parametrize("code", CASES)
def test_they_name_no_step(code: str) -> None:
    text = message_of(CASES[code])
    assert text.startswith(code) and not _WORDS_OF_STEPS.search(text), text


def test_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    def called_in_a_child(model: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            model(X)

    text = message_of(called_in_a_child)
    assert text.startswith("MC5009: the module") and "mirrorc.data_parallel(...)" in text, text


def test_a_forward_that_is_called_within_itself() -> None:
    def called_within(model: Any) -> None:
        model.module.register_forward_hook(lambda *_: model(X))
        model(X)

    text = message_of(called_within)
    assert "MC5004: a module was called while the module is running" in text, text
