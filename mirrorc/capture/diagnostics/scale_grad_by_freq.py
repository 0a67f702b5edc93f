"""Warns of embeddings that divide gradients by frequencies of rows, because each replica counts rows of its own shard."""

from __future__ import annotations

import torch
from torch import fx

from mirrorc.capture.diagnostics.python_effects import Note
from mirrorc.messages.source_lines import last_users_frame

_LOOKUPS = (
    torch.ops.aten.embedding.default,
    torch.ops.aten._embedding_bag.default,
    torch.ops.aten._embedding_bag_forward_only.default,
)
_SCALES = 3  # the index of scale_grad_by_freq in the arguments of each lookup


def notes_on_counted_lookups(graph: fx.Graph, model_name: str) -> tuple[Note, ...]:
    notes: dict[Note, None] = {}
    for node in graph.nodes:
        if node.target in _LOOKUPS and len(node.args) > _SCALES and node.args[_SCALES] is True:
            frame = last_users_frame(node.meta.get("stack_trace") or "")
            message = (
                f"an embedding of {model_name} has scale_grad_by_freq=True: each replica divides its gradients by how often a "
                "row occurs in its own shard, one device by how often it occurs in the whole batch. DistributedDataParallel "
                "does the same. To have the update of one device, leave it out"
            )
            notes[Note.at(frame, message)] = None
    return tuple(notes)
