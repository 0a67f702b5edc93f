"""An LRU cache of a step's compiled programs."""

from __future__ import annotations

import functools
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mirrorc.analysis.gradients.sent_factors import Counts, row_counts
from mirrorc.capture.call.call_arguments import Call, Structure
from mirrorc.capture.call.recompile_reasons import FIRST_CALL, CallKind, changes_since, changing_arguments
from mirrorc.capture.call.shards import Shards, SymbolicDims
from mirrorc.capture.call.step_outputs import Outputs
from mirrorc.capture.call.traced_loss import TracedLoss
from mirrorc.capture.front_ends.front_end import AllGuards
from mirrorc.capture.program.number_inputs import SymbolicSizes
from mirrorc.compilation.forward_and_backward import ForwardAndBackward
from mirrorc.errors import ExecutionError
from mirrorc.ir.program import LOSS_OUTPUT
from mirrorc.messages.problem import problem
from mirrorc.messages.source_lines import warn
from mirrorc.runtime.execution.executor import Executor
from mirrorc.torch_internals import size_now

logger = logging.getLogger(__name__)

MOST_SPECIALIZATIONS = 64
_MOST_HOMES = 4096  # kinds of calls that are known to fit a program with symbolic sizes
_MANY_COMPILATIONS = 8  # the number of compilations that triggers the warning

Key = tuple[Any, ...]
"""The cache key of a call, without guards: its structure, the types of the shards, then `_OTHER_PARTS`."""

_PARTS_OF_ARGUMENTS = ("structure of the arguments", "shape of a shard")
_OTHER_PARTS = (
    "the model's attributes",
    "the optimizer's groups",
    "torch's modes",
    "the rows that other workers gather",
)
_REMEDIES = (
    "keep attributes that no forward reads, such as counts of steps, outside of the model, and others in buffers",
    "group parameters before training, and change hyperparameters in their groups",
    "make all calls under the same settings of torch: autocast, precision, default dtype",
    "give all workers batches of few sizes",
)
_REMEDY = "pass a changing number as mirrorc.replicated(torch.tensor(...)), a size by x.size(1), and pad batches to few shapes"
_REMEDY_FOR_SHAPES = ", or leave Compiler(dynamic=) out, so that one more program serves all sizes"

_MOST_SHOWN = 3  # attributes, and values of one
_MOST_CHARACTERS = 40  # of one value


@dataclass(frozen=True, eq=False)
class _Compiled:
    key: Key
    kind: CallKind
    attributes: Mapping[str, tuple[type, Any]]


def _are_alike(one: Key, other: Key) -> bool:
    return one[0] == other[0] and one[2:] == other[2:]


def _changing_attributes(each: Sequence[Mapping[str, tuple[type, Any]]]) -> str:
    texts = []
    for path in dict.fromkeys(path for attributes in each for path in attributes):
        values = list(dict.fromkeys(attributes.get(path) for attributes in each))
        if len(values) > 1:
            shown = [_shown(value) for value in values[:_MOST_SHOWN]]
            texts.append(
                f"the model's {path!r} ({', '.join([*shown, *(['...'] if len(values) > _MOST_SHOWN else [])])})"
            )
    more = [f"{len(texts) - _MOST_SHOWN} more of its attributes"] if len(texts) > _MOST_SHOWN else []
    return " and ".join([*texts[:_MOST_SHOWN], *more])


def _shown(value: tuple[type, Any] | None) -> str:
    if value is None:
        return "no plain value"
    text = value[1] if value[0] is float and isinstance(value[1], str) else repr(value[1])  # floats are kept as text
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


@dataclass(frozen=True, eq=False)
class Backward:
    """The program of backward for a module's forward."""

    executor: Executor
    cut: ForwardAndBackward
    gradients: tuple[str, ...]
    constants: tuple[torch.Tensor, ...]  # tensors that it reads, other than variables
    runs_plain: bool  # as plain PyTorch


