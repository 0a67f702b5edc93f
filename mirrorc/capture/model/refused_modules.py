"""Refuses modules of torch that a captured step cannot run."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from mirrorc.capture.diagnostics.errors import UnreadableError
from mirrorc.errors import CaptureError
from mirrorc.torch_internals import hook_tables, is_script_module


def _refuse_scripts(root: nn.Module, model_name: str) -> None:
    """Tracers do not follow modules that run outside of Python."""
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
