"""What surrounds a forward that runs in Python while torch's joint export records its operators."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import linecache
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoints

from mirrorc.torch_internals.fx.asserts import assert_true
from mirrorc.torch_internals.tracing.tracing import is_users_file

_LOOKUPS = (F.embedding, F.embedding_bag)
_CALL: CodeType = nn.Module._call_impl.__code__


class RefusedRunError(RuntimeError):
    """Forward does what a trace cannot record; the text says what."""


class SparseLookupError(RefusedRunError):
    """Forward looks up with ``sparse=True``, so that backward would make a sparse tensor."""


class PythonRun(TorchFunctionMode):
    """A run of forward: notes for each operator the user's line and his modules, and puts tensors in the places of others.

    Args:
        modules: the names of modules, as in ``named_modules()`` of what is traced, by their ids.
        given: what takes the places of tensors that are reached by other ways than through these modules, by the ids of those.
        is_known: whether a tensor may be read that is not among these.
    """

    def __init__(
        self,
        modules: Mapping[int, str],
        given: Mapping[int, torch.Tensor],
        is_known: Callable[[torch.Tensor], bool],
    ) -> None:
        super().__init__()
        self._modules, self._given, self._is_known = modules, given, is_known
        self._top = sys._getframe(1)

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called in place of each function of torch."""
        args, kwargs = self._replaced(tuple(args)), self._replaced(dict(kwargs or {}))
        if function is torch._is_all_true and _is_of_distributions(sys._getframe(1)):
            assert_true(args[0].all(), "not all arguments are those of a distribution (torch.distributions)")
            return True
        if getattr(function, "__name__", "") != "__get__":
            self._note()
        elif function.__self__ is torch.Tensor.grad:
            raise RefusedRunError("it reads the gradient of a tensor (.grad), which a trace has not")
        if function in _LOOKUPS:
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            if given.get("sparse") and given["weight"].requires_grad and torch.is_grad_enabled():
                raise SparseLookupError("it looks up with sparse=True, and gradients of what is traced are dense")
        return function(*args, **kwargs)

    def _replaced(self, value: Any) -> Any:
        """Arguments with the given tensors in their places.

        Raises:
            RefusedRunError: there is another tensor among them.
        """
        if isinstance(value, torch.Tensor):
            own = self._given.get(id(value))
            if own is None and not self._is_known(value):
                raise RefusedRunError(
                    f"it reads a tensor of shape {list(value.shape)} that model and loss do not hold, or that requires a gradient"
                )
            return value if own is None else own
        kind = type(value)
        if kind is list or kind is tuple:
            return kind(map(self._replaced, value))
        if kind is dict:
            return {key: self._replaced(item) for key, item in value.items()}
        return value

    def _note(self) -> None:
        line, stack = "", []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame is not self._top:
            code = frame.f_code
            if code is _CALL:
                module = frame.f_locals["self"]
                stack.append((self._modules.get(id(module), ""), type(module)))
            elif not line and _is_users(code.co_filename):
                text = linecache.getline(code.co_filename, frame.f_lineno).strip()
                line = f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n    {text}\n'
            frame = frame.f_back
        meta = fx.traceback.current_meta
        meta["stack_trace"] = line
        named = [(f"L['self'].{path}".rstrip("."), kind) for path, kind in reversed(stack)]
        meta["nn_module_stack"] = {path: (path, kind) for path, kind in named}


_is_users = functools.lru_cache(maxsize=4096)(is_users_file)
_OF_DISTRIBUTIONS = f"{torch.__path__[0]}/distributions/"


def _is_of_distributions(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OF_DISTRIBUTIONS)


