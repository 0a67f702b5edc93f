"""A substitute for SpecAugment, the random masking in Hugging Face's speech models."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_NAME = "_compute_mask_indices"  # each file of a model has a copy
_PARAMETERS = ["shape", "mask_prob", "mask_length", "attention_mask", "min_masks"]


def masking_functions(root: nn.Module) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    files = {type(module).__module__ for module in root.modules()}
    functions = [
        function
        for file in files
        if file.startswith("transformers.")
        and (function := getattr(sys.modules.get(file), _NAME, None)) is not None
        and function.__module__ == file  # not a substitute by the user
    ]
    return {
        function: masked_spans for function in functions if list(inspect.signature(function).parameters) == _PARAMETERS
    }


def masked_spans(
    shape: tuple[int, int],
    mask_prob: float,
    mask_length: int,
    attention_mask: torch.Tensor | None = None,
    min_masks: int = 0,
) -> torch.Tensor:
    """A mask of random spans like Hugging Face's, drawn by torch instead of numpy.

    Args:
        mask_prob: the fraction of a row that non-overlapping spans would cover.
        attention_mask: [rows, positions], ones and then zeros in each row; spans lie among the ones.
    """
    rows, places = shape
    if mask_length < 1:
        raise ValueError("`mask_length` has to be bigger than 0.")
    if mask_length > places:
        raise ValueError("`mask_length` has to be smaller than `sequence_length`")
    lengths = torch.full((rows,), places) if attention_mask is None else attention_mask.detach().sum(-1)
    device = lengths.device
    rounding = torch.empty((), dtype=torch.float64, device=device).uniform_()  # one for all rows
    most = _num_spans(lengths.new_full((1,), places), rounding, places, mask_prob, mask_length, min_masks)
    spans = _num_spans(lengths, rounding, places, mask_prob, mask_length, min_masks)
    beginnings = places - mask_length + 1
    keys = torch.empty((rows, beginnings), dtype=torch.float64, device=device).uniform_()
    is_beyond = torch.arange(beginnings, device=device) >= (lengths - mask_length + 1).unsqueeze(1)
    keys = keys.masked_fill(is_beyond, 2.0)
    largest = keys.sort(dim=1).values.gather(1, (spans - 1).clamp(min=0).unsqueeze(1))
    begins = (keys <= largest) & (spans > 0).unsqueeze(1)
    begun = F.pad(begins.to(torch.int64), (0, mask_length - 1)).cumsum(1)
    masked = begun > F.pad(begun, (mask_length, 0))[:, :places]
    only_last = ((spans == 0) & (most > 0)).unsqueeze(1)  # in a row too short for a span, the last place is masked
    return masked | (only_last & (torch.arange(places, device=device) == places - 1))


def _num_spans(
    lengths: torch.Tensor, rounding: torch.Tensor, places: int, mask_prob: float, mask_length: int, min_masks: int
) -> torch.Tensor:
    wanted = (mask_prob * lengths.to(torch.float64) / mask_length + rounding).to(torch.int64).clamp(min=min_masks)
    wanted = torch.where(wanted * mask_length > places, places // mask_length, wanted)
    return torch.minimum(wanted, (lengths - mask_length + 1).clamp(min=0))
