"""Forwards that run on several devices in place: the modules keep their class, names and attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from mirrorc.calls.data_parallel import DataParallel
from mirrorc.calls.forward_run import ForwardRun
from mirrorc.errors import ExecutionError
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import hook_tables


class ParallelForwards:
    """Modules, perhaps nested, whose forwards run by `mirrorc.data_parallel`, made by ``wrap`` at the first call of
    each. Within another module's forward, a module's forward is plain.
    """

    def __init__(self, modules: Iterable[nn.Module], wrap: Callable[[nn.Module], DataParallel]) -> None:
        self._modules, self._wrap = list(modules), wrap
        self._parallel: dict[nn.Module, DataParallel] = {}
        self._unsynced: contextlib.ExitStack | None = None
        self._plain = {module: module.__dict__.get("forward") for module in self._modules}

    def install(self) -> None:
        for module in self._modules:
            module.forward = MethodType(self._forward_of(module), module)

    def remove(self) -> None:
        for module, plain in self._plain.items():
            module.__dict__.pop("forward", None)
            if plain is not None:
                module.forward = plain

    def _forward_of(self, module: nn.Module) -> Callable[..., Any]:
        def forward(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if this is not module:  # a copy is a plain module
                return type(this).forward(this, *args, **kwargs)
            with contextlib.ExitStack() as stack:
                self.remove()  # plain modules are captured, and compared with their captured state
                stack.callback(self.install)
                stack.enter_context(_without_hooks(module))
                return self._parallel_of(module).forward(*args, **kwargs)

        return forward

    def _parallel_of(self, module: nn.Module) -> DataParallel:
        if module not in self._parallel:
            self._parallel[module] = parallel = self._wrap(module)
            if self._unsynced is not None:
                self._unsynced.enter_context(parallel.no_sync())
        return self._parallel[module]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        self.install()
        try:
            yield
        finally:
            self.remove()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The ``no_sync`` of all modules, including those made within it."""
        with contextlib.ExitStack() as stack:
            for parallel in self._parallel.values():
                stack.enter_context(parallel.no_sync())
            self._unsynced = stack
            try:
                yield
            finally:
                self._unsynced = None

    def close(self) -> None:
        """Restores the plain forwards, and ends the threads."""
        self.remove()
        for parallel in self._parallel.values():
            parallel.close()


def check_parameters(loss: torch.Tensor, model: nn.Module) -> None:
    """Raises `ExecutionError` if a loss reads a model's parameter outside of `ParallelForwards`.

    Its gradient would not be summed over workers. Arguments of a forward are outside of it.
    """
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += _outside(node)
        if (name := names.get(getattr(node, "variable", None))) is not None:
            why = "gradients of several workers are summed in the backward of a compiled forward"
            fix = "move what uses it into the forward of the module"
            raise problem(ExecutionError, f"MC3305: parameter {name!r} is used outside of a forward", why, fix)


def _outside(node: Any) -> list[Any]:
    """The inputs of an autograd node. For a forward's node, only those of its arguments, which come first."""
    before = [other for other, _ in node.next_functions]
    run = getattr(node, "run", None)
    if not isinstance(run, ForwardRun) or run.backward is None:
        return before
    return before[: len(run.backward.cut.gradients_of_leaves)]


@contextlib.contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Keeps a module's own hooks out of the capture, because its call runs them around its forward."""
    hooks = [(table, dict(table)) for table in hook_tables(module)]
    for table, _ in hooks:
        table.clear()
    try:
        yield
    finally:
        for table, entries in hooks:
            table.update(entries)
