"""Operators that return all elements of their first argument in another shape or order."""

from __future__ import annotations

import torch

aten = torch.ops.aten

TRANSPOSITIONS = (aten.t.default, aten.permute.default, aten.transpose.int)

VIEWS_IN_ORDER = (aten.view.default, aten._unsafe_view.default)
"""Operators that fail if the strides do not allow the shape."""

SAME_MEMORY = (*TRANSPOSITIONS, *VIEWS_IN_ORDER)
"""Operators that never copy."""

RESHAPES = (*VIEWS_IN_ORDER, aten.reshape.default)
"""Operators that keep the order of the elements; ``reshape`` may copy."""

REARRANGEMENTS = (*TRANSPOSITIONS, *RESHAPES)
