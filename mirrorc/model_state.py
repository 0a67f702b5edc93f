"""What a step knows of the user's model: its variables by name, and what its captured graph depends on besides inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

_SCALARS = (bool, int, float, str, type(None))


class ModelState:
    """The variables of a model and its loss, and a fingerprint of the plain Python state that shapes their graph.

    Attributes:
        tensors: parameters and buffers, by name of their variable: the first name of each in the model, with the prefix
            ``loss_fn.`` for those of a loss module.
        names: from the names under `mirrorc.capture.TrainingCall`, all those of tied weights too, to variables.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: dict[str, str] = {}
        roots = {"model": model} | ({"loss_fn": loss_fn} if isinstance(loss_fn, nn.Module) else {})
        first: dict[int, str] = {}
        for prefix, root in roots.items():
            for tensors in (root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False)):
                for name, tensor in tensors:
                    if id(tensor) not in first:
                        variable = name if prefix == "model" else f"{prefix}.{name}"
                        while variable in self.tensors:
                            variable += "_"
                        first[id(tensor)] = variable
                        self.tensors[variable] = tensor
                    self.names[f"{prefix}.{name}"] = first[id(tensor)]
        self._modules = [module for root in roots.values() for module in root.modules()]
        self._watched = [
            (module.__dict__, key)
            for module in self._modules
            for key, value in module.__dict__.items()
            if isinstance(value, _SCALARS) and not key.startswith("_")
        ]
        self._members = [
            (module._parameters, key, parameter)
            for module in self._modules
            for key, parameter in module._parameters.items()
        ]

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters among the variables."""
        return {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)}

    def fingerprint(self) -> tuple[Any, ...]:
        """Equal as long as the captured graph stays true: training modes, plain attributes, and what is trainable.

        Raises:
            ValueError: a parameter was replaced by another object.
        """
        for parameters, key, parameter in self._members:
            if parameters.get(key) is not parameter:
                raise ValueError(
                    f"the model's parameter {key!r} was replaced since mirrorc.compile(): make a new optimizer over "
                    "model.parameters() and compile the model anew, or write into the parameter instead"
                )
        plain = tuple(attributes.get(key) for attributes, key in self._watched)
        return plain, tuple(p is not None and p.requires_grad for _, _, p in self._members)


def check_model(model: Any) -> None:
    """Refuses models that cannot be captured.

    Raises:
        TypeError: not a module.
        ValueError: parameters that have no memory or no shape yet, or none to train.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
            raise ValueError(
                f"{name!r} belongs to a lazy module and has no shape yet: call model(example_input) once before compiling"
            )
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device and has no memory: give the model memory and values first, with "
                "model.to_empty(device='cpu') and an initialisation, or load a checkpoint with assign=True"
            )
        if tensor.is_sparse:
            raise ValueError(f"{name!r} is a sparse tensor: mirrored variables are dense; use model.{name}.to_dense()")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter: there is nothing to update; set requires_grad on some"
        )
