"""Finds the parameters to which backward of a run would lead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mirrorc.capture.eager.eager_run import Run


def note_reach(run: Run) -> list[nn.Parameter]:
    """Notes which of its parameters a run has reached; gives those besides in which backward from its loss ends."""
    given = {id(tensor) for tensor in (*run.parameters, *run.buffers, *run.leaves)}
    leaves = _leaves_of_loss(run.loss)
    reached = set(map(id, leaves))
    run.unreached = frozenset(place for place, own in enumerate(run.parameters) if id(own) not in reached)
    return [one for one in leaves if isinstance(one, nn.Parameter) and id(one) not in given]


def reached_otherwise(besides: Sequence[nn.Parameter], originals: Mapping[str, nn.Parameter]) -> str | None:
    """The name of a parameter of the user's own that forward has reached by another way than through the modules of a run."""
    names = {id(original): name for name, original in originals.items()}
    return next((names[id(one)] for one in besides if id(one) in names), None)


def _leaves_of_loss(loss: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in which backward from a loss ends."""
    found, waiting, seen = [], [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node: Any = waiting.pop()
        following = node.next_functions if node is not None else ()
        if not following and hasattr(node, "variable"):
            found.append(node.variable)
        for one, _ in following:
            if one is not None and one not in seen:
                seen.add(one)
                waiting.append(one)
    return found
