"""The page on packing shows what the compiled programs do."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_schedules_of_the_page_are_those_of_the_programs() -> None:
    spec = importlib.util.spec_from_file_location("packing_schedules", ROOT / "examples" / "packing_schedules.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shown = "\n".join(module.table())
    assert shown in (ROOT / "docs" / "compiler" / "packing.md").read_text(encoding="utf-8"), (
        f"docs/compiler/packing.md is to show what python examples/packing_schedules.py prints:\n{shown}"
    )
