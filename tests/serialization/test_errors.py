import builtins
import contextlib
import functools
import gzip
import itertools
import json
import operator
import re
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from saved_programs import called, one_call, with_graph
from tiny_programs import SMALL_BUCKETS, handmade
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from typer.testing import CliRunner

import mirrorc
from mirrorc.cli import app
from mirrorc.errors import MirrorcError
from mirrorc.ir.nodes import replica_of
from mirrorc.ir.program import Program, Stage
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
    path = tmp_path / "program.mirror"
    path.write_text("before")
    with pytest.raises(ValueError, match=f"cannot save the program to .*program.mirror\n  why:  .*({message})"):
        make().save(path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(IsADirectoryError, match=r"Is a directory: '[^']*/folder'$"):
        handmade().save(tmp_path / "folder")
    with pytest.raises(OSError, match="file"):
        handmade().save(tmp_path / "file" / "program.mirror")
    assert {path.name for path in tmp_path.rglob("*")} == {"folder", "file"}


def test_folders_that_are_missing_are_made(tmp_path: Path) -> None:
    handmade().save(tmp_path / "a" / "b" / "program.mirror")
    assert Program.load(tmp_path / "a" / "b" / "program.mirror").stage is handmade().stage


def text_of(program: Program) -> str:
    return program.to_text(complete=True)


def load_text(text: str, directory: Path) -> Program:
    (directory / "program.mirror").write_text(text, encoding="utf-8", errors="surrogateescape")
    return Program.load(directory / "program.mirror")


def replaced(text: str, old: str, new: str) -> str:
    assert old in text, (old, text)
    return text.replace(old, new, 1)


def test_a_file_that_is_not_there_is_pythons_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Program.load(tmp_path / "nowhere.mirror")


@pytest.mark.parametrize("name", ["program.mirror", "program.mirror.gz"])
def test_a_file_that_is_cut_off_anywhere_is_refused(name: str, tmp_path: Path) -> None:
    handmade().save(tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    for length in range(0, len(whole) - 1, 97):
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"(?s)cannot read .*{name}.*fix:  "):
            Program.load(tmp_path / name)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x1f\x8b\x08"])
def test_what_is_not_text_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "program.mirror").write_bytes(content)
    with pytest.raises(ValueError, match=r"program\.mirror: it is no text, or not all of it"):
        Program.load(tmp_path / "program.mirror")


@pytest.mark.parametrize("text", ["", "PK\x03\x04", "[" * 100_000, "def f(): pass", "{}"])
def test_what_is_no_program_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"program.mirror: it is no program\n  why:  line 1 is .*\n  fix:  give a file that"
    ):
        load_text(text, tmp_path)


def test_a_short_form_is_refused_with_the_way_to_a_complete_one() -> None:
    for text in (handmade().to_text(), handmade().to_text(regions=True, fold=False)):
        with pytest.raises(
            ValueError, match=r"(?s)it is the short form of a program.*to_text\(complete=True\).*--complete"
        ):
            mirrorc.parse(text)
    with pytest.raises(TypeError, match="the text is a bytes, not a string"):
        mirrorc.parse(b"")  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [VERSION + 1, VERSION - 1])
def test_another_version_is_refused(version: int, tmp_path: Path) -> None:
    text = re.sub(r"form \d+ · mirrorc \S+", f"form {version} · mirrorc 7.5", text_of(handmade()), count=1)
    again = "" if version > VERSION else "\n  or:   save the program again"
    with pytest.raises(
        ValueError, match=rf"version {version} .* reads version {VERSION}\n  fix:  use mirrorc 7.5.*{again}"
    ):
        load_text(text, tmp_path)


