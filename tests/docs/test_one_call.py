"""The page that follows a call names functions that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/development/one-call.md"
_PLACE = re.compile(r"((?:mirrorc|runtime|passes)/[\w/]+\.py): (\w+(?:\.\w+)?)")


def names_in(path: str) -> set[str]:
    """Functions, classes, assigned names and methods (``Class.method``) at the top level of a file."""
    names: set[str] = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{child.name}" for child in node.body if isinstance(child, ast.FunctionDef)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_each_place_on_the_page_exists() -> None:
    places = _PLACE.findall(PAGE.read_text())
    assert len(places) > 30
    assert not [f"{path}: {name}" for path, name in places if not (ROOT / path).exists() or name not in names_in(path)]
