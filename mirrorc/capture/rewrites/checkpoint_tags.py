"""Copies the recomputation tags of `torch.utils.checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from mirrorc.errors import CaptureError
from mirrorc.ir.checkpoints import CHECKPOINT, Checkpoint
from mirrorc.messages.source_lines import source_line
from mirrorc.torch_internals import checkpoint_tag


def note_checkpoints(values: Mapping[fx.Node, fx.Node], model_name: str) -> None:
    """Copies the checkpoint of each operator of the joint graph to its counterpart in ``values``."""
    numbers: dict[int, int] = {}
    for joint_node, node in values.items():
        if node.op != "call_function":
            continue
        try:
            tag = checkpoint_tag(joint_node)
        except ValueError as error:
            raise CaptureError(
                f"the policy of a checkpoint in {model_name} asks for {error} at {source_line(node) or node.name}, and a step "
                "keeps a result where it is or computes it again. Remedy: let the policy return MUST_SAVE or PREFER_RECOMPUTE "
                "there"
            ) from None
        if tag is not None:
            number, keeps = tag
            node.meta[CHECKPOINT] = Checkpoint(numbers.setdefault(number, len(numbers)), keeps)
