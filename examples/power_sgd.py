"""A payload of one's own: workers send two thin factors of each gradient that is a matrix, as PowerSGD does.

    python examples/power_sgd.py

Of a gradient M that is a matrix, workers add up ``P = M Q``, make the columns of P orthonormal, and add up ``Q = M' P``. All take
``P Q'`` for the sum. Each keeps what its own factors leave out, ``M - P Q'``, for its next gradient, and the next step begins
with this Q (Vogels, Karimireddy, Jaggi, 2019). So ``rank * (rows + columns)`` numbers are sent in place of ``rows * columns``.

The script trains a small net on scikit-learn's digits, with two workers in processes of this machine, with and without.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import multiprocessing, nn
from torch.nn import functional as F

import mirrorc
from mirrorc.compression import Collectives, Gradients, Payload

SHORTEST = 1e-13  # what rounding leaves of a unit vector that lies in the span of others


@dataclass(frozen=True)
class PowerSGD(Payload):
    """Two factors of each gradient of two or more dimensions that is long enough; all others whole.

    Attributes:
        rank: how many columns each factor has.
        min_rate: how many times as long as its factors a matrix is at least to be sent so.
        seed: of the random numbers in the first Q.
    """

    rank: int = 2
    min_rate: float = 2.0
    seed: int = 0

    def is_factored(self, gradient: torch.Tensor) -> bool:
        """Whether factors of a gradient are sent."""
        if gradient.dim() < 2 or gradient.dtype not in (torch.float32, torch.float64):
            return False
        return self._num_factors(gradient) * max(self.min_rate, 1) <= gradient.numel()

    def _num_factors(self, gradient: torch.Tensor) -> int:
        rows = gradient.shape[0]
        return self.rank * (rows + gradient.numel() // rows)

    def num_bytes(self, gradients: Gradients, num_workers: int) -> int:
        """The bytes of both rounds; 0 without a matrix, which sends all whole."""
        if not any(map(self.is_factored, gradients.values())):
            return 0
        return sum(
            (self._num_factors(gradient) if self.is_factored(gradient) else gradient.numel()) * gradient.dtype.itemsize
            for gradient in gradients.values()
        )

    def exchange(
        self, gradients: Gradients, sums: Gradients, state: Gradients, collectives: Collectives
    ) -> dict[str, torch.Tensor]:
        """Two rounds: the left factors and all that is sent whole, then the right factors, with which the next step begins."""
        matrices = {name: gradient.flatten(1) for name, gradient in gradients.items() if self.is_factored(gradient)}
        whole = {name: gradient for name, gradient in gradients.items() if name not in matrices}
        begin = {
            name: state[name] if name in state else self.first_factor(name, matrix) for name, matrix in matrices.items()
        }
        lefts = {name: matrix @ begin[name] for name, matrix in matrices.items()}
        message = added_up(lefts | whole, collectives)
        for name, gradient in whole.items():
            sums[name].copy_(message[name])
            gradient.zero_()
        bases = {name: orthonormal(message[name]) for name in matrices}
        rights = {name: matrix.T @ bases[name] for name, matrix in matrices.items()}
        totals = added_up(rights, collectives)
        for name, base in bases.items():
            sums[name].copy_(product(base, totals[name]).view(sums[name].shape))
            gradients[name].sub_(product(base, rights[name]).view(sums[name].shape))
        return {name: orthonormal(total, begin[name]) for name, total in totals.items()}

    def first_factor(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """The first Q [columns, rank], which follows from the seed and the name alone: all workers have the same."""
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest))
        drawn = torch.rand(matrix.shape[1], self.rank, dtype=torch.float64, generator=generator) - 0.5
        return orthonormal(drawn).to(matrix.dtype)


def added_up(tensors: Mapping[str, torch.Tensor], collectives: Collectives) -> dict[str, torch.Tensor]:
    """The sums of tensors over all workers, by one collective."""
    message = torch.cat([tensor.flatten() for tensor in tensors.values()])
    collectives.all_reduce(message)
    pieces = message.split([tensor.numel() for tensor in tensors.values()])
    return {name: piece.view(tensors[name].shape) for name, piece in zip(tensors, pieces, strict=True)}


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right.T``, with the same bits on every processor: a matrix product adds up in an order that depends on it."""
    total = left[:, :1] * right[:, 0]
    for k in range(1, left.shape[1]):
        total += left[:, k : k + 1] * right[:, k]
    return total


def orthonormal(matrix: torch.Tensor, spare: torch.Tensor | None = None) -> torch.Tensor:
    """Orthonormal columns with the span of a matrix [n, rank], with the same bits on every processor: Gram-Schmidt, twice, in 64
    bits, whose sums are the last of cumulative sums.

    A column that lies in the span of those before becomes zero, or that of ``spare``, made orthonormal to the others.
    """
    columns: list[torch.Tensor] = []
    for k, column in enumerate(matrix.double().unbind(1)):
        unit = _unit(column / column.abs().max().clamp_min(torch.finfo(torch.float64).tiny), columns)
        if spare is not None and not unit.any():
            unit = _unit(spare[:, k].double(), columns)
        columns.append(unit)
    return torch.stack(columns, 1).to(matrix.dtype)


def _unit(vector: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    """A vector of length 1 without its parts along orthonormal others; zero if nothing is left of it."""
    length = _sum(vector * vector).sqrt()
    vector = torch.where(length == 0, 0, vector / length)
    for _ in range(2):
        for other in others:
            vector = vector - _sum(vector * other) * other
    length = _sum(vector * vector).sqrt()
    return torch.where(length <= SHORTEST, 0, vector / length)


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.cumsum(0)[-1]


def losses_of(compression: Payload | None, num_steps: int = 60) -> list[float]:
    """Trains as one of the workers, and gives the losses."""
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with mirrorc.compile(
        model,
        1,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        communication=mirrorc.Communication(exchange="dense", compression=compression),
        compiler=mirrorc.Compiler(backend="eager"),
    ) as step:
        losses = []
        for _ in range(num_steps):
            batch = step.shard_batch(torch.randint(len(images), (128,)))
            losses.append(float(step(images[batch], target=labels[batch])))
        if step.is_chief:
            print(*(f"{remark}\n" for remark in step.program.remarks if remark.by == "send-payload"), sep="", end="")
    return losses


def work(rank: int, port: int) -> None:
    """Trains with and without as one of two workers; the first one prints the losses side by side."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    whole, factored = losses_of(None), losses_of(PowerSGD(rank=2))
    if rank == 0:
        print("step   whole gradients   factors of rank 2")
        for number in (*range(0, len(whole), 10), len(whole) - 1):
            print(f"{number:4}   {whole[number]:15.4f}   {factored[number]:17.4f}")


def main() -> None:
    """Starts the workers, and waits for them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    multiprocessing.spawn(work, (port,), nprocs=2)


if __name__ == "__main__":
    main()
