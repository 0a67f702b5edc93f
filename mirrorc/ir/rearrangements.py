"""Operators that give all elements of their first argument in another shape or order, and what they keep of it."""

from __future__ import annotations

import torch

aten = torch.ops.aten

TRANSPOSITIONS = (aten.t.default, aten.permute.default, aten.transpose.int)
"""Operators that exchange dimensions: they give the same memory, and its elements in the order of other indices."""

VIEWS_IN_ORDER = (aten.view.default, aten._unsafe_view.default)
"""Operators that give the same memory another shape, with its elements in the same order.

They fail where the elements do not lie as the shape needs them.
"""

SAME_MEMORY = (*TRANSPOSITIONS, *VIEWS_IN_ORDER)
"""Operators that never copy."""

RESHAPES = (*VIEWS_IN_ORDER, aten.reshape.default)
"""Operators that change the shape and keep the order of the elements. ``reshape`` copies them where a view would fail."""

REARRANGEMENTS = (*TRANSPOSITIONS, *RESHAPES)
