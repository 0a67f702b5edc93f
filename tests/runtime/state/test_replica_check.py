"""A checksum tells tensors that differ in any bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mirrorc.runtime.state.replica_check import checksum, checksums

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def flipped(tensor: torch.Tensor, byte: int, bit: int) -> None:
    tensor.view(-1).view(torch.uint8)[byte] ^= 1 << bit


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 9000), st.integers(0, 2**32 - 1), st.data())
def test_flipped_bits_change_it(dtype: torch.dtype, size: int, seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(0, 2, (size,), generator=generator).to(dtype)
    copy, num_bytes = tensor.clone(), size * tensor.element_size()
    assert torch.equal(checksum(tensor), checksum(copy))
    flips = data.draw(
        st.lists(st.tuples(st.integers(0, num_bytes - 1), st.integers(0, 7)), min_size=1, max_size=2, unique=True)
    )
    for byte, bit in flips:
        flipped(copy, byte, bit)
    assert not torch.equal(checksum(tensor), checksum(copy))


def test_the_same_numbers_elsewhere_have_another_checksum() -> None:
    tensor = torch.zeros(9999)
    found = set()
    for place in (0, 1, 2047, 2048, 2049, 4097, 9998):
        other = tensor.clone()
        other[place] = 1.0
        found.add(tuple(checksum(other).tolist()))
    assert len(found) == 7
    assert torch.equal(checksum(torch.tensor(-0.0)), checksum(torch.tensor(-0.0)))
    assert not torch.equal(checksum(torch.tensor(-0.0)), checksum(torch.tensor(0.0)))
    assert checksum(torch.zeros(0)).tolist() == [0] * 4


def test_highest_bits_of_two_words_are_told_apart() -> None:
    """As unsigned sums of 64 bits, they would cancel out."""
    tensor = torch.zeros(9000, dtype=torch.float64)
    expected = checksum(tensor)
    for places in ((0, 1), (0, 2), (0, 1024), (0, 2048), (5, 5 + 1024), (1, 1026), (8191, 8999)):
        other = tensor.clone()
        other[list(places)] = -0.0
        assert not torch.equal(checksum(other), expected), places


def test_views_that_begin_anywhere_have_the_checksum_of_their_copies() -> None:
    numbers = torch.randn(5000)
    for start in range(4):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            view = numbers.to(dtype)[start : 4000 + start]
            assert torch.equal(checksum(view), checksum(view.clone()))


def test_checksums_of_many_are_those_of_each() -> None:
    tensors = [torch.rand(5), torch.rand(3000, dtype=torch.float64), torch.zeros(()), torch.zeros(0)]
    assert torch.equal(checksums(tensors), torch.stack([checksum(tensor) for tensor in tensors]))


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this build of torch knows no CUDA")
def test_checksums_of_several_devices_come_together() -> None:
    """Counts of steps may lie on the host while all else is on a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        found = checksums([torch.empty(2000, device="cuda"), torch.empty(()), torch.empty(3, device="cuda")])
    assert found.device.type == "cpu" and found.shape == (3, 4)
