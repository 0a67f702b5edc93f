import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from tiny_programs import MUON, Weight, captured_model, handmade, outputs
from torch import fx, nn

from mirrorc.errors import PassError
from mirrorc.ir.program import Program
from mirrorc.ir.variables import UpdateRule
from mirrorc.ir.workers import World
from mirrorc.packing import ByBytes, EqualPacks, EqualSplits, Gradient
from mirrorc.passes import PlanBuckets

KIB = 1 / 1024  # in MiB


def plan(weights: list[Weight], cap: float, first: float) -> Program:
    return PlanBuckets(buckets=ByBytes(cap, first)).run(handmade(1, weights))


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


@pytest.mark.slow
@fuzzed(150)
@given(weights=weights_strategy, cap=caps_strategy, first=caps_strategy)
def test_a_plan_holds_every_gradient_once_in_order_and_within_caps(
    weights: list[Weight], cap: float, first: float
) -> None:
    program = PlanBuckets(buckets=ByBytes(cap, first)).run(planned_only(weights))
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
        limit = cap if bucket.index or cap == math.inf else min(first, cap)
        before = sum(slot.num_elements for slot in bucket.slots[:-1]) * bucket.dtype.itemsize
        assert len(bucket.slots) == 1 or bucket.num_bytes <= limit * 2**20 or before < limit * 2**20 / 16
    if cap == math.inf:
        kinds = {(weight.dtype, weight.rule) for weight in weights}
        assert len(program.buckets) == len(kinds), "one pack of each dtype and rule, whatever the first cap is"
    ready = [position[bucket.slots[-1].variable] for bucket in program.buckets]
    assert ready == sorted(ready)


@pytest.mark.parametrize(("num_before", "is_joined"), [(16, True), (17, False)])
def test_a_bucket_that_is_nearly_empty_takes_the_next_gradient(num_before: int, is_joined: bool) -> None:
    """Less than a sixteenth of the cap, here 128 bytes, is not worth a message of its own; 17 elements are padded to 128."""
    program = plan([Weight("large", (1000,)), Weight("small", (num_before,))], cap=2 * KIB, first=2 * KIB)
    names = [[slot.variable for slot in bucket.slots] for bucket in program.buckets]
    assert names == ([["small", "large"]] if is_joined else [["small"], ["large"]])


@pytest.mark.parametrize(("num_before", "is_larger"), [(16, True), (17, False)])
def test_a_bucket_over_its_cap_is_explained_in_a_remark(num_before: int, is_larger: bool) -> None:
    weights = [Weight("next", (1000,)), Weight("large", (1000,)), Weight("small", (num_before,))]
    remarks = [remark.text for remark in plan(weights, cap=2 * KIB, first=2 * KIB).remarks]
    told = "; the last gradient of bucket 0 goes beyond that, as less than a sixteenth was full before it"
    assert any(text.endswith(told) for text in remarks) == is_larger


def test_the_first_bucket_has_a_cap_of_its_own() -> None:
    weights = [Weight(f"w{i}", (16,)) for i in range(6)]  # 64 bytes each
    program = plan(weights, cap=192 / 2**20, first=64 / 2**20)
    assert [len(bucket.slots) for bucket in program.buckets] == [1, 3, 2]


def test_the_graph_stays_as_it_is() -> None:
    program = handmade(1)
    before = str(program.shard_graphs[0])
    after = PlanBuckets().run(program)
    assert after.shard_graphs == program.shard_graphs and str(after.shard_graphs[0]) == before
    assert program.buckets == () and list(outputs(program.shard_graphs[0])["gradients"]) == ["fc2.weight", "fc1.weight"]


def test_scalar_parameters_get_a_slot_of_one_element() -> None:
    slot = plan([Weight("scale", ())], cap=1.0, first=1.0).buckets[0].slots[0]
    assert (slot.shape, slot.num_elements) == ((), 1)


def planned(weights: list[Weight], **options: Any) -> Program:
    return PlanBuckets(**options).run(planned_only(weights))


def contents(program: Program) -> list[list[str]]:
    return [[slot.variable for slot in bucket.slots] for bucket in program.buckets]


def packs(program: Program) -> list[list[tuple[int, int, int]]]:
    return [[(pack.number, pack.start, pack.stop) for pack in bucket.packs] for bucket in program.buckets]


def remarks(program: Program) -> str:
    return "\n".join(remark.text for remark in program.remarks)


