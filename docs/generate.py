"""Fills pages with what the code declares: a line ``<!-- generated: options -->`` is replaced by the text of its generator.

The generators need no Sphinx, so that tests call them as functions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

import mirrorc
from mirrorc import all_reduce_algorithms, cli, cluster, compression, errors, packing, passes
from mirrorc.calls import data_parallel
from mirrorc.ir.reference import reference
from mirrorc.messages.catalogue import ENTRIES
from mirrorc.options.option import Exclusion, Option, records_of
from mirrorc.options.table import MODES, OPTIONS
from mirrorc.passes import PASSES
from mirrorc.pipeline import protocol
from mirrorc.pipeline.protocol import PassDescription, traits_of
from mirrorc.verifier.rules.rule import rules

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"^<!-- generated: ([\w-]+)(?: (\S+))? -->$", re.MULTILINE)


def filled(text: str) -> str:
    """A page with the text of its generators."""
    return MARK.sub(lambda mark: GENERATORS[mark[1]](*filter(None, [mark[2]])).rstrip(), text)


def setup(app: Any) -> dict[str, Any]:
    """For Sphinx."""

    def fill(app: Any, name: str, source: list[str]) -> None:
        source[0] = filled(source[0])

    def mend(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
        lines[:] = for_docutils(lines)

    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", mend, priority=100)  # before napoleon
    return {"parallel_read_safe": True}


def for_docutils(lines: list[str]) -> list[str]:
    """A docstring's lines, whose facts (``Needs: links``) are paragraphs of their own."""
    mended: list[str] = []
    for line in lines:
        line = (
            line.replace("*args, **kwargs", r"\*args, \*\*kwargs") if line.endswith(":") or "kwargs:" in line else line
        )
        if fact := re.match(r"(Needs|Guarantees|Source): (.*)", line):
            mended += ["", f"**{fact[1]}:** {fact[2]}"]
        elif mended and mended[-1].startswith("**") and line.startswith("    "):
            mended[-1] += f" {line.strip()}"
        else:
            mended.append(line)
    return mended


# --- the API ---------------------------------------------------------------------------------------------------------

_TOPICS: dict[str, tuple[str, ...]] = {
    "Compiling": ("compile", "train_step", "data_parallel", "plan", "World"),
    "The step": ("Step", "join", "save_checkpoint", "load_checkpoint"),
    "Groups of options": ("Communication", "Memory", "Compiler", "Debug", "ClipGradNorm", "TopK"),
    "Arguments and outputs": ("replicated", "examples", "batch_dim", "PerReplica", "summed", "shard_batch"),
    "Values of all replicas": ("all_reduce", "all_gather", "replica_id", "num_replicas"),
    "Comparing with one device": ("check_loss", "LossCheck"),
    "Programs and pipelines": ("Program", "parse", "before", "after", "Placed"),
}
_MODULES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "mirrorc.calls.data_parallel": (data_parallel, ("DataParallel",)),
    "mirrorc.cluster": (cluster, ("join", "find_place", "Cluster", "Place", "Worker")),
    "mirrorc.packing": (packing, ("ByBytes", "EqualPacks", "EqualSplits", "Gradient")),
    "mirrorc.compression": (compression, ("Payload", "Gradients", "Collectives")),
    "mirrorc.all_reduce_algorithms": (
        all_reduce_algorithms,
        tuple(name for name in all_reduce_algorithms.__all__ if inspect.isclass(getattr(all_reduce_algorithms, name))),
    ),
    "mirrorc.testing": (None, ("check", "ProgramSnapshot")),
    "mirrorc.pipeline.protocol": (protocol, ("Pass", "Traits", "Instrument")),
}


def api() -> str:
    """Every public name of `mirrorc` by topic, then the modules that belong to the interface."""
    errors_of = [name for name, value in vars(errors).items() if inspect.isclass(value)]
    topics = {**_TOPICS, "Errors": tuple(errors_of)}
    named = {name for names in topics.values() for name in names}
    modules = {module.rpartition(".")[2] for module in _MODULES}
    if others := [name for name in mirrorc.__all__ if name not in named | modules]:
        topics["Others"] = tuple(others)
    lines = []
    for topic, names in topics.items():
        lines += [f"## {topic}", "", *_directives("mirrorc", mirrorc, names)]
    for path, (module, names) in _MODULES.items():
        lines += [f"## `{path}`", "", *_directives(path, module, names)]
    return "\n".join(lines)


def _directives(path: str, module: Any, names: tuple[str, ...]) -> Iterator[str]:
    yield "```{eval-rst}"
    for name in names:
        value = getattr(module, name, None)
        if inspect.isfunction(value) or name == "check":
            yield f".. autofunction:: {path}.{name}"
        elif inspect.isclass(value) and issubclass(value, Exception):
            yield from (f".. autoexception:: {path}.{name}", "   :show-inheritance:")
        else:
            yield f".. autoclass:: {path}.{name}"
            if not _is_option_group(value) and not hasattr(value, "_fields"):
                yield "   :members:"
            if name in ("Step", "ProgramSnapshot"):
                yield "   :inherited-members:"
                yield "   :special-members: __call__"
        yield ""
    yield "```\n"


def _is_option_group(value: Any) -> bool:
    return value in OPTIONS.groups.values()


# --- options ---------------------------------------------------------------------------------------------------------


