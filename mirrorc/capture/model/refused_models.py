"""Refuses models that have no step, and modules that cannot be traced."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from mirrorc.capture.diagnostics.capture_errors import cannot_trace
from mirrorc.errors import CaptureError
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import hook_tables, is_script_module, object_within

_BEFORE_SCRIPT = "give the module that it was made of, as it was before torch.jit"


def check_model(model: Any, *, is_trained: bool = True) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"MC1201: model is a {type(model).__name__}: give a torch.nn.Module")
    wrappers = _loaded(
        ("torch.nn.parallel", "DistributedDataParallel"), ("torch.distributed.fsdp", "FullyShardedDataParallel")
    )
    dealt_out = _loaded(("torch.distributed.tensor", "DTensor"))
    for name, module in model.named_modules():
        where, within = (f"{name!r} of the model", f"model.{name}") if name else ("the model", "model")
        if is_script_module(module):
            _check_script(module, where, within)
        if isinstance(module, wrappers):
            raise problem(
                ValueError,
                f"MC1202: {where} is a {type(module).__name__}, which reduces gradients by itself, as mirrorc does",
                fix=f"give the module that it wraps, {within}.module",
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, dealt_out):
            raise problem(
                ValueError,
                f"MC1202: {name!r} is a {type(tensor).__name__} of torch.distributed, of which this process has a part",
                "mirrorc gives each process all parameters; fully_shard and tensor parallelism deal them out",
                "leave fully_shard(model) out; memory=mirrorc.Memory(shard_optimizer=True) saves memory, too",
            )
        if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
            raise problem(
                ValueError,
                f"MC1203: {name!r} belongs to a lazy module and has no shape yet",
                fix="model(example_input), once, before it is compiled",
            )
        if tensor.is_meta:
            raise problem(
                ValueError,
                f"MC1203: {name!r} is on the meta device and has no memory",
                fix=("model.to_empty(device='cpu'), and initialize it", "model.load_state_dict(state, assign=True)"),
            )
        if tensor.layout is not torch.strided:
            raise problem(
                ValueError,
                f"MC1203: {name!r} is a sparse tensor, and parameters and buffers must be dense",
                fix=f"model.{name} = nn.Parameter(model.{name}.to_dense()), or the same of a buffer",
            )
        if tensor.is_inference():
            raise problem(
                ValueError,
                f"MC1203: {name!r} was made in inference mode, and takes no part in backward",
                fix=("make the model outside of torch.inference_mode()", "copy.deepcopy(model), outside of it"),
            )
    if is_trained and not any(parameter.requires_grad for parameter in model.parameters()):
        raise problem(
            ValueError,
            f"MC1204: {type(model).__name__} has no trainable parameter: there is nothing to update",
            fix="model.requires_grad_(True)",
        )


def _check_script(module: nn.Module, where: str, within: str) -> None:
    if any(not isinstance(parameter, nn.Parameter) for parameter in module.parameters()):
        raise problem(
            ValueError,
            f"MC1205: {where} is a ScriptModule whose parameters are plain tensors, as torch.jit.load makes them",
            fix=(
                f"before the optimizer is made, setattr(part, name, nn.Parameter(value.detach())) for each part "
                f"of {within}.modules()",
                f"load {within}.state_dict() into the module that it was made of",
            ),
        )
    if name := object_within(module):
        raise problem(
            ValueError,
            f"MC1205: {where} is a ScriptModule with an object of a class in its attribute {name!r}",
            "all replicas would share the object while they run",
            ("keep numbers, texts, tensors, lists and dicts there", _BEFORE_SCRIPT),
        )


def _loaded(*names: tuple[str, str]) -> tuple[type, ...]:
    """Only classes of imported modules; other classes have no instances."""
    return tuple(getattr(sys.modules[module], name) for module, name in names if hasattr(sys.modules.get(module), name))


def _refuse_scripts(root: nn.Module, model_name: str) -> None:
    for path, module in root.named_modules():
        if is_script_module(module):
            why = f"{path.removeprefix('model.')!r} of {model_name}" if path != "model" else model_name
            why += " is a ScriptModule, which runs outside of Python"
            raise cannot_trace(model_name, why, _BEFORE_SCRIPT, runs_as_pytorch=True)


def refuse_modules(root: nn.Module, model_name: str) -> None:
    _refuse_scripts(root, model_name)
    for path, module in root.named_modules():
        name = path.removeprefix("model.")
        kind = type(module).__name__
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            if module.training and module.track_running_stats and module.momentum is None:
                why = f"{kind} {name!r} has momentum=None, an average that reads the number of steps as a Python number"
                raise cannot_trace(model_name, why, f"{kind}(..., momentum=0.1)", runs_as_pytorch=True)
        elif isinstance(module, nn.EmbeddingBag) and module.sparse and module.mode == "max":
            raise problem(
                CaptureError,
                f"MC2501: {kind} {name!r} of {model_name} has sparse=True and mode='max'",
                "torch does not support them together",
                "sparse=False",
            )
        for hook in [hook for table in hook_tables(module) for hook in table.values()]:
            remedy = next((words for kind, words in _HOOKS.items() if isinstance(hook, kind)), "")
            if remedy:
                hooks = f"a hook of torch.nn.utils ({type(hook).__name__})"
                why = f"{kind} {name!r} has {hooks}, which assigns an attribute in forward"
                raise cannot_trace(model_name, why, remedy, runs_as_pytorch=True)


_HOOKS: dict[type, str] = {
    WeightNorm: "use torch.nn.utils.parametrizations.weight_norm",
    SpectralNorm: "use torch.nn.utils.parametrizations.spectral_norm",
    prune.BasePruningMethod: "multiply with the mask in a parametrization (torch.nn.utils.parametrize), or make the pruning "
    "permanent with torch.nn.utils.prune.remove",
}
