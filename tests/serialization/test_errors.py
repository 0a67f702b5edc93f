import builtins
import contextlib
import copy
import gzip
import itertools
import json
import operator
import random
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_programs import called, one_call, with_graph
from tiny_programs import SMALL_BUCKETS, handmade
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from typer.testing import CliRunner

from mirrorc.cli import app
from mirrorc.errors import MirrorcError
from mirrorc.ir.nodes import replica_of
from mirrorc.ir.program import Program
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.serialization import VERSION, program_file
from mirrorc.verifier.verifier import verify

aten = torch.ops.aten


def late_use() -> Program:
    program = one_call(aten.relu.default)
    x, node, _ = program.mirrored_graph.nodes
    with program.mirrored_graph.inserting_after(x):
        program.mirrored_graph.create_node("call_function", aten.neg.default, (node,), name="early")
    return program


def of_op(op: str) -> Program:
    graph = fx.Graph()
    graph.output(graph.create_node(op, "thing"))
    return with_graph(graph)


def symbolic_value() -> torch.Tensor:
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        return torch.empty(shape_env.create_unbacked_symint())


def sparse_value() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3, 3).to_sparse()


UNSAVABLE: dict[str, tuple[Callable[[], Program], str]] = {
    "function": (
        lambda: one_call(subprocess.run),
        "node 'run' of the mirrored graph: it calls <function run.*; register it as an operator .torch.library",
    ),
    "builtin": (lambda: one_call(operator.add), "it calls <built-in function add>"),
    "function of ours": (lambda: one_call(replica_of), "it calls <function replica_of"),
    "packet": (lambda: one_call(aten.add), "it calls <OpOverloadPacket"),
    "method": (lambda: of_op("call_method"), "programs have no call_method"),
    "attribute": (lambda: of_op("get_attr"), "programs have no get_attr"),
    "module": (lambda: of_op("call_module"), "it calls the module 'thing', which is no region of the program"),
    "later node": (late_use, "node 'early' of the mirrored graph: it uses relu_default, which comes later"),
    "other graph": (
        lambda: one_call(aten.relu.default, (fx.Graph().placeholder("y"),)),
        "it uses y, .* in another graph",
    ),
    "argument": (lambda: one_call(aten.relu.default, (range(3),)), r"an argument is range\(0, 3\) of type range"),
    "key": (lambda: one_call(aten.relu.default, ({1.5: 1},)), "a dict has the key 1.5"),
    "real value": (lambda: one_call(aten.relu.default, val=torch.zeros(2)), "its value is of type Tensor"),
    "layout": (lambda: one_call(aten.relu.default, val=sparse_value()), "its value has the layout torch.sparse_coo"),
    "symbolic": (
        lambda: one_call(aten.relu.default, val=symbolic_value()),
        "its value has the symbolic shape .*, of sizes that follow from values",
    ),
    "table": (lambda: handmade().evolve(shard_of_replica=(0, 0.5)), r"shard_of_replica\[1\] is 0.5, not of type int"),
}


@pytest.mark.parametrize("case", UNSAVABLE)
def test_what_cannot_be_saved_is_refused_and_the_file_that_was_there_stays(case: str, tmp_path: Path) -> None:
    make, message = UNSAVABLE[case]
    path = tmp_path / "program.json"
    path.write_text("before")
    with pytest.raises(ValueError, match=f"cannot save the program to .*program.json\n  why:  .*({message})"):
        make().save(path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(IsADirectoryError, match=r"Is a directory: '[^']*/folder'$"):
        handmade().save(tmp_path / "folder")
    with pytest.raises(OSError, match="file"):
        handmade().save(tmp_path / "file" / "program.json")
    assert {path.name for path in tmp_path.rglob("*")} == {"folder", "file"}


def test_folders_that_are_missing_are_made(tmp_path: Path) -> None:
    handmade().save(tmp_path / "a" / "b" / "program.json")
    assert Program.load(tmp_path / "a" / "b" / "program.json").stage is handmade().stage


def data_of(program: Program, directory: Path) -> Any:
    program.save(directory / "program.json")
    return json.loads((directory / "program.json").read_bytes())


def load_data(data: Any, directory: Path) -> Program:
    (directory / "program.json").write_text(json.dumps(data))
    return Program.load(directory / "program.json")


def test_a_file_that_is_not_there_is_pythons_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Program.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("name", ["program.json", "program.json.gz"])
def test_a_file_that_is_cut_off_anywhere_is_refused(name: str, tmp_path: Path) -> None:
    handmade().save(tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    for length in range(0, len(whole) - 1, 97):
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises(
            ValueError, match=f"(?s)cannot load .*{name}: it is not JSON, or not all of it.*Program.save"
        ):
            Program.load(tmp_path / name)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"PK\x03\x04", b"[" * 100_000, b"def f(): pass", b"\x1f\x8b\x08"])
