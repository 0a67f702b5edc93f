"""The README shows what its first example prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_program_of_the_first_example_is_the_one_that_follows_it() -> None:
    (_, code), (_, shown) = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)[:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace("range(100)", "range(1)"), {})
    assert printed.getvalue().strip() == shown.strip()
