"""Strategies for Lightning's `Trainer` and `Fabric`, registered as "mirrorc"."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.fabric.strategies as fabric
import lightning.pytorch.strategies as pytorch
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _sync_module_states
from torch import nn

from mirrorc.api import data_parallel
from mirrorc.calls.data_parallel import DataParallel
from mirrorc.integrations.parallel_forwards import ParallelForwards, check_parameters
from mirrorc.options.communication import Communication
from mirrorc.options.compiler import Compiler
from mirrorc.options.debug import Debug

_Strategy: Any = object  # stands beside one of Lightning's in both classes below


class _OneProcess(_Strategy):
    """A strategy with all devices in one process; under a launcher, one device in each process."""

    def __init__(
        self,
        devices: int | Sequence[str | torch.device] | None = None,
        *,
        communication: Communication | None = None,
        compiler: Compiler | None = None,
        debug: Debug | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._devices = devices
        self._data_parallel = functools.partial(
            data_parallel, reduction="workers", communication=communication, compiler=compiler, debug=debug
        )

    @property
    def _is_launched(self) -> bool:
        environment = self.cluster_environment
        return environment is not None and environment.creates_processes_externally

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ()) if self._is_launched else 1

    @property
    def _is_alone(self) -> bool:
        return self.num_processes * self.num_nodes == 1

    def _wrap(self, module: nn.Module) -> DataParallel:
        local = [self.root_device] if self._is_launched else self.parallel_devices
        numbered = [torch.device("cpu", i) for i, _ in enumerate(local)] if self.root_device.type == "cpu" else local
        devices = numbered if self._devices is None else self._devices
        return self._data_parallel(module, devices)

    def _configure_launcher(self) -> None:
        if not self._is_alone:
            super()._configure_launcher()

    @property
    def distributed_sampler_kwargs(self) -> Any:
        return None if self._is_alone else super().distributed_sampler_kwargs


class MirrorcStrategy(_OneProcess, pytorch.DDPStrategy):
    """A strategy for ``Trainer(strategy=MirrorcStrategy(), devices=2)``: one process with two devices.

    Hooks such as ``training_step`` run once, on the whole batch. The module's ``forward`` runs on all devices, and so
    do forwards of submodules with parameters that a hook calls. Under torchrun each process has one device, as with
    DDPStrategy.

    Args:
        devices, communication, compiler, debug: as for `mirrorc.data_parallel`; by default the Trainer's devices.
        **kwargs: of Lightning's DDPStrategy.
    """

    strategy_name = "mirrorc"
    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forwards = ParallelForwards([], self._wrap)

    def setup_distributed(self) -> None:
        if self._is_alone:
            self.set_world_ranks()
        else:
            super().setup_distributed()

    def setup(self, trainer: Trainer) -> None:
        if self._is_alone:  # the sampler of one device, which shuffles otherwise
            trainer._accelerator_connector.use_distributed_sampler = False
        if self._layer_sync is not None and trainer.state.fn == "fit":
            self.model = self._layer_sync.apply(self.model)
        super(pytorch.DDPStrategy, self).setup(trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if not self._is_alone:
            _sync_module_states(model)
        self._forwards = ParallelForwards(called_modules(model), self._wrap)
        return model

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._forwards.installed():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._forwards.installed():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._forwards.installed():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._forwards.installed():
            return super().predict_step(*args, **kwargs)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        if not self._is_alone:
            check_parameters(closure_loss, self.lightning_module)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self._forwards.no_sync():
            yield

    def teardown(self) -> None:
        self._forwards.close()
        super().teardown()


class MirrorcFabricStrategy(_OneProcess, fabric.DDPStrategy):
    """The same for ``Fabric(strategy=MirrorcFabricStrategy(), devices=2)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forwards: dict[nn.Module, ParallelForwards] = {}
        self._backward_sync_control = self  # has what Fabric calls

    def _setup_distributed(self) -> None:
        if self._is_alone:
            self._set_world_ranks()
        else:
            super()._setup_distributed()

    def setup_module(self, module: nn.Module) -> nn.Module:
        self._forwards[module] = ParallelForwards(called_modules(module), self._wrap)
        self._forwards[module].install()
        return module

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if not self._is_alone:
            for model in self._forwards:
                check_parameters(tensor, model)
        super().backward(tensor, module, *args, **kwargs)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
        return self._forwards[module].no_sync() if enabled else contextlib.nullcontext()

    def teardown(self) -> None:
        for forwards in self._forwards.values():
            forwards.close()
        super().teardown()


def called_modules(module: nn.Module) -> list[nn.Module]:
    """The module, if it has a forward. For a LightningModule, submodules with parameters that its hooks may call."""
    called = [module] if type(module).forward not in (nn.Module.forward, LightningModule.forward) else []
    return called + (_with_parameters(module) if isinstance(module, LightningModule) else [])


def _with_parameters(module: nn.Module) -> list[nn.Module]:
    called: list[nn.Module] = []
    for child in module.children():
        if next(child.parameters(), None) is not None:
            called += [child] if type(child).forward is not nn.Module.forward else _with_parameters(child)
    return [*dict.fromkeys(called)]


pytorch.StrategyRegistry.register("mirrorc", MirrorcStrategy, "One process, several devices", override=True)
fabric.STRATEGY_REGISTRY.register("mirrorc", MirrorcFabricStrategy, "One process, several devices", override=True)
