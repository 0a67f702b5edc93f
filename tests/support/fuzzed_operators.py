"""Random graphs of views, expansions, writes in place and indexing."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

Operator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Gives the next value, of the last one and of the first one."""

_MOST_ELEMENTS = 400
_VIEWS = (
    "expand",
    "expand_rows",
    "transpose",
    "narrow",
    "select",
    "stride",
    "unsqueeze",
    "flatten",
    "diagonal",
    "unfold",
)
_VALUES = (
    "flip",
    "roll",
    "repeat",
    "tanh",
    "product",
    "sum",
    "cumsum",
    "where",
    "pad",
    "softmax",
    "sort",
    "of_constant",
)
_WRITES = (
    "shift",
    "add_",
    "fill_",
    "copy_",
    "write_rows",
    "masked_fill_",
    "write_diagonal",
    "transposed_write",
    "write_across",
)
_INDEXED = (
    "index_add", "index_put", "index_accumulate", "index_copy", "index_fill", "index_select", "gather", "scatter",
    "scatter_add", "scatter_amax", "masked_scatter", "masked_fill", "take", "select_scatter", "slice_scatter", "put",
)  # fmt: skip


def _expand(t: torch.Tensor, h: torch.Tensor, *, dim: int, size: int) -> torch.Tensor:
    row = t.narrow(dim, 0, 1)
    return row.expand([size if d == dim else n for d, n in enumerate(t.shape)])


def _expand_rows(t: torch.Tensor, h: torch.Tensor, *, size: int) -> torch.Tensor:
    return t.unsqueeze(0).expand(size, *t.shape)


def _shift(t: torch.Tensor, h: torch.Tensor, *, dim: int) -> torch.Tensor:
    t = t * 1.5
    n = t.shape[dim] - 1
    t.narrow(dim, 1, n).copy_(t.narrow(dim, 0, n).clone())
    return t


def _add_(t: torch.Tensor, h: torch.Tensor, *, dim: int, start: int) -> torch.Tensor:
    t = t.clone()
    t.narrow(dim, start, 1).add_(h.sum() * 0.1)
    return t


def _copy_(t: torch.Tensor, h: torch.Tensor, *, dim: int, start: int) -> torch.Tensor:
    t = t.sin()
    t.select(dim, start).copy_(t.mean(dim))
    return t


def _fill_(t: torch.Tensor, h: torch.Tensor, *, dim: int, start: int) -> torch.Tensor:
    t = t.clone()
    t.narrow(dim, start, 1).fill_(0.5)
    return t * h.mean()


def _write_rows(t: torch.Tensor, h: torch.Tensor, *, index: Sequence[int]) -> torch.Tensor:
    t = t.clone()
    t[torch.tensor(index)] = t[torch.tensor(index)].tanh() * 2
    return t


def _masked_fill_(t: torch.Tensor, h: torch.Tensor, *, dim: int) -> torch.Tensor:
    t = t * 1.0
    view = t.narrow(dim, 0, max(1, t.shape[dim] - 1))
    view.masked_fill_(view > 0.3, 0.25)
    return t


