"""Installs Hugging Face's hooks that collect hidden states and attentions."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

HOOKS_ARE_INSTALLED = "_output_capturing_hooks_installed"
"""The attribute that marks a model with installed hooks."""


def install_capturing_hooks(model: nn.Module) -> bool:
    """Returns True if new hooks were installed.

    Models install hooks at the first call that needs them. They take a lock, which cannot be traced.
    """
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(capturing, "maybe_install_capturing_hooks", None)
    if install is None:
        return False
    before = _num_hooks(model)
    for module in model.modules():  # outer models first, as in a call: they install the hooks of inner ones
        if _captures(module, capturing.__file__):
            install(module)
    return _num_hooks(model) > before


def _captures(module: nn.Module, filename: str) -> bool:
    forward: Any = type(module).forward
    while forward is not None:
        if getattr(getattr(forward, "__code__", None), "co_filename", None) == filename:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _num_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())
