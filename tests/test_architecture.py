"""Which file may know what, how long files are and what they are called: loops over the source, parsed once."""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parent.parent
PACKAGES = {"mirrorc": ROOT / "mirrorc", "mirrorc.passes": ROOT / "passes", "mirrorc.runtime": ROOT / "runtime"}

# A file may import from its own folder and from those further down in this list.
ORDER = (
    "mirrorc/__main__",
    "mirrorc/cli",
    "mirrorc/testing",
    "mirrorc/integrations",
    "mirrorc/__init__",
    "mirrorc/interface",
    "mirrorc/api",
    "mirrorc/checkpoints",
    "mirrorc/step",
    "mirrorc/calls",
    "mirrorc/compilation",
    "mirrorc/coordination",  # between workers
    "runtime/execution",
    "mirrorc/options",
    "mirrorc/all_reduce_algorithms",
    "mirrorc/loss_check",
    "mirrorc/capture",
    "passes",
    "mirrorc/verifier",
    "mirrorc/report",
    "mirrorc/comparison",
    "mirrorc/dumps",
    "runtime/workers",
    "runtime/memory",
    "runtime/codegen",
    "runtime/communication",
    "runtime/profiling",
    "runtime/state",
    "runtime/devices",
    "mirrorc/cluster",
    "mirrorc/serialization",
    "mirrorc/printing",
    "mirrorc/analysis",
    "mirrorc/pipeline",
    "mirrorc/user",
    "mirrorc/collectives",
    "mirrorc/ir",
    "mirrorc/custom_ops",
    "mirrorc/compression",
    "mirrorc/packing",
    "mirrorc/messages",
    "mirrorc/torch_internals",
    "mirrorc/errors",
)

# The parts of the top level know passes and runtime; neither of the two knows the other or what is above it.
NEVER = {"passes": ("runtime",), "runtime": ("passes",)}

# What imports against the order, inside functions only, and why. Each entry is used.
AGAINST_THE_ORDER = {
    (
        "mirrorc.ir.program",
        "mirrorc/printing",
    ): "program.to_text() and print(program) are where users look for the text",
    ("mirrorc.ir.program", "mirrorc/serialization"): "program.save() and Program.load() are where users look for files",
}

MOST_LINES = 500
MOST_FILES = 20  # of a folder
MOST_FILES_AT_THE_TOP = 10  # of mirrorc/ itself

# Files of more lines, and why they are not two.
LONG_FILES = {
    "mirrorc/ir/ops.py": "the table of all operations",
}

NO_NOUNS = {"utils", "util", "misc", "common", "helpers", "helper", "new", "v2"}

PRIVATE_ATTRIBUTES = ("_opt", "_optimizer_step", "_schema", "_cdata")
MAY_BE_PRIVATE = "mirrorc/torch_internals/"


@dataclass(frozen=True)
class Import:
    """An import statement's name, and whether it runs when the file is loaded."""

    name: str
    at_load: bool


@dataclass(frozen=True)
class Source:
    """A file of the packages: where it is, what it is imported as, and what it says."""

    name: str
    module: str
    text: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        parts = self.name.removesuffix(".py").split("/")
        return parts[0] if parts[0] == "passes" or len(parts) == 1 else "/".join(parts[:2])

    @property
    def leaf_folder(self) -> str:
        return self.name.rpartition("/")[0]


@functools.cache
def sources() -> dict[str, Source]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            module = ".".join((package, *parts)).removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            found[module] = Source(path.relative_to(ROOT).as_posix(), module, text, ast.parse(text, str(path)))
    return found


def imports(source: Source) -> Iterator[Import]:
    """What a file imports, wherever in it, those under TYPE_CHECKING and within functions too."""

    def within_node(node: ast.AST, at_load: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, at_load) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{source.name} imports relatively"
                yield from (Import(f"{child.module}.{alias.name}", at_load) for alias in child.names)
            is_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            yield from within_node(child, at_load and not is_later)

    return within_node(source.tree, True)


def module_of(name: str) -> str | None:
    """The module of ours that a name is, or is in."""
    while name and name not in sources():
        name = name.rpartition(".")[0]
    return name or None


@functools.cache
def edges() -> dict[tuple[str, str], bool]:
    """Which module of ours imports which other, and whether it does so when it is loaded."""
    found: dict[tuple[str, str], bool] = {}
    for module, source in sources().items():
        for one in imports(source):
            other = module_of(one.name)
            if other is not None and other != module:
                found[module, other] = found.get((module, other), False) or one.at_load
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def refuse(wrong: list[str]) -> None:
    assert not wrong, "\n" + "\n".join(wrong)


def test_there_are_files_to_look_at() -> None:
    names = {source.name for source in sources().values()}
    assert {
        "mirrorc/api.py",
        "passes/replicas/replicate.py",
        "runtime/execution/executor.py",
        "mirrorc/ir/ops.py",
    } <= names
    assert len(edges()) > 300


def test_every_folder_has_its_place_in_the_order() -> None:
    folders = {source.folder for source in sources().values() if source.name != "runtime/__init__.py"}
    refuse([f"{folder} is not in ORDER: what does it stand on?" for folder in sorted(folders - set(ORDER))])


def test_imports_point_down() -> None:
    place = {folder: i for i, folder in enumerate(ORDER)}
    wrong, used = [], set()
    for (module, other), at_load in edges().items():
        above, below = sources()[module].folder, sources()[other].folder
        crosses = below.split("/")[0] in NEVER.get(above.split("/")[0], ())
        if above == below or (place.get(above, 0) < place.get(below, len(ORDER)) and not crosses):
            continue
        if (module, below) in AGAINST_THE_ORDER and not at_load:
            used.add((module, below))
            continue
        wrong.append(f"{sources()[module].name} imports {other}: {below} is not below {above}")
    refuse(wrong + [f"{entry} is no exception any more" for entry in AGAINST_THE_ORDER.keys() - used])


