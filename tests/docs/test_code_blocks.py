"""The Python blocks of each page run, from top to bottom, in one namespace and in an empty folder.

A block of the class ``shown`` (``{code-block} python`` with ``:class: shown``) is not run; a comment ``<!-- setup ... -->`` is.
"""

import contextlib
import io
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?P<indent>[ \t]*)(?P<fence>```+|:::+)(?:python|\{code-block\} *python)[ \t]*\n(?P<body>.*?)^(?P=indent)(?P=fence)[ \t]*$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)
OPTION = re.compile(r"^:([\w-]+):(.*)$")


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The line in which each block begins, counted from 0, and its code."""
    for match in BLOCK.finditer(text):
        kind = "setup" if match["setup"] is not None else "body"
        first = text.count("\n", 0, match.start(kind))
        lines = textwrap.dedent(match[kind]).splitlines()
        options = dict(iter_options(lines)) if kind == "body" else {}
        if options.get("class") != "shown":
            yield first + len(options), "\n".join(lines[len(options) :]) + "\n"


def iter_options(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if (option := OPTION.match(line.strip())) is None:
            return
        yield option[1], option[2].strip()


def with_blocks() -> list[Path]:
    return [page for page in PAGES if any(True for _ in blocks(page.read_text(encoding="utf-8")))]


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in with_blocks()])
def test_the_code_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    module = types.ModuleType("code_of_a_page")  # a module, so that objects of its classes can be pickled
    monkeypatch.setitem(sys.modules, module.__name__, module)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        with torch.random.fork_rng(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            torch.manual_seed(0)
            for line, code in blocks(page.read_text(encoding="utf-8")):
                # Errors, and mirrorc's messages, name the line of the page.
                exec(compile("\n" * line + code, str(page), "exec"), vars(module))
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def test_blocks_are_found() -> None:
    text = textwrap.dedent(
        """
        <!-- setup
        first = 1
        -->
        ```python
        second = 2
        ```
        ```{code-block} python
        :class: shown
        third = 3
        ```
          ```{code-block} python
          :caption: a.py
          fourth = 4
          ```
        ```console
        $ python a.py
        ```
        """
    )
    assert [*blocks(text)] == [(2, "first = 1\n"), (5, "second = 2\n"), (13, "fourth = 4\n")]
    lines = text.splitlines()
    assert all(lines[line].strip() == code.strip() for line, code in blocks(text))
