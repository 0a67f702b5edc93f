"""A warning for workers with equal batches, as without a DistributedSampler."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from mirrorc.capture.call.call_arguments import Call
from mirrorc.messages.source_lines import warn
from mirrorc.messages.wording import listed

_NUM_CALLS = 8  # the first ones are compared; later ones cost nothing
_NUM_EQUAL = 2  # in a row before the warning: single small batches may be equal by chance
_MOST_SAMPLES = 4096  # elements of a tensor


class EqualBatches:
    """Compares the first batches of all workers by digests, and warns once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_calls = self._num_equal = 0

    def digest(self, call: Call) -> int:
        """A digest of the arguments that are split over replicas; 0 without any, or after the last comparison."""
        if self._num_calls >= _NUM_CALLS:
            return 0
        compared = [leaf for leaf in call.leaves if leaf.column or (leaf.split and not leaf.counts_items)]
        tensors = [t for leaf in compared for t in (leaf.tensor, *leaf.per_replica) if t is not None]
        sampled = [tensor for tensor in tensors if tensor.layout is torch.strided and tensor.numel()]
        if not sampled:
            return 0
        hashed = hashlib.blake2b(digest_size=7)
        for tensor in sampled:
            hashed.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            hashed.update(_sample(tensor).numpy().tobytes())
        return int.from_bytes(hashed.digest())

    def note(self, digests: Sequence[int]) -> None:
        if self._num_calls >= _NUM_CALLS:
            return
        self._num_calls += 1
        mine = digests[self._rank]
        others = [rank for rank, other in enumerate(digests) if mine and other == mine and rank != self._rank]
        self._num_equal = self._num_equal + 1 if others else 0
        if self._num_equal < _NUM_EQUAL:
            return
        self._num_calls = _NUM_CALLS
        warn(
            f"MC3501: worker {self._rank} was given the same batches as {listed(f'worker {rank}' for rank in others)}",
            "each example counts twice or more",
            (
                f"torch.utils.data.DistributedSampler(dataset, {len(digests)}, rank), where rank is {self._rank} here",
                "mirrorc.shard_batch(batch), for a batch that every worker has whole",
            ),
        )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of up to `_MOST_SAMPLES` elements, at random, as evenly spaced ones could all be borders of images."""
    chosen = tensor.detach()
    if chosen.numel() > _MOST_SAMPLES:
        places = torch.randint(chosen.numel(), (_MOST_SAMPLES,), generator=torch.Generator().manual_seed(0))
        chosen = chosen.take(places.to(chosen.device))
    return chosen.resolve_conj().resolve_neg().cpu().reshape(-1).contiguous().view(torch.uint8)
