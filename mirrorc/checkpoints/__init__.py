"""Checkpoints of a step on disk."""

from mirrorc.checkpoints.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
