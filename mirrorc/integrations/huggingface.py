"""A Hugging Face `Trainer` whose model runs on several devices, with the loss of the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import nn

from mirrorc.calls.data_parallel import DataParallel
from mirrorc.capture.call.argument_markers import replicated
from mirrorc.integrations.accelerate import Accelerator
from mirrorc.integrations.loss_weights import LossWeights
from mirrorc.options.communication import Communication
from mirrorc.options.compiler import Compiler
from mirrorc.options.debug import Debug

_Trainer: Any = object  # stands beside the mixin


class DataParallelMixin(_Trainer):
    """A mixin that makes a `transformers.Trainer`, or a subclass, use several devices.

    Args:
        *args, **kwargs: of the trainer.
        devices, communication, compiler, debug: as for `mirrorc.integrations.accelerate.Accelerator`.
    """

    def __init__(
        self,
        *args: Any,
        devices: int | Sequence[str | torch.device] | None = None,
        communication: Communication | None = None,
        compiler: Compiler | None = None,
        debug: Debug | None = None,
        **kwargs: Any,
    ) -> None:
        self._parallel = {"devices": devices, "communication": communication, "compiler": compiler, "debug": debug}
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1  # no torch.nn.DataParallel, and the batch is that of this process

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator  # parts of it are bound already
        self.accelerator.set_devices(**self._parallel)
        self._weights = LossWeights(self.accelerator.gather)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Evaluations use the same `DataParallel` as training if it exists."""
        model = super()._wrap_model(model, training, dataloader)
        is_wrapped = isinstance(self.model_wrapped, DataParallel) and self.model_wrapped.module is model
        return self.model_wrapped if is_wrapped and not training else model

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The trainer's loss of the whole batch, even if the model computes the loss."""
        with contextlib.ExitStack() as stack:
            if isinstance(model, DataParallel):
                stack.enter_context(_replicated_items(model))
                has_items = self.model_accepts_loss_kwargs and num_items_in_batch is not None
                if has_items and self._returns_loss(inputs) and not self._divides(model.module, inputs):
                    # It is a mean, which the trainer must not multiply by the number of processes.
                    has_items, num_items_in_batch = False, None
                if self._returns_loss(inputs) and self.accelerator.most_devices > 1:
                    stack.enter_context(self._weights.applied(model, inputs, has_items))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _divides(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        is_alone = self.accelerator.most_devices * self.accelerator.num_processes == 1
        return is_alone or self._weights.divides(model, inputs)

    def _returns_loss(self, inputs: dict[str, Any]) -> bool:
        if self.label_smoother is not None or self.compute_loss_func is not None:
            return False
        return isinstance(inputs.get("labels"), torch.Tensor)


class DataParallelTrainer(DataParallelMixin, transformers.Trainer):
    """A `transformers.Trainer` on several devices of one process, or one device of each process of torchrun.

    Batch sizes "per device" are per process. Evaluations also run on all devices.
    """


@contextlib.contextmanager
def _replicated_items(model: nn.Module) -> Iterator[None]:
    def mark(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        number = kwargs.get("num_items_in_batch")
        return args, kwargs | ({"num_items_in_batch": replicated(number)} if torch.is_tensor(number) else {})

    with model.register_forward_pre_hook(mark, with_kwargs=True):
        yield
