"""Finds the parameters that backward of a run would reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mirrorc.capture.eager.eager_run import Run


def note_reach(run: Run) -> list[nn.Parameter]:
    """Notes the parameters outside of the graph of a run's loss; gives other parameters at which its backward ends."""
    known = {id(tensor) for tensor in (*run.parameters, *run.buffers, *run.leaves)}
    leaves = _leaves_of_loss(run.loss)
    reached = set(map(id, leaves))
    run.unreached = frozenset(place for place, parameter in enumerate(run.parameters) if id(parameter) not in reached)
    return [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in known]


def reached_otherwise(besides: Sequence[nn.Parameter], originals: Mapping[str, nn.Parameter]) -> str | None:
    """The name of a parameter of the user's that forward has reached past the modules of a run; or None."""
    names = {id(original): name for name, original in originals.items()}
    return next((names[id(parameter)] for parameter in besides if id(parameter) in names), None)


def _leaves_of_loss(loss: torch.Tensor) -> list[torch.Tensor]:
    leaves, waiting, seen = [], [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node: Any = waiting.pop()
        following = node.next_functions if node is not None else ()
        if not following and hasattr(node, "variable"):
            leaves.append(node.variable)
        for source, _ in following:
            if source is not None and source not in seen:
                seen.add(source)
                waiting.append(source)
    return leaves