@contextlib.contextmanager
def recorded_run(
    modules: Mapping[int, str], given: Mapping[int, torch.Tensor], is_known: Callable[[torch.Tensor], bool]
) -> Iterator[None]:
    """A block in which torch's joint export runs forward: operators know where they come from, as `PythonRun` says.

    `torch.utils.checkpoint` marks operators, as Dynamo does, and does not run them again; seeding a generator is refused; and
    models are told that they are compiled.
    """
    with (
        fx.traceback.preserve_node_meta(),
        _compiling(),
        _marked_checkpoints(),
        _refused_seeds(),
        PythonRun(modules, given, is_known),
    ):
        yield


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Checkpoints:
    """What stands in the place of the two ways in which torch runs a function again in backward."""

    def __init__(self) -> None:
        self._thread, self._num = threading.get_ident(), 0
        self._again, self._reentrant = (
            checkpoints._checkpoint_without_reentrant_generator,
            checkpoints.CheckpointFunction,
        )

    def around(self, function: Any, preserve: Any, context: Any = None, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Without reentrant autograd: runs before the function, and after it."""
        if threading.get_ident() != self._thread:
            return (yield from self._again(function, preserve, context, *args, **kwargs))
        if context is not checkpoints.noop_context_fn:
            raise RefusedRunError("it has a checkpoint with a policy (context_fn)")
        with self._marking():
            yield

    def apply(self, function: Callable[..., Any], preserve: Any, *args: Any) -> Any:
        """With reentrant autograd."""
        if threading.get_ident() != self._thread:
            return self._reentrant.apply(function, preserve, *args)
        with self._marking():
            return function(*args)

    @contextlib.contextmanager
    def _marking(self) -> Iterator[None]:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        mode: Any = get_proxy_mode()
        number, self._num = self._num, self._num + 1
        last = next(iter(reversed(mode.tracer.graph.nodes)), None) if mode is not None else None
        yield
        for node in reversed(mode.tracer.graph.nodes) if mode is not None else ():
            if node is last:
                break
            if node.op == "call_function" and "recompute" not in node.meta:  # that of the innermost
                node.meta["recompute"] = checkpoints.CheckpointPolicy.PREFER_RECOMPUTE
                node.meta["ac_graph_id"] = number


@contextlib.contextmanager
def _marked_checkpoints() -> Iterator[None]:
    own = _Checkpoints()
    with (
        _patched(checkpoints, "_checkpoint_without_reentrant_generator", own.around),
        _patched(checkpoints, "CheckpointFunction", own),
    ):
        yield


class _UnseededGenerator:
    """The generator of the process, whose seed forward may neither set nor read: each step has another."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._thread = generator, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if (
            name in ("manual_seed", "seed", "initial_seed", "set_state", "set_offset")
            and threading.get_ident() == self._thread
        ):
            raise RefusedRunError("it seeds torch's generator of random numbers, or reads or sets its state")
        return getattr(self._generator, name)


@contextlib.contextmanager
def _refused_seeds() -> Iterator[None]:
    with _patched(torch.random, "default_generator", _UnseededGenerator(torch.random.default_generator)):
        yield


class KeptCaches:
    """Empties what forward puts into caches of ``functools`` while it is traced: tensors that a trace makes have no values."""

    def __init__(self) -> None:
        found = [one for one in gc.get_objects() if type(one) is functools._lru_cache_wrapper]
        self._caches = [(one, one.cache_info().currsize) for one in found]

    def empty(self) -> None:
        """Empties those that have grown, or may have."""
        for cache, size in self._caches:
            now = cache.cache_info().currsize
            if now > size or (now and now == cache.cache_info().maxsize):
                cache.cache_clear()


class LeftTensors:
    """Tells whether tensors of a trace are held after its end, by what forward has kept."""

    def __init__(self) -> None:
        self._before = {id(tensor): weakref.ref(tensor) for tensor in self._now()}

    @staticmethod
    def _now() -> list[torch.Tensor]:
        from torch._subclasses.functional_tensor import FunctionalTensor

        return [one for one in gc.get_objects() if type(one) is FunctionalTensor]

    def are_there(self) -> bool:
        """Whether there are any that were not there before."""
        if self._are_new():
            gc.collect()
        return self._are_new()

    def _are_new(self) -> bool:
        before = self._before
        return any(id(tensor) not in before or before[id(tensor)]() is not tensor for tensor in self._now())


def is_traced_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of a trace, and has no values."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if isinstance(tensor, FunctionalTensor | FakeTensor) or torch._is_functional_tensor(tensor):
        return True
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def make_what_torch_makes_once() -> None:
    """Has torch make what it makes once in a process, when it first runs a graph, such as a monitor of progress bars.

    The code of a model may reach it; made in a trace, it would be taken for what the model changes.
    """
    graph = fx.Graph()
    graph.output(())
    fx.Interpreter(fx.GraphModule({}, graph)).run()


def is_data_dependent(error: BaseException) -> bool:
    """Whether a run on tensors without values has failed because it asked for values, or for a shape that follows from them."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return True
    return (
        type(error).__name__ in ("GuardOnDataDependentSymNode", "UserError") or "data-dependent" in str(error).lower()
    )