FOUR = [Weight("a", (16,)), Weight("b", (160,)), Weight("c", (0,)), Weight("d", (3, 5))]


def test_an_infinite_cap_is_one_bucket_whatever_the_first_one_is() -> None:
    for buckets in (math.inf, ByBytes(math.inf, 1e-6)):
        assert contents(planned(FOUR, buckets=buckets)) == [["a", "b", "c", "d"]]


def test_the_first_bucket_has_no_larger_cap_than_the_others() -> None:
    assert len(planned(FOUR, buckets=1e-6).buckets) == 4  # though the first one's default cap is 1 MiB
    assert len(planned(FOUR, buckets=ByBytes(1e-6)).buckets) == 4


@pytest.mark.parametrize("cap", [0, 0.0, -1, -1.0, math.nan, True, "25", None])
def test_a_cap_that_is_not_positive_is_refused(cap: Any) -> None:
    for option in ("cap_mb", "first_mb"):
        with pytest.raises(
            ValueError, match=f"{option} is .*: give a positive number of MiB, or math.inf for one bucket"
        ):
            ByBytes(**{option: cap})
    is_number = isinstance(cap, int | float) and cap is not True
    with pytest.raises(
        ValueError if is_number else TypeError,
        match="buckets(=| is ).*"
        + (": give a positive number of MiB, or math.inf for one bucket" if is_number else "\n  fix:  buckets=25"),
    ):
        planned(FOUR, buckets=cap)


def test_equal_packs_cut_the_bucket_anywhere() -> None:
    program = planned(FOUR, buckets=EqualPacks(3))  # 16 + 160 + 16 + 16 elements with gaps
    assert contents(program) == [["a", "b", "c", "d"]]
    assert packs(program) == [[(0, 0, 69), (1, 69, 138), (2, 138, 208)]]
    (bucket,) = program.buckets
    assert [[slot.variable for slot in bucket.slots_in(pack)] for pack in bucket.packs] == [
        ["a", "b"],
        ["b"],
        ["b", "c", "d"],
    ]
    assert "bucket 0: b lies in several packs" in remarks(program)
    assert packs(planned(FOUR, buckets=EqualPacks(1))) == [[]] and packs(planned(FOUR)) == [[]]


def test_packs_are_numbered_as_they_become_complete_over_all_kinds() -> None:
    other = UpdateRule("B", 1)
    weights = [Weight("a", (64,)), Weight("b", (64,), rule=other), Weight("c", (64,)), Weight("d", (64,), rule=other)]
    program = planned(weights, buckets=EqualPacks(2))
    assert contents(program) == [["a", "c"], ["b", "d"]]
    assert packs(program) == [[(0, 0, 64), (2, 64, 128)], [(1, 0, 64), (3, 64, 128)]]
    assert [pack.number for _, pack in program.packs] == [0, 1, 2, 3]


def test_packs_of_a_reversed_bucket_are_complete_in_the_order_of_backward() -> None:
    program = planned([Weight("a", (64,)), Weight("b", (64,))], order=lambda one: -one.ready, buckets=EqualPacks(2))
    assert contents(program) == [["b", "a"]] and packs(program) == [[(1, 0, 64), (0, 64, 128)]]


def test_dtypes_are_not_mixed() -> None:
    weights = [Weight("a", (64,)), Weight("b", (64,), torch.float64), Weight("c", (64,))]
    program = planned(weights, buckets=EqualPacks(2))
    assert [(bucket.dtype, len(bucket.packs)) for bucket in program.buckets] == [(torch.float64, 2), (torch.float32, 2)]


def test_a_bucket_with_fewer_elements_than_packs_has_one_each() -> None:
    program = planned([Weight("a", (3,))], buckets=EqualPacks(50))
    assert [pack[1:] for pack in packs(program)[0]] == [(i, i + 1) for i in range(16)]
    assert "bucket 0 has 16 packs, not 50" in remarks(program)


def test_no_packing_gives_each_gradient_a_bucket() -> None:
    program = planned(FOUR, buckets=EqualPacks(0))
    assert contents(program) == [["a"], ["b"], ["c"], ["d"]] and packs(program) == [[]] * 4