def test_what_is_not_json_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "program.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"program\.json: it is not JSON"):
        Program.load(tmp_path / "program.json")


@pytest.mark.parametrize("data", [None, [], 3, {}, {"format": "other"}, {"version": 1}])
def test_what_is_no_program_is_refused(data: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"program.json: it is JSON, but no mirrorc program\n  fix:  give a file that Program.save"
    ):
        load_data(data, tmp_path)


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    data = {"format": "mirrorc program", "version": VERSION + 1, "mirrorc": "7.5", "something": "else"}
    with pytest.raises(
        ValueError, match=rf"version {VERSION + 1} .* up to {VERSION}\n  fix:  use mirrorc 7.5, .* or later"
    ):
        load_data(data, tmp_path)


def test_an_earlier_version_is_refused(tmp_path: Path) -> None:
    data = {"format": "mirrorc program", "version": VERSION - 1, "mirrorc": "0.1", "something": "else"}
    with pytest.raises(
        ValueError, match=rf"version {VERSION - 1} .* reads version {VERSION}\n.*\n  or:   use mirrorc 0.1"
    ):
        load_data(data, tmp_path)


UNKNOWN = (
    "gone.scale.default", "aten.mm.gone", "aten.mm", "ops.gone", "ops.replica_of", "ops.Any", "operator.add", "os.system",
    "load_library.__func__.x", "aten.__class__.mro", "higher_order.cond", "", "...", "aten.m\x00m.default", "ä.ö.ü",
    "seeded aten.mm.default", "seeded mirrorc.seeded_mask.default", "seeded ops.read", "seeded aten.bernoulli_.float",
)  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_operator_that_is_not_known_here_is_named(name: str, tmp_path: Path) -> None:
    data = data_of(one_call(aten.relu.default), tmp_path) | {"torch": "9.9.9"}
    data["tables"]["operators"] = [name]
    with pytest.raises(ValueError) as caught:
        load_data(data, tmp_path)
    text = str(caught.value)
    assert (
        "program.json\n  why:  " in text
        and f"the operator {name!r} is unknown here\n  fix:  import the library" in text
    )
    assert "first; on the command line, --import MODULE\n  or:   use torch" in text
    assert str(caught.value).endswith(f"use torch 9.9.9, which has written the file; this is torch {torch.__version__}")
    with pytest.raises(ValueError) as caught:
        load_data(data | {"torch": str(torch.__version__)}, tmp_path)
    assert str(caught.value).endswith("on the command line, --import MODULE")


def test_operators_of_the_users_are_found(tmp_path: Path) -> None:
    library = torch.library.Library("saved_programs", "DEF")
    library.define("halve(Tensor x) -> Tensor")
    target = torch.ops.saved_programs.halve.default
    assert called(load_data(data_of(one_call(target), tmp_path), tmp_path)).target is target


Edit = Callable[[dict[str, Any]], Any]


def with_first_node(edit: Callable[[list[Any]], Any]) -> Edit:
    return lambda data: edit(data["program"]["graph"][0])


