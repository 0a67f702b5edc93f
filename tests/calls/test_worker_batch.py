"""The parts of workers of a batch that all have whole."""

import dataclasses
import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from planned_steps import step_of_world
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import mirrorc
from mirrorc.calls.worker_batch import part_of_worker
from mirrorc.capture.call.call_arguments import flatten_call
from mirrorc.capture.call.shards import split_call
from mirrorc.ir.workers import ALONE, World

DEVICES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 2, 1), (3, 1, 2), (1,) * 5]


@dataclasses.dataclass
class Sample:
    images: torch.Tensor
    names: list[str]


def shards_of(batch: torch.Tensor, num_replicas: int, fewest: int) -> list[list[float]]:
    split = split_call(flatten_call(["x"], (batch,), {}), num_replicas, fewest=fewest, may_be_empty=True)
    return [shard.tolist() for (shard,) in split.tensors]


@pytest.mark.parametrize("fewest", [1, 2])
@pytest.mark.parametrize("devices", DEVICES)
def test_parts_are_cut_into_the_shards_of_one_process(devices: tuple[int, ...], fewest: int) -> None:
    world, num_replicas = World(len(devices), devices), sum(devices)
    for size in range(1, 4 * num_replicas + 2):
        batch = torch.arange(float(size))
        expected = shards_of(batch, num_replicas, fewest)
        parts = [part_of_worker(batch, world.worker(rank), fewest) for rank in range(len(devices))]
        assert torch.cat(parts).equal(batch)
        assert [shard for own, n in zip(parts, devices, strict=True) for shard in shards_of(own, n, fewest)] == expected


def test_containers_are_those_of_the_batch() -> None:
    x, scale, weight = torch.arange(10).view(5, 2), torch.tensor(2.0), torch.ones(3)
    sequences = [torch.ones(length, 2) * length for length in (2, 4, 1, 3, 5)]
    batch: dict[str, Any] = {
        "pair": (x, [x.float(), None]),
        "ordered": OrderedDict(images=x),
        "sample": Sample(x, ["a", "b"]),
        "scale": scale,
        "weight": mirrorc.replicated({"w": weight}),
        "own": mirrorc.PerReplica([torch.ones(n) * n for n in (2, 1, 1, 1)]),
        "packed": pack_sequence(sequences, enforce_sorted=False),
    }
    part = part_of_worker(batch, World(3, (1, 2, 1)).worker(1))
    assert list(part) == list(batch) and part["pair"][0].equal(x[2:4]) and part["pair"][1][1] is None
    assert part["pair"][0].data_ptr() == x[2:].data_ptr(), "a view"
    assert (
        type(part["pair"]) is tuple and type(part["ordered"]) is OrderedDict and part["ordered"]["images"].equal(x[2:4])
    )
    assert part["sample"].images.equal(x[2:4]) and part["sample"].names == ["a", "b"]
    assert part["scale"] is scale and [value.tolist() for value in part["own"].values] == [[1.0], [1.0]]
    (leaf,) = flatten_call(["w"], (part["weight"],), {}).leaves
    assert leaf.tensor is weight and not leaf.split
    expected = pack_sequence(sequences[2:4], enforce_sorted=False)
    assert part["packed"].data.equal(expected.data) and part["packed"].batch_sizes.equal(expected.batch_sizes)
    assert part_of_worker(batch, ALONE) is batch


def test_lists_of_examples_and_other_dims_keep_their_marks() -> None:
    x, items = torch.arange(5), [{"boxes": torch.ones(n, 4) * n} for n in (1, 2, 3, 4, 6)]
    cut = [
        mirrorc.examples(items[:2]),
        mirrorc.examples(items[2:3]),
        mirrorc.examples(items[3:4]),
        mirrorc.examples(items[4:]),
    ]
    bags = mirrorc.PerReplica([mirrorc.replicated(torch.arange(n)) for n in range(4)])
    states = torch.arange(10).view(2, 5)
    batch = (x, items, mirrorc.examples(items), mirrorc.PerReplica(cut), bags, mirrorc.batch_dim(states, 1))
    part = part_of_worker(batch, World(3, (1, 2, 1)).worker(1))
    assert part[0].tolist() == [2, 3] and isinstance(part[1], list)
    for listed in (part[1], part[2].items, [item for each in part[3].values for item in each.items]):
        assert [len(item["boxes"]) for item in listed] == [3, 4]
    assert [value.value.tolist() for value in part[4].values] == [[0], [0, 1]]
    assert part[5].dim == 1 and part[5].value.equal(states[:, 2:4])


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ((torch.zeros(4), torch.zeros(3)), "arguments disagree on dim 0: 'batch[0]' has 4 examples, 'batch[1]' has 3"),
        ({"scale": torch.tensor(1.0)}, "no tensor to split"),
        ({"x": torch.zeros(0, 2)}, "argument 'batch.x' has no examples"),
        (torch.zeros(4, requires_grad=True), "argument 'batch' requires a gradient"),
        (torch.zeros(4).numpy(), "argument 'batch' is a numpy array"),
    ],
)
def test_what_cannot_be_split_is_named(batch: Any, error: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        part_of_worker(batch, World(2).worker(0))
    assert error in str(raised.value)


def test_packed_sequences_of_which_a_worker_gets_none_are_refused_by_all() -> None:
    batch = {"sequences": pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])}
    for rank in range(3):
        with pytest.raises(ValueError, match="MC6303: worker 2 would get none of the packed sequences of 2 examples"):
            part_of_worker(batch, World(3).worker(rank))


def test_workers_are_those_that_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(7)
    assert mirrorc.shard_batch(x, devices_per_worker=2) is x
    cluster = {"chief": ["127.0.0.1:1234"], "worker": ["127.0.0.1:1235"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    assert mirrorc.shard_batch(x).tolist() == [4, 5, 6]
    assert mirrorc.shard_batch(x, devices_per_worker=[1, 2]).tolist() == [3, 4, 5, 6]
    with pytest.raises(ValueError, match="devices_per_worker has 3 numbers, but num_workers is 2"):
        mirrorc.shard_batch(x, devices_per_worker=[1, 2, 1])


def test_a_step_knows_its_workers_and_what_is_normalized() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.zeros(5, 2)
    sizes = {}
    for rank in (0, 1):
        options = {"optimizer": optimizer, "loss_fn": nn.CrossEntropyLoss(), "backend": "eager"}
        with step_of_world(model, world=World(2, (1, 2)), rank=rank, **options) as step:
            sizes[rank] = [len(step.shard_batch(x)), len(step.shard_batch({"x": x})["x"])]
            model.eval()
            sizes[rank].append(len(step.shard_batch(x)))
            model.train()
    assert sizes == {0: [3, 3, 2], 1: [2, 2, 3]}
    with mirrorc.compile(
        model, 2, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss(), compiler=mirrorc.Compiler(backend="eager")
    ) as step:
        assert step.shard_batch(x) is x
