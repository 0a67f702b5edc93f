"""Every algorithm of all-reduce: what it sums, how the verifier sees it, and what its messages cost."""

import math
from collections.abc import Callable

import pytest
import torch
from selections import slow_but
from summed_by_messages import averaging, linked, linked_by_shares, run, summed
from tiny_programs import Weight, handmade, targets

from mirrorc.all_reduce_algorithms import (
    ALGORITHMS,
    AllReduceAlgorithm,
    HalvingDoubling,
    HierarchicalCopy,
    ReduceToOne,
    Ring,
    RoundRobin,
    Tree,
)
from mirrorc.analysis.cost.message_costs import message_costs
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.passes import LowerDevices, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier.verifier import Verify, verify

SENDING = (
    ReduceToOne(),
    ReduceToOne(device=1, order=(1, 0)),
    ReduceToOne(dtype=torch.float64),
    HierarchicalCopy(),
    HierarchicalCopy(groups=3),
    Ring(),
    HalvingDoubling(),
    Tree(),
    Tree(device=1),
    RoundRobin(),
    RoundRobin(num_devices=2),
)


def fits(algorithm: AllReduceAlgorithm, num_devices: int) -> bool:
    return not algorithm.objection(num_devices)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", slow_but([2, 3, 4], range(2, 9)))
def test_every_algorithm_is_proved_and_sums_each_element_once(num_devices: int) -> None:
    """The last of the lengths has chunks and shares of unequal lengths, the first ones have empty ones."""
    for algorithm in filter(lambda one: fits(one, num_devices), SENDING):
        for make in (linked, linked_by_shares):
            before = make(num_devices, 1, num_devices - 1, 64 * num_devices + 70)
            after = algorithm.run(before)
            verify(after)
            verify(LowerDevices().run(after))
            assert not targets(after.mirrored_graph, *ops.REDUCTIONS)
            for bucket in after.buckets:
                packed = [torch.arange(bucket.num_elements, dtype=torch.float32) * 10**i for i in range(num_devices)]
                expected = torch.stack(packed).sum(0)
                found = summed(after, packed, bucket.index)
                whole = found if make is linked else [torch.cat(found)]
                assert len(found) == num_devices or make is linked_by_shares
                assert all(torch.equal(one, found[0]) for one in found) or make is linked_by_shares
                for one in whole:
                    torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("num_devices", [2, 3, 4, 7])
def test_a_device_sends_what_it_has_before_it_waits(num_devices: int) -> None:
    """Else the rounds of a ring run one after the other around it: the next device waits for what nobody needs."""
    for algorithm in filter(lambda one: fits(one, num_devices), SENDING):
        for make in (linked, linked_by_shares):
            after = algorithm.run(make(num_devices, 1, 64 * num_devices + 70))
            for send in targets(after.mirrored_graph, ops.send):
                (value,), replica = send.all_input_nodes, send.kwargs["replica"]
                waits = [n for n in targets(after.mirrored_graph, ops.wait) if n.kwargs["replica"] == replica]
                assert not [wait for wait in waits if value < wait < send], (algorithm, make, send)


def test_an_empty_share_is_measured_too() -> None:
    """The bucket has one share, which one of three devices takes; all tell their norms, and whether all is finite."""
    pipeline = default_pipeline(algorithm=Ring(), max_grad_norm=1.0, check_finite=True)
    after = run_passes(handmade(3, [Weight("w", (3,))]), pipeline, [Verify()])
    values = [
        node.all_input_nodes[0] for module in after.device_graphs.values() for node in targets(module.graph, ops.norm)
    ]
    assert sorted(value.meta["val"].numel() for value in values if value.target is not ops.commit) == [0, 0, 16]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_dtype_is_summed(dtype: torch.dtype) -> None:
    packed = [torch.arange(7.0).to(dtype) + replica for replica in range(3)]
    for algorithm in SENDING:
        if fits(algorithm, 3):
            for one in run(algorithm, packed):
                assert one.dtype == dtype and torch.equal(one, (3 * torch.arange(7.0) + 3).to(dtype))


@pytest.mark.parametrize("algorithm", [one for one in SENDING if fits(one, 2)], ids=str)
def test_means_are_sums_divided_by_the_number_of_replicas(algorithm: AllReduceAlgorithm) -> None:
    for values, mean in (([[1.0], [3.0]], [2.0]), ([[39.0, 2.0], [3.0, 41.0]], [21.0, 21.5])):
        before = averaging(linked(2, len(mean)))
        found = run(algorithm, [torch.tensor(value) for value in values], before)
        assert [one.tolist() for one in found] == [mean, mean]


def test_the_order_and_the_precision_of_a_sum_can_be_chosen() -> None:
    packed = [torch.tensor([value]) for value in (1.0, 1e8, -1e8)]
    in_order, other, wide = (
        run(one, packed)[0].item()
        for one in (ReduceToOne(), ReduceToOne(order=(1, 2, 0)), ReduceToOne(dtype=torch.float64))
    )
    assert (in_order, other, wide) == (0.0, 1.0, 1.0)
    wider = ReduceToOne(dtype=torch.float32).run(linked(2, 3, dtype=torch.float64))  # no less precise than the bucket
    assert not targets(wider.mirrored_graph, torch.ops.aten._to_copy.default)


