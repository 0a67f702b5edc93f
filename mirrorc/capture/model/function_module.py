"""A training function as a module, whose submodules are the modules that it calls."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from mirrorc.messages.problem import problem

ABSENT = object()


class FunctionModule(nn.Module):
    """Calls a user's function. Submodules are named after the function's variables."""

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        names = dict(_named_modules(function))
        for number, module in enumerate(modules):
            name = names.get(id(module), f"module_{number}")
            self.add_module(name if not hasattr(self, name) and "." not in name else f"module_{number}", module)
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def module_of_function(function: Callable[..., Any], modules: nn.Module | Sequence[nn.Module]) -> FunctionModule:
    """A module with the function's name and signature."""
    of_function = [modules] if isinstance(modules, nn.Module) else modules
    are_modules = isinstance(of_function, Sequence) and all(isinstance(m, nn.Module) for m in of_function)
    if not are_modules or not of_function:
        raise problem(
            TypeError,
            f"MC1201: modules is {modules!r:.80}",
            fix="give the modules that the function calls and the optimizer trains, modules=[net]",
        )
    signature = inspect.signature(function)
    of_self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)

    def forward(self: FunctionModule, /, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    forward.__signature__ = signature.replace(parameters=[of_self, *signature.parameters.values()])  # type: ignore[attr-defined]
    kind = type(getattr(function, "__name__", "function"), (FunctionModule,), {"forward": forward})
    return kind(function, of_function)


def with_trained_modules(loss_fn: Any, model: nn.Module, optimized: Iterable[Any]) -> Any:
    """Wraps a loss function in a module if it uses modules whose parameters the optimizer trains."""
    if loss_fn is None or isinstance(loss_fn, nn.Module):
        return loss_fn
    unknown = set(map(id, optimized)) - set(map(id, model.parameters()))
    in_use = {id(module): module for module in _modules_in_use(loss_fn)} if unknown else {}
    held = [module for module in in_use.values() if not unknown.isdisjoint(map(id, module.parameters()))]
    return module_of_function(loss_fn, held) if held else loss_fn


def _modules_in_use(value: Any, depth: int = 0) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
        return
    if depth > _DEEPEST:
        return
    held: list[Any] = []
    if isinstance(value, MethodType):
        held = [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        held = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        held = [*inspect.getclosurevars(value).nonlocals.values(), *(value.__defaults__ or ())]
        held += [
            each for each in map(value.__globals__.get, global_names(value.__code__)) if isinstance(each, nn.Module)
        ]
    elif callable(value) or depth:
        held = [*getattr(value, "__dict__", {}).values()] if not isinstance(value, type) else []
    for each in held:
        yield from _modules_in_use(each, depth + 1)


_DEEPEST = 3


def with_copies(function: FunctionType, copy_of: Callable[[Any], Any]) -> FunctionType:
    """A function that uses copies of the modules in its closure and globals; the same function if there are none.

    Other globals are read at each call. Functions that it calls keep their modules. One that assigns globals stays.
    """
    if assigned_globals(function.__code__):
        return function
    cells = [_copied_cell(cell, copy_of) for cell in function.__closure__ or ()]
    copied = {
        name: copy
        for name in global_names(function.__code__)
        if isinstance(value := function.__globals__.get(name), nn.Module) and (copy := copy_of(value)) is not value
    }
    if not copied and all(a is b for a, b in zip(cells, function.__closure__ or (), strict=True)):
        return function
    names = _Globals(function.__globals__, copied) if copied else function.__globals__
    other = FunctionType(function.__code__, names, function.__name__, function.__defaults__, tuple(cells))
    other.__kwdefaults__ = function.__kwdefaults__
    return other


class _Globals(dict[str, Any]):
    def __init__(self, originals: dict[str, Any], replaced: dict[str, Any]) -> None:
        super().__init__(replaced)
        self._originals = originals

    def __missing__(self, name: str) -> Any:
        return self._originals[name]


def content_of_cell(cell: CellType) -> Any:
    """`ABSENT` for an empty cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _copied_cell(cell: CellType, copy_of: Callable[[Any], Any]) -> CellType:
    value = content_of_cell(cell)
    copy = copy_of(value) if isinstance(value, nn.Module) else value
    return cell if copy is value else CellType(copy)


def _named_modules(function: Callable[..., Any]) -> Iterator[tuple[int, str]]:
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return
    for name in global_names(function.__code__):
        if isinstance(value := function.__globals__.get(name), nn.Module):
            yield id(value), name
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if isinstance(value := content_of_cell(cell), nn.Module):
            yield id(value), name


@functools.cache
def global_names(code: CodeType) -> tuple[str, ...]:
    """Possible names of globals in code or its inner functions; includes attribute names."""
    within = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return (*code.co_names, *(name for inner in within for name in global_names(inner)))


_WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL")


def assigned_globals(code: CodeType) -> frozenset[str]:
    """Globals that code or its inner functions assign or delete."""
    return used_globals(code, _WRITES)


@functools.cache
def used_globals(
    code: CodeType, operations: tuple[str, ...] = (*_WRITES, "LOAD_GLOBAL", "LOAD_NAME")
) -> frozenset[str]:
    within = [used_globals(constant, operations) for constant in code.co_consts if isinstance(constant, CodeType)]
    own = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in operations}
    return frozenset(own).union(*within)
