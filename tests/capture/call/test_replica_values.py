"""Values of replicas, put together outside of a step: TensorFlow's worked examples, and torch's own sums as the reference."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mirrorc import PerReplica


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


def tensors(*values: Any) -> PerReplica:
    return PerReplica([torch.tensor(value) for value in values])


def test_the_examples_of_mirrored_strategy() -> None:
    repeated = tensors([0.0], [1.0, 1.0])  # r on replica r, r + 1 times
    assert repeated.reduce("sum", dim=0) == 2 and repeated.reduce("mean", dim=0) == pytest.approx(2 / 3)
    assert tensors(1.0, 3.0).reduce("sum") == 4 and tensors(1.0, 3.0).reduce("mean") == 2
    pairs = tensors([39.0, 2.0], [3.0, 41.0])
    assert pairs.reduce().tolist() == [42, 43] and pairs.reduce("mean").tolist() == [21, 21.5]
    wide = PerReplica([torch.ones(1, 3)] * 2)
    assert wide.gather(1).shape == (1, 6) and wide.gather(-1).shape == (1, 6) and wide.gather().shape == (2, 3)
    assert len(wide) == 2 and all(torch.equal(value, torch.ones(1, 3)) for value in wide)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_they_are_torchs_own_over_all_elements(data: st.DataObject) -> None:
    dtype = data.draw(
        st.sampled_from([torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
    )
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    dim = data.draw(st.integers(-2, 1))
    shapes = [(size, 3) if dim % 2 == 0 else (3, size) for size in sizes]
    values = [
        (torch.arange(6 * 3.0)[: size * 3].reshape(shape) % 5 * 50).to(dtype)
        for size, shape in zip(sizes, shapes, strict=True)
    ]
    value, whole = PerReplica(values), torch.cat(values, dim)
    assert torch.equal(value.gather(dim), whole)
    torch.testing.assert_close(value.reduce("sum", dim=dim), whole.sum(dim))
    if dtype is not torch.bool and whole.numel():
        expected = whole.sum(dim) / whole.size(dim)
        torch.testing.assert_close(value.reduce("mean", dim=dim), expected)
    if len({*sizes}) == 1:
        torch.testing.assert_close(value.reduce(), torch.stack(values).sum(0))


def test_containers_sparse_tensors_and_scalars() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    found = PerReplica([{"a": [one], "b": (two, Pair(one, two))}, {"a": [two], "b": (one, Pair(two, one))}]).reduce()
    assert (
        found["a"][0].tolist() == [3, 3] and isinstance(found["b"][1], Pair) and found["b"][1].other.tolist() == [3, 3]
    )
    rows = torch.sparse_coo_tensor([[0]], torch.ones(1, 2), (3, 2))
    total = PerReplica([rows, rows]).reduce()
    assert total.is_sparse and torch.equal(total.to_dense(), 2 * rows.to_dense())
    assert tensors(1, 2, 3).gather().tolist() == [1, 2, 3] and tensors(True, True).reduce() == 2
    only = torch.ones(2)
    PerReplica([only]).reduce().add_(1)
    assert only.tolist() == [1, 1], "a result has memory of its own"


@pytest.mark.parametrize(
    ("value", "call", "message"),
    [
        (tensors([1.0], [1.0, 2.0]), lambda v: v.reduce(), r"MC1307: the values have different shapes\n  why:  \[1\], \[2\]"),
        (tensors([[1.0]], [[1.0, 2.0]]), lambda v: v.gather(0), r"(?s)different shapes.*\[1, 1\], \[1, 2\]"),
        (tensors(1.0, [1.0]), lambda v: v.gather(), "different shapes"),
        (tensors(True, False), lambda v: v.reduce("mean"), "(?s)booleans have no mean.*which counts them"),
        (tensors(1.0, 2.0), lambda v: v.reduce("max"), "(?s)op is 'max'.*op='sum' or op='mean'"),
        (PerReplica(["a", "b"]), lambda v: v.gather(), "the values are str"),
        (PerReplica([torch.ones(1), None]), lambda v: v.reduce(), "the values are Tensor, NoneType"),
        (PerReplica([{"a": torch.ones(1)}, {"b": torch.ones(1)}]), lambda v: v.reduce(), "different entries"),
        (PerReplica([]), lambda v: v.reduce(), "the values are nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_put_together_is_refused(value: PerReplica, call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(value)
