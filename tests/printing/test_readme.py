"""The README shows what its first example prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_program_of_the_first_example_is_the_one_that_follows_it() -> None:
    """All lines of the function but comments of their own."""
    (_, code), (_, shown) = [block for block in BLOCKS if block[0] != "diff"][:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace("range(100)", "range(1)"), {})
    _, function = printed.getvalue().split("\n\n# cpu:0", 1)
    lines = [line for line in function.splitlines() if not line.lstrip().startswith("#")]
    assert "\n".join(lines[1:]).strip() == shown.strip()
