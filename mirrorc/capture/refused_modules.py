"""Refuses modules of torch that a captured step cannot run as they are."""

from __future__ import annotations

from torch import nn

from mirrorc.errors import CaptureError


def refuse_modules(root: nn.Module, what: str) -> None:
    """Refuses modules that cannot be captured in the mode that they are in.

    Args:
        root: the call's module.
        what: the name of the model.

    Raises:
        CaptureError: names the module and the remedy.
    """
    for path, module in root.named_modules():
        name = path.removeprefix("model.")
        kind = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.training and module.track_running_stats and module.momentum is None:
                raise CaptureError(
                    f"{kind} {name!r} of {what} has momentum=None: its average over all steps so far reads the number of steps "
                    "as a Python number, which a captured graph cannot. Remedy: give it a momentum, such as 0.1."
                )
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise CaptureError(
                f"{kind} {name!r} of {what} has sparse=True: gradients of mirrored variables are dense. Remedy: set its "
                "attribute sparse to False, and use an optimizer for dense gradients; on CPUs only rows that were looked up "
                "are added all the same."
            )