def options() -> str:
    """Every option with its values, default, passes and exclusions."""
    described = _arguments_of(inspect.getdoc(mirrorc.compile) or "", "Args")
    lines = ["## Keywords of `mirrorc.compile`", ""]
    for name in inspect.signature(mirrorc.compile).parameters:
        record = next((option for option in OPTIONS if option.name == name and not option.group), None)
        if name in described and name not in OPTIONS.groups and name != "declared":
            lines += _option(name, described[name], record)
    for keyword, group in OPTIONS.groups.items():
        described = _arguments_of(inspect.getdoc(group) or "", "Attributes")
        lines += [f"## `{keyword}=mirrorc.{group.__name__}(...)`", ""]
        for record in records_of(group):
            lines += _option(record.name, described[record.name], record)
    return "\n".join(lines)


def modes() -> str:
    """What each ``mode`` sets."""
    lines = ["| `mode` | sets |", "|---|---|"]
    for mode, values in MODES.items():
        lines.append(f"| `{mode!r}` | {', '.join(f'`{name}={value!r}`' for name, value in values.items())} |")
    return "\n".join(lines)


def _option(name: str, text: str, record: Option | None) -> Iterator[str]:
    yield f"### `{name}`"
    yield ""
    yield _markdown(text[:1].upper() + text[1:])
    yield ""
    if record is not None:
        if record.texts or isinstance(record.default, (bool, int, float, str, type(None), tuple)):
            yield f"- Default: `{record.default!r}`"
        if record.passes is not None and not callable(record.passes.names) and record.passes.names:
            names = ", ".join(f"[`{entry}`](../compiler/passes.md#{entry})" for entry in record.passes.names)
            yield f"- Pass{'es' if len(record.passes.names) > 1 else ''}: {names}"
        yield from dict.fromkeys(_refusal(exclusion) for exclusion in record.excludes)
        yield ""


def _refusal(exclusion: Exclusion) -> str:
    beside, why = exclusion.beside, exclusion.why if isinstance(exclusion.why, str) else ""
    if "{request" in beside:
        beside = "on some devices"
    return f"- May be refused {f'with `{beside}`' if beside.isidentifier() else beside}{why and f': {why}'}"


def _arguments_of(docstring: str, section: str) -> dict[str, str]:
    """The entries of a section of a Google-style docstring."""
    _, _, rest = docstring.partition(f"\n{section}:\n")
    found: dict[str, str] = {}
    name = ""
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        if entry := re.match(r"    ([\w*][\w, *]*): (.*)", line):
            name = entry[1]
            found[name] = entry[2]
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _markdown(text: str) -> str:
    """A docstring's text: its literals and names as Markdown's code."""
    return re.sub(r"``([^`]+)``", r"`\1`", text)


# --- the command line ------------------------------------------------------------------------------------------------


def command_line() -> str:
    """The help of each command, as it is printed."""
    group: Any = typer.main.get_command(cli.app)
    context = group.make_context("mirrorc", [], resilient_parsing=True)
    context.max_content_width = 100
    lines = ["```text", group.get_help(context), "```", ""]
    for name, command in sorted(group.commands.items()):
        own: Any = type(context)(command, info_name=name, parent=context, terminal_width=100)
        lines += [f"## `mirrorc {name}`", "", "```text", command.get_help(own), "```", ""]
    return "\n".join(lines)


# --- passes, rules, operations ---------------------------------------------------------------------------------------


def pass_table() -> str:
    """A row for each pass in the order of the pipeline."""
    lines = ["| pass | stages | left out of |", "|---|---|---|"]
    for name, made in PASSES.items():
        described = PassDescription.of(made())
        lines.append(f"| [`{name}`](#{name}) | {described.stages} | {described.left_out_of} |")
    return "\n".join(lines)


def pass_list() -> str:
    """The docstring of each pass, with its options."""
    lines = []
    for name, made in PASSES.items():
        kind = type(made())
        path = f"mirrorc.passes.{kind.__name__}"
        if kind.__name__ not in passes.__all__:
            path = f"mirrorc.all_reduce_algorithms.{kind.__name__}"
        elsewhere = path.startswith("mirrorc.all_reduce_algorithms")
        lines += [f"### {name}", "", "```{eval-rst}", f".. autoclass:: {path}", *(["   :no-index:"] * elsewhere), ""]
        if bits := traits_of(made()).changes_bits:
            lines += [f"**Changes bits:** {bits}.", ""]
        lines += ["```", ""]
    return "\n".join(lines)


def rule_table() -> str:
    """Each rule with its statement, by the stage from which it holds."""
    groups: dict[str, list[str]] = {}
    for rule in rules():
        groups.setdefault(f"Applies {rule.applies}", []).append(f"`{rule.name}`\n: {_markdown(rule.statement)}\n")
    return "\n".join(line for heading, entries in groups.items() for line in (f"### {heading}", "", *entries))


def operation_list() -> str:
    """Every operation of the IR."""
    return reference()


def error_list() -> str:
    """Every code of errors and warnings, with an anchor."""
    lines = []
    for group in dict.fromkeys(entry.group for entry in ENTRIES.values()):
        lines += [f"## {group}", ""]
        for entry in ENTRIES.values():
            if entry.group == group:
                lines += [f"({entry.code.lower()})=", f"### {entry.code}: {entry.title}", "", entry.text, ""]
    return "\n".join(lines)


# --- files of the repository -----------------------------------------------------------------------------------------

_PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def repository_file(name: str) -> str:
    """A page of the repository's root in ``development/``, with its links as seen from there."""

    def moved(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        if path.startswith("docs/"):
            return f"](../{path.removeprefix('docs/')}{anchor})"
        return f"]({_PAGES[path]}{anchor})" if path in _PAGES else f"](../../{path}{anchor})"

    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)", moved, text)


GENERATORS: dict[str, Callable[..., str]] = {
    "api": api,
    "options": options,
    "modes": modes,
    "command-line": command_line,
    "pass-table": pass_table,
    "pass-list": pass_list,
    "rules": rule_table,
    "operations": operation_list,
    "errors": error_list,
    "file": repository_file,
}
