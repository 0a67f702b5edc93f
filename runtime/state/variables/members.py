"""The user's tensors in a store of variables, and their names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

_COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class Members:
    """The tensors of a store. Immutable, because a call in another thread may iterate over them.

    Attributes:
        names: id of a tensor -> its name.
        guarded: variables with guards on shape and dtype; a change compiles a new program.
        counters: id of a statistic -> id of its counter; forwards do not change the statistic's version.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    guarded: frozenset[str] = frozenset()
    counters: Mapping[int, int] = field(default_factory=dict)

    def with_added(
        self, tensors: Mapping[str, torch.Tensor], counters: Mapping[int, int], *, are_guarded: bool = False
    ) -> Members:
        """Adds tensors. Members may be among them, under the same names."""
        new = tensors.keys() - self.tensors.keys()
        return Members(
            {**self.tensors, **tensors},
            {**self.names, **{id(tensor): name for name, tensor in tensors.items()}},
            self.guarded | new if are_guarded else self.guarded - tensors.keys(),
            {**self.counters, **counters},
        )

    def joined(self, other: Members, names: Mapping[str, str]) -> Members:
        new = {names[name]: tensor for name, tensor in other.tensors.items() if names[name] not in self.tensors}
        return Members(
            {**self.tensors, **new},
            {**self.names, **{id(tensor): name for name, tensor in new.items()}},
            self.guarded | (new.keys() & {names[name] for name in other.guarded}),
            {**other.counters, **self.counters},
        )

    def only(self, remaining: Collection[str]) -> Members:
        names = {key: name for key, name in self.names.items() if name in remaining}
        return Members(
            {name: tensor for name, tensor in self.tensors.items() if name in remaining},
            names,
            self.guarded.intersection(remaining),
            {key: counter for key, counter in self.counters.items() if key in names and counter in names},
        )

    def counter_of(self, name: str) -> str | None:
        tensor = self.tensors.get(name)
        return self.names.get(self.counters[id(tensor)]) if id(tensor) in self.counters else None

    def counted(self) -> set[str]:
        return {self.names[key] for pair in self.counters.items() for key in pair if key in self.names}


def counters_among(tensors: Mapping[str, torch.Tensor]) -> dict[int, int]:
    """Ids of a model's statistics -> ids of their counters, which are buffers of the same module."""
    counters = {}
    for name, tensor in tensors.items():
        counter = tensors.get(f"{name.rpartition('.')[0]}.{_COUNTER}".removeprefix("."))
        if counter is not None and counter is not tensor and not isinstance(tensor, torch.nn.Parameter):
            counters[id(tensor)] = id(counter)
    return counters
