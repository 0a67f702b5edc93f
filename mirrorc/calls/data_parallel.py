"""The module that `mirrorc.data_parallel` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from mirrorc.calls.module_calls import ModuleCalls
from mirrorc.calls.reports import StepReports
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.options.step_options import StepOptions
from mirrorc.passes import WorkerCompression
from mirrorc.runtime.memory.report import MemoryReport
from mirrorc.runtime.profiling.explanation import Explanation

_PREFIX = "module."


def refuse_options_of_steps(options: StepOptions) -> None:
    """Raises `ValueError` for an option that a module cannot implement."""
    refused = {
        "compression=": any(isinstance(entry, WorkerCompression) for entry in options.pipeline),
        "cuda_graphs=True": options.cuda_graphs,
        "check_replicas_every=": bool(options.check_replicas_every),
    }
    for option, is_given in refused.items():
        if is_given:
            why = "it concerns the update, which your own optimizer makes here"
            fix = (f"leave {option} out", f"mirrorc.compile(...), which takes {option}")
            raise problem(ValueError, f"MC1003: {option} cannot be used by data_parallel", why, fix)


class DataParallel(nn.Module):
    """A model that runs on several devices. The outputs of the whole batch are results of one autograd node.

    Its parameters are those of ``module``, the user's model, which stays usable. ``state_dict`` has the names of the
    plain model.

    Attributes:
        module: the model.
    """

    def __init__(
        self,
        module: nn.Module,
        step: StepReports,
        calls: ModuleCalls,
        close: Callable[[], None],
        again: Callable[[nn.Module], DataParallel],
    ) -> None:
        super().__init__()
        self.training = module.training
        self.module = module
        self.__dict__["_captured"] = module  # no second child of this name
        self._step, self._calls, self._close, self._again = step, calls, close, again
        self._forward = torch.compiler.disable(calls.forward)  # an enclosing torch.compile does not trace it
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward on all devices.

        Args:
            *args, **kwargs: of the model; tensors are split along dim 0, see `mirrorc.replicated`, `mirrorc.examples`,
                `mirrorc.batch_dim` and `mirrorc.PerReplica`.

        Returns:
            The model's outputs for the whole batch. Tensors with a row for each example are concatenated.
                Floating-point scalars are means over examples. Tensors marked by `mirrorc.summed` are summed. Anything
                else is a `PerReplica`.
        """
        if self.module is not self._captured:
            why = "the module runs what was there before"
            fix = "model = mirrorc.data_parallel(model.module, ...), for the new one"
            raise problem(ValueError, "MC1206: model.module was replaced since mirrorc.data_parallel()", why, fix)
        return self._forward(args, kwargs)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The program of the last forward with gradients, and that of its backward; empty before."""
        return self._calls.programs

    def explain(self, program: Program | None = None) -> Explanation:
        """See `Step.explain`.

        Args:
            program: a backward from `programs`; None for the last.
        """
        return self._step.explain(self._or_last(program))

    def memory(self, program: Program | None = None) -> MemoryReport:
        """See `Step.memory`.

        Args:
            program: one of `programs`; None for the last backward.
        """
        return self._step.memory(self._or_last(program))

    def _or_last(self, program: Program | None) -> Program | None:
        return program if program is not None or not self._calls.programs else self._calls.programs[-1]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """For loops written for DDP; it has no effect. Each backward sums the gradients of all devices and workers."""
        yield

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads. The model keeps its values. Calls of this module and pending backwards fail from now on."""
        self._close()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the state of the plain model. ``assign=True`` is refused, as the parameters must stay the same tensors."""
        if assign:
            _refuse_assigned()
        return self.module.load_state_dict(state_dict, strict)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DataParallel:
        if any(fn(tensor) is not tensor for tensor in (*self.parameters(), *self.buffers())):
            raise problem(
                RuntimeError,
                "MC1604: to(), cuda(), half() and the like would move the parameters of a compiled module",
                "its devices are fixed by mirrorc.data_parallel()",
                "mirrorc.data_parallel(model.to(...), devices=...)",
            )
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copy compiles again."""
        return self._again, (self.module,)


def _without_prefix(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    for names in (state, getattr(state, "_metadata", {})):
        _rename(names, prefix + _PREFIX, prefix)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
    if metadata.get("assign_to_params_buffers"):
        _refuse_assigned()
    _rename(state, prefix, prefix + _PREFIX)


def _refuse_assigned() -> NoReturn:
    why = "the programs read what was there before"
    fix = ("model.load_state_dict(state)", "load the plain model, before mirrorc.data_parallel()")
    raise problem(ValueError, "MC1206: load_state_dict(assign=True) would replace the parameters", why, fix)


def _rename(state: dict[str, Any], before: str, after: str) -> None:
    for key in [key for key in state if key.startswith(before)]:
        state[after + key.removeprefix(before)] = state.pop(key)
