"""Watches the Python objects that the code of model and loss names: whether they are as they were when it was traced."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Set
from contextvars import ContextVar
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn

from mirrorc.capture.call.arguments import Constant
from mirrorc.capture.call.training_call import TrainingCall
from mirrorc.capture.model.transient_attributes import Attribute
from mirrorc.capture.python_trace.bytecode_names import codes_in, globals_of, names_of
from mirrorc.capture.python_trace.call_observer import ENVIRONMENT, functions_of
from mirrorc.capture.python_trace.code_owner import is_watched_file
from mirrorc.capture.python_trace.imports_in_code import file_of, imported_by
from mirrorc.capture.python_trace.reflective_objects import WatchedWhole
from mirrorc.capture.python_trace.watchable_objects import (
    HOOKS,
    PLAIN,
    Attributes,
    Cell,
    OwnDict,
    Variable,
    attributes_of,
    called_by,
    contents_of,
    copy_of,
    function_behind,
    is_lasting,
    is_users_class,
    is_value,
    slots_of,
    tables_of,
)
from mirrorc.capture.python_trace.watched_places import ABSENT, Root, WatchedPlaces

_MOST_CONTAINERS = 20_000  # that are reached by one name
_ALWAYS = ""  # the name of what code reaches without one, such as variables of a closure, or methods of operators
_NAMED_BY_TORCH = frozenset({_ALWAYS, ".forward", ".backward", ".setup_context", ".vmap", ".jvp"})
_UNCALLED = frozenset({"__init__", "__repr__", "__str__", "__reduce__", "__getstate__", "__setstate__"})


class PythonState:
    """What model and loss hold besides parameters and buffers, and what their code names.

    These are attributes of modules and of their classes; globals and variables of closures that the code of these classes and
    of the loss names, and the functions that it calls; in each the contents of lists, dicts, sets and objects of Python's.

    Args:
        call: model and loss.
        codes: other code that is known to run, with its globals.
        names: the keys (`PythonCalls.names`) by which what is watched is reached; None for those in all code that is found.
        passing: attributes that are assigned before they are read, which are not watched.
        made_names: further names of attributes, which code is known to make while it runs.
        whole: what code is known to read without naming it.

    Attributes:
        tensors: the tensors in all of that, which are neither parameters nor buffers of the call, by their ids.
        unwatched: the names of what keeps something where it cannot be watched, each with what that is.
    """

    def __init__(
        self,
        call: TrainingCall,
        codes: Mapping[CodeType, dict[str, Any]] | None = None,
        names: Set[str] | None = None,
        passing: Set[Attribute] = frozenset(),
        made_names: Set[str] = frozenset(),
        whole: WatchedWhole | None = None,
    ) -> None:
        modules = list(call.modules())
        self._names, self._passing = names, {(id(vars(modules[place])), name) for place, name in passing}
        self._call, self._known, self._whole = call, codes or {}, whole or WatchedWhole()
        self._plain = {name: Constant(value) for name, value in call.plain.items()}
        self._found = {*_NAMED_BY_TORCH, *(f".{name}" for name in made_names)}  # the names in all code that is known
        num_names = 0
        while len(self._found) > num_names:
            num_names = len(self._found)
            self._look()

    def _look(self) -> None:
        """Finds what can be reached by the names that are known."""
        self.tensors: dict[int, torch.Tensor] = {}
        self.unwatched: list[str] = []
        self._watched = WatchedPlaces()
        self._num_containers: dict[str, int] = {}
        self._seen: set[int] = set()
        self._keep: list[Any] = []  # so that ids stay those of one object
        self._codes: set[CodeType] = set()
        for path, module in self._call.named_modules():
            self._look_at_module(module, path.removeprefix("model"))
        self._look_at(self._call.loss_fn, Root(_ALWAYS, "loss_fn"))
        for value in self._whole.objects:
            self._look_at(value, Root(_ALWAYS, f"a {type(value).__name__}"))
        missing = self.missing(self._known)
        for function in functions_of(missing):
            self._look_at_function(function)
        for code in missing:
            self._look_at_code(code, self._known[code])
        for tensor in (*self._call.parameters(), *self._call.buffers()):
            self.tensors.pop(id(tensor), None)

    def missing(self, codes: Iterable[CodeType]) -> list[CodeType]:
        """Those among codes that are not known to be reached."""
        return [code for code in codes if code not in self._codes]

    def hold(self) -> bool:
        """Whether everything is as it was."""
        return not self._changed_arguments() and self._watched.hold()

    def changed(self) -> list[str]:
        """The names of all that is not as it was."""
        return list(dict.fromkeys([*self._changed_arguments(), *self._watched.changed()]))

    def put_back(self) -> None:
        """Puts back what has changed, as far as Python lets it."""
        self._watched.put_back()

    def _changed_arguments(self) -> list[str]:
        own = [(name, self._call.plain.get(name, ABSENT), value) for name, value in self._plain.items()]
        return [name for name, now, value in own if now is not value.value and Constant(now) != value]

    def _look_at_module(self, module: nn.Module, path: str) -> None:
        if module is not self._call:
            self._watched.add_names(vars(module), path.removeprefix(".") or type(module).__name__)
            self._add_own_dict(module, Root(_ALWAYS, path.removeprefix(".") or type(module).__name__))
            is_whole = self._whole.has_module(type(module))
            for key, value in attributes_of(module).items():
                root = Root(f".{key}", f"{path}.{key}".removeprefix("."))
                self._add(vars(module), key, value, root, is_whole=is_whole)
        for hooks in HOOKS:
            for hook in (vars(module).get(hooks) or {}).values():
                self._look_at(hook, Root(_ALWAYS, f"a hook of {path.removeprefix('.')!r}"))
        self._look_at_class(type(module))

    def _look_at_class(self, kind: type) -> None:
        """Watches the attributes of a class of the user's, and of those that it is derived from."""
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        for base in kind.__mro__[1:]:
            self._look_at_class(base)
        if not is_users_class(kind):
            return
        attributes = vars(kind)
        self._watched.add_class(kind, attributes)
        for key, value in list(attributes.items()):
            value = function_behind(value)
            is_implied = key.startswith("__") and key not in _UNCALLED and isinstance(value, FunctionType)
            root = Root(_ALWAYS if is_implied else f".{key}", f"{kind.__qualname__}.{key}")
            self._add(attributes, key, attributes[key], root, value, is_whole=kind in self._whole.classes)

    def _add(
        self, owner: Any, key: Any, value: Any, root: Root, within: Any = ABSENT, *, is_whole: bool = False
    ) -> None:
        """Watches one place of a mapping, if that can be reached, and what is within that which is there.

        Of a mapping that is watched whole, functions that no code names are looked into once they have run.
        """
        names = self._found if self._names is None else self._names
        is_named = root.key in names or root.key in _NAMED_BY_TORCH
        if not (is_named or is_whole) or (id(owner), key) in self._passing:
            return
        self._watched.add(owner, key, value, root)
        behind = value if within is ABSENT else within
        if is_named or not isinstance(behind, FunctionType) or behind.__code__ in self._known:
            self._look_at(behind, root)

    def _look_at(self, value: Any, root: Root) -> None:
        """Watches what is within an object."""
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, PLAIN) or id(value) in self._seen:
                continue
            if isinstance(value, type):
                self._look_at_class(value)
                continue
            self._seen.add(id(value))
            self._keep.append(value)
            waiting += self._within(value, root)

    def _within(self, value: Any, root: Root) -> list[Any]:
        """What is to be looked at in an object."""
        if isinstance(value, torch.Tensor):
            if is_value(value):
                self.tensors[id(value)] = value
            self._watched.add(Attributes(value), "requires_grad", value.requires_grad, root)
            return []
        if isinstance(value, FunctionType):
            self._look_at_function(value)
            return []
        if (called := called_by(value)) is not None:
            return called
        if isinstance(value, nn.Module):
            self._look_at_class(type(value))
            return self._within_module(value, root)
        if isinstance(value, ContextVar):
            owner = Variable(value)
            self._watched.add(owner, "", owner.get("", ABSENT), root)
            return [owner.get("", None)]
        if isinstance(value, MappingProxyType):
            self._watched.add_names(value, root.words)
            for key, item in value.items():
                self._watched.add(value, key, item, root)
            return list(value.values())
        if is_lasting(value):
            return []
        containers = contents_of(value)
        if containers is None:
            self.unwatched.append(f"{root.words!r}, which holds a {type(value).__module__}.{type(value).__name__}")
            return []
        self._look_at_class(type(value))
        self._add_own_dict(value, root)
        slots = slots_of(value)
        for slot in slots:
            self._watched.add(slot, "", slot.get("", ABSENT), root)
        found = [item for container in containers for item in self._items(container, root)]
        return [*found, *(slot.get("", None) for slot in slots)]

    def _add_own_dict(self, value: Any, root: Root) -> None:
        """Watches which dict has the attributes of an object: another one may take its place."""
        if (owner := OwnDict(value)).get("", ABSENT) is not ABSENT:
            self._watched.add(owner, "", owner.get("", ABSENT), root)

    def _within_module(self, module: nn.Module, root: Root) -> list[Any]:
        """What is to be looked at in a module that is reached otherwise than through the call."""
        tables, attributes = tables_of(module), attributes_of(module)
        self._add_own_dict(module, root)
        self._watched.add_names(vars(module), root.words)
        for key, value in attributes.items():
            self._watched.add(vars(module), key, value, root)
        return [*attributes.values(), *(item for table in tables for item in self._items(table, root))]

    def _items(self, container: Any, root: Root) -> list[Any]:
        """Watches a container; what is in it."""
        self._num_containers[root.key] = self._num_containers.get(root.key, 0) + 1
        if self._num_containers[root.key] > _MOST_CONTAINERS:
            self.unwatched.append(f"{root.words!r}, which holds more than {_MOST_CONTAINERS} objects")
            return []
        if not isinstance(container, tuple):
            self._watched.add_container(container, root)
        found = copy_of(container)
        return [item for item in (found.values() if isinstance(found, dict) else found) if not isinstance(item, PLAIN)]

    def _look_at_function(self, function: FunctionType) -> None:
        """Watches what a function may read."""
        wrapped = getattr(function, "__wrapped__", None)
        if isinstance(wrapped, FunctionType) and id(wrapped) not in self._seen:
            self._look_at(wrapped, Root(_ALWAYS, wrapped.__qualname__))
        if not is_watched_file(function.__code__.co_filename):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            owner = Cell(cell)
            if (value := owner.get("", ABSENT)) is not ABSENT:
                self._add(owner, "", value, Root(_ALWAYS, name))
        for key in ("__defaults__", "__kwdefaults__", "__dict__"):
            if value := getattr(function, key):
                self._add(Attributes(function), key, value, Root(_ALWAYS, f"{function.__qualname__}.{key}"))
        self._look_at_code(function.__code__, function.__globals__)

    def _look_at_code(self, code: CodeType, names_there: dict[str, Any]) -> None:
        """Watches the globals that some code names."""
        if code in self._codes:
            return
        self._codes.update(codes_in(code))
        names, of_globals = names_of(code), globals_of(code)
        self._found |= of_globals.union(f".{name}" for name in names)
        for key in sorted(names_there.keys() & of_globals):
            value = names_there[key]
            if isinstance(value, ModuleType):
                self._look_at_names(value, names)
            else:
                self._add(names_there, key, value, Root(key, key))
        for module in imported_by(code, names_there):
            self._look_at_names(module, names)

    def _look_at_names(self, module: ModuleType, names: Set[str], seen: frozenset[int] = frozenset()) -> None:
        """Watches what code may read of a module of Python."""
        if id(module) in seen or module.__name__.partition(".")[0] == "torch":
            return
        is_users = is_watched_file(file_of(module))
        for key in sorted(names & vars(module).keys()):
            value, root = vars(module)[key], Root(f".{key}", f"{module.__name__}.{key}")
            if isinstance(value, ModuleType):
                self._look_at_names(value, names, seen | {id(module)})
            elif value is sys.modules:
                self.unwatched.append(f"{root.words!r}, which holds all modules")
            elif is_users or isinstance(value, (*PLAIN, dict, list, set, ENVIRONMENT)):
                self._add(vars(module), key, value, root)