UNKNOWN = (
    "gone.scale.default", "aten.mm.gone", "aten.mm", "ops.read", "replica_of", "Any", "operator.add", "os.system",
    "load_library.__func__.x", "aten.__class__.mro", "higher_order.cond", "__import__", "seeded.aten.mm.default",
    "seeded.mirrorc.seeded_mask.default", "seeded.read", "seeded.aten.bernoulli_.float", "eval", "getattr",
)  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_operator_that_is_not_known_here_is_named(name: str, tmp_path: Path) -> None:
    text = replaced(text_of(one_call(aten.relu.default)), X, f"{name}(x)")
    other = re.sub(r"torch \S+", "torch 9.9.9", text, count=1)
    with pytest.raises(ValueError) as caught:
        load_text(other, tmp_path)
    message = str(caught.value)
    assert "program.mirror, line " in message and f"the operator {name!r} is unknown here\n" in message
    assert f" = {name}(x)\n" in message and "\n  fix:  import the library" in message
    assert "first; on the command line, --import MODULE\n  or:   use torch 9.9.9, which has written it" in message
    with pytest.raises(ValueError) as caught:
        load_text(text, tmp_path)
    assert str(caught.value).endswith("on the command line, --import MODULE")


def test_operators_of_the_users_are_found(tmp_path: Path) -> None:
    library = torch.library.Library("saved_programs", "DEF")
    library.define("halve(Tensor x) -> Tensor")
    library.define("halve.from(Tensor x) -> Tensor")  # a keyword of Python
    for target in (torch.ops.saved_programs.halve.default, getattr(torch.ops.saved_programs.halve, "from")):
        assert called(load_text(text_of(one_call(target)), tmp_path)).target is target


