import collections
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st

import mirrorc
from mirrorc.capture.call.argument_markers import PerReplica, replicated
from mirrorc.capture.call.call_arguments import Constant, flatten_call, rebuilding
from mirrorc.capture.call.shards import split_call
from mirrorc.ir.names import identifier


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    first: Any
    second: Any = 0


class Halved(Record):
    """A dataclass whose constructor must not run twice, with an attribute that is no field."""

    def __post_init__(self) -> None:
        self.doubled = [self.first, self.first]
        self.first = (self.first, "made once")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    first: Any
    hidden: Any = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", {"of": self.first})


class Table(dict[str, Any]):
    def __init__(self, value: Any) -> None:
        super().__init__(a=value)
        self.size = [value, 1]

    def __getitem__(self, key: str) -> Any:
        return "another value"


class Ordered(collections.OrderedDict[str, Any]):
    def __init__(self, value: Any) -> None:
        super().__init__(b=value, a=1)
        self.move_to_end("b")
        self.size = (value,)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, (value,))


class Items(list[Any]):
    def __init__(self, value: Any) -> None:
        super().__init__([value, value])
        self.size = value

    def append(self, value: Any) -> None:
        raise TypeError("fixed")

    extend = __iter__ = append  # type: ignore[assignment]


class Point(Pair):
    def __new__(cls, left: Any) -> "Point":
        made = super().__new__(cls, left, [left])
        made.note = left  # type: ignore[attr-defined]
        return made


class Counted(collections.UserDict[str, Any]):
    def __init__(self, value: Any) -> None:
        super().__init__(a=value)
        self.count = {"n": value}


def _defaults(value: Any) -> collections.defaultdict[str, Any]:
    return collections.defaultdict(list, {"a": value})


def _queue(value: Any) -> collections.deque[Any]:
    return collections.deque([value, 1, value], maxlen=2)


KINDS = (Halved, Slotted, Table, Ordered, Items, Point, Counted, _defaults, _queue)

leaves_strategy = st.one_of(
    st.integers(0, 5),
    st.sampled_from(["a", None, True, 2.5]),
    st.tuples(st.integers(1, 4), st.integers(1, 3)).map(lambda shape: torch.zeros(shape)),
)
values_strategy = st.recursive(
    leaves_strategy,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=2).map(collections.OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Record, inner, inner),
        *(inner.map(kind) for kind in KINDS),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, Slotted):
        return same([a.first, a.hidden], [b.first, b.hidden])
    if hasattr(a, "__dict__") and not same(vars(a), vars(b)):
        return False
    if isinstance(a, collections.deque | collections.defaultdict):
        name = "maxlen" if isinstance(a, collections.deque) else "default_factory"
        if getattr(a, name) != getattr(b, name):
            return False
    if isinstance(a, dict):
        kind: Any = collections.OrderedDict if isinstance(a, collections.OrderedDict) else dict
        return same(list(kind.items(a)), list(kind.items(b)))
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(same(a[i], b[i]) for i in range(len(a)))
    return isinstance(a, Record | Counted) or bool(a == b)


def _entries(structure: Any) -> Iterator[Any]:
    if isinstance(structure, tuple):
        for entry in structure:
            yield from _entries(entry)
    else:
        yield structure


@pytest.mark.slow
@fuzzed(150)
@given(st.lists(values_strategy, max_size=3), st.dictionaries(st.sampled_from(["k", "m"]), values_strategy))
def test_a_call_is_put_together_as_it_was(args: list[Any], kwargs: dict[str, Any]) -> None:
    call = flatten_call(["x"], tuple(args), kwargs)
    positional, keyword = rebuilding(call.structure)(call.structure, [leaf.tensor for leaf in call.leaves], call.plain)
    assert same(positional, args) and same(keyword, kwargs)
    again = flatten_call(["x"], tuple(args), kwargs)
    assert call.structure == again.structure and hash(call.structure) == hash(again.structure)
    assert not any(isinstance(constant, Constant) for constant in _entries(call.structure))


