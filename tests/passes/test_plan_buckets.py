import dataclasses
import math

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from tiny_programs import MUON, Weight, handmade, outputs
from torch import fx

from mirrorc.ir.program import Program, Stage
from mirrorc.ir.variables import UpdateRule
from mirrorc.passes import PlanBuckets

KIB = 1 / 1024  # in MiB


def plan(weights: list[Weight], cap: float, first: float) -> Program:
    return PlanBuckets(bucket_cap_mb=cap, first_bucket_mb=first).run(handmade(1, weights))


def planned_only(weights: list[Weight]) -> Program:
    """A captured program with nothing but an output that lists gradients: all that planning looks at."""
    graph = fx.Graph()
    nodes = {weight.name: graph.placeholder(f"g{i}") for i, weight in enumerate(weights)}
    graph.output({"loss": None, "gradients": nodes, "writes": {}})
    empty = handmade(1, weights[:1])
    variables = {w.name: dataclasses.replace(empty.variables[weights[0].name], name=w.name, shape=w.shape, dtype=w.dtype,
                                             update=w.rule) for w in weights}  # fmt: skip
    return empty.evolve(shard_graphs=(graph,), variables=variables)


weights_strategy = st.lists(
    st.tuples(
        st.lists(st.integers(1, 9), max_size=3).map(tuple),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        st.sampled_from([UpdateRule("A", 0), UpdateRule("A", 0, state_class=1), UpdateRule("B", 1)]),
    ),
    min_size=1,
    max_size=25,
).map(lambda specs: [Weight(f"w{i}", shape, dtype, rule) for i, (shape, dtype, rule) in enumerate(specs)])
caps_strategy = st.sampled_from([0.05, 0.1, 0.25, 0.5, 1.0, 4.0, math.inf]).map(lambda kib: kib * KIB)


@fuzzed(150)
@given(weights=weights_strategy, cap=caps_strategy, first=caps_strategy)
def test_a_plan_holds_every_gradient_once_in_order_and_within_caps(
    weights: list[Weight], cap: float, first: float
) -> None:
    program = PlanBuckets(bucket_cap_mb=cap, first_bucket_mb=first).run(planned_only(weights))
    position = {weight.name: i for i, weight in enumerate(weights)}
    by_name = {weight.name: weight for weight in weights}
    placed = [slot.variable for bucket in program.buckets for slot in bucket.slots]
    assert sorted(placed, key=position.__getitem__) == [weight.name for weight in weights]
    assert [bucket.index for bucket in program.buckets] == list(range(len(program.buckets)))
    for bucket in program.buckets:
        end = 0
        for slot in bucket.slots:
            weight = by_name[slot.variable]
            assert (weight.dtype, weight.rule) == (bucket.dtype, bucket.rule)
            assert slot.shape == weight.shape and slot.num_elements == math.prod(weight.shape)
            assert slot.offset >= end and slot.offset * bucket.dtype.itemsize % 64 == 0
            end = slot.offset + slot.num_elements
        assert end <= bucket.num_elements
        positions = [position[slot.variable] for slot in bucket.slots]
        assert positions == sorted(positions)
        limit = first if bucket.index == 0 else max(first, cap)
        assert len(bucket.slots) == 1 or bucket.num_bytes <= limit * 2**20
    ready = [position[bucket.slots[-1].variable] for bucket in program.buckets]
    assert ready == sorted(ready)


def test_buckets_reverse_the_forward() -> None:
    program = plan([Weight("first"), Weight("second"), Weight("third")], cap=math.inf, first=math.inf)
    assert [slot.variable for slot in program.buckets[0].slots] == ["third", "second", "first"]
    assert program.stage is Stage.CAPTURED and len(program.buckets) == 1


def test_the_first_bucket_has_a_cap_of_its_own() -> None:
    weights = [Weight(f"w{i}", (16,)) for i in range(6)]  # 64 bytes each
    program = plan(weights, cap=192 / 2**20, first=64 / 2**20)
    assert [len(bucket.slots) for bucket in program.buckets] == [1, 3, 2]


def test_a_new_bucket_is_explained_in_a_remark() -> None:
    program = plan([Weight("a", (16,)), Weight("b", (16,))], cap=1.0, first=64 / 2**20)
    assert any(remark.text.startswith("a opens a new bucket") for remark in program.remarks)
    assert [remark.text for remark in plan([Weight("a")], cap=1.0, first=1.0).remarks] == ["1 gradient in one bucket"]


def test_kinds_of_bucket_are_explained_in_a_remark() -> None:
    program = plan([Weight("a"), Weight("b", rule=MUON)], cap=1.0, first=1.0)
    assert len(program.buckets) == 2
    assert any(remark.text.startswith("2 kinds of bucket") for remark in program.remarks)


def test_the_graph_stays_as_it_is() -> None:
    program = handmade(1)
    before = str(program.shard_graphs[0])
    after = PlanBuckets().run(program)
    assert after.shard_graphs == program.shard_graphs and str(after.shard_graphs[0]) == before
    assert program.buckets == () and list(outputs(program.shard_graphs[0])["gradients"]) == ["fc2.weight", "fc1.weight"]


def test_scalar_parameters_get_a_slot_of_one_element() -> None:
    slot = plan([Weight("scale", ())], cap=1.0, first=1.0).buckets[0].slots[0]
    assert (slot.shape, slot.num_elements) == ((), 1)


@pytest.mark.parametrize("option", ["bucket_cap_mb", "first_bucket_mb"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, True, "25", None])
def test_caps_that_are_no_positive_numbers_are_refused(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option} is .*positive number of MiB"):
        PlanBuckets(**{option: value})  # type: ignore[arg-type]