DAMAGE: dict[str, tuple[Edit, str]] = {
    "no key": (lambda d: d.pop("torch"), "the file has no 'torch'"),
    "no field": (lambda d: d["program"].pop("buckets"), "the program has no 'buckets'"),
    "unknown field": (lambda d: d["program"].update(extra=1), "the program has 'extra', which is unknown"),
    "no table": (lambda d: d["tables"].pop("lines"), "tables has no 'lines'"),
    "version": (lambda d: d.update(version="1"), "version is '1', not of type int"),
    "version 0": (lambda d: d.update(version=0), "there is no version 0"),
    "stage": (lambda d: d["program"].update(stage="DONE"), "there is no stage 'DONE'"),
    "type": (
        lambda d: d["program"]["variables"]["fc1.weight"].update(shape=[4, "2"]),
        r"variables\['fc1.weight'\].shape\[1\] is '2', not of type int",
    ),
    "dtype": (lambda d: d["program"]["buckets"][0].update(dtype="f31"), r"there is no buckets\[0\].dtype 'f31'"),
    "device": (lambda d: d["program"]["devices"][0].update(torch_device="abacus"), "torch_device 'abacus'"),
    "later node": (
        with_first_node(lambda n: n[2].append([9])),
        "node 0 of the mirrored graph: there is no earlier node 9",
    ),
    "itself": (with_first_node(lambda n: n[2].append([0])), "node 0 of the mirrored graph: there is no earlier node 0"),
    "operator": (with_first_node(lambda n: n.__setitem__(1, 99)), "there is no operator 99"),
    "method": (with_first_node(lambda n: n.__setitem__(1, ["call_method", "x"])), "is nothing to call"),
    "module": (with_first_node(lambda n: n.__setitem__(1, ["call_module", "x"])), "is nothing to call"),
    "name": (with_first_node(lambda n: n.__setitem__(0, "a b")), "its name is 'a b', not an identifier"),
    "short node": (with_first_node(lambda n: n.pop()), "is no node"),
    "argument": (with_first_node(lambda n: n[2].append(["set", 1])), "stands for no argument"),
    "slice": (with_first_node(lambda n: n[2].append(["slice", 1])), "stands for no argument"),
    "object": (with_first_node(lambda n: n[2].append({"a": 1})), "stands for no argument"),
    "nesting": (with_first_node(lambda n: n[2].append(nested(900))), "recursion"),
    "meta": (with_first_node(lambda n: n[4].update(other=1)), "is no meta"),
    "two names": (
        lambda d: d["program"]["graph"][1].__setitem__(0, d["program"]["graph"][0][0]),
        "the name '.*' is taken",
    ),
    "no output": (lambda d: d["program"]["graph"].pop(), "the mirrored graph does not end with its output"),
    "tensor": (lambda d: d["tables"]["types"][0].update(offset=-9), "there is no tensor of TensorType"),
    "module table": (lambda d: d["tables"]["modules"].append(["x"]), "is no module"),
    "line": (lambda d: d["tables"]["lines"].append("nowhere"), "'nowhere' is no line of a source file"),
    "operator's name": (lambda d: d["tables"]["operators"].append(3), "an entry of operators is 3, not of type str"),
}


def nested(depth: int) -> Any:
    return ["list", nested(depth - 1)] if depth else 1


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_and_named(case: str, tmp_path: Path) -> None:
    edit, message = DAMAGE[case]
    data = data_of(run_passes(handmade(), default_pipeline()[:-1]), tmp_path)
    edit(data)
    with pytest.raises(
        ValueError,
        match=f"cannot load .*program.json, it is damaged\n  why:  .*{message}.*\n  fix:  save the program again",
    ):
        load_data(data, tmp_path)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


@pytest.mark.slow
def test_whatever_is_changed_in_a_file_it_is_loaded_or_refused(tmp_path: Path) -> None:
    whole = data_of(run_passes(handmade(2, buffer=True), default_pipeline(**SMALL_BUCKETS)), tmp_path)
    generator = random.Random(0)
    wrong: list[Any] = [None, True, -1, 10**30, 1.5, "", "x", [], [0], [[]], ["list"], ["pending", 1], {}, {"x": 0}]
    loaded = refused = 0
    for path in generator.sample([path for path in places(whole) if path], 300):
        data = copy.deepcopy(whole)
        holder = data
        for key in path[:-1]:
            holder = holder[key]
        if generator.random() < 0.3:
            del holder[path[-1]]
        else:
            holder[path[-1]] = generator.choice(wrong)
        try:
            load_data(data, tmp_path).num_replicas  # noqa: B018
            loaded += 1
        except ValueError as error:
            assert "program.json" in str(error) and len(str(error)) < 1000
            refused += 1
    assert refused > 150 and loaded > 15


PAYLOADS = (
    "x=__import__('builtins').__dict__.update(was_executed=1)",
    "x):\n    pass\n__import__('builtins').was_executed = 1\ndef forward(self",
    "__import__('builtins').__dict__.update(was_executed=1)",
    'x"); __import__("builtins").__dict__.update(was_executed=1); ("',
)