def test_what_cannot_be_made_again_is_refused_by_name() -> None:
    class Defaults(collections.defaultdict[str, Any]):
        pass

    class Failure(Record, ValueError):
        pass

    class Made(collections.OrderedDict[str, Any]):
        def __new__(cls, *given: Any) -> "Made":
            return super().__new__(cls)

    tensor = torch.zeros(4)
    tensor.weight = 3.0  # type: ignore[attr-defined]

    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> int:
            return 0

    cases = {
        "Defaults, which": Defaults(list),
        "Failure, which": Failure(1),
        "Made, which": Made(),
        r"attributes that Python code has set, weight": tensor,
        r"(?s:Kind, a kind of tensor.*)x\.a\.as_subclass\(torch\.Tensor\)": torch.zeros(4).as_subclass(Kind),
        r"default_factory has no hash\n  fix:  dict\(x\.a\)": collections.defaultdict(Unhashable()),
    }
    for text, value in cases.items():
        with pytest.raises(TypeError, match=rf"'x.a' is a .*{text}"):
            flatten_call(["x"], ({"a": value},), {})


class Kind(torch.Tensor):
    pass


@pytest.mark.slow
def test_what_holds_itself_is_refused_by_name() -> None:
    ring: list[Any] = [torch.zeros(4)]
    ring.append(ring)
    plain: list[Any] = [1]
    plain.append(plain)
    record = Record(1)
    record.parent = record  # type: ignore[attr-defined]
    for value in (ring, plain, record, {"a": ring}):
        with pytest.raises(ValueError, match="'y' holds itself"):
            flatten_call(["x", "y"], (torch.zeros(4), value), {})


def test_keys_of_other_types_make_another_structure() -> None:
    structures = [flatten_call(["x"], ({key: torch.zeros(4)},), {}).structure for key in (1, 1.0, True, 1)]
    assert len(set(structures)) == 3 and structures[0] == structures[3]


def test_tensors_that_cannot_be_split_are_refused_by_name() -> None:
    quantized = torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8)
    for text, value in {r"quantized.*y\.dequantize\(\)": quantized, "meta": torch.zeros(4, device="meta")}.items():
        with pytest.raises(ValueError, match=f"(?s)'y' is .*{text}"):
            split_call(flatten_call(["x", "y"], (torch.zeros(4), value), {}), 2)


def test_shards_hold_the_numbers_of_lazily_negated_and_conjugated_tensors() -> None:
    complex_one = torch.complex(torch.arange(4.0), torch.ones(4)).conj()
    negated = complex_one.imag
    assert negated.is_neg() and complex_one.is_conj()
    arguments = (negated, mirrorc.replicated(complex_one), mirrorc.PerReplica([negated[:2], negated[2:]]))
    shards = split_call(flatten_call(["x", "y", "z"], arguments, {}), 2)
    for r, own in enumerate(shards.tensors):
        assert not any(tensor.is_neg() or tensor.is_conj() for tensor in own)
        for found, expected in zip(own, (negated[2 * r :][:2], complex_one, negated[2 * r :][:2]), strict=True):
            assert torch.equal(found, expected)


@fuzzed(80)
@given(num_replicas=st.integers(1, 6), extra=st.integers(0, 20), width=st.integers(1, 3))
def test_shards_differ_by_one_example_at_most_and_are_the_batch(num_replicas: int, extra: int, width: int) -> None:
    total = num_replicas + extra
    x, y = torch.arange(total * width).view(total, width), torch.arange(total)
    shards = split_call(flatten_call(["x"], (x,), {"target": y}), num_replicas)
    assert sum(shards.num_examples) == total and max(shards.num_examples) - min(shards.num_examples) <= 1
    assert tuple(shard[0].size(0) for shard in shards.tensors) == shards.num_examples
    for column, whole in ((0, x), (1, y)):
        assert torch.equal(torch.cat([shard[column] for shard in shards.tensors]), whole)


def test_shards_are_views_without_a_gradient() -> None:
    x = torch.randn(4, 2)
    shards = split_call(flatten_call(["x"], (x,), {}), 2)
    assert shards.tensors[1][0].data_ptr() == x[2:].data_ptr()


def test_a_replicated_argument_is_passed_whole() -> None:
    x, table = torch.zeros(4, 2), torch.zeros(3)
    call = flatten_call(["x", "table"], (x, mirrorc.replicated({"t": table})), {})
    shards = split_call(call, 2)
    assert [shard[1].data_ptr() for shard in shards.tensors] == [table.data_ptr()] * 2
    assert shards.num_examples == (2, 2)
    assert repr(replicated(table)) == "mirrorc.replicated(...)"