@dataclass(frozen=True, eq=False)
class Specialization:
    """A compiled program, and guards on the Python values that its capture read."""

    executor: Executor
    guards: AllGuards  # checked with the plain values in `traced_loss`
    traced_loss: TracedLoss
    plain: Mapping[str, Any]
    batch: CallKind  # of the call for which the program was compiled
    outputs: Outputs | None = None
    shard_of_replica: tuple[int | None, ...] = ()  # the index of each replica's graph; None without examples
    loss_dtype: torch.dtype | None = None  # None for an evaluation
    sizes: SymbolicSizes | None = None
    symbolic: SymbolicDims = ()
    backward: Backward | None = None  # for a module's forward

    @property
    def executors(self) -> list[Executor]:
        return [self.executor, *([self.backward.executor] if self.backward is not None else [])]

    def sizes_of(self, shards: Shards) -> list[tuple[int | float, ...]]:
        sizes = self.sizes.of_shards(shards) if self.sizes is not None else []
        assert sizes is not None, "the program was found for these shards"
        return sizes

    @functools.cached_property
    def row_counts(self) -> Callable[[Shards], Counts]:
        """The numbers of rows in the factors that this worker sends, for shards; of backward, if it is a program of its own."""
        counts = row_counts(self.executors[-1].program)
        if self.sizes is not None and counts:
            return self.sizes.sizes_for(counts)
        numbers = tuple([size_now(count) for _, count in counts])
        return lambda _: numbers

    def fits(self, shards: Shards) -> bool:
        return self.sizes is not None and self.sizes.of_shards(shards) is not None

    def numbers(self) -> list[tuple[int | float, ...]]:
        of_graphs = self.guards.numbers_by_graph()
        if not any(of_graphs):
            return []
        if self.executor.program.microbatches:  # a replica may run any of the graphs
            return [self.guards.numbers] * len(self.shard_of_replica)
        return [of_graphs[shard or 0] for shard in self.shard_of_replica]  # absent replicas read none

    def trained(self, loss: torch.Tensor, call: Call, shards: Shards) -> tuple[torch.Tensor, Any]:
        """Outputs that are not kept are None."""
        if self.outputs is None:
            return loss, None
        try:
            gathered = self.executor.outputs.take(shards.num_examples)
            if not self.executor.program.present:
                gathered = self.outputs.of_no_examples(loss.device)
            return loss, self.outputs.of_step(gathered, loss, call, shards)
        except Exception as error:
            fix = "go on with the next batch"
            now = "the step is done and its update is made"
            raise problem(
                ExecutionError, "MC2403: the outputs of the step could not be put together", str(error), fix, now=now
            ) from error

    def evaluated(self, call: Call, shards: Shards) -> tuple[torch.Tensor | None, Any]:
        assert self.outputs is not None, "an evaluation gathers what it gives"
        try:
            gathered = self.executor.outputs.take(shards.num_examples)
            if LOSS_OUTPUT not in gathered:
                return None, self.outputs.of_step(gathered, None, call, shards)
            loss = gathered.pop(LOSS_OUTPUT).reshape(())
            return loss, self.outputs.of_step(gathered, loss, call, shards)
        except Exception as error:
            fix = "step.evaluate(x) with another number of examples, or return means and rows alone"
            raise problem(
                ExecutionError, "MC2403: the outputs of the evaluation could not be put together", str(error), fix
            ) from error

    def changes(self, plain: Mapping[str, Any]) -> tuple[list[str], str]:
        """Why guards fail for these plain values: names of changed values, and other reasons."""
        self.traced_loss.plain = self.plain
        if not self.guards.hold():
            return [], self.guards.broken()
        read = []
        for name, value in plain.items():
            self.traced_loss.plain = {**self.plain, name: value}
            if not self.guards.hold():
                read.append(name)
        return read, ""


