"""What `import mirrorc` and the command line load."""

import subprocess
import sys
from pathlib import Path

import pytest

import mirrorc

ROOT = Path(__file__).parents[1]
COMPILERS = {"torch._dynamo", "torch._inductor", "torch.export", "sympy", "networkx", "transformers"}


def in_new_process(script: str) -> None:
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_an_import_alone_loads_nothing_and_the_first_name_no_compiler() -> None:
    in_new_process(f"""
import concurrent.futures, sys
import mirrorc
for name in ("__wrapped__", "__warningregistry__"):
    assert not hasattr(mirrorc, name)
assert "torch" not in sys.modules
import torch
before = set(sys.modules)
names = ("compile", "Memory", "packing", "__all__", "ir")
with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
    values = list(pool.map(lambda name: getattr(mirrorc, name), names))
assert values[0] is mirrorc.api.compile and values[2] is sys.modules["mirrorc.packing"]
assert not {COMPILERS!r} & (set(sys.modules) - before)
""")


def test_the_interface_is_that_of_a_plain_module() -> None:
    in_new_process("""
from mirrorc import *
assert compile.__module__ == "mirrorc.api"
import pickle, pydoc
import mirrorc
assert set(mirrorc.__all__) <= set(dir(mirrorc)) and set(mirrorc.__all__) <= {*globals(), "__version__"}
assert pickle.loads(pickle.dumps([mirrorc.TopK(), mirrorc.compile])) == [mirrorc.TopK(), mirrorc.compile]
assert "load_checkpoint(" in pydoc.render_doc(mirrorc, renderer=pydoc.plaintext)
""")


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        mirrorc.nonsense  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"mirrorc\.PowerSGD is no part of mirrorc any more"):
        mirrorc.PowerSGD  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_a_type_checker_sees_the_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    user = tmp_path / "user.py"
    user.write_text("import mirrorc\nfrom mirrorc import compile, TopK\nmirrorc.plan\nmirrorc.nonsense\n")
    files = (ROOT / "mirrorc" / "__init__.py", ROOT / "mirrorc" / "interface.py", user)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=skip",
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    run = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, cwd=ROOT)
    assert 'user.py:4: error: Module has no attribute "nonsense"' in run.stdout, run.stdout + run.stderr
    assert "Found 1 error" in run.stdout, run.stdout


@pytest.mark.parametrize("command", ["--help", "--version", "show --help", "passes --help", "doctor --help"])
def test_help_needs_no_torch(command: str) -> None:
    in_new_process(f"""
import sys
sys.argv = ["mirrorc", *{command.split()!r}]
from mirrorc.cli import main
try:
    main()
finally:
    assert "torch" not in sys.modules
""")


def test_operators_of_saved_programs_are_registered_by_what_loads_them() -> None:
    """Commands import no more of mirrorc than this."""
    in_new_process("""
from mirrorc.ir.program import Program
import mirrorc.serialization, torch
for name in ("seeded_mask", "recurrent", "run_forward", "mm_into", "all_reduce_value"):
    assert getattr(torch.ops.mirrorc, name).default, name
""")