def test_splits_decline_with_a_reason() -> None:
    large = Weight("large", (4096,))
    assert packs(planned([large], buckets=EqualSplits(4))) == [[(i, 1024 * i, 1024 * (i + 1)) for i in range(4)]]
    few = planned([large], buckets=EqualSplits(5))
    assert contents(few) == [["large"]] and packs(few) == [[]]
    assert "4096 elements in 5 packs are fewer than 1024 each; each gradient is reduced by itself" in remarks(few)
    mixed = planned([large, Weight("b", (9,), torch.float64), Weight("c", (9,))], buckets=EqualSplits(2))
    assert contents(mixed) == [["large"], ["b"], ["c"]]
    assert "EqualSplits(num_splits=2) declines: gradients are torch.float32 and torch.float64" in remarks(mixed)
    other = planned([large, Weight("b", (9,), rule=MUON), Weight("c", (9,), rule=MUON)], buckets=EqualSplits(2))
    assert contents(other) == [["large"], ["b"], ["c"]] and [len(own) for own in packs(other)] == [2, 1, 1]


def test_a_gradient_without_factors_goes_whole_whatever_workers_have_chosen() -> None:
    program = captured_model(nn.Sequential(nn.Linear(4, 100), nn.Tanh(), nn.Linear(100, 3)), 1)
    names = ("0.weight", "0.bias")
    workers = dataclasses.replace(World(2).worker(0), sent_as_factors=names)
    planned = PlanBuckets().run(program.evolve(workers=workers))
    sent = [slot.variable for bucket in planned.buckets if bucket.is_sent_as_factors for slot in bucket.slots]
    assert sent == ["0.weight"]
    assert planned.remarks[-1].text.startswith("0.bias goes to other workers whole: no factors of the gradient exist")


def test_groups_of_ones_own_are_buckets() -> None:
    def mine(gradients: Sequence[Gradient]) -> list[list[str]]:
        return [["d", "a"], ["b"], ["c"]]

    program = planned(FOUR, buckets=mine)
    assert contents(program) == [["b"], ["c"], ["d", "a"]]
    assert "the groups of buckets=mine" in remarks(program)
    rules = [Weight("a"), Weight("b", rule=MUON), Weight("c", (9,)), Weight("d", (9,))]
    program = planned(rules, buckets=mine)
    program = planned([*rules[:3], Weight("d", (9,), rule=MUON)], buckets=mine)
    assert contents(program) == [["a"], ["b"], ["c"], ["d"]]
    assert "the group of d becomes 2 buckets" in remarks(program)


def test_packs_are_not_dealt_out() -> None:
    several = dataclasses.replace(World(2).worker(0), shards_optimizer=True)
    with pytest.raises(PassError, match="cut into packs cannot be sharded over workers"):
        PlanBuckets(buckets=EqualPacks(2)).run(planned_only(FOUR).evolve(workers=several))


@pytest.mark.slow
@fuzzed(100)
@given(weights=weights_strategy, number=st.integers(1, 9), is_reversed=st.booleans())
def test_every_element_lies_in_one_pack(weights: list[Weight], number: int, is_reversed: bool) -> None:
    program = planned(weights, order="reversed" if is_reversed else "ready", buckets=EqualPacks(number))
    position = {weight.name: i for i, weight in enumerate(weights)}
    ready = []
    for bucket, pack in program.packs:
        own = bucket.slots_in(pack)
        assert own and all(slot.offset < pack.stop for slot in own)
        ready.append(max(position[slot.variable] for slot in own))
    assert ready == sorted(ready)
    for bucket in program.buckets:
        assert (
            len(
                {
                    (program.variables[slot.variable].dtype, program.variables[slot.variable].update)
                    for slot in bucket.slots
                }
            )
            == 1
        )
        ends = [0, *(pack.stop for pack in bucket.launch_units)]
        assert ends[:-1] == [pack.start for pack in bucket.launch_units] and ends[-1] == bucket.num_elements
        covered = [slot.variable for pack in bucket.launch_units for slot in bucket.slots_in(pack)]
        assert dict.fromkeys(covered).keys() == bucket.slot_of.keys()


@pytest.mark.slow
def test_functions_of_the_users_that_fail_are_told_from_ours() -> None:
    def groups(gradients: Any) -> Any:
        return [[one["name"]] for one in gradients]

    for option, function, said in (
        ("buckets", groups, "buckets=groups: your function raised TypeError"),
        ("order", lambda one: one.size, "order: your function raised AttributeError"),
    ):
        with pytest.raises(PassError, match=said):
            PlanBuckets(**{option: function}).run(captured_model(nn.Linear(4, 3)))