def test_a_per_replica_value_is_taken_as_split() -> None:
    own = PerReplica([{"a": torch.zeros(3, 2), "n": 1}, {"a": torch.ones(1, 2), "n": 1}])
    call = flatten_call(["x"], (torch.zeros(()).expand(4), own)[1:], {})
    shards = split_call(call, 2)
    assert shards.num_examples == (3, 1)
    assert torch.equal(shards.tensors[1][0], torch.ones(1, 2))
    assert rebuilding(call.structure)(call.structure, ["L"], {}) == ([{"a": "L", "n": 1}], {})
    assert repr(own) == "PerReplica(2 values)"


def test_leaves_after_a_per_replica_value_keep_their_numbers() -> None:
    own = PerReplica([(torch.zeros(1), torch.zeros(1)), (torch.zeros(2), torch.zeros(2))])
    call = flatten_call(["x"], (mirrorc.replicated(torch.zeros(5)), [own], mirrorc.replicated(torch.zeros(6))), {})
    assert rebuilding(call.structure)(call.structure, [0, 1, 2, 3], {})[0] == [0, [(1, 2)], 3]


def test_what_is_no_container_is_put_in_its_place_without_a_look_at_the_structure() -> None:
    given = {"target": torch.zeros(2), "mode": "sum"}
    call = flatten_call(["x"], (torch.ones(2), 3.5), given)
    assert rebuilding(call.structure)((), ["x", "y"], call.plain) == (["x", 3.5], {"target": "y", "mode": "sum"})


def test_paths_name_the_argument() -> None:
    call = flatten_call(["batch"], ({"x": [torch.zeros(1)]}, Pair(torch.zeros(1), 0)), {"k": Record(torch.zeros(1))})
    assert [leaf.path for leaf in call.leaves] == ["batch.x[0]", "args[1].left", "k.first"]


def test_constants_are_compared_by_value_and_type() -> None:
    assert Constant(1) == Constant(1) and Constant("a") != Constant("b")
    assert Constant(1) != Constant(1.0) and Constant(1) != Constant(True)
    unhashable = {1, 2}
    assert Constant(unhashable) == Constant(unhashable) and Constant(unhashable) != Constant({1, 2})


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (torch.zeros(4), torch.zeros(6)),
            {},
            r"(?s)disagree on dim 0.*'x' has 4 examples, 'y' has 6.*mirrorc.replicated\(y\)",
        ),
        ((torch.zeros(4),), {"target": torch.zeros(3)}, "'x' has 4 examples, 'target' has 3"),
        ((3, "a"), {}, "no tensor to split"),
        ((replicated(torch.zeros(4)),), {}, "(?s)no tensor to split.*leave mirrorc.replicated"),
        ((torch.tensor(1.0),), {}, r"(?s)'x' is a scalar tensor.*mirrorc.replicated\(x\)"),
        ((torch.zeros(0, 3),), {}, r"(?s)'x' has no examples.*leaves the empty batch out.*mirrorc.replicated\(x\)"),
        ((PerReplica([torch.zeros(1)] * 3),), {}, "'x' is a PerReplica of 3 values, but there are 2 replicas"),
        ((PerReplica([torch.tensor(1.0)] * 2),), {}, "'x' is a PerReplica of scalars"),
        (
            (PerReplica([torch.zeros(0), torch.zeros(0)]),),
            {},
            "(?s)'x' has no examples on any replica.*leaves the empty batch out",
        ),
        (
            (PerReplica([torch.zeros(2), torch.zeros(0)]), torch.zeros(2)),
            {},
            r"'x' has 2 \+ 0 examples, 'y' has 1 \+ 1",
        ),
        ((PerReplica([]),), {}, "'x': a PerReplica needs one value for each replica"),
        ((PerReplica([torch.zeros(1), [torch.zeros(1)]]),), {}, "all have the same structure"),
        ((PerReplica([(torch.zeros(1), 1), (torch.zeros(1), 2)]),), {}, "all have the same structure"),
    ],
)
def test_batches_that_cannot_be_split_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_call(flatten_call(["x", "y"], args, kwargs), 2)


@pytest.mark.parametrize(
    ("path", "name"),
    [("x", "x"), ("batch.x[0]", "batch_x_0"), ("args[1]", "args_1"), ("0.weight", "_0_weight"), ("[]", "input")],
)
def test_identifiers(path: str, name: str) -> None:
    assert identifier(path) == name and name.isidentifier()
