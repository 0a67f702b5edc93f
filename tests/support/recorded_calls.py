"""A stand-in for CUDA graphs on CPUs: a capture changes nothing, a replay runs operators alone, on the same memory."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedCalls(TorchDispatchMode):
    """Operators with the very tensors and numbers that they were called with; numbers stay as they were.

    Operators are run while they are recorded, to have outputs of the right kind; `undone` puts back what they write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.num_replays = 0
        self.is_reset = False
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument in tree_leaves((args, kwargs)):
            if isinstance(argument, torch.Tensor) and func._schema.is_mutable:
                storage = argument.untyped_storage()
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        outputs = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, outputs))
        return outputs

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        assert not self.is_reset, "a graph that was freed is replayed"
        self.num_replays += 1
        for func, args, kwargs, outputs in self.calls:
            for old, new in zip(tree_leaves(outputs), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def reset(self) -> None:
        self.is_reset = True


class CallRecorder:
    """In place of `mirrorc.runtime.execution.cuda_graphs.CudaCapturer`; captures raise ``error`` at their end."""

    def __init__(self) -> None:
        self.graphs: list[RecordedCalls] = []
        self.is_capturing = False
        self.error: Exception | None = None
        self.num_waits = 0
        self.hangs = False

    def capture(self, function: Callable[[], None]) -> RecordedCalls:
        calls = RecordedCalls()
        with self._capturing():
            try:
                with calls:
                    function()
            finally:
                calls.undo()
        if self.error is not None:
            raise self.error
        self.graphs.append(calls)
        return calls

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def wait(self) -> bool:
        self.num_waits += 1
        return not self.hangs

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)
