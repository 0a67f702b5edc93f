"""Writes the table of docs/reference/models.md anew: ``python tests/support/zoo_table.py``."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "models.md"

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests" / "zoo"))
    from zoo import BEGIN, END, table

    text = PAGE.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN)], text[text.index(END) + len(END) :]
    PAGE.write_text(before + table() + after, encoding="utf-8")
