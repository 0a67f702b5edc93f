"""Refuses models without a possible step."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from mirrorc.torch_internals import is_script_module, object_within


def check_model(model: Any) -> None:
    """Refuses a model that cannot be trained, by a TypeError or a ValueError."""
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
    """The imported classes among these; of the others, there are no objects."""
    return tuple(getattr(sys.modules[module], name) for module, name in names if hasattr(sys.modules.get(module), name))
