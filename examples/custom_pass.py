"""A user-defined compiler pass: gradients are sent as bfloat16, which halves the bytes, and are applied in float32.

    python examples/custom_pass.py

The pass is shown in the dumps and checked by the verifier like mirrorc's own. The script trains a small net on scikit-learn's
digits with and without it, and prints the schedule that it makes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.type_inference import set_type

cast = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class Bfloat16OnTheWire:
    """Casts float32 buckets to bfloat16 for their reduction, and casts the result back::

        ar = all_reduce(pack, pack_1, bucket=0)        half   = aten._to_copy(pack, dtype=bf16)     (and half_1)
        w  = wait(ar, bucket=0, replica=0)       ->    ar     = all_reduce(half, half_1, bucket=0)
        update(w, bucket=0, replica=0)                 w      = wait(ar, bucket=0, replica=0)
                                                       whole  = aten._to_copy(w, dtype=f32)
                                                       update(whole, bucket=0, replica=0)

    Needs: the final reductions: place it after "share-parameters".
    """

    name: str = field(default="bfloat16-on-the-wire", init=False)
    input_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    changes_dataflow: bool = field(default=True, init=False)  # what is updated from is rounded on the way

    def run(self, program: Program) -> Program:
        program = program.evolve(graph=copied(program.mirrored_graph))
        for launch in list(calls_to(program.mirrored_graph, *ops.REDUCTIONS)):
            if program.buckets[bucket_of(launch)].dtype == torch.float32:
                packed = launch.all_input_nodes
                launch.args = tuple(insert(program, launch, cast, (p,), {"dtype": torch.bfloat16}) for p in packed)
                set_type(program, launch)
                for wait in launch.users:
                    self._widen(program, wait)
        return program

    def _widen(self, program: Program, wait: torch.fx.Node) -> None:
        set_type(program, wait)
        users = list(wait.users)  # none, where a small bucket has no share for this device
        if users:
            whole = insert(program, wait.next, cast, (wait,), {"dtype": torch.float32})
            for user in users:
                user.replace_input_with(wait, whole)


def train(passes: list[mirrorc.Placed], steps: int = 150) -> tuple[float, mirrorc.Program]:
    """Trains on two logical CPUs; gives the last loss and the program."""
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with mirrorc.compile(
        model, 2, optimizer=optimizer, loss_fn=F.cross_entropy, compiler=mirrorc.Compiler(add=passes)
    ) as step:
        for _ in range(steps):
            batch = torch.randint(len(images), (128,))
            loss = step(images[batch], target=labels[batch])
        return float(loss), step.program


def main() -> None:
    """Trains twice and compares."""
    loss, _ = train([])
    loss_16, program = train([mirrorc.after("share-parameters", Bfloat16OnTheWire())])
    print(program)
    print(f"loss after 150 steps: {loss:.4f} with float32 on the wire, {loss_16:.4f} with bfloat16")


if __name__ == "__main__":
    main()
