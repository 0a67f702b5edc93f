"""The kinds of values that the options of `mirrorc.compile` take, and the refusal of others."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from types import NoneType
from typing import Any, Literal, get_args

from mirrorc.compression import TopK
from mirrorc.ir import workers
from mirrorc.power_sgd import PowerSGD

LossReduction = Literal["mean", "sum"]
Auto = Literal["auto"]

# What can be declared outside of the package, too, is any text; these are the names that are there from the beginning.
BackendName = Literal["inductor", "eager"] | str
LinkName = Literal["shared-memory", "nccl", "copy"] | str
FrontEndName = Literal["auto", "dynamo", "trace", "autograd"] | str
FiniteCheck = bool | Literal["skip"]
Workers = Auto | None
Exchange = Literal["auto", "dense", "factors"]
Compression = Literal["bfloat16", "float16"]
PlacementName = Literal["auto", "mirrored", "shared", "central", "least-loaded", "cached"]


@dataclass(frozen=True)
class _Takes:
    """What an option takes.

    Attributes:
        kinds: the types of its values; bool, str and bytes are meant only by themselves, not as numbers or sequences.
        allowed: what the user can give, for the message.
        texts: those that it takes besides.
    """

    kinds: tuple[Any, ...]
    allowed: str
    texts: tuple[str, ...] = ()


_NAMES = _Takes((Sequence, Set), "give a sequence of names, such as ('replicate',)")
_TAKES = {
    "loss_fn": _Takes((Callable, NoneType), "give a function loss_fn(output, target)"),
    "loss_reduction": _Takes((), "say 'mean' or 'sum', as the loss does over its examples", get_args(LossReduction)),
    "dump": _Takes((str, os.PathLike, NoneType), "give the path of a directory, or None"),
    "print_after": _NAMES,
    "print_after_all": _Takes((bool,), "say True, to print the program after each pass, or False"),
    "passes": _Takes((Sequence, NoneType), "give a list of passes, or None for mirrorc.passes.default_pipeline()"),
    "add_passes": _Takes((Sequence,), "give a list, such as [mirrorc.after('pack-gradients', it)]"),
    "disable_passes": _NAMES,
    "bucket_cap_mb": _Takes(
        (Real, NoneType),
        "give a positive number of MiB (0 for one bucket), or None for the default",
    ),
    "first_bucket_mb": _Takes(
        (Real, NoneType), "give a positive number of MiB, or None for what bucket_cap_mb chooses"
    ),
    "exact_order": _Takes((bool,), "say True, to leave out passes that change bits, or False"),
    "timeout_seconds": _Takes((Real,), "give a positive number of seconds (math.inf for no bound)"),
    "record": _Takes((bool,), "say True, for step.explain() and step.timeline(), or False"),
    "cuda_graphs": _Takes((bool,), "say True, for one GPU, or False"),
    "return_outputs": _Takes((bool,), "say True, for loss, outputs = step(...), or False"),
    "microbatches": _Takes((int,), "give a number of parts, 1 to run each shard at once"),
    "activation_memory": _Takes(
        (int, float, NoneType),
        "give a number of bytes for each device as an int, a part of what activations would take as a float, or None",
    ),
    "progress": _Takes((bool,), "say True, to be told what takes long while it is compiled, or False"),
    "check_finite": _Takes(
        (bool,),
        "say True, to raise an error where a loss or gradient is not finite, 'skip', to leave such updates out, or False",
        ("skip",),
    ),
    "check_replicas_every": _Takes((int, NoneType), "give a number of steps, or 0 for never"),
    "example_inputs": _Takes(
        (tuple, dict, NoneType),
        "give a tuple of positional arguments, a dict of keyword arguments, or a pair of both",
    ),
    "world": _Takes((workers.World, NoneType), "give a mirrorc.World, such as World(num_workers=2), or None"),
    "rank": _Takes((int, NoneType), "give the number of a worker of world=, or None for worker 0"),
    "exchange": _Takes(
        (),
        "say 'dense', to send all gradients whole, 'factors', to send the factors of those that have some, or 'auto'",
        get_args(Exchange),
    ),
    "compression": _Takes(
        (PowerSGD, TopK, NoneType),
        "say 'bfloat16' or 'float16', to send sums to other workers so, mirrorc.TopK(ratio), to send a part of them, "
        "mirrorc.PowerSGD(rank), to send factors of matrices, or None for all in their own dtype",
        get_args(Compression),
    ),
    "placement": _Takes(
        (Mapping,),
        "say 'auto', 'mirrored', 'shared', 'central', 'least-loaded' or 'cached', or give a dict with the owners of "
        "parameters, such as {'embedding.weight': 'cpu:0', '*': 'least-loaded'}",
        get_args(PlacementName),
    ),
    "dynamic": _Takes(
        (bool, NoneType),
        "say False, to compile each new size, None, for symbols in place of sizes that change, or True, for symbols from the "
        "first call on",
    ),
    "early_update": _Takes((bool,), "say True, to update each bucket when its own sum is there, or False"),
    "overlap_next_step": _Takes((bool,), "say True, to return with the last buckets in flight, or False"),
    "shard_optimizer": _Takes((bool,), "say True, to deal the optimizer's state out to the workers, or False"),
    "workers": _Takes((NoneType,), "say 'auto', or None, to train in this process alone", get_args(Auto)),
}
"""By option. What is looked up or inspected is refused there: model, optimizer, devices, names of backends, links, front ends."""
_MEANT_BY_THEMSELVES = (bool, str, bytes)


def check_kinds(options: Mapping[str, Any]) -> None:
    """Refuses values of another kind than an option takes.

    Args:
        options: the arguments of `mirrorc.compile`, by name.

    Raises:
        TypeError: a value has the wrong type; names the option, the value, and what is allowed.
        ValueError: so does this, for a text where other texts are taken.
    """
    for option, takes in _TAKES.items():
        value = options[option]
        if takes.texts and isinstance(value, str):
            if value not in takes.texts:
                raise ValueError(f"{option} is {_shown(value)}: {takes.allowed}")
        elif not any(_is_of(value, kind) for kind in takes.kinds):
            raise TypeError(f"{option} is {_shown(value)}: {takes.allowed}")


def _is_of(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and (kind in _MEANT_BY_THEMSELVES or not isinstance(value, _MEANT_BY_THEMSELVES))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"
