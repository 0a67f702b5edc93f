"""The reference of the IR is what the declarations give."""

from mirrorc.ir.operation import operations
from mirrorc.ir.reference import reference


def test_every_operation_has_its_entry() -> None:
    page = reference()
    for found in operations():
        assert f"### `{found.name}`\n\n{found.summary}\n" in page
        assert all(f"`{keyword}`" in page for keyword in found.keywords)
    assert "| keywords | `bucket`, `variable`, [`padding_idx`] |" in page
    assert "| operands | `*gradients`, one for each of `buckets` |" in page
    assert "| effects | gives a pending value; takes a value from another replica |" in page
    assert "###" not in reference([])
