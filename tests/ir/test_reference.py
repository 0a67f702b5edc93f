"""The page of the IR is what the declarations give."""

from pathlib import Path

from mirrorc.ir.operation import operations
from mirrorc.ir.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "ir.md"


def test_the_committed_page_is_what_the_declarations_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: python -m mirrorc.ir > docs/ir.md"


def test_every_operation_has_its_entry() -> None:
    page = reference()
    for found in operations():
        assert f"### `{found.name}`\n\n{found.summary}\n" in page
        assert all(f"`{keyword}`" in page for keyword in found.keywords)
    assert "| keywords | `bucket`, `variable`, [`padding_idx`] |" in page
    assert "| operands | `*gradients`, one for each of `buckets` |" in page
    assert "| effects | gives a pending value; takes a value from another replica |" in page
    assert reference([]).startswith("# The operations of the IR") and "###" not in reference([])