X = "aten.relu.default()"
DAMAGE: dict[str, tuple[str, str, str]] = {
    "no table": ("stage = ", "# ", "there is no table stage"),
    "unknown table": ("stage = ", "extra = 3\nstage = ", "a program has no table extra, only stage, devices"),
    "two tables": ("stage = ", "stage = CAPTURED\nstage = ", "there are two tables stage"),
    "stage": ("stage = REPLICATED", "stage = DONE", "stage is DONE, not one of CAPTURED"),
    "type": ("shape=[4, 2]", 'shape=[4, "2"]', r"variables\['fc1.weight'\].shape\[1\] is '2', not of type int"),
    "dtype": ("dtype=f32", "dtype=f31", r"dtype is f31, not one of "),
    "device": ('torch_device="cpu"', 'torch_device="abacus"', "there is no device 'abacus'"),
    "no field": ("role=PARAMETER,", "", "lacks role"),
    "unknown field": ("role=PARAMETER", "role=PARAMETER, rolle=1", "Variable has no 'rolle', only name, shape"),
    "two keys": ('"fc2.weight": Variable', '"fc1.weight": Variable', "variables has a key twice"),
    "no expression": ("stage = REPLICATED", "stage = (", "this is no expression"),
    "later value": (X, "aten.relu.default(later)", "no line above gives later"),
    "itself": (X, "aten.relu.default(relu_default)", "no line above gives relu_default"),
    "method": (X, "x.numpy()", "the operator 'x.numpy' is unknown here"),
    "module": (X, "region.fwd_0(x)", "only the graphs of devices call regions so"),
    "name": ("relu_default: ", "relu default: ", "a statement is NAME: TYPE = OPERATION"),
    "keyword": ("relu_default: ", "class: ", "its name is 'class', not an identifier"),
    "no call": (X, "x", "here comes a call"),
    "set": (X, "aten.relu.default({1})", r"\{1\} stands for no argument"),
    "slice": (X, "aten.relu.default(slice(1))", r"slice\(1\) stands for no argument"),
    "lambda": (X, "aten.relu.default(lambda: 1)", "stands for no argument"),
    "bytes": (X, "aten.relu.default(b'')", "stands for no argument"),
    "constant": (X, "aten.relu.default(torch.float31)", "there is no torch.float31"),
    "starred": (X, "aten.relu.default(*x)", r"\*x stands for no argument"),
    "double starred": (X, "aten.relu.default(**x)", r"'\*\*' stands for no keyword"),
    "nesting": (X, f"aten.relu.default({'[' * 150}1{']' * 150})", ""),
    "deep nesting": (X, f"aten.relu.default({'[' * 5000}1{']' * 5000})", "too many nested|cannot be read"),
    "digits": (X, f"aten.relu.default({'9' * 5000})", "this is no expression|cannot be read"),
    "taken": ("    return ", "    x = aten.relu.default(x)\n    return ", "the name x is taken"),
    "no return": ("    return relu_default", "", "all_devices does not end with its return"),
    "two returns": ("    return relu_default", "    return x\n    return x", "nothing comes behind the return"),
    "return of two": ("    return relu_default", "    return x y", "this is no expression"),
    "tensor": ("f32[2]", "f32[-2]", "there is no tensor|there is no table|is no size"),
    "offset": ("f32[2]", "f32[2]{offset=-9}", "there is no tensor|there is no table|only numbers"),
    "strides": ("f32[2]", "f32[2]{strides=(1, 1)}", "there is no tensor"),
    "fact": ("f32[2]", "f32[2]{color=3}", "color is nothing that a type has in braces"),
    "symbol": ("f32[2]", "f32[s0]", "there is no table 0 of symbols"),
    "no type": ("f32[2]", "g32[2]", "'g32\\[2\\]' is no type"),
    "line": (
        "    relu_default: ",
        '    at(line="nowhere")\n    relu_default: ',
        "'nowhere' is no line of a source file",
    ),
    "position": ("    relu_default: ", "    at(place=3)\n    relu_default: ", "here stands at"),
    "module without type": ("    relu_default: ", '    at(module="fc")\n    relu_default: ', "here stands at"),
    "decorator": ("@mirrored", "@mirror", "here stands @shard, @mirrored"),
    "two graphs": ("\n@mirrored", "\n@mirrored\ndef f():\n    return None\n\n@mirrored", "there are two of @mirrored"),
    "opening": ("def all_devices(", "define all_devices(", "behind @mirrored comes 'def NAME"),
    "indent": ("    return ", "  return ", "a statement is four columns in"),
    "something else": ("@mirrored", "hello", "here comes a table 'NAME = ...' or a function"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_and_shown_with_its_line(case: str, tmp_path: Path) -> None:
    old, new, message = DAMAGE[case]
    with FakeTensorMode():
        value = torch.empty(2)
    graph = one_call(aten.relu.default, val=value).mirrored_graph
    text = replaced(text_of(handmade().evolve(graph=graph, shard_graphs=(), stage=Stage.REPLICATED)), old, new)
    if case == "nesting":
        assert load_text(text, tmp_path)
        return
    place = r"(?s)cannot read .*program.mirror, line \d+, column \d+\n  why:  "
    with pytest.raises(ValueError, match=f"{place}.*({message})") as caught:
        load_text(text, tmp_path)
    found = str(caught.value)
    line = text.split("\n")[int(re.findall(r", line (\d+), ", found)[0]) - 1]
    assert len(found) < 1200 and re.search(r"\n    .*\n +\^\n  fix:  ", found)
    assert line[:40].strip() in found or len(line) > 1000


ENDLESS = ["-" * 20_000 + "1", "1" + "+1" * 5000, "x" + ".a" * 20_000, "x" + "[0]" * 5000]


@pytest.mark.parametrize("argument", ENDLESS, ids=["signs", "sums", "attributes", "parts"])
def test_what_is_nested_too_deeply_is_refused(argument: str, tmp_path: Path) -> None:
    text = replaced(text_of(one_call(aten.relu.default)), X, f"aten.relu.default({argument})")
    with pytest.raises(ValueError, match=r"MC7102: cannot read .*program\.mirror"):
        load_text(text, tmp_path)


TYPES = [
    f"{'(' * 3000}f32[2]{')' * 3000}",
    "[" * 5000,
    f"{'pending ' * 5000}f32[2]",
    f"f32[{'9' * 5000}]",
    "f32[Pow(9, 9999999999)]",
]


@pytest.mark.parametrize("kind", TYPES, ids=["tuples", "lists", "pending", "digits", "a power"])
def test_no_type_is_endless(kind: str, tmp_path: Path) -> None:
    text = replaced(text_of(one_call(aten.relu.default)), "relu_default = ", f"relu_default: {kind} = ")
    symbols = 'symbols = [[SizeSymbol(name="s0", value=4, least=2)]]\n\n@mirrored'
    with pytest.raises(ValueError, match=r"MC7102: cannot read .*program\.mirror"):
        load_text(replaced(text, "\n@mirrored", symbols), tmp_path)


TWICE = {
    "a field": ('name="cpu:0"', 'name="cpu:0", name="cpu:7"', "name is given twice"),
    "a keyword": (X, 'aten.relu.default(self="a", self="b")', "self is given twice"),
    "a key": (X, "aten.relu.default({1: 2, 1: 3})", "the key 1 is given twice"),
    "a position": ("    relu_default = ", "    at(3)\n    relu_default = ", "here stands at"),
}


@pytest.mark.parametrize("case", TWICE)
def test_what_is_given_twice_is_refused(case: str, tmp_path: Path) -> None:
    old, new, message = TWICE[case]
    with pytest.raises(ValueError, match=message):
        load_text(replaced(text_of(one_call(aten.relu.default)), old, new), tmp_path)


def test_an_error_in_a_table_is_marked_where_it_is() -> None:
    text = replaced(text_of(handmade()), "stage = CAPTURED", "loss_reduction = 3\nstage = CAPTURED")
    with pytest.raises(ValueError, match=r"line 3, column 18\n.*\n\n    loss_reduction = 3\n {21}\^"):
        mirrorc.parse(text)


def test_lines_of_windows_and_comments_are_read() -> None:
    text = text_of(handmade())
    commented = text.replace("    return", "# at the margin\n        # deep\n    return").replace(
        "\ndef ", "\n# between\ndef "
    )
    for other in (text.replace("\n", "\r\n"), commented.replace("devices = [", "devices = [\n    # first\n    ")):
        assert text_of(mirrorc.parse(other)) == text


@pytest.mark.slow
@fuzzed(300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_changed_in_a_text_it_is_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    lines = WHOLE().split("\n")
    place, other = (data.draw(st.integers(2, len(lines) - 1)) for _ in range(2))
    kind = data.draw(st.sampled_from(["drop", "double", "swap", "char", "cut", "token"]))
    line = lines[place]
    column = data.draw(st.integers(0, max(0, len(line) - 1)))
    if kind == "drop":
        del lines[place]
    elif kind == "double":
        lines.insert(place, line)
    elif kind == "swap":
        lines[place], lines[other] = lines[other], line
    elif kind == "char":
        lines[place] = line[:column] + data.draw(st.characters()) + line[column + 1 :]
    elif kind == "cut":
        lines[place] = line[:column]
    else:
        tokens = re.findall(r"\w+|\W", line) or [""]
        wrong = st.sampled_from(
            ["None", "-1", "10**9", "x", '""', "[", ")", "=", "True", "f32[2]", "float", "torch.int8", "*"]
        )
        tokens[data.draw(st.integers(0, len(tokens) - 1))] = data.draw(wrong)
        lines[place] = "".join(tokens)
    try:
        program = mirrorc.parse("\n".join(lines))
    except ValueError as error:
        assert len(str(error)) < 1200 and "MC7102" in str(error)
        return
    text = text_of(program)
    assert text_of(mirrorc.parse(text)) == text


@functools.cache
def WHOLE() -> str:
    return text_of(run_passes(handmade(2, buffer=True), default_pipeline(**SMALL_BUCKETS)))


PAYLOADS = (
    "x=__import__('builtins').__dict__.update(was_executed=1)",
    "x):\n    pass\n__import__('builtins').was_executed = 1\ndef forward(self",
    "__import__('builtins').__dict__.update(was_executed=1)",
    'x"); __import__("builtins").__dict__.update(was_executed=1); ("',
)


@pytest.mark.slow
def test_nothing_in_a_text_is_executed() -> None:
    """Any string or name may be code: torch.fx writes a graph's names, targets and keywords into a function as they are."""
    whole = text_of(run_passes(handmade(1), default_pipeline()))
    loaded, payloads = 0, itertools.cycle(PAYLOADS)
    for match in re.finditer(r'"[^"]*"|[A-Za-z_][\w.]*', whole):
        code = next(payloads)
        code = json.dumps(code) if match[0].startswith('"') else code
        with contextlib.suppress(ValueError, KeyError):
            mirrorc.parse(whole[: match.start()] + code + whole[match.end() :]).to_text(regions=True)
            loaded += 1
        assert not hasattr(builtins, "was_executed"), (match, code)
    assert loaded > 20


ESCAPES = "\x1b]0;title\x07\x1b[2J", "\x9b2J \u202eevil \ud800", "a\rb\x08\x7f"


@pytest.mark.slow
def test_nothing_in_a_text_reaches_a_terminal_as_a_control_character() -> None:
    """Neither in a printed program nor in a message about one."""
    program = run_passes(handmade(1, buffer=True), default_pipeline()).with_remarks("a remark")
    next(iter(program.device_graphs["cpu:0"].graph.nodes)).meta["stack_trace"] = (
        'File "model.py", line 3, in f\n    return x'
    )
    whole = text_of(program)
    shown, said, escapes = 0, 0, itertools.cycle(ESCAPES)
    for match in re.finditer(r'"[^"]*"', whole):
        escape = next(escapes)
        literal = json.dumps(f"x:1  {escape}")
        for text in (literal, f'"x:1  {escape}"'):
            try:
                program = mirrorc.parse(whole[: match.start()] + text + whole[match.end() :])
                message = program.to_text(regions=True, slots=True)
                shown += "\\x" in message
                verify(program)
            except (ValueError, KeyError, MirrorcError) as error:
                message = str(error)
                said += "\\x" in message
            assert all(line.isprintable() for line in message.split("\n")), (match, message)
    assert shown >= 3 and said > 40


def test_the_command_line_shows_no_control_characters(tmp_path: Path) -> None:
    text = text_of(handmade(1))
    (tmp_path / "evil.mirror").write_text(
        replaced(text, "\n    read", '\n    at(line="model.py:3  x\x1b[2J")\n    read')
    )
    (tmp_path / "evil.txt").write_text("# mirrorc \x1b[2J\n")
    (tmp_path / "later.mirror").write_text(re.sub(r"form \d+ · mirrorc \S+", "form 99 · mirrorc \x1b[2J", text))
    for command in (["show", "evil.mirror"], ["show", "later.mirror"], ["verify", "evil.mirror", "later.mirror"]):
        done = CliRunner().invoke(app, [command[0], *(str(tmp_path / name) for name in command[1:])])
        assert "\x1b" not in done.output and done.output
    done = CliRunner().invoke(app, ["diff", str(tmp_path / "evil.mirror"), str(tmp_path / "evil.txt")])
    assert "\x1b" not in done.output and done.output


def test_a_file_that_is_larger_than_any_program_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_file, "_MOST_BYTES", 2**20)
    for name, content in (("large.mirror", b" " * (2**20 + 1)), ("large.mirror.gz", gzip.compress(b" " * (2**20 + 1)))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"(?s)large\.mirror.*(larger|more) than 1 MiB"):
            Program.load(tmp_path / name)


def test_a_file_that_decompresses_to_much_more_than_any_program_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_file, "_ALWAYS_READ", 2**20)
    bomb = tmp_path / "bomb.mirror.gz"
    bomb.write_bytes(gzip.compress(b" " * 2**20) * 200)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"(?s)bomb.mirror.gz: .*decompresses to more than 2\d MiB.*give a file"):
            Program.load(bomb)
        assert tracemalloc.get_traced_memory()[1] < 2**26, "no more of it is decompressed than a program may have"
    finally:
        tracemalloc.stop()
