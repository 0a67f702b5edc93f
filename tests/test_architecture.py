"""Which file may know what."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"mirrorc": ROOT / "mirrorc", "mirrorc.passes": ROOT / "passes", "mirrorc.runtime": ROOT / "runtime"}
FILES = sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))
KNOW_ALL = {"mirrorc/__init__.py", "mirrorc/api.py", "mirrorc/cli.py", "mirrorc/step.py", "mirrorc/specializer.py"}
PRIVATE_MODULES = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._guards")
PRIVATE_ATTRIBUTES = ("_opt", "_optimizer_step")
MAY_BE_PRIVATE = "mirrorc/torch_internals/"


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> set[str]:
    """Full names of what a file imports, wherever in it, those under TYPE_CHECKING too."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def dotted_names(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute):
            parts, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield ".".join([inner.id, *reversed(parts)])


def test_there_are_files_to_look_at() -> None:
    names = {relative(path) for path in FILES}
    assert {
        "mirrorc/api.py",
        "passes/replicate.py",
        "runtime/execution/executor.py",
        "runtime/communication/base.py",
    } <= names


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_dependencies_point_one_way(path: Path) -> None:
    name = relative(path)
    if name in KNOW_ALL:
        return
    forbidden = {
        "mirrorc": ("mirrorc.passes", "mirrorc.runtime"),
        "passes": ("mirrorc.runtime", "mirrorc.api", "mirrorc.cli"),
        "runtime": ("mirrorc.passes", "mirrorc.api", "mirrorc.cli"),
    }[name.split("/")[0]]
    wrong = {found for found in imports(path) if any(within(found, package) for package in forbidden)}
    assert not wrong, f"{name} imports {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nobody_imports_a_second_copy_from_the_root(path: Path) -> None:
    assert not {found for found in imports(path) if within(found, "passes") or within(found, "runtime")}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_private_names_of_torch_stay_in_one_folder(path: Path) -> None:
    if relative(path).startswith(MAY_BE_PRIVATE):
        return
    names = {*imports(path), *dotted_names(path)}
    wrong = {name for name in names if any(within(name, module) for module in PRIVATE_MODULES)}
    attributes = {node.attr for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)}
    attributes |= {
        str(node.args[1].value)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("getattr", "setattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    }
    wrong |= {
        f".{name}" for name in attributes if name.startswith(PRIVATE_ATTRIBUTES) and not name.startswith("_optimizers")
    }
    own = {f".{name}" for name in _own_attributes(path)}
    assert not wrong - own, f"{relative(path)} uses {', '.join(sorted(wrong - own))}: move it to {MAY_BE_PRIVATE}"


def _own_attributes(path: Path) -> set[str]:
    """Attributes that a file sets on ``self``: mirrorc's own, whatever they are called."""
    return {
        node.attr
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_are_nouns(path: Path) -> None:
    words = set(path.stem.split("_"))
    assert not words & {"utils", "util", "misc", "common", "helpers", "helper", "new", "v2"}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_every_file_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(parsed(path)), f"{relative(path)} has no docstring"


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "passes"], ids=relative)
def test_passes_keep_no_state_and_read_no_environment(path: Path) -> None:
    tree = parsed(path)
    assert "os" not in {name.split(".")[0] for name in imports(path)}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal)]
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            assert not isinstance(node.value, ast.Dict | ast.List | ast.Set) or relative(path) == "passes/__init__.py"
