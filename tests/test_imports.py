"""What `import mirrorc` loads."""

import subprocess
import sys

import pytest

IMPORT = """
import sys
import torch
before = set(sys.modules)
import mirrorc
print(*sorted(set(sys.modules) - before))
"""


def test_an_import_loads_no_compiler() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "mirrorc.api" in loaded
    assert not loaded & {"torch._dynamo", "torch._inductor", "torch.export", "sympy", "networkx", "transformers"}


@pytest.mark.parametrize("command", ["show", "diff"])
def test_commands_that_read_programs_load_no_compiler(command: str) -> None:
    script = f"""
import sys
sys.argv = ["mirrorc", "{command}", "--help"]
from mirrorc.cli import main
try:
    main()
finally:
    assert not {{"torch._dynamo", "torch._inductor", "sympy"}} & set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
