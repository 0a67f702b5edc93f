"""Forms of gradient: the representation of a gradient by factors, and its construction from them.

A gradient without a form is one whole tensor. With a form, it is a few smaller tensors, its factors, until its bucket is
packed or each device makes its share of it. Each microbatch gives a part with factors of its own; the gradient is the sum over
the parts. A form has one class here, and one in `mirrorc.runtime.state` that makes the shares.
"""

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
from mirrorc.torch_internals import num_elements_now

_T = TypeVar("_T")
Apply = Callable[..., Any]
"""A function that applies its first argument, an operator of torch, to values: to tensors or to representations of them."""

_TAGS = ("bucket", "variable", "replica")


@dataclass(frozen=True)
class FactoredGradient:
    """A gradient in a region's body, represented by its factors.

    Attributes:
        factors: nodes of the body.
        details: its other parameters, by the keywords of the form's operation.
    """

    form: GradientForm
    factors: tuple[fx.Node, ...]
    details: Mapping[str, Any] = field(default_factory=dict)


class GradientForm(ABC):
    """A form of gradient.

    Args:
        operation: the operation of the IR for it. Its arguments are the factors, its keywords ``bucket``, ``variable``,
            ``replica`` and the form's details. If it takes any number of arguments, it may have several parts.

    Attributes:
        factor_names: in the order of the arguments.
        writes_all: whether all elements of a gradient are written to make it. If most stay zero, factors save work on one device.
        description: a gradient of this form in words, for remarks: "a product of two matrices".
    """

    factor_names: ClassVar[tuple[str, ...]]
    writes_all: ClassVar[bool] = True
    description: ClassVar[str]

    def __init__(self, operation: Callable[..., Any]) -> None:
        self.operation = operation

    @abstractmethod
    def recognize(self, gradient: fx.Node) -> FactoredGradient | None:
        """Finds the factors of a result of a region's body.

        None if the result is no gradient of this form, or if the operators that make it have other uses.
        """

    @abstractmethod
    def make_whole(self, apply: Apply, factors: Sequence[Any], shape: Sequence[int], **details: Any) -> Any:
        """Makes the gradient of one part with the operators of the captured graph, because the verifier compares both.

        Args:
            apply: applies an operator; the verifier's gives an expression in place of a tensor.
            factors: the part's factors.
            shape: the gradient's.
            details: the form's keywords.
        """

    @property
    def takes_parts(self) -> bool:
        """Tests for a form that may have the factors of several microbatches."""
        declared = operation_of(self.operation)
        return declared is not None and declared.operands is None

    def parts(self, factors: Sequence[_T]) -> list[tuple[_T, ...]]:
        """The arguments of the operation, split into the factors of each part."""
        number = len(self.factor_names)
        return [tuple(factors[i : i + number]) for i in range(0, len(factors), number)]

    def make_sum(self, apply: Apply, factors: Sequence[Any], shape: Sequence[int], **details: Any) -> Any:
        """Makes the whole gradient of the factors of all its parts, in their order; arguments as for `make_whole`."""
        wholes = [self.make_whole(apply, part, shape, **details) for part in self.parts(factors)]
        return functools.reduce(functools.partial(apply, torch.ops.aten.add.Tensor), wholes)

    def to_rows(self, factors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """One part's factors as rows [count, ...], views or copies; other workers may have another count.

        None if factors of this form cannot be sent to other workers: gradients are then sent whole. Tensors may be fake.
        """
        return None

    def from_rows(self, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The inverse of `to_rows`: factors for `make_whole`."""
        raise NotImplementedError(f"{type(self).__name__} says by to_rows that its factors are not sent")

    def num_multiplications(self, gradient: torch.Tensor, num_rows: int) -> int:
        """The number of multiplications to make a gradient of so many rows of factors."""
        return 0

    @abstractmethod
    def expression(self, *factors: str) -> str:
        """The printed form, such as ``left @ right``; `factors` are texts such as names or types."""

    def num_elements(self, factors: Sequence[torch.Tensor]) -> int:
        """The number of elements of the factors of all parts. Tensors may be fake."""
        return sum(map(num_elements_now, factors))

    def is_worth_it(self, gradient: torch.Tensor, factors: Sequence[torch.Tensor]) -> bool:
        """Tests for factors smaller than the gradient."""
        return self.num_elements(factors) < num_elements_now(gradient)


FORMS: dict[Any, GradientForm] = {}
"""The registered forms by their operations, in the order in which they are tried."""


def register(form: GradientForm) -> None:
    """Registers a form, so that passes recognize it and graphs may contain gradients of it.

    Raises:
        ValueError: its operation gives no gradient as factors, or is another form's.
    """
    name = form.operation.__name__
    if form.operation not in ops.FACTORED:
        raise ValueError(
            f"{type(form).__name__}: {name} is not declared as an operation that gives a gradient as factors"
        )
    if form.operation in FORMS:
        raise ValueError(
            f"{type(form).__name__}: the operation {name} is already that of {type(FORMS[form.operation]).__name__}"
        )
    FORMS[form.operation] = form


def unregister(form: GradientForm) -> None:
    del FORMS[form.operation]


def form_of(gradient: fx.Node) -> GradientForm:
    """The form of a factored gradient, a call of one of the operations `ops.FACTORED`.

    Raises:
        LookupError: no form has its operation.
    """
    form = FORMS.get(gradient.target)
    if form is None:
        name = getattr(gradient.target, "__name__", gradient.target)
        raise LookupError(f"{gradient.name}: no form of gradient has the operation {name}; register it, see {__name__}")
    return form


def form_named(operation: str) -> GradientForm:
    """The form whose operation has this name.

    Raises:
        LookupError: there is none.
    """
    form = next((form for known, form in FORMS.items() if known.__name__ == operation), None)
    if form is None:
        raise LookupError(f"no form of gradient has the operation {operation}; register it, see {__name__}")
    return form


def recognize(gradient: fx.Node) -> FactoredGradient | None:
    """The factors of a result of a region's body, by the first form that recognizes it; None if no form does."""
    for form in FORMS.values():
        factored = form.recognize(gradient)
        if factored is not None:
            return factored
    return None


def details_of(gradient: fx.Node) -> dict[str, Any]:
    """The parameters of a factored gradient besides its factors, by keyword."""
    return {key: value for key, value in gradient.kwargs.items() if key not in _TAGS}


def matrix_product(gradient: fx.Node) -> fx.Node | None:
    """The matrix product behind a gradient, up to views of the same layout.

    None if the gradient is no matrix product, or if the product has other uses.
    """
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
    """A matrix product, the gradient of a linear layer's weight: ``left`` [m, k] times ``right`` [k, n]."""

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
    """The gradient of an embedding's table [m, n]: ``rows`` [..., n] that are added up at ``indices`` [...].

    Its detail ``padding_idx`` is the row to which nothing is added.
    """

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
