"""Measures how easily a stranger finds a way through the tree: ``make house``."""

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = ("mirrorc", "passes", "runtime")
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 500, 50
VAGUE_NAMES = ("found", "own", "given", "told", "said", "one", "what", "kept")
RELATIVE_WORDS = {"which", "that", "what", "who", "whose", "whom", "whatever", "whichever", "whoever", "where"}


@dataclass(frozen=True)
class Source:
    """A Python file of the tree; ``name`` is its path, from the root of the repository."""

    name: str
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @property
    def folder(self) -> str:
        return self.name.rpartition("/")[0]


def sources(folders: tuple[str, ...]) -> list[Source]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    return [Source(name, text, ast.parse(text)) for name, text in texts]


def functions(source: Source) -> Iterator[tuple[str, int]]:
    """The name and the number of lines of each function, docstrings and comments included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{source.name}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def docstrings(source: Source) -> Iterator[str]:
    """Docstrings of modules, classes and functions, and texts below assignments."""
    for node in ast.walk(source.tree):
        for child in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield child.value.value


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z][A-Za-z'-]*", text)


def name_tokens(source: Source) -> list[str]:
    """Words of the names in the code, such as ``own`` and ``shard`` of ``own_shard``."""
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return [part for token in tokens if token.type == tokenize.NAME for part in token.string.split("_") if part]


def importers(library: list[Source]) -> Counter[str]:
    counts: Counter[str] = Counter()
    modules = {module_name(source) for source in library}
    for source in library:
        imported = set()
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        counts.update((imported & modules) - {module_name(source)})
    return counts


def module_name(source: Source) -> str:
    parts = source.name.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "mirrorc" else ["mirrorc", *parts])


def report() -> Iterator[str]:
    library, tests = sources(LIBRARY), sources(("tests",))
    yield f"library: {sum(s.num_lines for s in library):,} lines in {len(library)} files"
    yield f"tests: {sum(s.num_lines for s in tests):,} lines in {len(tests)} files"
    per_folder = Counter(s.folder for s in library if not s.name.endswith("/__init__.py"))
    largest = ", ".join(f"{folder} {count}" for folder, count in per_folder.most_common(3))
    yield f"files a folder: median {statistics.median(per_folder.values()):.0f}, most {largest}; mirrorc/ {per_folder['mirrorc']}"
    long_files = [f"{s.name} {s.num_lines}" for s in library if s.num_lines > MOST_LINES_OF_A_FILE]
    median = statistics.median(s.num_lines for s in library)
    yield f"lines a file: median {median:.0f}, over {MOST_LINES_OF_A_FILE}: {len(long_files)} ({', '.join(long_files)})"
    long_functions = [name for s in library for name, lines in functions(s) if lines > MOST_LINES_OF_A_FUNCTION]
    yield f"functions over {MOST_LINES_OF_A_FUNCTION} lines: {len(long_functions)}"
    pages = {p.relative_to(ROOT).as_posix(): len(p.read_text(encoding="utf-8").split()) for p in markdown()}
    yield f"words of Markdown: {sum(pages.values()):,} (README {pages['README.md']:,}, ARCHITECTURE {pages['ARCHITECTURE.md']:,})"
    prose = [word.lower() for s in library for text in docstrings(s) for word in words(text)]
    lines = sum(s.num_lines for s in library)
    yield f"words of docstrings: {len(prose):,}, {1000 * len(prose) / lines:,.0f} per 1,000 lines"
    yield f"relative words in docstrings: {100 * sum(word in RELATIVE_WORDS for word in prose) / len(prose):.1f} per 100"
    names = Counter(name for s in library for name in name_tokens(s))
    each = {name: 100_000 * names[name] / names.total() for name in VAGUE_NAMES}
    listed = ", ".join(f"{name} {count:.0f}" for name, count in each.items())
    yield f"vague names per 100,000: {listed}; the first five {sum(list(each.values())[:5]):.0f}"
    same = Counter(Path(s.name).name for s in library if not s.name.endswith(("/__init__.py", "/__main__.py")))
    repeated = sorted(name for name, count in same.items() if count > 1)
    yield f"file names that occur more than once: {len(repeated)} ({', '.join(repeated)})"
    counts = importers(library)
    single = [s for s in library if counts[module_name(s)] == 1 and not s.name.endswith("/__init__.py")]
    yield f"files with one importer: {len(single)} of {len(library)}"


def markdown() -> list[Path]:
    hidden = {path for path in ROOT.iterdir() if path.name.startswith(".") or path.name in ("build", "out")}
    return [path for path in ROOT.rglob("*.md") if not hidden & {*path.parents}]


if __name__ == "__main__":
    sys.stdout.write("\n".join(report()) + "\n")