def test_no_file_imports_itself_through_others() -> None:
    """There is no circle of files but those that the exceptions above close."""
    graph = nx.DiGraph()
    graph.add_edges_from(edge for edge in edges() if (edge[0], sources()[edge[1]].folder) not in AGAINST_THE_ORDER)
    refuse([" and ".join(sorted(part)) for part in nx.strongly_connected_components(graph) if len(part) > 1])


def test_no_folder_imports_itself_through_others() -> None:
    """Folders within folders have an order, too; the files at the top of a package are by themselves."""

    def unit(source: Source) -> str:
        return source.leaf_folder if source.leaf_folder not in ("mirrorc", "passes", "runtime") else source.name

    graph = nx.DiGraph()
    for module, other in edges():
        if (module, sources()[other].folder) not in AGAINST_THE_ORDER:
            graph.add_edge(unit(sources()[module]), unit(sources()[other]))
    refuse([" and ".join(sorted(part)) for part in nx.strongly_connected_components(graph) if len(part) > 1])


def test_nobody_imports_a_second_copy_from_the_root() -> None:
    wrong = []
    for source in sources().values():
        names = {one.name for one in imports(source)}
        wrong += [
            f"{source.name} imports {name}" for name in names if within(name, "passes") or within(name, "runtime")
        ]
    refuse(wrong)


def test_private_names_of_torch_stay_in_one_folder() -> None:
    wrong = []
    for source in sources().values():
        if source.name.startswith(MAY_BE_PRIVATE):
            continue
        names = {*(one.name for one in imports(source)), *dotted_names(source)}
        found = {name for name in names if is_private(name)}
        attributes = attributes_of(source) - own_attributes(source)
        found |= {
            f".{name}"
            for name in attributes
            if name.startswith(PRIVATE_ATTRIBUTES) and not name.startswith(("_optimizers", "_options"))
        }
        wrong += [f"{source.name} uses {name}: move it to {MAY_BE_PRIVATE}" for name in sorted(found)]
    refuse(wrong)


def is_private(name: str) -> bool:
    """Whether a dotted name is private to torch; operators are public, whatever their names begin with."""
    first, *others = name.split(".")
    is_operator = others[:1] == ["ops"]
    return first == "torch" and not is_operator and any(re.match("_[^_]", part) for part in others)


def dotted_names(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            parts, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield ".".join([inner.id, *reversed(parts)])


def attributes_of(source: Source) -> set[str]:
    found = {node.attr for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr") and len(node.args) > 1:
            name = node.args[1]
            found |= {str(name.value)} if isinstance(name, ast.Constant) else set()
    return found


def own_attributes(source: Source) -> set[str]:
    """Attributes that a file sets on ``self``: mirrorc's own, whatever they are called."""
    return {
        node.attr
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_files_are_nouns_that_say_what_they_are_for() -> None:
    wrong = []
    for source in sources().values():
        words = {word for part in source.module.split(".") for word in part.split("_")}
        wrong += [f"{source.name}: {word} says nothing" for word in words & NO_NOUNS]
        wrong += [] if ast.get_docstring(source.tree) else [f"{source.name} has no docstring"]
    refuse(wrong)


def test_files_and_folders_are_of_a_size_to_read() -> None:
    """Files are cohesive rather than many: those of more lines are listed above, with a reason."""
    lines = {source.name: source.text.count("\n") for source in sources().values()}
    long_files = {name for name, count in lines.items() if count > MOST_LINES}
    wrong = [f"{name} has {lines[name]} lines: split it" for name in sorted(long_files - LONG_FILES.keys())]
    wrong += [f"{name} is not long any more" for name in LONG_FILES.keys() - long_files]
    files = Counter(source.leaf_folder for source in sources().values() if not source.name.endswith("/__init__.py"))
    for folder, count in files.items():
        most = MOST_FILES_AT_THE_TOP if folder == "mirrorc" else MOST_FILES
        wrong += [f"{folder}/ has {count} files: make folders of it"] if count > most else []
    refuse(wrong)


def test_passes_keep_no_state_and_read_no_environment() -> None:
    wrong = []
    for source in sources().values():
        if source.folder != "passes":
            continue
        wrong += [f"{source.name} imports os" for one in imports(source) if within(one.name, "os")]
        for node in ast.walk(source.tree):
            wrong += [f"{source.name} has globals"] if isinstance(node, ast.Global | ast.Nonlocal) else []
        for node in source.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict | ast.List | ast.Set):
                wrong += [f"{source.name} has a mutable global"] if not source.name.endswith("/__init__.py") else []
    refuse(wrong)


def test_folders_of_tests_are_folders_of_the_packages() -> None:
    of_no_folder = {"docs", "end_to_end", "support", "golden", "zoo"}
    tests = ROOT / "tests"
    wrong = []
    for folder in sorted({path.parent.relative_to(tests) for path in tests.rglob("test_*.py")} - {Path()}):
        if folder.parts[0] in of_no_folder:
            continue
        beside = folder.parts[0] in ("passes", "runtime", "benchmarks")
        if not (ROOT / folder if beside else ROOT / "mirrorc" / folder).is_dir():
            wrong.append(f"tests/{folder.as_posix()} mirrors no folder")
    refuse(wrong)
