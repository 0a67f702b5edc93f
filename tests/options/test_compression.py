"""What `mirrorc.Communication(compression=...)` makes for a world that is not there, and what it refuses."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from payloads import FirstElements
from planned_steps import step_of_world
from saved_programs import assert_same, reload
from torch import nn

import mirrorc
from mirrorc import World
from mirrorc.analysis.communication.worker_meetings import schedule_hash
from mirrorc.compression import Payload, TopK
from mirrorc.ir import ops
from mirrorc.ir.devices import Device, parse_devices
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.workers import Workers
from mirrorc.options.option import Request
from mirrorc.options.table import OPTIONS
from mirrorc.passes import CompressExchange, default_pipeline
from mirrorc.runtime.execution.commit.update_progress import UsedVariables


def step_of(**options: Any) -> mirrorc.Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 4))
    given = {"world": World(2), "compression": "bfloat16", "backend": "eager", **options}
    optimizer = torch.optim.AdamW(model.parameters())
    return step_of_world(model, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss(), **given)


def prepared(**options: Any) -> mirrorc.Program:
    return step_of(**options).prepare(torch.zeros(6, 5), target=torch.zeros(6, dtype=torch.int64))


PRINTED = {
    "bfloat16": ("bfloat16", ["rounded for the wire: this changes numbers", "decompress(bucket=0"]),
    "largest": (
        TopK(0.02),
        ["the largest 86 elements of each of 2 workers: this changes numbers", "add_unsent(bucket=0"],
    ),
    "payload": (
        FirstElements(),
        [
            "payload=FirstElements(part=10), num_bytes=1708",
            "1.7 KiB in place of 16.8 KiB summed over 2 workers: this changes numbers",
            "add_unsent(bucket=0",
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PRINTED)
def test_the_printed_program_says_what_is_compressed_and_is_read_back(case: str, tmp_path: Path) -> None:
    compression, said = PRINTED[case]
    program = prepared(compression=compression, exchange="dense")
    text = program.to_text(fold=False)
    assert [words for words in said if words not in text] == []
    assert_same(program, reload(program, tmp_path))


def memory_of(**options: Any) -> str:
    step = step_of(exchange="dense", **options)
    step.prepare(torch.zeros(6, 5), target=torch.zeros(6, dtype=torch.int64))
    return str(step.memory())


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_sent_is_counted_in_memory(devices: int) -> None:
    assert "compressed sums" in memory_of(world=World(2, devices))
    assert "compressed sums" not in memory_of(world=World(2, devices), compression=None)


@pytest.mark.slow
def test_factors_are_sent_as_they_are() -> None:
    program = prepared(exchange="factors")
    (graph,) = program.graphs()
    assert list(calls_to(graph, ops.gather_factors))
    assert any("not compressed: sent as factors" in str(remark) for remark in program.remarks)


@pytest.mark.slow
def test_whole_gradients_are_weighed_against_factors_by_the_bytes_that_are_sent() -> None:
    """The layer's gradient has 60 x 60 elements, and its factors 60 + 60 of each of 20 examples."""

    def remark(compression: Any) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 4))
        program = mirrorc.plan(
            model,
            {"input": torch.zeros(200, 5), "target": torch.zeros(200, dtype=torch.int64)},
            world=World(2),
            optimizer=torch.optim.AdamW(model.parameters()),
            loss_fn=nn.CrossEntropyLoss(),
            compiler=mirrorc.Compiler(backend="eager"),
            communication=mirrorc.Communication(compression=compression),
        )
        return next(str(one) for one in program.remarks if "how workers send gradients" in str(one))

    assert "2.weight as factors (937.5 KiB against 1.4 MiB)" in remark(None)
    assert "2.weight whole (937.5 KiB against 703.1 KiB)" in remark("bfloat16")
    assert "2.weight whole (937.5 KiB against 28.1 KiB)" in remark(TopK(0.01))
    assert "2.weight whole (937.5 KiB against 140.6 KiB)" in remark(FirstElements())