def _write_diagonal(t: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.diagonal(dim1=-2, dim2=-1).mul_(3.0)
    return t


def _transposed_write(t: torch.Tensor, h: torch.Tensor, *, dim: int, start: int) -> torch.Tensor:
    t = t.clone().transpose(0, dim)
    t[start] += 1.0
    t[start].mul_(h.std())
    return t


def _write_across(t: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    first, last = t[0], t[-1]
    last.add_(first)
    first.mul_(last.clone())
    return t


def _values(shape: Sequence[int], h: torch.Tensor) -> torch.Tensor:
    """Values of a shape, computed of the first value."""
    count = int(torch.Size(shape).numel())
    flat = h.reshape(-1)
    times = -(-count // flat.numel())
    return flat.repeat(times)[:count].reshape(tuple(shape))


def _rows(t: torch.Tensor, dim: int, count: int) -> list[int]:
    return [count if d == dim else n for d, n in enumerate(t.shape)]


def _index_add(t: torch.Tensor, h: torch.Tensor, *, dim: int, index: Sequence[int]) -> torch.Tensor:
    return t.index_add(dim, torch.tensor(index), _values(_rows(t, dim, len(index)), h))


def _index_copy(t: torch.Tensor, h: torch.Tensor, *, dim: int, index: Sequence[int]) -> torch.Tensor:
    index = sorted(set(index))
    return t.index_copy(dim, torch.tensor(index), _values(_rows(t, dim, len(index)), h))


def _index_fill(t: torch.Tensor, h: torch.Tensor, *, dim: int, index: Sequence[int]) -> torch.Tensor:
    return t.index_fill(dim, torch.tensor(index), 0.75)


def _index_select(t: torch.Tensor, h: torch.Tensor, *, dim: int, index: Sequence[int]) -> torch.Tensor:
    return t.index_select(dim, torch.tensor(index))


def _index_put(t: torch.Tensor, h: torch.Tensor, *, index: Sequence[int]) -> torch.Tensor:
    index = sorted(set(index))
    return t.index_put((torch.tensor(index),), _values([len(index), *t.shape[1:]], h))


def _index_accumulate(t: torch.Tensor, h: torch.Tensor, *, index: Sequence[int]) -> torch.Tensor:
    return t.index_put((torch.tensor(index),), _values([len(index), *t.shape[1:]], h), accumulate=True)


def _places(t: torch.Tensor, dim: int, step: int) -> torch.Tensor:
    """Distinct places along a dimension for each line of it."""
    n = t.shape[dim]
    line = torch.arange(t.numel()).reshape(t.shape) // 3
    own = torch.arange(n).reshape([n if d == dim else 1 for d in range(t.dim())])
    return (own + line.select(dim, 0).unsqueeze(dim) + step) % n


def _gather(t: torch.Tensor, h: torch.Tensor, *, dim: int, step: int) -> torch.Tensor:
    return t.gather(dim, _places(t, dim, step) // 2)


def _scatter(t: torch.Tensor, h: torch.Tensor, *, dim: int, step: int) -> torch.Tensor:
    return t.scatter(dim, _places(t, dim, step), _values(t.shape, h))


def _scatter_add(t: torch.Tensor, h: torch.Tensor, *, dim: int, step: int) -> torch.Tensor:
    return t.scatter_add(dim, _places(t, dim, step) // 2, _values(t.shape, h))


def _scatter_amax(t: torch.Tensor, h: torch.Tensor, *, dim: int, step: int) -> torch.Tensor:
    return t.scatter_reduce(dim, _places(t, dim, step), _values(t.shape, h) * 1.37, "amax")


def _masked_scatter(t: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    t = t * 1.25
    return t.masked_scatter(t > 0, _values(t.shape, h).tanh())


def _take(t: torch.Tensor, h: torch.Tensor, *, index: Sequence[int]) -> torch.Tensor:
    return t + t.take(torch.tensor(index)).sum()


def _put(t: torch.Tensor, h: torch.Tensor, *, index: Sequence[int]) -> torch.Tensor:
    return t.put(torch.tensor(index), _values([len(index)], h), accumulate=True)


def _select_scatter(t: torch.Tensor, h: torch.Tensor, *, dim: int, start: int) -> torch.Tensor:
    return t.select_scatter(t.select(dim, start).cos(), dim, start)


def _slice_scatter(t: torch.Tensor, h: torch.Tensor, *, dim: int, start: int) -> torch.Tensor:
    part = t.narrow(dim, start, t.shape[dim] - start)
    return t.slice_scatter(part.flip(dim), dim, start, t.shape[dim])


def _of_constant(
    t: torch.Tensor, h: torch.Tensor, *, dim: int, size: int, index: Sequence[int], name: str
) -> torch.Tensor:
    """Indexes an expanded constant, which has one row in memory."""
    shape = [1 if d == dim else n for d, n in enumerate(t.shape)]
    constant = torch.full(shape, 0.5, dtype=t.dtype).expand(t.shape)
    rows = t.index_select(dim, torch.tensor(index))
    if name == "index_add":
        return constant.index_add(dim, torch.tensor(index), rows)
    if name == "scatter_add":
        return constant.scatter_add(dim, _places(t, dim, size) // 2, t)
    if name == "index_put":
        return constant.index_put((torch.tensor([0]),), t[:1] * 2, accumulate=True)
    return constant.masked_scatter(t > 0, t.tanh())


_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "expand": _expand,
    "expand_rows": _expand_rows,
    "transpose": lambda t, h, dim: t.transpose(0, dim),
    "narrow": lambda t, h, dim, start: t.narrow(dim, start, t.shape[dim] - start),
    "select": lambda t, h, dim, start: t.select(dim, start),
    "stride": lambda t, h, dim: t[::2] if dim == 0 else t.transpose(0, dim)[::2].transpose(0, dim),
    "unsqueeze": lambda t, h, dim: t.unsqueeze(dim),
    "flatten": lambda t, h: t.flatten(0, 1),
    "diagonal": lambda t, h: t.diagonal(dim1=-2, dim2=-1),
    "unfold": lambda t, h, dim: t.unfold(dim, 2, 1),
    "flip": lambda t, h, dim: t.flip(dim),
    "roll": lambda t, h, dim, step: t.roll(step, dim),
    "repeat": lambda t, h: t.repeat(2, *[1] * (t.dim() - 1)),
    "tanh": lambda t, h: t.tanh(),
    "product": lambda t, h: t * _values(t.shape, h),
    "sum": lambda t, h, dim: t.sum(dim, keepdim=True) + t,
    "cumsum": lambda t, h, dim: t.cumsum(dim) * 0.5,
    "where": lambda t, h: torch.where(t > 0, t.sin(), t * 0.5),
    "pad": lambda t, h: nn.functional.pad(t, (1, 0), value=0.5),
    "softmax": lambda t, h, dim: t.softmax(dim),
    "sort": lambda t, h, dim: t.sort(dim).values,
    "of_constant": _of_constant,
    "shift": _shift,
    "add_": _add_,
    "fill_": _fill_,
    "copy_": _copy_,
    "write_rows": _write_rows,
    "masked_fill_": _masked_fill_,
    "write_diagonal": _write_diagonal,
    "transposed_write": _transposed_write,
    "write_across": _write_across,
    "index_add": _index_add,
    "index_put": _index_put,
    "index_accumulate": _index_accumulate,
    "index_copy": _index_copy,
    "index_fill": _index_fill,
    "index_select": _index_select,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
    "scatter_amax": _scatter_amax,
    "masked_scatter": _masked_scatter,
    "masked_fill": lambda t, h: t.masked_fill(t < 0, 0.125),
    "take": _take,
    "put": _put,
    "select_scatter": _select_scatter,
    "slice_scatter": _slice_scatter,
}
"""Each operator: of the last value, of the first one, and of numbers that `_drawn_numbers` draws."""


def _has_windows(t: torch.Tensor) -> bool:
    """Tests for elements that share memory but are not expanded: plain PyTorch scatters into both."""
    places = torch.arange(t.untyped_storage().nbytes() // t.element_size())
    strides = [stride for stride, n in zip(t.stride(), t.shape, strict=True) if n > 1]
    return 0 not in strides and places.as_strided(t.shape, t.stride(), t.storage_offset()).unique().numel() < t.numel()


def _drawn_numbers(name: str, t: torch.Tensor, rng: random.Random) -> dict[str, Any] | None:
    """The numbers of an operator for a value; None if it does not take this value."""
    if t.dim() == 0:
        return None
    dim = rng.randrange(t.dim())
    n = t.shape[dim]
    start, size, step = rng.randrange(n), rng.randrange(2, 5), rng.randrange(1, 4)
    index = [rng.randrange(n) for _ in range(rng.randrange(1, 5))]
    needs = {
        "flatten": t.dim() > 1, "diagonal": t.dim() > 1, "write_diagonal": t.dim() > 1, "unfold": n > 1,
        "shift": n > 1, "select": t.dim() > 1, "expand_rows": t.dim() < 4, "unsqueeze": t.dim() < 4,
        "write_across": len(t) > 1, "select_scatter": not _has_windows(t), "slice_scatter": not _has_windows(t),
    }  # fmt: skip
    if not needs.get(name, True):
        return None
    rows = [rng.randrange(len(t)) for _ in range(rng.randrange(1, 5))]
    every = [rng.randrange(t.numel()) for _ in range(rng.randrange(1, 5))]
    indices = {"index_put": rows, "index_accumulate": rows, "write_rows": rows, "take": every, "put": every}
    numbers: dict[str, Any] = {
        "dim": dim,
        "start": start,
        "size": size,
        "step": step,
        "index": indices.get(name, index),
        "name": rng.choice(("index_add", "scatter_add", "index_put", "masked_scatter")),
    }
    names = _FUNCTIONS[name].__code__
    return {key: numbers[key] for key in names.co_varnames[2 : names.co_argcount + names.co_kwonlyargcount]}


def drawn_graph(seed: int, most: int = 7) -> list[tuple[str, Operator]]:
    """Operators with their names, which take a value of shape [4, 5]."""
    rng = random.Random(seed)
    t = h = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    drawn: list[tuple[str, Operator]] = []
    length = rng.randrange(2, most + 1)
    while len(drawn) < length:
        name = rng.choice(rng.choice((_VIEWS, _VALUES, _WRITES, _INDEXED)))
        numbers = _drawn_numbers(name, t, rng)
        if numbers is None:
            continue
        operator = partial(_FUNCTIONS[name], **numbers)
        following = operator(t, h)
        if following.dim() and 0 < following.numel() <= _MOST_ELEMENTS and following.dim() <= 5:
            t = following
            drawn.append((f"{name}({', '.join(f'{key}={value}' for key, value in numbers.items())})", operator))
    return drawn