@pytest.mark.slow
def test_devices_take_turns_with_buckets() -> None:
    def adders(algorithm: AllReduceAlgorithm, num_devices: int) -> list[int]:
        after = algorithm.run(linked(num_devices, 3, 3, 3, 3))
        firsts = [node for node in targets(after.mirrored_graph, ops.send) if node.args[0].target is ops.pack]  # type: ignore[union-attr]
        found = {node.kwargs["bucket"]: node.kwargs["destination"] for node in firsts}
        return [int(found[bucket]) for bucket in range(4)]  # type: ignore[arg-type, call-overload]

    assert adders(RoundRobin(), 3) == [0, 1, 2, 0]
    assert adders(RoundRobin(num_devices=2), 3) == [0, 1, 0, 1]
    assert adders(ReduceToOne(device=2), 3) == [2, 2, 2, 2]
    assert adders(HierarchicalCopy(), 4) == [2, 3, 2, 3]  # of the second group; of the first 0, 1, 0, 1


def log2(number: int) -> int:
    return number.bit_length() - 1


TEXTBOOK: dict[str, Callable[[int], tuple[float, int, int, float]]] = {
    "reduce-to-one": lambda n: (n - 1, n - 1, 2, 2 * (n - 1)),
    "hierarchical-copy": lambda n: (n / 2, n // 2, 3 if n > 2 else 1, 2 * (n / 2 - 1) + 1),
    "ring": lambda n: (2 * (n - 1) / n, 2 * (n - 1), 2 * (n - 1), 2 * (n - 1) / n),
    "halving-doubling": lambda n: (2 * (n - 1) / n, 2 * log2(n), 2 * log2(n), 2 * (n - 1) / n),
    "tree": lambda n: (math.ceil(math.log2(n)), math.ceil(math.log2(n)), 2 * log2(n), 2 * log2(n)),
}
"""Of N devices, a power of two: buckets and messages that the busiest one sends, the longest chain, and the time, in buckets."""


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_costs_are_those_of_the_textbook(num_devices: int) -> None:
    num_elements = 64 * num_devices
    for name, expected in TEXTBOOK.items():
        after = ALGORITHMS[name]().run(linked(num_devices, num_elements))
        costs, size = message_costs(after), num_elements * 4
        found = (max(costs.bytes_sent) / size, max(costs.num_messages), costs.path_messages, costs.path_bytes / size)
        assert found == expected(num_devices), name
        assert f"the longest chain of a bucket has {costs.path_messages} message" in str(after.remarks[-1])


@pytest.mark.slow
def test_costs_of_numbers_of_devices_that_are_no_power_of_two() -> None:
    def costs(algorithm: AllReduceAlgorithm, num_devices: int) -> tuple[float, int, int, float]:
        found = message_costs(algorithm.run(linked(num_devices, 96)))
        return (
            max(found.bytes_sent) / 384,
            max(found.num_messages),
            found.path_messages,
            found.path_bytes / 384,
        )

    assert costs(Ring(), 6) == (10 / 6, 10, 10, 10 / 6)
    assert costs(HalvingDoubling(), 6) == (1.5 + 1, 5, 6, 1.5 + 2)  # a bucket before, and one afterwards
    assert costs(Tree(), 6) == (3, 3, 4, 6)
    assert costs(ReduceToOne(), 6) == (5, 5, 2, 10)


def test_a_share_of_the_sum_alone_costs_half() -> None:
    def costs(algorithm: AllReduceAlgorithm) -> tuple[float, int]:
        found = message_costs(algorithm.run(linked_by_shares(4, 256)))
        return found.path_bytes / 1024, found.path_messages

    assert costs(Ring()) == (3 / 4, 3)
    assert costs(HalvingDoubling()) == (3 / 4, 2)
    assert costs(ReduceToOne()) == (3 + 3 / 4, 2)  # the device that adds up sends each other one its share


def test_load_is_dealt_out_over_buckets() -> None:
    lengths = (16,) * 4
    alone, in_turn = (message_costs(one.run(linked(4, *lengths))) for one in (ReduceToOne(), RoundRobin()))
    assert alone.bytes_sent == (4 * 192, 256, 256, 256)
    assert in_turn.bytes_sent == (192 + 3 * 64,) * 4


def test_what_cannot_be_used_is_refused() -> None:
    for algorithm, said in (
        (ReduceToOne(device=2), "device is 2: give a number from 0 to 1"),
        (ReduceToOne(order=(0, 0)), r"order is \(0, 0\): name each device from 0 to 1 once"),
        (HierarchicalCopy(groups=1), "groups is 1: give a number of groups, 2 at least"),
        (HierarchicalCopy(groups=3), "groups is 3, more than there are devices"),
        (RoundRobin(num_devices=3), "num_devices is 3: give a number from 1 to 2, or None for all"),
    ):
        with pytest.raises(PassError, match=f"pass {algorithm.name!r} cannot be used on 2 devices: {said}"):
            algorithm.run(linked(2, 3))
    with pytest.raises(ValueError, match=r"dtype is torch\.int32: give a floating-point dtype"):
        ReduceToOne(dtype=torch.int32)


@pytest.mark.slow
def test_each_algorithm_is_listed_under_its_name() -> None:
    assert {name: algorithm().name for name, algorithm in ALGORITHMS.items()} == {name: name for name in ALGORITHMS}
    assert [*ALGORITHMS] == [
        "native", "reduce-to-one", "hierarchical-copy", "ring", "halving-doubling", "tree", "round-robin", "auto",
    ]  # fmt: skip
