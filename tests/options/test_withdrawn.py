"""Options that `mirrorc.compile` no longer takes, or never took."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import mirrorc


@pytest.mark.parametrize("value", [True, False])
def test_a_withdrawn_option_is_refused_with_the_reason_and_the_remedy(value: bool) -> None:
    said = (
        "overlap_next_step= was withdrawn from mirrorc.compile: it gained nothing on any machine measured; leave it out"
    )
    with pytest.raises(TypeError, match=re.escape(said)):
        mirrorc.compile(nn.Linear(2, 1), overlap_next_step=value)  # type: ignore[arg-type]


def test_an_option_that_never_was_is_refused_as_by_python() -> None:
    model = nn.Linear(2, 1)
    options: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters()), "optimiser": None}
    said = "mirrorc.compile() got an unexpected keyword argument 'optimiser'"
    with pytest.raises(TypeError, match=re.escape(said)):
        mirrorc.compile(model, **options)
