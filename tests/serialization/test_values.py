import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from saved_programs import called, described, one_call, reload, with_graph
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mirrorc.ir import ops
from mirrorc.messages.source_lines import source_line

aten = torch.ops.aten
one_folder_for_all = fuzzed(100, suppress_health_check=[HealthCheck.function_scoped_fixture])

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=5)
    | st.sampled_from([torch.float32, torch.bool, torch.float8_e4m3fn, torch.strided, torch.sparse_csr])
    | st.sampled_from([torch.channels_last, torch.preserve_format])
    | st.sampled_from([torch.device("cpu"), torch.device("cuda:3"), torch.device("meta")])
)
ARGUMENTS = st.recursive(
    PLAIN | st.builds(slice, PLAIN, PLAIN, PLAIN),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(args=st.lists(ARGUMENTS, max_size=3), kwargs=st.dictionaries(st.sampled_from("abc"), ARGUMENTS, max_size=2))
@one_folder_for_all
def test_arguments_stay_what_they_are(args: list[Any], kwargs: dict[str, Any], tmp_path: Path) -> None:
    program = one_call(aten.add.Tensor, tuple(args), kwargs)
    found = called(reload(program, tmp_path))
    assert described(found.args) == described(called(program).args)
    assert described(found.kwargs) == described(called(program).kwargs)


def test_nodes_are_found_in_every_container_and_collections_are_those_of_fx(tmp_path: Path) -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output({"a": [x, (y, {"b": slice(x, None, y)})], 3: torch.Size([2])})
    found = list(reload(with_graph(graph), tmp_path).mirrored_graph.nodes)
    result = found[2].args[0]
    assert type(result) is fx.immutable_collections.immutable_dict
    assert type(result["a"]) is fx.immutable_collections.immutable_list
    assert result == {"a": [found[0], (found[1], {"b": slice(found[0], None, found[1])})], 3: (2,)}
    assert list(found[0].users) == list(found[1].users) == [found[2]]


def test_every_operation_of_the_ir_has_a_name(tmp_path: Path) -> None:
    operations = [value for value in vars(ops).values() if getattr(value, "__code__", None) is ops.read.__code__]
    assert {ops.argument, ops.call_region, ops.wait, ops.write, *ops.COLLECTIVES} <= set(operations)
    for target in operations:
        assert called(reload(one_call(target), tmp_path)).target is target


SHAPES = st.lists(st.integers(0, 5), max_size=4).flatmap(
    lambda shape: st.tuples(st.just(shape), st.lists(st.integers(0, 7), min_size=len(shape), max_size=len(shape)))
)


@pytest.mark.slow
@given(
    place=SHAPES,
    offset=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.complex64, torch.bool]),
    device=st.sampled_from(["cpu", "cuda:0", "cuda:7"]),
    flags=st.sampled_from([(), ("conj",), ("conj", "imag")]),
)
@one_folder_for_all
def test_types_of_values_stay_what_they_are(
    place: Any, offset: int, dtype: torch.dtype, device: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    with FakeTensorMode():
        value: Any = torch.empty(1000, dtype=dtype, device=device).as_strided(*place, offset)
        for flag in flags if dtype is torch.complex64 else ():
            value = value.conj() if flag == "conj" else value.imag
    values = (value, [ops.Pending(value), ops.Pending((value, None))], 3, None)
    program = one_call(aten.clone.default, val=values)
    found = called(reload(program, tmp_path)).meta["val"]
    assert described(found) == described(values)
    with found[0].fake_mode:
        assert described(found[0] + 1)[1:3] == ((value.dtype if dtype is not torch.bool else torch.int64), value.device)


NAMES = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters='/"<'), min_size=1, max_size=8)
CODE = st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), max_size=20)


@pytest.mark.slow
@given(folder=NAMES, name=NAMES, line=st.integers(1, 9999), code=CODE)
@one_folder_for_all
def test_source_lines_stay_what_they_are(folder: str, name: str, line: int, code: str, tmp_path: Path) -> None:
    folder = f"/secret{folder}"
    frames = [(f"{folder}/main.py", 3, "main()"), (f"{folder}/{name}", line, code), (torch.__file__, 1, "inner()")]
    trace = "".join(f'  File "{path}", line {number}, in f\n    {text}\n' for path, number, text in frames)
    program = one_call(aten.clone.default, stack_trace=trace)
    found = called(reload(program, tmp_path))
    assert source_line(found) == source_line(called(program)) != ""
    text = (tmp_path / "program.mirror").read_text(encoding="utf-8")
    assert "secret" not in text and "main.py" not in text and os.path.dirname(torch.__file__) not in text


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"stack_trace": "", "nn_module_stack": {}},
        {"stack_trace": f'  File "{torch.__file__}", line 1, in f\n    x\n'},
        {"nn_module_stack": {"1": ("L['self'].model", nn.Module), "2": ("L['self'].model.fc.0", nn.Linear)}},
        {"nn_module_stack": {"fc": ("L['self'].model.fc", "torch.nn.modules.linear.Linear")}, "stack_trace": "nothing"},
    ],
    ids=["nothing", "empty", "torch's line", "module", "module's name"],
)
def test_what_stands_in_for_a_line_of_the_users_stays(meta: dict[str, Any], tmp_path: Path) -> None:
    program = one_call(aten.clone.default, **meta)
    found = called(reload(program, tmp_path))
    assert source_line(found) == source_line(called(program))
    assert bool(found.meta.get("stack_trace")) == bool(meta.get("stack_trace"))
    assert "val" not in found.meta


def test_a_frame_without_code_does_not_give_away_the_path_of_the_next(tmp_path: Path) -> None:
    trace = f'  File "/secret/model.py", line 3, in f\n  File "{torch.__file__}", line 9, in g\n    inner()\n'
    program = one_call(aten.clone.default, stack_trace=trace)
    assert source_line(called(reload(program, tmp_path))) == "model.py:3"
    assert os.path.dirname(torch.__file__) not in (tmp_path / "program.mirror").read_text(encoding="utf-8")
