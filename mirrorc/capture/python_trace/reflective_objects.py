"""Notes the objects whose attributes code reads without naming them while it is traced, so that they are watched whole."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from mirrorc.capture.model.transient_attributes import unwatched_class
from mirrorc.capture.python_trace.reflective_reads import DICT, LOOKUP, WholeReads, whole_reads
from mirrorc.capture.python_trace.watchable_objects import contents_of, is_lasting
from mirrorc.torch_internals import is_script_module


@dataclass(frozen=True)
class WatchedWhole:
    """What is watched whatever names code has.

    Attributes:
        modules: the classes of the call's modules of which all attributes are.
        classes: those of which all attributes are, with the classes that they are derived from.
        objects: objects that are read so, and that last from one run to the next.
    """

    modules: frozenset[type] = frozenset()
    classes: frozenset[type] = frozenset()
    objects: tuple[Any, ...] = ()

    def has_module(self, kind: type) -> bool:
        """Whether all attributes of the call's modules of a class are watched."""
        return kind in self.modules

    def __or__(self, other: WatchedWhole) -> WatchedWhole:
        known = {id(value): value for value in (*self.objects, *other.objects)}
        return WatchedWhole(self.modules | other.modules, self.classes | other.classes, tuple(known.values()))

    def __ge__(self, other: WatchedWhole) -> bool:
        known = {id(value) for value in self.objects}
        has_all = all(id(value) in known for value in other.objects)
        return has_all and self.modules >= other.modules and self.classes >= other.classes


class WholeObjects:
    """The objects whose attributes code reads without naming them, as far as it runs.

    Attributes:
        untold: how code reads attributes so of what cannot be watched whole, or be told, and that code; None if it does not.
    """

    def __init__(self) -> None:
        self.untold: tuple[str, CodeType] | None = None
        self._reads: dict[CodeType, WholeReads] = {}
        self._modules: set[type] = set()
        self._classes: set[type] = set()
        self._objects: dict[int, weakref.ref[Any]] = {}

    def add_code(self, code: CodeType, its_globals: dict[str, Any], around: Iterable[CodeType]) -> None:
        """Finds out what some code reads so, when it begins to run for the first time."""
        reads = whole_reads(code, around)
        shadowed = next((name for name in reads.builtins if name in its_globals), "")
        if reads.untold or shadowed:
            self.refuse(repr(reads.untold or shadowed), code)
        if reads.variables:
            self._reads[code] = reads

    def note_frame(self, frame: FrameType) -> None:
        """Notes what a call of some code reads so."""
        reads = self._reads.get(frame.f_code)
        for name, finds_in_class in reads.variables if reads is not None else ():
            self.note(frame.f_locals.get(name), frame.f_code, finds_in_class=finds_in_class)

    def note(self, value: Any, code: CodeType, *, finds_in_class: bool = False) -> None:
        """Notes one object.

        Args:
            value: the object.
            code: which reads it.
            finds_in_class: whether attributes of its class may be read, too.
        """
        kind = unwatched_class(type(value))
        if finds_in_class:
            self._classes.update(kind.__mro__)
        if isinstance(value, nn.Module) and not is_script_module(value):
            self._modules.update(kind.__mro__)
            return
        known = self._objects.get(id(value))
        if known is not None and known() is value:
            return
        if isinstance(value, torch.Tensor) or is_lasting(value) or not contents_of(value):
            self.refuse(f"{DICT!r} of a {kind.__module__}.{kind.__qualname__}", code)
            return
        try:
            self._objects[id(value)] = weakref.ref(value)
        except TypeError:
            self.refuse(f"{DICT!r} of a {kind.__module__}.{kind.__qualname__}", code)

    def note_named(self, function: str, value: Any, name: str, code: CodeType) -> None:
        """Notes what code asks of an object by a function that takes the name of an attribute, such as ``getattr``."""
        if name == DICT and function == "getattr":
            self.note(value, code)
        elif name == LOOKUP or (name == DICT and function != "hasattr"):
            self.refuse(repr(name), code)

    def found(self) -> WatchedWhole:
        """What is to be watched whole: objects that were made and dropped meanwhile are not."""
        living = (reference() for reference in self._objects.values())
        objects = tuple(value for value in living if value is not None)
        return WatchedWhole(frozenset(self._modules), frozenset(self._classes), objects)

    def refuse(self, words: str, code: CodeType) -> None:
        """Notes that code reads attributes of what cannot be watched whole, or cannot be told."""
        self.untold = self.untold or (words, code)
