"""Forms of gradients that are computed from factors: smaller tensors, for each microbatch."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.operation import operation_of
from mirrorc.ir.rearrangements import SAME_MEMORY
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import num_elements_now

_T = TypeVar("_T")
Apply = Callable[..., Any]
"""Applies an operator of torch to tensors or to representations of them."""

_TAGS = ("bucket", "variable", "replica")


@dataclass(frozen=True)
class FactoredGradient:
    form: GradientForm
    factors: tuple[fx.Node, ...]
    details: Mapping[str, Any] = field(default_factory=dict)


class GradientForm(ABC):
    """A form in which gradients are computed from factors.

    Attributes:
        writes_all: computing a gradient writes every element.
        description: such as "a product of two matrices".
    """

    factor_names: ClassVar[tuple[str, ...]]
    writes_all: ClassVar[bool] = True
    description: ClassVar[str]

    def __init__(self, operation: Callable[..., Any]) -> None:
        self.operation = operation

    @abstractmethod
    def recognize(self, gradient: fx.Node) -> FactoredGradient | None:
        """The factors of a gradient; None if it has another form, or if other nodes use the whole gradient."""

    @abstractmethod
    def make_whole(self, apply: Apply, factors: Sequence[Any], shape: Sequence[int], **details: Any) -> Any:
        """Computes one microbatch's gradient with the captured operators, so that the verifier can compare."""

    @property
    def takes_parts(self) -> bool:
        declared = operation_of(self.operation)
        return declared is not None and declared.operands is None

    def parts(self, factors: Sequence[_T]) -> list[tuple[_T, ...]]:
        number = len(self.factor_names)
        return [tuple(factors[i : i + number]) for i in range(0, len(factors), number)]

    def make_sum(self, apply: Apply, factors: Sequence[Any], shape: Sequence[int], **details: Any) -> Any:
        wholes = [self.make_whole(apply, part, shape, **details) for part in self.parts(factors)]
        return functools.reduce(functools.partial(apply, torch.ops.aten.add.Tensor), wholes)

    def to_rows(self, factors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """One microbatch's factors as rows [count, ...]; None for a form that workers do not send."""
        return None

    def from_rows(self, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError(f"{type(self).__name__} says by to_rows that its factors are not sent")

    def num_multiplications(self, gradient: torch.Tensor, num_rows: int) -> int:
        return 0

    @abstractmethod
    def expression(self, *factors: str) -> str:
        """The gradient as an expression, such as ``left @ right``."""

    def num_elements(self, factors: Sequence[torch.Tensor]) -> int:
        return sum(map(num_elements_now, factors))

    def is_worth_it(self, gradient: torch.Tensor, factors: Sequence[torch.Tensor]) -> bool:
        return self.num_elements(factors) < num_elements_now(gradient)


FORMS: dict[Any, GradientForm] = {}
"""Tried in this order."""


def register(form: GradientForm) -> None:
    """Raises ValueError if the operation is not declared as factored, or has a form already."""
    name = form.operation.__name__
    if form.operation not in ops.FACTORED:
        raise problem(
            ValueError,
            f"MC4005: {type(form).__name__}: the operation {name} is not declared to give a gradient as factors",
            fix="@operation(Kind.FACTORED, ...) above its declaration",
        )
    if form.operation in FORMS:
        raise ValueError(
            f"MC4005: {type(form).__name__}: the operation {name} is already that of {type(FORMS[form.operation]).__name__}"
        )
    FORMS[form.operation] = form


def unregister(form: GradientForm) -> None:
    del FORMS[form.operation]


def form_of(gradient: fx.Node) -> GradientForm:
    form = FORMS.get(gradient.target)
    if form is None:
        name = getattr(gradient.target, "__name__", gradient.target)
        raise LookupError(
            f"MC4005: {gradient.name}: no form of gradient has the operation {name}; register it, see {__name__}"
        )
    return form


def form_named(operation: str) -> GradientForm:
    form = next((form for known, form in FORMS.items() if known.__name__ == operation), None)
    if form is None:
        raise LookupError(f"MC4005: no form of gradient has the operation {operation}; register it, see {__name__}")
    return form


def recognize(gradient: fx.Node) -> FactoredGradient | None:
    for form in FORMS.values():
        factored = form.recognize(gradient)
        if factored is not None:
            return factored
    return None


def details_of(gradient: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in gradient.kwargs.items() if key not in _TAGS}


def matrix_product(gradient: fx.Node) -> fx.Node | None:
    """The `mm` node, maybe under views, that computes a gradient; None without one, or with other users of it."""
    node = gradient
    while node.target in SAME_MEMORY and len(node.users) == 1:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    if node.target is not torch.ops.aten.mm.default or len(node.users) != 1:
        return None
    value, product = gradient.meta["val"], node.meta["val"]
    is_same = value.shape == product.shape and value.is_contiguous() and product.is_contiguous()
    return node if is_same else None


class ProductForm(GradientForm):
    """The gradient of a linear layer's weight: ``left`` [m, k] times ``right`` [k, n]."""

    factor_names = ("left", "right")
    description = "a product of two matrices"

    def recognize(self, gradient: fx.Node) -> FactoredGradient | None:
        product = matrix_product(gradient)
        return FactoredGradient(self, product.args) if product is not None else None  # type: ignore[arg-type]

    def make_whole(self, apply: Apply, factors: Sequence[Any], shape: Sequence[int], **details: Any) -> Any:
        return apply(torch.ops.aten.mm.default, *factors)

    def to_rows(self, factors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        left, right = factors
        return [left.t(), right]

    def from_rows(self, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        left, right = rows
        return left.t(), right

    def num_multiplications(self, gradient: torch.Tensor, num_rows: int) -> int:
        return gradient.numel() * num_rows

    def expression(self, *factors: str) -> str:
        return " @ ".join(factors)


class TableForm(GradientForm):
    """An embedding's gradient: ``rows`` [..., n] added up at ``indices`` [...] of a table [m, n], except at ``padding_idx``."""

    factor_names = ("rows", "indices")
    writes_all = False
    description = "a table's"

    def recognize(self, gradient: fx.Node) -> FactoredGradient | None:
        is_table = gradient.target is torch.ops.aten.embedding_dense_backward.default and len(gradient.users) == 1
        if not is_table or not gradient.meta["val"].is_contiguous():
            return None
        rows, indices, _, padding_idx, is_scaled_by_counts = gradient.args
        if is_scaled_by_counts:  # the counts are those of a replica's own shard, not of the whole batch
            return None
        return FactoredGradient(self, (rows, indices), {"padding_idx": padding_idx} if padding_idx != -1 else {})  # type: ignore[arg-type]

    def make_whole(
        self, apply: Apply, factors: Sequence[Any], shape: Sequence[int], padding_idx: int = -1, **details: Any
    ) -> Any:
        return apply(torch.ops.aten.embedding_dense_backward.default, *factors, shape[0], padding_idx, False)

    def to_rows(self, factors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        rows, indices = factors
        return [rows.reshape(-1, rows.shape[-1]), indices.reshape(-1)]

    def from_rows(self, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(rows)

    def expression(self, *factors: str) -> str:
        return f"index_add({', '.join(factors)})"


PRODUCT, TABLE = ProductForm(ops.product), TableForm(ops.index_add)
register(PRODUCT)
register(TABLE)
