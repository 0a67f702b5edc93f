"""What a printed program says of the model: tied parameters, buffers of replicas, norms, where random numbers are drawn."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirrorc


class Net(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = norm(6)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("hits", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hits += x.sum()
        return self.head(self.dropout(self.norm(self.embedding(x))))


def text_of(model: nn.Module, num_devices: int = 2, num_examples: int = 8, microbatches: int = 1) -> str:
    x = torch.arange(num_examples) % 11
    program = mirrorc.plan(
        model,
        (x, x),
        num_devices,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        microbatches=microbatches,
        compiler=mirrorc.Compiler(backend="eager"),
    )
    return program.to_text()


def test_the_facts_of_a_model_are_remarks() -> None:
    text = text_of(Net())
    for line in (
        "# remark: embedding.weight (also head.weight) is a tied parameter: the gradients of all uses are added up before the "
        "reduction",
        "# remark: buffers hits, norm.running_mean and norm.running_var: each replica reads and writes its own; after a step "
        "the model shows their mean",
        "# remark: norm normalizes over a replica's examples, as under DDP, and not over the batch as one device does",
    ):
        assert line in text
    assert "each replica draws random numbers of its own, in dropout; the step's seed" in text


@pytest.mark.parametrize(
    "model", [Net().eval(), Net(nn.SyncBatchNorm), Net(nn.LayerNorm)], ids=["eval", "sync", "layer"]
)
def test_norms_that_are_exact_are_not_mentioned(model: nn.Module) -> None:
    assert "normalizes over" not in text_of(model)


def test_norms_of_microbatches_see_a_microbatch_also_on_one_device() -> None:
    for num_devices in (1, 2):
        text = text_of(Net(), num_devices, num_examples=16, microbatches=2)
        assert "norm normalizes over a microbatch's examples, as under DDP" in text


def test_an_evaluation_leaves_no_microbatches_out() -> None:
    model, x = Net(), torch.arange(8) % 11
    optimizer, compiler = torch.optim.SGD(model.parameters(), lr=0.1), mirrorc.Compiler(backend="eager")
    with mirrorc.compile(
        model, 2, optimizer=optimizer, loss_fn=F.cross_entropy, microbatches=2, compiler=compiler
    ) as step:
        step.evaluate(x, x)
        assert all("is left out" not in str(program) for program in step.programs)


def test_one_device_has_no_replicas_to_speak_of() -> None:
    text = text_of(Net(), num_devices=1)
    assert "is a tied parameter" in text and "each replica reads" not in text and "normalizes over" not in text


def test_microbatches_that_are_not_run_are_mentioned() -> None:
    text = text_of(Net(), num_devices=3, num_examples=7, microbatches=2)
    assert "# remark: microbatches=2 is left out: shards have size 3 and 2, and a part has at least one" in text
