"""What models ask of all replicas: in plain PyTorch, in a captured program, and where it is refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from broken_meetings import Meeting
from planned_steps import step_of_world
from tiny_programs import captured_model
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.analysis.communication.worker_meetings import worker_meetings, worker_schedule
from mirrorc.capture.rewrites.replica_exchanges import refuse_over_workers
from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program


def test_one_replica_has_copies() -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    for ask in (mirrorc.all_reduce, mirrorc.all_gather, lambda x: mirrorc.all_reduce(x, op="mean")):
        found = ask(x)
        assert torch.equal(found, x)
        assert found.data_ptr() != x.data_ptr()
        assert torch.autograd.gradcheck(ask, x)
        assert torch.autograd.gradgradcheck(ask, x)
    assert (mirrorc.replica_id(), mirrorc.num_replicas()) == (0, 1)
    assert torch.compile(lambda x: mirrorc.all_gather(x) * mirrorc.num_replicas(), backend="eager")(x).equal(x)


WRONG: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "op is 'max': all_reduce gives a sum or a mean": (ValueError, lambda: mirrorc.all_reduce(torch.ones(2), "max")),
    "all_reduce takes a tensor, not float": (TypeError, lambda: mirrorc.all_reduce(1.0)),  # type: ignore[arg-type]
    "all_gather takes a tensor, not list": (TypeError, lambda: mirrorc.all_gather([1.0])),  # type: ignore[arg-type]
    "a scalar has none\n  fix:  gather value[None]": (ValueError, lambda: mirrorc.all_gather(torch.ones(()))),
    "was given truth values": (TypeError, lambda: mirrorc.all_reduce(torch.tensor([True]))),
    "a mean of torch.int64": (TypeError, lambda: mirrorc.all_reduce(torch.ones(2, dtype=torch.int64), "mean")),
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments(text: str) -> None:
    kind, ask = WRONG[text]
    with pytest.raises(kind, match=re.escape(text)):
        ask()


@pytest.mark.slow
def test_graphs_say_how_many_rows_all_replicas_have() -> None:
    program = captured_model(Meeting(), 3, 7)
    for graph, size in zip(program.shard_graphs, (3, 2), strict=True):
        (gathered,) = calls_to(graph, ops.rows_of_replicas)
        (own,) = calls_to(graph, ops.own_rows_of_sum)
        assert (gathered.kwargs["rows"], own.kwargs["rows"]) == (7, size)


class Asking(nn.Linear):
    def __init__(self, ask: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(4, 3)
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + self.ask(y)


def by_size(y: torch.Tensor) -> torch.Tensor:
    return mirrorc.all_reduce(y.sum()) if len(y) > 2 else mirrorc.all_gather(y).sum()


def for_large_ones(y: torch.Tensor) -> torch.Tensor:
    return mirrorc.all_reduce(y.sum()) if len(y) > 2 else y.sum()


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    r"at test_replica_exchanges.py:\d+ .* Asking is given .*\n  why:  .*\[3, 3\].* and .*\[2, 3\].*\n  fix:  reduce it "
    "over the examples": mirrorc.all_reduce,
    r"all_gather at .* is given .* must be alike in all else": lambda y: mirrorc.all_gather(y.T).sum(),
    "calls mirrorc.all_reduce at .* for one shard size, and mirrorc.all_gather at .* for another": by_size,
    "calls mirrorc.all_reduce at .* for a shard of one size, and not for another": for_large_ones,
    r"gathers f32\[2, 3\] twice on one replica.*\n  why:  it is 5 rows in one place and 4 in another": (
        lambda y: mirrorc.all_gather(y).sum() + mirrorc.all_gather(y[:2]).sum()
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("text", REFUSED)
def test_values_that_do_not_go_together(text: str) -> None:
    with pytest.raises(mirrorc.CaptureError, match=text):
        captured_model(Asking(REFUSED[text]), 2, 5)


@pytest.mark.slow
def test_microbatches_are_refused() -> None:
    with pytest.raises(
        mirrorc.CaptureError,
        match=r"Meeting calls mirrorc.all_reduce at .*microbatches\n  why:  .*\n  fix:  leave microbatches= out",
    ):
        captured_model(Meeting(), 2, 8, microbatches=2)


def of_worker(rank: int, rows: int) -> tuple[Program, str]:
    model = Meeting()
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "backend": "eager", "progress": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with step_of_world(model, world=mirrorc.World(2, 2), rank=rank, optimizer=optimizer, **options) as step:
        program = step.prepare(torch.randn(rows, 4), target=torch.randn(rows, 3))
        return program, step.schedule_hash


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 3, 1])
def test_meetings_of_workers_are_in_their_schedule(rows: int) -> None:
    """Rows are taken to be as many on the other worker, and behind those of the workers before."""
    for rank in (0, 1):
        program, own = of_worker(rank, rows)
        assert own == of_worker(0, 4)[1]
        found = {one.name: one for one in worker_meetings(program)}
        gathered = found["rows_of_replicas"]
        assert (gathered.rows, gathered.before) == (rows, rank * rows) and gathered.shape[0] == 2 * rows
        assert [line.split()[:2] for line in worker_schedule(program)[1:5]] == [
            ["sum_over_replicas", "0"],
            ["rows_of_replicas", "1"],
            ["own_rows_of_sum", "2"],
            ["sum_over_replicas", "3"],
        ]


@pytest.mark.slow
def test_a_worker_without_examples_attends_the_meetings_of_the_others() -> None:
    program, own = of_worker(1, 0)
    assert own == of_worker(0, 4)[1]
    assert [one.first.target for one in worker_meetings(program)] == [ops.attend] * 4
    assert "attend(number=1, meeting=rows_of_replicas" in program.to_text()
    assert not any(next(calls_to(graph, *ops.MEETINGS), None) for graph in program.graphs())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Meeting(), r"calls mirrorc.all_reduce at .*, which several workers with GPUs cannot do yet"),
        (nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3)), r"calls the SyncBatchNorm '1', which several workers"),
    ],
)
def test_workers_with_gpus_are_refused(model: nn.Module, text: str) -> None:
    program = captured_model(model, 1, 4).evolve(
        devices=(Device("cuda:0", torch.device("cuda:0")),), workers=mirrorc.World(2).worker(0)
    )
    with pytest.raises(mirrorc.CaptureError, match=text):
        refuse_over_workers(program)


@pytest.mark.parametrize("model", [Meeting(), nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))])
def test_check_loss_says_that_it_cannot_tell(model: nn.Module) -> None:
    with pytest.raises(
        mirrorc.MirrorcError,
        match=r"(?s)MC3103: check_loss cannot compare.*it computes one shard after the other.*fix:  compare",
    ):
        mirrorc.check_loss(model, torch.randn(4, 4), target=torch.randn(4, 3), loss_fn=F.mse_loss)
