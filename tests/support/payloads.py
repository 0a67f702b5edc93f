"""Payloads from outside of the package, for tests; each process may make them fail."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mirrorc.compression import Collectives, Gradients, Payload
from mirrorc.passes import SendPayload

fails = False  # in this process


@dataclass(frozen=True)
class FirstElements(Payload):
    """One element in ten of each gradient, the next ones in each step: gathered, and added up in the order of ranks."""

    part: int = 10

    def num_bytes(self, gradients: Gradients, num_workers: int) -> int:
        return (
            sum(len(self._sent(own.flatten(), 0)) * own.dtype.itemsize for own in gradients.values()) * num_workers // 2
        )

    def exchange(
        self, gradients: Gradients, sums: Gradients, state: Gradients, collectives: Collectives
    ) -> Mapping[str, torch.Tensor]:
        for name, gradient in gradients.items():
            begin = int(state[name]) if name in state else 0
            own, total = gradient.flatten(), sums[name].flatten()
            for sent in collectives.all_gather(self._sent(own, begin).clone()):
                self._sent(total, begin).add_(sent)
            self._sent(own, begin).zero_()
            sums[name].copy_(total.view(gradient.shape))
            gradient.copy_(own.view(gradient.shape))
            if fails:
                raise ValueError("the code book is lost")
        return {name: torch.tensor(int(state.get(name, torch.tensor(0))) + 1) for name in gradients}

    def _sent(self, flat: torch.Tensor, begin: int) -> torch.Tensor:
        return flat[begin % min(self.part, len(flat)) :: self.part]


@dataclass(frozen=True)
class OtherNames(FirstElements):
    """Returns a state for a gradient that it was not given."""

    def exchange(
        self, gradients: Gradients, sums: Gradients, state: Gradients, collectives: Collectives
    ) -> Mapping[str, torch.Tensor]:
        return {"nobody": torch.ones(1)}


def send_first_elements() -> SendPayload:
    """A pass of pipelines as text, in which no payload can be written."""
    return SendPayload(FirstElements())