def test_a_process_alone_compresses_nothing_and_says_so() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    with mirrorc.compile(
        model,
        2,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=nn.CrossEntropyLoss(),
        compiler=mirrorc.Compiler(backend="eager"),
        communication=mirrorc.Communication(compression="float16"),
    ) as step:
        step(torch.zeros(6, 5), target=torch.zeros(6, dtype=torch.int64))
        assert any("nothing is compressed: there is one worker" in str(remark) for remark in step.program.remarks)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"compression": "int8"},
            "compression is 'int8': say 'bfloat16' or 'float16', to send sums to other workers so, mirrorc.TopK(ratio)",
        ),
        ({"shard_optimizer": True}, "shard_optimizer=True\n  why:  workers send each other parts of sums there"),
        ({"exact_order": True}, "cannot be used with exact_order=True\n  why:  sums are rounded on their way"),
        ({"disable": ["compress-exchange"]}, "needs the pass 'compress-exchange', which disable= switches"),
        (
            {"compression": TopK(0.1), "shard_optimizer": True},
            "compression=TopK(ratio=0.1) cannot be used with shard_opti",
        ),
        (
            {"compression": TopK(0.1), "exact_order": True},
            "with exact_order=True\n  why:  workers send a part of each gradient, and the rest in later steps\n "
            " fix:  leave compression= out",
        ),
        (
            {"compression": TopK(0.1), "disable": ["send-largest"]},
            "needs the pass 'send-largest', which disable= switches",
        ),
        (
            {"compression": TopK(0.1), "passes": default_pipeline(over_workers=True)},
            "put mirrorc.passes.SendLargest(ratio=0.1) behind ReduceOverWorkers() there",
        ),
        (
            {"compression": FirstElements(), "shard_optimizer": True},
            "cannot be used with shard_optimizer=True\n  why:  workers send each other parts of sums there",
        ),
        (
            {"compression": FirstElements(), "exact_order": True},
            "with exact_order=True\n  why:  workers send payloads of gradients, and what these leave out in "
            "later steps\n  fix:  leave compression= out",
        ),
        (
            {"compression": FirstElements(), "disable": ["send-payload"]},
            "needs the pass 'send-payload', which disable= switches",
        ),
        (
            {"compression": FirstElements(), "passes": default_pipeline(over_workers=True)},
            "put mirrorc.passes.SendPayload(payload=FirstElements(part=10)) behind",
        ),
        (
            {"passes": default_pipeline(over_workers=True)},
            "put mirrorc.passes.CompressExchange(dtype='bfloat16') behind ReduceOverWorkers() there",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        step_of(**options)


def test_it_is_refused_on_gpus() -> None:
    asked = {**OPTIONS.defaults, "compression": "bfloat16"}
    request = Request(asked, Workers((1, 1), 0), (Device("cuda:0", torch.device("cuda:0")),))
    with pytest.raises(ValueError, match=r"of the type 'cuda' yet\n  why:  compressed sums have not been tried there"):
        OPTIONS.check_exclusions(request)
    OPTIONS.check_exclusions(replace(request, devices=parse_devices(1)))


def test_a_number_is_no_compression() -> None:
    with pytest.raises(TypeError, match=r"compression is 16: say 'bfloat16' or 'float16'"):
        step_of(compression=16)


@pytest.mark.slow
def test_a_pipeline_of_ones_own_may_compress() -> None:
    program = prepared(
        compression=None, exchange="dense", passes=default_pipeline(over_workers=True, compression="float16")
    )
    assert any("in float16, which changes numbers" in str(remark) for remark in program.remarks)
    assert CompressExchange("float16").changes_bits


@pytest.mark.slow
def test_what_is_kept_of_gradients_is_counted_in_memory() -> None:
    largest, payload = memory_of(compression=TopK(0.02)), memory_of(compression=FirstElements(), world=World(2, (1, 2)))
    assert (
        "50.2 KiB" in largest and "largest elements" in largest
    )  # the bucket's 16.8 KiB, and twice that for what is kept
    assert "50.2 KiB" in payload and "payloads" in payload
    assert "50.2 KiB" not in memory_of(compression=None)


@pytest.mark.parametrize("compression", [TopK(0.1), FirstElements(), "bfloat16"])
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"placement": "mirrored"}, "these need to share their parameters, so that a worker sends each sum once"),
        ({"placement": "central"}, "an owner updates for the devices of its own process"),
        ({"placement": "least-loaded"}, "an owner updates for the devices of its own process"),
        ({"algorithm": "ring"}, "it sums among the devices of one process"),
        ({"algorithm": "reduce-to-one"}, "it sums among the devices of one process"),
        ({"cuda_graphs": True}, "a graph does not replay what joins workers"),
    ],
)
def test_what_workers_cannot_have_is_refused_with_compression_too(
    compression: Any, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        step_of(world=World(2, 2), compression=compression, **options)


class Undecorated(FirstElements):
    pass


@dataclass(frozen=True)
class Unsized(Payload):
    def exchange(self, *given: Any) -> None:
        return None


@dataclass(frozen=True)
class Unsent(Payload):
    def num_bytes(self, *given: Any) -> int:
        return 1


@dataclass(frozen=True)
class Fractional(FirstElements):
    def num_bytes(self, *given: Any) -> Any:
        return 0.5


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Undecorated, "an instance of Undecorated, which is no frozen dataclass\n  why:  workers compare its repr"),
        (Unsized, "an instance of Unsized, which has no num_bytes()\n"),
        (Unsent, "an instance of Unsent, which has no exchange()\n"),
        (Payload, "an instance of Payload, which is no frozen dataclass"),
        (lambda: FirstElements, "compression is"),
    ],
)
def test_a_payload_that_is_not_complete_is_refused(kind: Any, why: str) -> None:
    with pytest.raises(TypeError, match=re.escape(why)):
        step_of(compression=kind())


