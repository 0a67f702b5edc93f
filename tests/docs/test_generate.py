"""Generated parts of the site have everything that the code declares."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import mirrorc
from mirrorc.cli import app
from mirrorc.ir.operation import operations
from mirrorc.messages.catalogue import ENTRIES
from mirrorc.options.table import MODES, OPTIONS
from mirrorc.passes import PASSES
from mirrorc.verifier.rules.rule import rules

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


def test_every_page_can_be_filled(generate: ModuleType) -> None:
    used = set()
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        used |= {mark[1] for mark in generate.MARK.finditer(text)}
        assert generate.MARK.search(generate.filled(text)) is None, page
    assert used == {*generate.GENERATORS}


def test_the_reference_has_every_public_name(generate: ModuleType) -> None:
    page = generate.api()
    modules = {"all_reduce_algorithms", "cluster", "compression", "packing"}
    assert {name for name in mirrorc.__all__ if f":: mirrorc.{name}\n" not in page} == modules
    assert all(f"`mirrorc.{name}`" in page for name in modules)
    assert "## Others" not in page, "give the name a topic in docs/generate.py"


def test_the_reference_has_every_option_and_command(generate: ModuleType) -> None:
    headings = re.findall(r"^### `(\w+)`$", generate.options(), re.MULTILINE)
    assert {option.name for option in OPTIONS} <= {*headings} and len(headings) == len({*headings})
    assert "a remark says that it has no effect" in generate.options(), "descriptions are whole"
    assert all(f"`{mode!r}`" in generate.modes() for mode in MODES)
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert {*re.findall(r"^## `mirrorc ([\w-]+)`$", generate.command_line(), re.MULTILINE)} == commands


def test_the_reference_has_every_pass_rule_and_operation(generate: ModuleType) -> None:
    assert re.findall(r"^### ([\w-]+)$", generate.pass_list(), re.MULTILINE) == [*PASSES]
    assert all(f"| [`{name}`](#{name}) |" in generate.pass_table() for name in PASSES)
    assert all(f"`{rule.name}`\n: " in generate.rule_table() for rule in rules())
    assert all(f"### `{operation.name}`\n" in generate.operation_list() for operation in operations())


def test_the_page_of_errors_has_an_anchor_for_each_code(generate: ModuleType) -> None:
    page = generate.error_list()
    assert all(
        f"({code.lower()})=\n### {code}: {entry.title}\n\n{entry.text}\n" in page for code, entry in ENTRIES.items()
    )
    assert "<!-- generated: errors -->" in (DOCS / "troubleshooting" / "errors.md").read_text(encoding="utf-8")


def test_links_of_the_repository_lead_to_pages(generate: ModuleType) -> None:
    text = generate.repository_file("ARCHITECTURE.md") + generate.repository_file("CONTRIBUTING.md")
    assert "](docs/" not in text and "](ARCHITECTURE.md" not in text and "](architecture.md" in text
