"""Symbolic sizes: Dynamo's symbols for sizes of arguments, what is computed of them, and the guards that torch puts on them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

Size = Any
"""A size: an int, or a `torch.SymInt` in a fake tensor."""

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)  # `isinstance` is faster with a tuple than with a union


_PLAIN = (fx.Node, int, float, bool, str, type(None))  # what most arguments of nodes are, and has no symbols


class SizesGivenUp(Exception):
    """Sizes cannot be symbols in a graph; the text says why, in a few words."""


def mark_symbolic(tensor: torch.Tensor, dims: Sequence[int]) -> None:
    """Has a trace give these dimensions of an argument symbols, unless what it computes needs their very sizes."""
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether a trace gives some dimension of an argument a symbol."""
    return bool(getattr(tensor, "_dynamo_weak_dynamic_indices", None))


def dims_marked_by_user(tensor: torch.Tensor) -> frozenset[int]:
    """The dimensions for which the user has called `torch._dynamo.mark_dynamic` or ``maybe_mark_dynamic``."""
    names = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")
    marked = {int(dim) for name in names for dim in getattr(tensor, name, None) or ()}
    return frozenset(dim % tensor.dim() for dim in marked if tensor.dim())


@contextlib.contextmanager
def raw_sizes_allowed() -> Iterator[None]:
    """A block in which nodes may be made with sizes as they are: torch warns of that, and they become inputs before anything
    runs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Raw SymInt value")
        yield


def symbols_dispatched(*values: Any) -> contextlib.AbstractContextManager[None]:
    """A block in which operators take these values, as in a trace: some take symbolic sizes by their Python kernels alone."""
    if not any(map(has_symbols, values)):
        return contextlib.nullcontext()
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def is_symbolic(value: Any) -> bool:
    """Whether a value is a number that stands for a size, or is computed of sizes."""
    return isinstance(value, _NUMBERS)


def has_symbols(value: Any) -> bool:
    """Whether a value is such a number, or a tensor that has some among its sizes or strides."""
    if isinstance(value, torch.Tensor):
        return any(map(is_symbolic, (*value.shape, *value.stride(), value.storage_offset())))
    return is_symbolic(value)


def environment_of(value: Any) -> int:
    """The id of the environment that the symbols in a value are of."""
    owner: Any = value
    return id((owner.fake_mode if isinstance(value, torch.Tensor) else owner.node).shape_env)


def size_key(size: Size) -> Any:
    """A size as something that can be hashed and compared without a guard: a number, or an expression of symbols."""
    if not is_symbolic(size):
        return size
    expression = size.node.expr
    return (int(expression) if expression.is_Integer else expression) if hasattr(expression, "is_Integer") else size


def sizes_key(sizes: Sequence[Size]) -> tuple[Any, ...]:
    """The same for several sizes."""
    return tuple([size if type(size) is int else size_key(size) for size in sizes])


def size_of_key(key: Any, fake_mode: Any) -> Size:
    """The size of a key, in the environment of symbols that a fake mode has."""
    if isinstance(key, int):
        return key
    environment = fake_mode.shape_env
    make = environment.create_symintnode if key.is_integer else environment.create_symfloatnode
    return make(key, hint=None)


def text_of_size(size: Size) -> str:
    """A size as it is printed: ``8``, ``s0``, ``2*s0``, ``(s1 - 1)*s0``."""
    key = size_key(size)
    if isinstance(key, int):
        return str(key)
    return _code(key)


def size_now(size: Size) -> Any:
    """The number that a size was when the graph was captured; no guard is made of it."""
    return size.node.hint if is_symbolic(size) else size


def sizes_now(tensor: torch.Tensor) -> torch.Size:
    """The sizes that a value had when the graph was captured."""
    return torch.Size([size_now(size) for size in tensor.shape])


def with_sizes_now(tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor with the sizes that it had when the graph was captured; itself if no size is a symbol."""
    if not has_symbols(tensor):
        return tensor
    shape, strides = (tuple(map(size_now, sizes)) for sizes in (tensor.shape, tensor.stride()))
    with tensor.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)


def num_elements_now(tensor: torch.Tensor) -> int:
    """How many elements a value had when the graph was captured."""
    count = 1
    for size in tensor.shape:
        count *= size_now(size)
    return count


def num_bytes_now(value: Any) -> int:
    """How many bytes the elements of a value had; 0 for what is no tensor."""
    return num_elements_now(value) * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0


def storage_bytes_now(tensor: torch.Tensor) -> int:
    """How many bytes the memory of a value had."""
    return int(size_now(tensor.untyped_storage().nbytes()))


def symbols_in(value: Any) -> frozenset[Any]:
    """The symbols in a number, or in the sizes and strides of a tensor, or of several."""
    if isinstance(value, list | tuple):
        return frozenset().union(*map(symbols_in, value)) if value else frozenset()
    if isinstance(value, torch.Tensor):
        if not value._has_symbolic_sizes_strides:  # as a rule: every pass asks this of each node
            return frozenset()
        return symbols_in([s for s in (*value.shape, *value.stride(), value.storage_offset()) if is_symbolic(s)])
    return frozenset(value.node.expr.free_symbols) if is_symbolic(value) else frozenset()


def raw_symbols(value: Any) -> list[Any]:
    """The symbolic numbers in the arguments of a node, which no device could tell."""
    if isinstance(value, _NUMBERS):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [one for item in items if type(item) not in _PLAIN for one in raw_symbols(item)]


