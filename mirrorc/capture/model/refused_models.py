"""Refuses models that cannot have a step, and modules that a trace cannot follow."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from mirrorc.capture.diagnostics.capture_errors import UnreadableError
from mirrorc.errors import CaptureError
from mirrorc.torch_internals import hook_tables, is_script_module, object_within


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    wrappers = _loaded(
        ("torch.nn.parallel", "DistributedDataParallel"),
        ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    )
    dealt_out = _loaded(("torch.distributed.tensor", "DTensor"))
    for name, module in model.named_modules():
        where, within = (f"{name!r} of the model", f"model.{name}") if name else ("the model", "model")
        if is_script_module(module):
            _check_script(module, where, within)
        if isinstance(module, wrappers):
            raise ValueError(
                f"{where} is a {type(module).__name__}, which reduces gradients by itself, as mirrorc does: give the module "
                f"that it wraps, {within}.module"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, dealt_out):
            raise ValueError(
                f"{name!r} is a {type(tensor).__name__} of torch.distributed, as fully_shard and tensor parallelism make them, "
                "and this process has a part of it: give the model as it was before. mirrorc gives each process all parameters, "
                "and deals out the optimizer's state with shard_optimizer=True"
            )
        if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
            raise ValueError(
                f"{name!r} belongs to a lazy module and has no shape yet: call model(example_input) once before compiling"
            )
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device and has no memory: give the model memory and values first, with "
                "model.to_empty(device='cpu') and an initialization, or load a checkpoint with assign=True"
            )
        if tensor.is_sparse:
            raise ValueError(f"{name!r} is a sparse tensor: mirrored variables are dense; use model.{name}.to_dense()")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter: there is nothing to update; set requires_grad on some"
        )


def _check_script(module: nn.Module, where: str, within: str) -> None:
    if any(not isinstance(parameter, nn.Parameter) for parameter in module.parameters()):
        raise ValueError(
            f"{where} is a ScriptModule whose parameters are plain tensors, as torch.jit.load makes them. Before the optimizer "
            "is made, replace each by setattr(part, name, torch.nn.Parameter(value.detach())), where part is its module, one of "
            f"{within}.modules(); or load {within}.state_dict() into the module that it was made of"
        )
    if name := object_within(module):
        raise ValueError(
            f"{where} is a ScriptModule with an object of a class in its attribute {name!r}, which all replicas would share "
            "while they run: keep numbers, texts, tensors, lists and dicts there, or give the module that it was made of, as it "
            "was before torch.jit"
        )


def _loaded(*names: tuple[str, str]) -> tuple[type, ...]:
    """A class whose module is not imported can have no objects."""
    return tuple(getattr(sys.modules[module], name) for module, name in names if hasattr(sys.modules.get(module), name))


def _refuse_scripts(root: nn.Module, model_name: str) -> None:
    for path, module in root.named_modules():
        if is_script_module(module):
            why = f"{path.removeprefix('model.')!r} of {model_name}" if path != "model" else model_name
            why += " is a ScriptModule, which runs outside of Python"
            raise UnreadableError(
                f"cannot capture {model_name}: {why}. Remedy: give the module that it was made of, as it was before torch.jit.",
                f": {why}",
            )


def refuse_modules(root: nn.Module, model_name: str) -> None:
    _refuse_scripts(root, model_name)
    for path, module in root.named_modules():
        name = path.removeprefix("model.")
        kind = type(module).__name__
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            if module.training and module.track_running_stats and module.momentum is None:
                why = (
                    f"{kind} {name!r} has momentum=None: its average over all steps so far reads the number of steps as a Python "
                    "number, which a captured graph cannot"
                )
                raise UnreadableError(
                    f"cannot capture {model_name}: {why}. Remedy: give it a momentum, such as 0.1.", f": {why}"
                )
        elif isinstance(module, nn.EmbeddingBag) and module.sparse and module.mode == "max":
            raise CaptureError(
                f"{kind} {name!r} of {model_name} has sparse=True and mode='max', which torch does not support together. Remedy: "
                "sparse=False"
            )
        for hook in [hook for table in hook_tables(module) for hook in table.values()]:
            remedy = next((words for kind, words in _HOOKS.items() if isinstance(hook, kind)), "")
            if remedy:
                raise CaptureError(
                    f"{kind} {name!r} of {model_name} has a hook of torch.nn.utils ({type(hook).__name__}), which assigns an "
                    f"attribute in forward, and a captured step does not do that again. Remedy: {remedy}."
                )


_HOOKS: dict[type, str] = {
    WeightNorm: "use torch.nn.utils.parametrizations.weight_norm",
    SpectralNorm: "use torch.nn.utils.parametrizations.spectral_norm",
    prune.BasePruningMethod: "multiply with the mask in a parametrization (torch.nn.utils.parametrize), or make the pruning "
    "permanent with torch.nn.utils.prune.remove",
}
