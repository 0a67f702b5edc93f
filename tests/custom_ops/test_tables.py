import pytest
import torch

from mirrorc.custom_ops.out_products import add_rows_into


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [-1, 3])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_are_added_as_the_tables_gradient_would_be(
    dtype: torch.dtype, padding_idx: int, index_dtype: torch.dtype
) -> None:
    """Bit for bit, though no table of zeros is made; rows that lie apart, of which many have one index."""
    rows = torch.randn(7, 20, 3, dtype=dtype).transpose(1, 2).transpose(0, 1)
    rows, indices = rows.expand(3, 7, 20), torch.randint(9, (3, 7), dtype=index_dtype)
    before = torch.randn(50, 20, dtype=dtype)
    table = torch.ops.aten.embedding_dense_backward(rows, indices, 50, padding_idx, False)
    found = before.clone()
    add_rows_into(found, rows, indices, padding_idx)
    assert torch.equal(found, before + table)


def test_no_rows_add_nothing() -> None:
    found = torch.ones(4, 2)
    add_rows_into(found, torch.ones(0, 2), torch.ones(0, dtype=torch.int64), -1)
    assert torch.equal(found, torch.ones(4, 2))