class Specializations:
    """An LRU cache. Specializations of one key differ in their guards. With ``has_numbers_as_sizes``, because of
    ``dynamic=False``, each size has its own program.
    """

    def __init__(self, subject: str = "step", *, has_numbers_as_sizes: bool = False) -> None:
        self._subject, self._has_numbers_as_sizes = subject, has_numbers_as_sizes
        self._by_key: OrderedDict[Key, list[Specialization]] = OrderedDict()  # both in the order of their last use
        self._homes: dict[Key, Key] = {}  # from call keys to keys of programs with symbolic sizes
        self._numbers = itertools.count()
        self._first: list[_Compiled] | None = []  # the first compilations; None after the warning
        self._read: list[str] = []  # causes of failed guards besides arguments, in words
        self._read_plain: set[str] = set()  # names of plain values that failed guards

    def get(self, key: Key, plain: Mapping[str, Any]) -> Specialization | None:
        """Marks the specialization as used."""
        return self._usable(self._homes.get(key, key), plain)

    def fitting(
        self, key: Key, plain: Mapping[str, Any], shards: Shards, symbolic: SymbolicDims
    ) -> Specialization | None:
        """A specialization with these symbolic sizes that fits the shards, or None. `get` then returns it for the key."""
        home = self._homes.get(key, key)
        for other, entries in reversed(list(self._by_key.items())):
            is_alike = _are_alike(other, key) and entries[-1].symbolic == symbolic
            if other != home and is_alike and entries[-1].fits(shards):
                cached = self._usable(other, plain)
                if cached is not None:
                    self._remember_home(key, other)
                    return cached
        return None

    def _remember_home(self, key: Key, home: Key) -> None:
        self._homes[key] = home
        if len(self._homes) > _MOST_HOMES:
            del self._homes[next(iter(self._homes))]

    def _forget_homes(self, key: Key, symbolic: SymbolicDims) -> None:
        """Makes calls miss programs with older symbols, because a resumed run would not have these."""
        older = {
            other
            for other, entries in self._by_key.items()
            if entries[-1].symbolic not in ((), symbolic) and _are_alike(other, key)
        }
        self._homes = {called: home for called, home in self._homes.items() if home not in older}

    def _usable(self, key: Key, plain: Mapping[str, Any]) -> Specialization | None:
        entries = self._by_key.get(key)
        if entries is None:
            return None
        for place in range(len(entries) - 1, -1, -1):
            if plain:
                entries[place].traced_loss.plain = plain
            if entries[place].guards.hold():
                if entries is not next(reversed(self._by_key.values())):  # hashing a key is slow
                    self._by_key.move_to_end(key)
                if place != len(entries) - 1:
                    entries.append(entries.pop(place))
                return entries[-1]
        return None

    def changed_numbers(self, structure: Structure, plain: Mapping[str, Any]) -> list[str]:
        changed: list[str] = []
        for key, entries in self._by_key.items():
            for cached in entries if key[0] == structure else ():
                cached.traced_loss.plain = plain
                changed += cached.guards.changed_numbers()
        return list(dict.fromkeys(changed))

    def add(
        self,
        key: Key,
        call: Call,
        new: Specialization,
        instead: Specialization | None = None,
        attributes: Mapping[str, tuple[type, Any]] | None = None,
        reasons: Sequence[str] = (),
    ) -> list[Executor]:
        """Returns the programs that leave the cache. ``reasons`` explain why changing numbers are not inputs."""
        called = key
        if new.sizes is not None:  # the cached key may belong to other sizes
            key = (key[0], ("symbolic", next(self._numbers)), *key[2:])
            self._forget_homes(key, new.symbolic)
            self._remember_home(called, key)
        else:
            self._homes.pop(called, None)
        dropped = instead.executors if instead is not None else []
        if instead is not None:
            self._remove(instead)
        entries = self._by_key.setdefault(key, [])
        if entries:
            names, besides = entries[-1].changes(call.plain)
            self._read_plain.update(names)
            self._read += [besides] if besides else []
        entries.append(new)
        self._by_key.move_to_end(key)
        while len(self) > MOST_SPECIALIZATIONS:
            dropped += self._drop().executors
            logger.info(
                "a step keeps %d compiled programs of a kind: the one that was not used for longest is dropped",
                MOST_SPECIALIZATIONS,
            )
        if self._first is not None:
            self._first.append(_Compiled(called, CallKind.of(call, called[1][0]), attributes or {}))
            self._warn_of_many(self._first, reasons)
        return dropped

    def changes(self, key: Key, call: Call, shards: Shards) -> str:
        """Describes how a call differs from the most similar cached call, the last used if several are equally similar."""
        if not self._by_key:
            return FIRST_CALL
        places = range(2 + len(_OTHER_PARTS))
        differing = {
            known: [
                i
                for i in places
                if known[i] != key[i] and not (i == 1 and known[0] == key[0] and entries[-1].fits(shards))
            ]
            for known, entries in reversed(self._by_key.items())
        }
        nearest, parts = min(differing.items(), key=lambda entry: len(entry[1]))
        entry = self._by_key[nearest][-1]
        of_arguments = [i for i in parts if i < 2]
        names, besides = entry.changes(call.plain) if not parts else ([], "")
        texts = changes_since(entry.batch, CallKind.of_batch(call), names) if of_arguments or names else []
        texts = texts or [f"another {_PARTS_OF_ARGUMENTS[i]}" for i in of_arguments]
        texts += [f"{_OTHER_PARTS[i - 2]} have changed" for i in parts if i >= 2]
        return "; ".join(texts) or besides or "something else that forward or the loss reads"

    def _remove(self, removed: Specialization) -> None:
        for key, entries in list(self._by_key.items()):
            if removed in entries:
                entries.remove(removed)
                if not entries:
                    del self._by_key[key]

    def _drop(self) -> Specialization:
        key, entries = next(iter(self._by_key.items()))
        dropped = entries.pop(0)
        if not entries:
            del self._by_key[key]
        return dropped

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def __iter__(self) -> Iterator[Executor]:
        return iter(
            [executor for entries in self._by_key.values() for cached in entries for executor in cached.executors]
        )

    def _warn_of_many(self, first: list[_Compiled], reasons: Sequence[str]) -> None:
        if len(first) < _MANY_COMPILATIONS:
            return
        self._first = None
        keys, kinds = [compiled.key for compiled in first], [compiled.kind for compiled in first]
        always = set.intersection(*(set(kind.plain) for kind in kinds))
        kinds = [kind.without(always - self._read_plain) for kind in kinds]
        changing = changing_arguments(kinds)
        attributes = _changing_attributes([compiled.attributes for compiled in first])
        parts = (attributes or _OTHER_PARTS[0], *_OTHER_PARTS[1:])
        others = [i for i in range(len(parts)) if len({key[i + 2] for key in keys}) > 1]
        are_shapes = self._has_numbers_as_sizes and len({kind.shapes for kind in kinds}) > 1
        remedy = _REMEDY + _REMEDY_FOR_SHAPES if are_shapes else _REMEDY
        remedies = [remedy] if changing or self._read or not others else []
        remedies += [_REMEDIES[i] for i in others]
        changing += [parts[i] for i in others]
        if self._read:
            changing.append(f"what Python reads in forward and loss (last: {self._read[-1]})")
        causes = " and ".join(changing) or "the optimizer's state"
        constants = f" ({'; '.join(reasons)})" if reasons else ""
        why = f"each new value of {causes} is compiled anew{constants}"
        warn(f"MC3403: the {self._subject} was compiled {len(first)} times", why, remedies)