def with_code(data: Any, path: tuple[Any, ...], code: str) -> Any:
    """A file with code in place of one string: a value, or the key that is the path's end."""
    data = copy.deepcopy(data)
    holder, last = at(data, path[:-1]), path[-1]
    if isinstance(holder[last], str):
        holder[last] = code
    elif isinstance(last, str):
        holder[code] = holder.pop(last)
    return data


@pytest.mark.slow
@pytest.mark.parametrize("payloads_at_a_place", [1, pytest.param(len(PAYLOADS), marks=pytest.mark.slow)])
def test_nothing_in_a_file_is_executed(tmp_path: Path, payloads_at_a_place: int) -> None:
    """Any string may be code: torch.fx writes a graph's names, targets and keywords into a function as they are."""
    whole = data_of(run_passes(handmade(1), default_pipeline()), tmp_path)
    loaded, payloads = 0, itertools.cycle(PAYLOADS)
    for path in places(whole):
        if path and any(isinstance(part, str) for part in (path[-1], at(whole, path))):
            for code in itertools.islice(payloads, payloads_at_a_place):
                with contextlib.suppress(ValueError, KeyError):
                    load_data(with_code(whole, path, code), tmp_path).to_text(regions=True)
                    loaded += 1
                assert not hasattr(builtins, "was_executed"), (path, code)
    assert loaded > 50


ESCAPES = "\x1b]0;title\x07\x1b[2J", "\x9b2J \u202eevil \ud800", "a\rb\x08\x7f"


@pytest.mark.slow
def test_nothing_in_a_file_reaches_a_terminal_as_a_control_character(tmp_path: Path) -> None:
    """Neither in a printed program nor in a message about one."""
    whole = data_of(run_passes(handmade(1, buffer=True), default_pipeline()), tmp_path)
    whole["program"]["remarks"] = [{"text": "a remark", "by": "", "is_kept": True}]
    whole["tables"]["lines"] = ["model.py:3  return x"]
    whole["program"]["device_graphs"]["cpu:0"]["nodes"][0][4]["line"] = 0
    shown, said, escapes = 0, 0, itertools.cycle(ESCAPES)
    for path in places(whole):
        if path and any(isinstance(part, str) for part in (path[-1], at(whole, path))):
            try:
                program = load_data(with_code(whole, path, f"x:1  {next(escapes)}"), tmp_path)
                text = program.to_text(regions=True, slots=True)
                shown += "\\x" in text
                verify(program)
            except (ValueError, KeyError, MirrorcError) as error:
                text = str(error)
                said += "\\x" in text
            assert all(line.isprintable() for line in text.split("\n")), (path, text)
    assert shown >= 3 and said > 50


def test_the_command_line_shows_no_control_characters(tmp_path: Path) -> None:
    data = data_of(handmade(1), tmp_path)
    data["tables"]["lines"] = ["model.py:3  x\x1b[2J"]
    data["program"]["shard_graphs"][0][0][4]["line"] = 0
    (tmp_path / "evil.json").write_text(json.dumps(data))
    (tmp_path / "evil.txt").write_text("# mirrorc \x1b[2J\n")
    (tmp_path / "later.json").write_text(json.dumps({**data, "version": 99, "mirrorc": "\x1b[2J"}))
    for command in (["show", "evil.json"], ["show", "later.json"], ["verify", "evil.json", "later.json"]):
        done = CliRunner().invoke(app, [command[0], *(str(tmp_path / name) for name in command[1:])])
        assert "\x1b" not in done.output and done.output
    done = CliRunner().invoke(app, ["diff", str(tmp_path / "evil.json"), str(tmp_path / "evil.txt")])
    assert "\x1b" not in done.output and done.output


def test_a_file_that_decompresses_to_much_more_than_any_program_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_file, "_ALWAYS_READ", 2**20)
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b" " * 2**20) * 200)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"(?s)bomb.json.gz: .*decompresses to more than 2\d MiB.*give a file"):
            Program.load(bomb)
        assert tracemalloc.get_traced_memory()[1] < 2**26, "no more of it is decompressed than a program may have"
    finally:
        tracemalloc.stop()


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data