class SizesOfArguments:
    """The symbols of a graph: where arguments have them, what is computed of them, and what must hold for them.

    Args:
        fake_mode: of the graph, with torch's environment of symbols.
        leaves: the fake tensors of the arguments; None for one that the graph does not use.

    Raises:
        SizesGivenUp: torch has put a guard on something else than sizes of these arguments.
    """

    def __init__(self, fake_mode: Any, leaves: Sequence[torch.Tensor | None]) -> None:
        self._fake_mode = fake_mode
        self._leaves = {f"t{leaf}": tensor for leaf, tensor in enumerate(leaves) if tensor is not None}
        self._count = len(leaves)
        self._places: dict[Any, tuple[str, str, int]] = {}
        for leaf, tensor in self._leaves.items():
            for kind, sizes in (("shape", tensor.shape), ("stride()", tensor.stride())):
                for dim, size in enumerate(sizes):
                    one: Any = size
                    key = one.node._expr if is_symbolic(one) else one  # even if it is known to equal another one
                    if getattr(key, "is_Symbol", False):
                        self._places.setdefault(key, (leaf, kind, dim))
        self._numbers: dict[Any, Any] = {}  # by their expressions
        self._check: Callable[..., Any] | None = None
        unknown = {s for guard in fake_mode.shape_env.guards for s in guard.expr.free_symbols} - self._places.keys()
        if unknown:
            raise SizesGivenUp("Python looks at the size of an argument that the graph does not take")

    @property
    def symbols(self) -> list[Any]:
        """The symbols that arguments have, in their order."""
        replaced = self._fake_mode.shape_env.replacements
        return [symbol for symbol in self._places if symbol not in replaced]

    def add(self, value: Any) -> Any:
        """Notes a number that the graph takes; gives its key, or the number if it is always the same one.

        Raises:
            SizesGivenUp: it is computed of something else than sizes of arguments.
        """
        key = size_key(value)
        if not hasattr(key, "free_symbols"):
            return key
        if not key.free_symbols:
            return int(key) if isinstance(value, torch.SymInt) else float(key)
        self.check_symbols(value)
        self._numbers.setdefault(key, value)
        return key

    def check_symbols(self, value: Any) -> None:
        """Refuses a value with symbols that stand for no size of an argument, such as how many elements are not zero.

        Raises:
            SizesGivenUp: it has one.
        """
        others = symbols_in(value) - self._places.keys()
        if others:
            raise SizesGivenUp(f"the size {sorted(map(str, others))[0]} follows from the values of tensors")
        if isinstance(value, torch.SymBool):
            raise SizesGivenUp("a truth value that is computed of sizes is used as one")

    @property
    def numbers(self) -> Mapping[Any, Any]:
        """The numbers that were added, by their keys."""
        return self._numbers

    def known(self, key: Any) -> Any:
        """The number of a key."""
        return self._numbers[key] if key in self._numbers else size_of_key(key, self._fake_mode)

    def numbers_for(self, tensors: Sequence[torch.Tensor], keys: Sequence[Any]) -> tuple[int | float, ...] | None:
        """The numbers of these keys for arguments, 0 for None; None if the graph is not that of these arguments.

        To be asked only when the graph will not change any more: torch puts guards on symbols while it is compiled.
        """
        if self._check is None:
            self._check = self._made_check(keys)
        try:
            return self._check(*tensors)
        except ArithmeticError:  # a size divides by another one, which is zero here
            return None

    def _made_check(self, keys: Sequence[Any]) -> Callable[..., Any]:
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

        lines = [f"def check({', '.join(f't{leaf}' for leaf in range(self._count))}):"]
        ranks = [f"len({name}.shape) != {tensor.dim()}" for name, tensor in self._leaves.items()]
        lines.append(f"    if {' or '.join(ranks)}: return None")
        lines += [f"    {symbol} = {name}.{kind}[{dim}]" for symbol, (name, kind, dim) in self._places.items()]
        conditions = list(dict.fromkeys(self._guards()))
        scope: dict[str, Any] = {**SYMPY_INTERP}
        for name, tensor in self._leaves.items():
            scope[f"{name}_dtype"] = tensor.dtype
            conditions += [f"{name}.dtype is {name}_dtype"]
            conditions += [f"{name}.shape == {_tuple(tensor.shape)}", f"{name}.stride() == {_tuple(tensor.stride())}"]
        lines.append(f"    if not ({' and '.join(conditions)}): return None")
        lines.append(f"    return ({' '.join(f'{0 if key is None else _code(key)},' for key in keys)})")
        if {s for guard in self._fake_mode.shape_env.guards for s in guard.expr.free_symbols} - self._places.keys():
            return lambda *_: None
        exec("\n".join(lines), scope)  # made of torch's expressions of sizes above
        made: Callable[..., Any] = scope["check"]
        return made

    def _guards(self) -> Iterator[str]:
        """What torch and the ranges of sizes ask for, in Python's words."""
        environment = self._fake_mode.shape_env
        for symbol in self._places:
            known = environment.var_to_range.get(symbol)
            for bound, sign in ((known.lower, ">="), (known.upper, "<=")) if known is not None else ():
                if bound.is_Integer:
                    yield f"{symbol} {sign} {bound}"
        for guard in environment.guards:
            yield f"({_code(guard.expr)})"


def _code(key: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter

    return str(PythonPrinter().doprint(key))


def _tuple(sizes: Sequence[Size]) -> str:
    return f"({' '.join(f'{text_of_size(size)},' for size in sizes)})"
