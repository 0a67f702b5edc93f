"""Random operations with a stream of their own: functions of a seed, so that threads and backends draw the same numbers."""

from __future__ import annotations

import operator
import re
import threading
from typing import Any

import torch
from torch import fx

_LIBRARY = torch.library.Library("mirrorc", "FRAGMENT")
_MASK_64 = (1 << 64) - 1
_global_generator_lock = threading.Lock()


def mix(seed: int, stream: int) -> int:
    """A 63-bit seed for stream ``stream`` of ``seed`` (the finaliser of SplitMix64, Steele et al., 2014)."""
    z = (seed + (stream + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (z ^ (z >> 31)) >> 1


def seed_random_ops(graph: fx.Graph, seed: fx.Node) -> int:
    """Replaces every random operation of a graph by one that draws from a stream of ``seed``.

    Dropout becomes a mask and a product. Every other random operation of ATen becomes an operator of the same schema
    that runs it under the seed.

    Returns:
        How many random operations there were.
    """
    stream = 0
    for node in list(graph.nodes):
        if not is_random(node):
            continue
        with graph.inserting_before(node):
            if node.target is torch.ops.aten.native_dropout.default:
                _replace_dropout(graph, node, seed, stream)
            else:
                _replace_by_seeded(graph, node, seed, stream)
        stream += 1
    return stream


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace == "mirrorc" or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if node.target is torch.ops.aten.native_dropout.default:
        return True
    values = {a.name: v for a, v in zip(node.target._schema.arguments, node.args, strict=False)} | dict(node.kwargs)
    dropout = next((a for a in node.target._schema.arguments if a.name == "dropout_p"), None)
    return dropout is None or bool(values.get("dropout_p", dropout.default_value) != 0.0)


def _replace_dropout(graph: fx.Graph, node: fx.Node, seed: fx.Node, stream: int) -> None:
    source, p = node.args[0], node.args[1]
    train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
    assert isinstance(source, fx.Node) and isinstance(p, int | float)
    value = source.meta["val"]
    keep = 1.0 - p if train is not False else 1.0
    mask = _insert(
        graph, node, torch.ops.mirrorc.seeded_mask.default, (seed, stream, list(value.shape), keep, value.device)
    )
    mask.meta["val"] = node.meta["val"][1]
    scale = 1.0 / keep if keep > 0.0 else 0.0
    masked = _insert(graph, node, torch.ops.aten.mul.Tensor, (source, mask))
    masked.meta["val"] = node.meta["val"][0]
    scaled = _insert(graph, node, torch.ops.aten.mul.Tensor, (masked, scale))
    scaled.meta["val"] = node.meta["val"][0]
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with((scaled, mask)[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


def _replace_by_seeded(graph: fx.Graph, node: fx.Node, seed: fx.Node, stream: int) -> None:
    kwargs = {key: value for key, value in node.kwargs.items() if key != "generator"}
    new = _insert(graph, node, seeded(node.target), (seed, stream, *node.args), kwargs)
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _insert(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
    node = graph.call_function(target, args, kwargs or {})
    for key in ("stack_trace", "nn_module_stack"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


def _draw_mask(
    seed: torch.Tensor, stream: int, size: list[int], keep_probability: float, device: torch.device
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(mix(int(seed), stream))
    return torch.empty(size, dtype=torch.bool, device=device).bernoulli_(keep_probability, generator=generator)


def _fake_mask(
    seed: torch.Tensor, stream: int, size: list[int], keep_probability: float, device: torch.device
) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bool, device=device)


_LIBRARY.define(
    "seeded_mask(Tensor seed, int stream, SymInt[] size, float keep_probability, Device device) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl("seeded_mask", _draw_mask, "CompositeExplicitAutograd")
torch.library.register_fake("mirrorc::seeded_mask", _fake_mask, lib=_LIBRARY)

_seeded_ops: dict[Any, Any] = {}


def seeded(op: Any) -> Any:
    """The operator of ours that runs a random ATen operator under a seed; defined at its first use."""
    if op not in _seeded_ops:
        schema = op._schema
        name = (
            "seeded_"
            + schema.name.removeprefix("aten::")
            + (f"_{schema.overload_name}" if schema.overload_name else "")
        )
        signature = str(schema)[str(schema).index("(") :].replace("(", "(Tensor seed, int stream, ", 1)
        signature = re.sub(r",( \*,)? Generator\? generator(=None)?", "", signature)

        def run(seed: torch.Tensor, stream: int, *args: Any, **kwargs: Any) -> Any:
            return _run_under_seed(op, mix(int(seed), stream), args, kwargs)

        def fake(seed: torch.Tensor, stream: int, *args: Any, **kwargs: Any) -> Any:
            return op(*args, **kwargs)

        _LIBRARY.define(name + signature, tags=(torch.Tag.needs_fixed_stride_order,))
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mirrorc::{name}", fake, lib=_LIBRARY)
        _seeded_ops[op] = getattr(torch.ops.mirrorc, name).default
    return _seeded_ops[op]


def unseeded(op: Any) -> Any:
    """The random operator that an operator of `seeded` runs; None if it is none of those."""
    return next((drawn for drawn, own in _seeded_ops.items() if own is op), None)


def _run_under_seed(op: Any, seed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator that draws from its device's global generator, and leaves that generator as it was."""
    generator = _global_generator(args, kwargs)
    with _global_generator_lock:
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            return op(*args, **kwargs)
        finally:
            generator.set_state(state)


def _global_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    devices = [value.device for value in args if isinstance(value, torch.Tensor)]
    devices += [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device)]
    device = next((d for d in devices if d.type == "cuda"), None)
    if device is None:
        return torch.default_generator
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]
