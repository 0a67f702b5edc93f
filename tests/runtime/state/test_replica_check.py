"""A checksum tells tensors that differ in any bit."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mirrorc.runtime.state.replica_check import checksum

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
    """Flips a bit in memory."""
    tensor.view(-1).view(torch.uint8)[byte] ^= 1 << bit


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 5000), st.integers(0, 2**32 - 1), st.data())
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
    tensor = torch.zeros(4000)
    found = set()
    for place in (0, 1, 1023, 1024, 1025, 2049, 3999):
        other = tensor.clone()
        other[place] = 1.0
        found.add(tuple(checksum(other).tolist()))
    assert len(found) == 7
    assert torch.equal(checksum(torch.tensor(-0.0)), checksum(torch.tensor(-0.0)))
    assert not torch.equal(checksum(torch.tensor(-0.0)), checksum(torch.tensor(0.0)))
    assert checksum(torch.zeros(0)).tolist() == [0, 0]
