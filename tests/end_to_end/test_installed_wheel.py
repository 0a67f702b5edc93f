"""The wheel: it has every file of the packages, and trains where it is installed."""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PLACES = {"mirrorc": "mirrorc", "passes": "mirrorc/passes", "runtime": "mirrorc/runtime"}
PLUGIN = "mirrorc/testing/plugin/"

TRAINING = """
import torch
import mirrorc
assert "installed" in mirrorc.__file__, mirrorc.__file__
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = mirrorc.compile(model, devices=2, optimizer=optimizer, loss_fn=torch.nn.functional.mse_loss)
x, y = torch.randn(8, 4), torch.randn(8, 2)
losses = [float(step(x, y)) for _ in range(3)]
assert losses[2] < losses[0], losses
"""


def expected_files() -> set[str]:
    expected = {"mirrorc/py.typed"}
    for folder, place in PLACES.items():
        for path in (ROOT / folder).rglob("*.py"):
            name = f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
            expected.add(name.replace(PLUGIN, "mirrorc_pytest/"))
    return expected


def built_wheel(folder: Path) -> Path:
    sources = folder / "sources"
    sources.mkdir()
    for name in PLACES:
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(sources)], check=True, cwd=folder)
    return next(folder.glob("*.whl"))


def test_the_wheel_is_whole_and_trains_from_an_empty_folder(tmp_path: Path) -> None:
    wheel = built_wheel(tmp_path)
    assert expected_files() <= set(zipfile.ZipFile(wheel).namelist())
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    venv.create(installed, with_pip=False, symlinks=True)
    python = installed / "bin" / "python"
    folder = next(installed.glob("lib/python*/site-packages"))
    target = ["--target", str(folder), "--no-deps", "--quiet", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "install", *target], check=True, cwd=empty)
    # A line of a .pth file adds a folder alone: the finder of an editable install there is not loaded.
    seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (folder / "environment.pth").write_text("\n".join([*seen, ""]))
    done = subprocess.run([python, "-c", TRAINING], cwd=empty, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