@pytest.mark.slow
def test_a_size_that_is_no_number_of_bytes_is_refused() -> None:
    with pytest.raises(mirrorc.PassError, match=re.escape("says that it sends 0.5 bytes of 4.weight")):
        prepared(compression=Fractional(), exchange="dense")


@pytest.mark.slow
def test_workers_whose_payloads_differ_differ_in_what_they_exchange() -> None:
    hashes = {schedule_hash(prepared(compression=FirstElements(n), exchange="dense")) for n in (10, 11)}
    assert len(hashes) == 2


def test_the_old_name_says_where_it_is() -> None:
    with pytest.raises(AttributeError, match=r"its place is examples/power_sgd.py, a payload of one's own"):
        _ = mirrorc.PowerSGD  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="module 'mirrorc' has no attribute 'powersgd'"):
        _ = mirrorc.powersgd  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ratio", "error"),
    [(0.0, ValueError), (1.5, ValueError), (float("nan"), ValueError), ("1%", TypeError), (True, TypeError)],
)
def test_another_part_is_refused(ratio: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"ratio is .*: give the part of all elements that is sent"):
        TopK(ratio)


def test_a_part_is_one_element_at_least_and_all_at_most() -> None:
    assert [TopK(ratio).count(10) for ratio in (1e-9, 0.11, 1)] == [1, 2, 10]


@pytest.mark.parametrize(("compression", "is_told"), [(TopK(0.1), False), (FirstElements(), False), (None, True)])
def test_what_may_be_of_an_earlier_step_counts_as_used(compression: Any, is_told: bool) -> None:
    step = step_of(compression=compression, exchange="dense", capture="autograd")
    program = step.prepare(torch.zeros(6, 5), target=torch.zeros(6, dtype=torch.int64))
    tensors = {slot.variable: torch.zeros(1) for bucket in program.buckets for slot in bucket.slots}
    kept = SimpleNamespace(used=frozenset(tensors))
    state: Any = SimpleNamespace(store=SimpleNamespace(tensors=tensors), accumulated=kept)
    variables = UsedVariables(program, state)
    variables.begin()
    assert (variables.tell() is not None) == is_told
