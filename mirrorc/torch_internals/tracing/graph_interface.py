"""A traced graph's inputs, read from its module, and its results as the user's Python objects."""

from __future__ import annotations

import contextlib
import gc
import operator
import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from mirrorc.torch_internals.tracing.dynamo_guards import scope_of_guards
from mirrorc.torch_internals.tracing.source_names import source_words

_COUNTER = "num_batches_tracked"  # of forwards that write a batch norm's statistics
_OF_MODEL = ("L['self'].model.", "L['self']._modules['model']")  # the beginning of expressions through the model


class ReadVariable(NamedTuple):
    """A parameter or buffer that a graph reads from outside of the traced module.

    Attributes:
        root: the module that leads to the variable; None for a lone parameter.
        counter: for a batch norm's statistic, ``num_batches_tracked``, as the statistic's version stays; else None.
    """

    tensor: torch.Tensor
    words: str
    root: nn.Module | None = None
    counter: torch.Tensor | None = None
    counter_words: str = ""


def read_variables_from_module(traced: fx.GraphModule) -> None:
    """Makes all variables attributes of the traced module, so that joint export can replace them. Forward may have
    reached a variable otherwise, as through a closure.

    Export replaces variables of copies, so that other threads can run the user's modules meanwhile.
    """
    copies: dict[nn.Module, nn.Module] = {}
    traced._modules = {name: _copied(module, copies) for name, module in traced._modules.items()}
    codegen: Any = traced.graph._codegen
    read: Any = _ModulesTensors(codegen.dynamo_bytecode_flatten, traced)
    codegen.dynamo_bytecode_flatten = traced._dynamo_bytecode_flatten = read


def _copied(module: nn.Module | None, copies: dict[nn.Module, nn.Module]) -> nn.Module | None:
    if module is None or module in copies:
        return copies.get(module) if module is not None else None
    copy: nn.Module = object.__new__(type(module))
    copies[module] = copy
    children = {name: _copied(child, copies) for name, child in module._modules.items()}
    tables = {"_parameters": dict(module._parameters), "_buffers": dict(module._buffers), "_modules": children}
    vars(copy).update(vars(module) | tables)
    return copy


def outside_tensors(traced: fx.GraphModule, leaves: Sequence[torch.Tensor]) -> list[tuple[fx.Node, torch.Tensor]]:
    """Tensors that a graph reads, other than ``leaves`` and its module's parameters and buffers."""
    codegen: Any = traced.graph._codegen
    read: _ModulesTensors = codegen.dynamo_bytecode_flatten
    known = {*map(id, leaves), *read.named}
    inputs = zip(traced.graph.find_nodes(op="placeholder"), read(*leaves), strict=True)
    return [(n, t) for n, t in inputs if isinstance(t, torch.Tensor) and id(t) not in known]


def module_variables(traced: fx.GraphModule, leaves: Sequence[torch.Tensor]) -> dict[fx.Node, str]:
    codegen: Any = traced.graph._codegen
    read: _ModulesTensors = codegen.dynamo_bytecode_flatten
    inputs = zip(traced.graph.find_nodes(op="placeholder"), read(*leaves), strict=True)
    names = {id(tensor): name for tensor, name in read.named.values()}
    return {node: names[id(tensor)] for node, tensor in inputs if id(tensor) in names}


def reading_names(module: nn.Module, names: Collection[str], tensors: Sequence[torch.Tensor]) -> list[str]:
    """Expressions in the user's code that read the tensors; "" for a tensor without one."""
    scope = scope_of_guards(module)
    by_id: dict[int, str] = {}
    for name in sorted(names, key=len):
        with contextlib.suppress(Exception):  # the expression runs the user's code
            value = eval(name, scope)
            by_id.setdefault(id(value), name)
            for key, variable in value._parameters.items() if isinstance(value, nn.Module) else ():
                by_id.setdefault(id(variable), f"{name}.{key}")
    return [source_words(by_id[id(tensor)], scope).name if id(tensor) in by_id else "" for tensor in tensors]


