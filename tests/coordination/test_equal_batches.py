"""Workers that are given the same batches are warned once."""

import warnings

import pytest
import torch

import mirrorc
from mirrorc.capture.call.call_arguments import flatten_call
from mirrorc.coordination.equal_batches import EqualBatches


def digest_of(*args: object, **kwargs: object) -> int:
    return EqualBatches(0).digest(flatten_call(["x"], args, kwargs))


def test_a_digest_is_of_values_shapes_and_dtypes() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert digest_of(x) == digest_of(x.clone()) != 0
    others = [x + 1, x.reshape(4, 3), x.double(), x.T, x[:2]]
    assert len({digest_of(other) for other in (x, *others)}) == 6
    assert digest_of(x, target=torch.tensor([1, 2, 3])) != digest_of(x, target=torch.tensor([1, 2, 0]))
    z = torch.tensor([1 + 2j, 3j])
    assert digest_of(z.conj()) == digest_of(z.conj().resolve_conj()) != digest_of(z)
    images = [torch.zeros(64, 1, 64, 64), torch.zeros(64, 1, 64, 64)]
    for seed, image in enumerate(images):
        image[..., 8:-8, 8:-8] = torch.rand(48, 48, generator=torch.Generator().manual_seed(seed))
    assert digest_of(images[0]) != digest_of(images[1]), "borders are alike"
    assert digest_of(images[0].to(memory_format=torch.channels_last)) == digest_of(images[0])
    large = torch.arange(1_000_001, dtype=torch.bfloat16)
    assert digest_of(large) == digest_of(large.clone()) != digest_of(large.flip(0))


@pytest.mark.parametrize("value", [torch.empty(0, 4), mirrorc.replicated(torch.ones(3)), 3, torch.eye(3).to_sparse()])
def test_without_split_values_there_is_none(value: object) -> None:
    assert digest_of(value) == 0


def test_values_of_replicas_count() -> None:
    one, other = (mirrorc.PerReplica([torch.ones(2), torch.full((2,), value)]) for value in (1.0, 2.0))
    assert digest_of(one) not in (0, digest_of(other))


def test_two_equal_batches_in_a_row_warn_once() -> None:
    batches = EqualBatches(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches.note([5, 5, 7])
        batches.note([5, 6, 7])
        batches.note([0, 0, 0])
        batches.note([8, 8, 8])
    with pytest.warns(
        UserWarning, match=r"worker 1 was given the same batches as worker 0 and worker 2\n.*\n.*\n.*shard_batch"
    ):
        batches.note([9, 9, 9])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches.note([9, 9, 9])
        assert batches.digest(flatten_call(["x"], (torch.ones(2),), {})) == 0


def test_only_the_first_calls_are_compared() -> None:
    batches, call = EqualBatches(0), flatten_call(["x"], (torch.ones(2),), {})
    for number in range(8):
        assert batches.digest(call)
        batches.note([number, number + 1])
    assert batches.digest(call) == 0
