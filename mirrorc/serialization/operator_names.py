"""Names of operators, to find them in another process."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from mirrorc.custom_ops.eager_calls import OPAQUE
from mirrorc.custom_ops.random import seeded, unseeded
from mirrorc.ir.operation import operation_named, operation_of
from mirrorc.serialization.literals import TextError, UnknownOperatorError
from mirrorc.torch_internals import inductor_decompositions, is_operator, writes_argument

_SEEDED = "seeded."  # in front of the name of the random operator that runs under a seed
_BY_INDUCTOR = ("inductor", "prims")  # namespaces in which operators are registered when Inductor is imported


def operator_name(target: Any) -> str:
    """Such as ``pack``, ``aten.mm.default``, ``seeded.aten.rand.default``."""
    if target is operator.getitem:
        return "operator.getitem"
    if target in OPAQUE:
        raise TextError(
            "it was captured with capture='autograd': its forward and backward are Python code and objects of this process, "
            "which no file keeps"
        )
    if is_operator(target):
        drawn = unseeded(target)
        if drawn is not None:
            return _SEEDED + str(drawn)
        if _overload(str(target)) is target:
            return str(target)
    operation = operation_of(target)
    if operation is not None:
        return operation.name
    raise TextError(
        f"it calls {target!r}, which is no operator of torch and no operation of mirrorc.ir.ops, and only these are found by "
        "name when a program is loaded; register it as an operator (torch.library.custom_op) and call that"
    )


def find_operator(name: str) -> Callable[..., Any]:
    """Inverts `operator_name`. Raises `UnknownOperatorError` if this process has no such operator."""
    if name == "operator.getitem":
        return operator.getitem
    operation = operation_named(name)
    target: Any = operation.symbol if operation is not None else None
    target = target or _overload(name.removeprefix(_SEEDED))
    if name.split(".")[0] in _BY_INDUCTOR and target is None:
        inductor_decompositions()
        target = _overload(name)
    if target is not None and name.startswith(_SEEDED):
        target = seeded(target) if _supports_seed(target) else None
    if target is None:
        raise UnknownOperatorError(f"the operator {name!r:.120} is unknown here")
    return target


def _supports_seed(target: Any) -> bool:
    is_functional = is_operator(target) and not writes_argument(target)
    return is_functional and target.namespace != "mirrorc" and torch.Tag.nondeterministic_seeded in target.tags


def _overload(name: str) -> Any:
    overload: Any = torch.ops
    for part in name.split("."):
        if part.startswith("__") or not part.isascii():
            return None
        overload = getattr(overload, part, None)
    return overload if is_operator(overload) else None
