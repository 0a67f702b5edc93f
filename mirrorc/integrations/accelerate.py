"""An `Accelerator` whose `prepare` returns modules of `mirrorc.data_parallel`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import accelerate
import torch
from torch import nn

from mirrorc.api import data_parallel
from mirrorc.calls.data_parallel import DataParallel
from mirrorc.ir.devices import parse_devices
from mirrorc.options.communication import Communication
from mirrorc.options.compiler import Compiler
from mirrorc.options.debug import Debug


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` that prepares a model for several devices of one process.

    Under ``accelerate launch`` or torchrun each process has one device, as with DDP, and gradients are averaged over
    processes.

    Args:
        *args, **kwargs: of `accelerate.Accelerator`.
        devices, communication, compiler, debug: as for `mirrorc.data_parallel`. With several processes, the default is
            the device chosen by Accelerate.
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
        super().__init__(*args, **kwargs)
        self.set_devices(devices, communication=communication, compiler=compiler, debug=debug)

    def set_devices(self, devices: int | Sequence[str | torch.device] | None, **options: Any) -> None:
        """Sets devices and options for models prepared from now on."""
        if devices is None and (self.num_processes > 1 or self.device.type == "cpu"):
            devices = 1 if self.device.type == "cpu" else [self.device]
        numbers = self.gather(torch.tensor([len(parse_devices(devices))], device=self.device))
        self.most_devices = int(numbers.max())  # of one process
        # Trainers scale losses for an average over processes.
        wrap = functools.partial(data_parallel, devices=devices, reduction="workers", **options)
        self.wrap: Callable[[nn.Module], DataParallel] = wrap

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """See `accelerate.Accelerator.prepare_model`. A model without trainable parameters stays as it is."""
        trains = not evaluation_mode and any(parameter.requires_grad for parameter in model.parameters())
        if trains and not isinstance(model, DataParallel):
            if self.device_placement if device_placement is None else device_placement:
                model = model.to(self.device)
            model, device_placement = self.wrap(model), False
        # What is left for Accelerate is mixed precision, around the module.
        return super().prepare_model(model, device_placement, evaluation_mode=evaluation_mode or trains)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The plain model, with the same parameters."""
        if isinstance(model, DataParallel):
            model = model.module
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def end_training(self) -> None:
        """Ends trackers and process group, as `accelerate.Accelerator.end_training` does, and the models' threads."""
        for model in self._models:
            if isinstance(model, DataParallel):
                model.close()
        super().end_training()
