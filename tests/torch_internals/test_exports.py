"""Every private API of torch that mirrorc uses is called by a test in this folder, which checks what it does."""

import inspect
import re
from pathlib import Path

from mirrorc import torch_internals as internals


def test_every_function_is_called_in_this_folder() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.rglob("test_*.py")))
    names = [
        name
        for name, found in inspect.getmembers(internals, inspect.isfunction)
        if found.__module__.startswith(f"{internals.__name__}.")
    ]
    public = [name for name in names if not name.startswith("_")]
    assert len(public) >= 20
    assert [name for name in public if re.search(rf"\b{name}\b", source) is None] == []