def outside_variables(
    traced: fx.GraphModule, module: nn.Module, leaves: Sequence[torch.Tensor], names: Collection[str]
) -> list[ReadVariable]:
    wanted = {id(tensor): tensor for _, tensor in outside_tensors(traced, leaves)}
    if not wanted:
        return []
    scope, variables = scope_of_guards(module), dict[int, ReadVariable]()
    seen = {id(child) for child in module.modules()}
    for name in sorted(names, key=lambda name: (len(name), name)):
        value = None
        with contextlib.suppress(Exception):  # the expression runs the user's code
            value = eval(name, scope)
        if isinstance(value, nn.Module) and id(value) not in seen:
            words = source_words(name, scope).name
            if name.startswith(_OF_MODEL):
                words = words.removeprefix("model.")
            for path, child in value.named_modules():
                seen.add(id(child))
                place = f"{words}.{path}" if path else words
                counter = child._buffers.get(_COUNTER), f"{place}.{_COUNTER}"
                for key, tensor in (*child._parameters.items(), *child._buffers.items()):
                    if id(tensor) in wanted and id(tensor) not in variables:
                        counts = counter if key in child._buffers and key != _COUNTER else ()
                        variables[id(tensor)] = ReadVariable(wanted[id(tensor)], f"{place}.{key}", value, *counts)
        elif isinstance(value, nn.Parameter) and id(value) in wanted:
            variables.setdefault(id(value), ReadVariable(value, source_words(name, scope).name))
    return [variables[key] for key in wanted if key in variables]


def read_from_module(traced: fx.GraphModule, place: str, tensors: Sequence[torch.Tensor]) -> list[str]:
    """Registers detached views of tensors as buffers, which joint export can write. Returns their names."""
    codegen: Any = traced.graph._codegen
    read: _ModulesTensors = codegen.dynamo_bytecode_flatten
    holder = nn.Module()
    for i, tensor in enumerate(tensors):
        holder.register_buffer(f"v{i}", tensor.detach())
        read.named[id(tensor)] = tensor, f"{place}.v{i}"
    traced.add_module(place, holder)
    return [f"{place}.v{i}" for i in range(len(tensors))]


class _ModulesTensors:
    def __init__(self, read: Any, module: fx.GraphModule) -> None:
        self.input_processor = read.input_processor
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        self.named = {id(tensor): (tensor, name) for name, tensor in reversed(named)}
        self._read, self._module = read, module

    def __call__(self, *inputs: object) -> tuple[Any, ...]:
        tensors = tuple(self._current(value) for value in self._read(*inputs))
        _admit(tensors)
        return tensors

    def _current(self, value: Any) -> Any:
        if id(value) not in self.named:
            return value
        return operator.attrgetter(self.named[id(value)][1])(self._module)


def _admit(values: Sequence[Any]) -> None:
    """Lets the current fake mode accept real tensors as inputs; torch 2.11 does not."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode()
    if mode is not None and any(isinstance(value, torch.Tensor) and not mode.is_our_fake(value) for value in values):
        mode.allow_non_fake_inputs = True


class StandIns:
    """Tensors in place of a graph's output values. After `give`, only weak references remain."""

    def __init__(self, values: Sequence[object]) -> None:
        self._tensors = [torch.empty(0, device="meta") for _ in values]
        self._known = [(weakref.ref(tensor), node) for tensor, node in zip(self._tensors, values, strict=True)]

    def give(self) -> tuple[torch.Tensor, ...]:
        tensors, self._tensors = tuple(self._tensors), []
        return tensors

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        nodes = (node for reference, node in self._known if reference() is tensor and isinstance(node, fx.Node))
        return next(nodes, None)

    def any_held_beyond(self, met: Collection[int]) -> bool:
        if self._held() - set(met):
            gc.collect()  # takes a second with many objects: only for reference cycles
        return bool(self._held() - set(met))

    def _held(self) -> set[int]:
        return {id(tensor) for ref, _ in self._known if (tensor := ref()) is not None}


def results_with_stand_ins(traced: fx.GraphModule, leaves: Sequence[torch.Tensor]) -> tuple[Any, StandIns]:
    """The result of the traced forward, with a stand-in tensor for each value of the graph.

    torch.compile's code builds the objects, without forward's side effects.

    Raises:
        RuntimeError, NotImplementedError, TypeError: the result has Python numbers or arrays computed from tensors.
    """
    values = traced.graph.output_node().args[0]
    assert isinstance(values, tuple | list)
    stand_ins = StandIns(values)
    unflatten: Any = traced._dynamo_bytecode_unflatten
    return unflatten(stand_ins.give(), tuple(leaves)), stand_ins


def give_values(traced: fx.GraphModule, values: Sequence[fx.Node]) -> None:
    codegen: Any = traced.graph._codegen
    module: Any = traced
    traced.graph.output_node().args = (tuple(values),)
    codegen.dynamo_bytecode_unflatten = module._dynamo_bytecode_unflatten = lambda values, inputs: tuple(values)
    traced.recompile()
