"""Calls every private API of torch that mirrorc uses, and checks what it does."""

import ast
import contextlib
import functools
import inspect
import json
import logging
import operator
import os
import subprocess
import sys
import threading
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mirrorc import torch_internals as internals
from mirrorc.torch_internals import cpp_compiler, tracing

aten = torch.ops.aten
CHATTY = logging.getLogger("chatty")


class Small(nn.Module):
    """A frozen parameter, a buffer that forward writes, and a trained weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        self.count.add_(1.0)
        return (x * self.weight + self.frozen).sum()


def joint_of(module: nn.Module, *leaves: torch.Tensor) -> internals.JointGraph:
    with contextlib.ExitStack() as stack:
        return internals.export_joint_graph(stack, internals.trace_full_graph(module, leaves), leaves, {})


def test_trace_full_graph_gives_one_graph_with_the_results_example() -> None:
    traced = internals.trace_full_graph(Small(), (torch.ones(2, 3), torch.ones(1)))
    assert isinstance(traced, fx.GraphModule)
    (loss,) = next(n for n in traced.graph.nodes if n.op == "output").all_input_nodes
    assert loss.meta["example_value"].shape == ()


def test_trace_full_graph_fixes_shapes() -> None:
    module = Small()
    for rows in (2, 5):
        traced = internals.trace_full_graph(module, (torch.ones(rows, 3), torch.ones(1)))
        assert not any(isinstance(n.meta.get("example_value"), torch.SymInt) for n in traced.graph.nodes)


def test_trace_full_graph_leaves_logging_out() -> None:
    class Chatty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            CHATTY.warning("once %s", "more")
            return (x * self.weight).sum()

    assert internals.trace_full_graph(Chatty(), (torch.ones(3),)) is not None


def test_logging_methods_are_those_of_a_logger() -> None:
    assert {logging.Logger.info, logging.Logger.warning, logging.Logger.isEnabledFor} <= tracing._logging_methods()


def test_export_joint_graph_says_what_every_input_and_output_is() -> None:
    joint = joint_of(Small(), torch.ones(2, 3), torch.ones(1))
    assert sorted(joint.leaf_of.values()) == [0, 1]
    assert sorted(joint.variable_of.values()) == ["count", "frozen", "weight"]
    assert joint.tangent.op == "placeholder" and joint.tangent.meta["val"].shape == ()
    assert joint.loss.meta["val"].shape == ()
    trained = {name: node for name, node in joint.gradients.items() if node is not None}
    assert list(trained) == ["weight"] and trained["weight"].meta["val"].shape == (3,)
    assert list(joint.buffer_writes) == ["count"] and joint.written_inputs == []


def test_export_joint_graph_computes_loss_and_gradient() -> None:
    module, x = Small(), torch.randn(2, 3)
    joint = joint_of(module, x, torch.ones(1))
    values = {"weight": module.weight, "frozen": module.frozen, "count": module.count}
    inputs = []
    for node in joint.graph_module.graph.nodes:
        if node.op == "placeholder":
            if node in joint.leaf_of:
                inputs.append((x, torch.ones(1))[joint.leaf_of[node]])
            else:
                inputs.append(torch.tensor(2.0) if node is joint.tangent else values[joint.variable_of[node]].detach())
    results = fx.Interpreter(joint.graph_module).run(*inputs, enable_io_processing=False)
    of = dict(zip(joint.graph_module.graph.output_node().args[0], results, strict=True))
    torch.testing.assert_close(of[joint.loss], (x * module.weight + module.frozen).sum().detach())
    torch.testing.assert_close(of[joint.gradients["weight"]], 2.0 * x.sum(0))
    torch.testing.assert_close(of[joint.buffer_writes["count"]], torch.tensor(1.0))


@pytest.mark.parametrize(
    ("writes", "found"), [("parameter", [("parameter", "weight")]), ("argument", [("argument", "0")])]
)
def test_export_joint_graph_notes_inputs_that_are_written(writes: str, found: list[tuple[str, str]]) -> None:
    class Writes(Small):
        def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                (self.weight if writes == "parameter" else x).mul_(0.5)
            return (x * self.weight).sum()

    assert joint_of(Writes(), torch.ones(3), torch.ones(1)).written_inputs == found


def test_constants_of_a_joint_graph() -> None:
    class Holds(Small):
        def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
            return (x * self.weight * torch.tensor([1.0, 2.0, 3.0])).sum()

    joint = joint_of(Holds(), torch.ones(3), torch.ones(1))
    constants = [n for n in joint.graph_module.graph.nodes if n.op == "get_attr"]
    assert [joint.constant(n).tolist() for n in constants] == [[1.0, 2.0, 3.0]]
    assert joint.variable_of[constants[0]] == str(constants[0].target)


def test_a_fake_seed_belongs_to_the_graphs_mode() -> None:
    joint = joint_of(Small(), torch.ones(2, 3), torch.ones(1))
    seed = joint.fake_seed()
    assert seed.fake_mode is joint.fake_mode and (seed.dtype, seed.shape) == (torch.int64, ())  # type: ignore[attr-defined]


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x.sum()
        return x.mean()


def test_user_frames_name_the_line_that_cannot_be_traced() -> None:
    with pytest.raises(Exception) as caught:
        internals.trace_full_graph(Branches(), (torch.ones(3),))
    frame = internals.user_frames(caught.value)[-1]
    assert Path(frame.filename) == Path(__file__) and frame.line == "if x.sum() > 0:"


def test_user_frames_looks_behind_a_wrapped_error() -> None:
    inner = RuntimeError("inner")
    inner.real_stack = [traceback.FrameSummary("/home/me/net.py", 3, "forward", line="y")]  # type: ignore[attr-defined]
    outer = ValueError("outer")
    outer.__cause__ = inner
    assert [frame.lineno for frame in internals.user_frames(outer)] == [3]
    assert internals.user_frames(ValueError("alone")) == []


def test_users_files_are_those_of_nobody_else() -> None:
    assert internals.is_users_file(__file__) and internals.is_users_file("/home/me/net.py")
    assert internals.is_users_file(pytest.__file__)  # an installed package is a user's, too
    assert not any(map(internals.is_users_file, (nn.__file__, json.__file__, internals.__file__, "<eval>")))


def test_inductor_decompositions_keep_dropout() -> None:
    table = internals.inductor_decompositions()
    assert aten.native_dropout.default not in table
    assert aten.native_layer_norm_backward.default in table or aten.addcmul.default in table
    from torch._inductor.decomposition import select_decomp_table

    assert aten.native_dropout.default in select_decomp_table(), "the table that mirrorc copies was changed"


@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("padding_idx", [-1, 2])
def test_gradients_of_tables_are_kept_for_passes_and_decomposed_for_inductor(padding_idx: int) -> None:
    target = aten.embedding_dense_backward.default
    assert target not in internals.inductor_decompositions()
    graph = fx.Graph()
    rows, indices = graph.placeholder("rows"), graph.placeholder("indices")
    gradient = graph.call_function(target, (rows, indices, 9, padding_idx, False))
    graph.output((gradient,))
    with FakeTensorMode():
        rows.meta["val"], indices.meta["val"] = torch.empty(5, 2, 4), torch.empty(5, 2, dtype=torch.int64)
        gradient.meta["val"] = torch.empty(9, 4)
    examples = [rows.meta["val"], indices.meta["val"]]
    function = internals.compile_with_inductor(fx.GraphModule({}, graph), examples, num_threads=1)
    given = [torch.randn(5, 2, 4), torch.randint(9, (5, 2))]
    (found,) = function(list(given))
    torch.testing.assert_close(found, target(*given, 9, padding_idx, False))


@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_compile_with_inductor_computes_and_keeps_strides() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.sin.default, (graph.call_function(aten.permute.default, (x, [1, 0])),))
    graph.output((y, graph.call_function(aten.sum.default, (y,))))
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4, 6)
        for node in graph.nodes:
            if node.op == "call_function":
                node.meta["val"] = node.target(*fx.node.map_arg(node.args, lambda n: n.meta["val"]))
    stride = y.meta["val"].stride()
    function = internals.compile_with_inductor(fx.GraphModule({}, graph), [x.meta["val"]], num_threads=1)
    given = torch.randn(4, 6)
    box = [given]
    found, total = function(box)
    assert box == [] and found.stride() == stride
    torch.testing.assert_close(found, given.t().sin())
    torch.testing.assert_close(total, given.sin().sum())


def sine_of(rows: int) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A graph of one sine, and its fake argument."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.sin.default, (x,))
    graph.output((y,))
    with FakeTensorMode():
        x.meta["val"], y.meta["val"] = torch.empty(rows, 3), torch.empty(rows, 3)
    return fx.GraphModule({}, graph), [x.meta["val"]]


@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_compile_with_inductor_finds_what_it_compiled_in_the_cache_and_not_what_others_did() -> None:
    from torch._dynamo.utils import counters
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import fresh_cache
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def lookups() -> tuple[int, int]:
        return counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]

    with fresh_cache():
        misses, hits = lookups()
        for _ in range(2):
            graph_module, examples = sine_of(5)
            function = internals.compile_with_inductor(graph_module, examples, num_threads=1)
            assert examples[0].fake_mode.shape_env is None  # type: ignore[attr-defined]
        assert lookups() == (misses + 1, hits + 1)
        given = torch.randn(5, 3)
        torch.testing.assert_close(function([given])[0], given.sin())
        graph_module, examples = sine_of(5)
        mode = examples[0].fake_mode  # type: ignore[attr-defined]
        mode.shape_env = ShapeEnv()
        tracing = torch._guards.tracing(torch._guards.TracingContext(mode))
        with torch.no_grad(), torch._inductor.config.patch({"cpp.threads": 1}), tracing:
            compile_fx_inner(graph_module, examples)
        assert lookups() == (misses + 2, hits + 1)


@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_kernels_compiled_together_are_there_at_the_end() -> None:
    given = torch.randn(7, 3)
    with internals.kernels_compiled_together():
        functions = [internals.compile_with_inductor(*sine_of(rows), num_threads=1) for rows in (7, 8)]
    torch.testing.assert_close(functions[0]([given])[0], given.sin())
    torch.testing.assert_close(functions[1]([torch.ones(8, 3)])[0], torch.ones(8, 3).sin())


def test_kernels_compiled_together_are_waited_for_at_the_end_alone() -> None:
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import LambdaFuture

    waited: list[str] = []
    scopes = [{"kernel": LambdaFuture(functools.partial(waited.append, name))} for name in ("first", "second")]
    with internals.kernels_compiled_together():
        for scope in scopes:
            AsyncCompile().wait(scope)
        assert waited == []
    assert waited == ["first", "second"] and scopes[0] == {"kernel": None}
    AsyncCompile().wait({"kernel": LambdaFuture(lambda: waited.append("as ever"))})
    assert waited[-1] == "as ever"
    with pytest.raises(KeyError), internals.kernels_compiled_together():
        AsyncCompile().wait({"kernel": LambdaFuture(lambda: waited.append("in vain"))})
        raise KeyError
    assert waited[-1] == "as ever"


@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_prepare_cpp_compiler_tries_once_what_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpu_vec_isa

    internals.prepare_cpp_compiler()
    known = cpu_vec_isa.valid_vec_isa_list()  # Inductor keeps the list
    tried: list[tuple[str, bool]] = []
    main_is_held = threading.Event()

    class Instructions(str):
        def __bool__(self) -> bool:
            main_is_held.wait(60)
            tried.append((str(self), threading.current_thread() is threading.main_thread()))
            if self == "avx512":
                raise OSError("no compiler")
            return True

    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [*map(Instructions, ("avx512", "avx2", "asimd"))])
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512"])
    cpp_compiler._prepared.clear()
    try:
        internals.prepare_cpp_compiler()
        internals.prepare_cpp_compiler()
        threading.Timer(0.05, main_is_held.set).start()
        assert cpu_vec_isa.valid_vec_isa_list() is known  # once all are tried
        assert sorted(tried) == [("avx2", False), ("avx512", False)]
    finally:
        cpp_compiler._prepared.clear()


def test_has_cpp_compiler_sees_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def none() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    assert internals.has_cpp_compiler() is False


def test_has_cpp_compiler_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
    assert internals.has_cpp_compiler() is True


def test_mark_optimizer_stepped_satisfies_schedulers() -> None:
    def warnings_of(mark: bool) -> list[str]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        if mark:
            internals.mark_optimizer_stepped(optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step()
        return [str(warning.message) for warning in caught if "lr_scheduler.step()" in str(warning.message)]

    assert warnings_of(mark=True) == [] and len(warnings_of(mark=False)) == 1


def test_has_step_hooks() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    assert not internals.has_step_hooks(optimizer)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(lambda *_: None)
        assert internals.has_step_hooks(optimizer)
        handle.remove()
    assert not internals.has_step_hooks(optimizer)


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(x)


class Around(torch.nn.Module):
    """As `mirrorc.capture.training_call.TrainingCall` holds a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def test_written_modules_are_found() -> None:
    written = internals.trace_full_graph(Around(Counting()), [torch.zeros(1, 2)])
    clean = internals.trace_full_graph(Around(torch.nn.Linear(2, 2)), [torch.zeros(1, 2)])
    assert internals.written_modules(written) == ["model"]
    assert internals.written_modules(clean) == []


def test_hook_tables_are_live() -> None:
    layer = torch.nn.Linear(2, 2)
    tables = internals.hook_tables(layer)
    layer.register_forward_hook(lambda *_: None)
    layer.register_forward_pre_hook(lambda *_: None)
    layer.register_full_backward_hook(lambda *_: None)
    assert sum(len(table) for table in tables) == 3


def test_has_gradient_hooks() -> None:
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    assert not internals.has_gradient_hooks(first)
    first.register_hook(lambda gradient: gradient)
    second.register_post_accumulate_grad_hook(lambda parameter: None)
    assert internals.has_gradient_hooks(first) and internals.has_gradient_hooks(second)


def test_torch_modes_follow_the_user() -> None:
    before = internals.torch_modes()
    with torch.autocast("cpu", torch.bfloat16):
        assert internals.torch_modes() != before
    assert internals.torch_modes() == before


def test_is_plain_thread() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    assert internals.is_plain_thread()
    for mode in (torch.autocast("cpu"), torch.device("meta"), TorchDispatchMode()):
        with mode:
            assert not internals.is_plain_thread()
    assert internals.is_plain_thread()


def test_is_dense() -> None:
    assert internals.is_dense(torch.zeros(3, 4).t())
    assert internals.is_dense(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert not internals.is_dense(torch.zeros(3, 1).expand(3, 4))
    assert not internals.is_dense(torch.zeros(4, 4)[:, ::2])


def test_every_function_is_called_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    names = [
        name
        for name, found in inspect.getmembers(internals, inspect.isfunction)
        if found.__module__.startswith(f"{internals.__name__}.")
    ]
    public = [name for name in names if not name.startswith("_")]
    assert len(public) >= 20
    assert [
        name for name in public if operator.countOf(source.split(), name) == 0 and f"internals.{name}" not in source
    ] == []


def test_a_lazy_graph_module_is_a_graph_module_that_runs() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    module = internals.lazy_graph_module({}, graph, "Negative")
    assert isinstance(module, fx.GraphModule)
    assert torch.equal(module(torch.ones(2)), -torch.ones(2)) and "neg" in module.code


def test_a_function_is_traced_on_fake_tensors_with_decompositions() -> None:
    aten = torch.ops.aten
    with FakeTensorMode():
        values = [torch.empty(2, 3), torch.empty(3)]
    graph = internals.traced_on_fake_tensors(lambda x, y: torch.nn.functional.silu(x + y), values)
    assert [node.op for node in graph.nodes][:2] == ["placeholder", "placeholder"]
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [aten.add.Tensor, aten.silu.default]
    assert all(node.meta["val"].fake_mode is values[0].fake_mode for node in graph.nodes if node.op == "call_function")
    table = {aten.silu.default: lambda x: x * torch.sigmoid(x)}
    graph = internals.traced_on_fake_tensors(lambda x: torch.nn.functional.silu(x), values[:1], table)
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        aten.sigmoid.default,
        aten.mul.Tensor,
    ]


def test_quiet_fake_tensors_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def multiply() -> None:
        with FakeTensorMode(), pytest.raises(RuntimeError):
            torch.mm(torch.empty(2, 3), torch.empty(4, 5))

    def errors() -> list[str]:
        return [record.name for record in caplog.records if record.levelname == "ERROR"]

    with internals.quiet_fake_tensors():
        multiply()
    assert errors() == []
    multiply()
    assert errors() != []


def test_the_structured_trace_is_off_where_nobody_asked_for_it() -> None:
    code = "import torch; from mirrorc import torch_internals as t; print(t.is_structured_trace_on())"
    without = {name: value for name, value in os.environ.items() if name != "TORCH_TRACE"}
    done = subprocess.run([sys.executable, "-c", code], env=without, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_the_structured_trace_is_on_where_it_has_a_folder(tmp_path: Path) -> None:
    code = "import torch; from mirrorc import torch_internals as t; print(t.is_structured_trace_on())"
    given = {**os.environ, "TORCH_TRACE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr


def test_artifacts_reach_torchs_structured_trace() -> None:
    from torch._logging._internal import trace_log

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    records: list[logging.LogRecord] = []
    was_on = internals.is_structured_trace_on()
    internals.trace_artifact("before", "nobody listens")
    handler = Keeps()
    trace_log.addHandler(handler)
    try:
        assert internals.is_structured_trace_on()
        internals.trace_artifact("name of it", "line one\nline two")
    finally:
        trace_log.removeHandler(handler)
    assert internals.is_structured_trace_on() == was_on
    (record,) = records
    assert record.metadata["artifact"] == {"name": "name of it", "encoding": "string"}  # type: ignore[attr-defined]
    assert record.payload == "line one\nline two"  # type: ignore[attr-defined]


def test_add_node_does_what_create_node_does() -> None:
    slow, fast = fx.Graph(), fx.Graph()
    slow_x, fast_x = slow.placeholder("x"), fast.placeholder("x")
    given = {"alpha": 2}
    made = slow.create_node("call_function", torch.add, (slow_x, slow_x), given, name="x")
    added = internals.add_node(fast, "call_function", torch.add, (fast_x, fast_x), given, "x")
    for graph, node in ((slow, made), (fast, added)):
        with graph.inserting_before(node):
            first = graph.create_node if graph is slow else functools.partial(internals.add_node, graph)
            source = next(iter(graph.nodes))
            first("call_function", torch.neg, (source,), {}, "y")
        graph.output(node)
        graph.lint()
    assert [str(n.format_node()) for n in fast.nodes] == [str(n.format_node()) for n in slow.nodes]
    assert len(fast.nodes) == len(slow.nodes) == 4
    assert set(fast_x.users) == set(list(fast.nodes)[1:3])
    assert fast.find_nodes(op="call_function", target=torch.add) == [added]
    assert fast.create_node("placeholder", "x").name == slow.create_node("placeholder", "x").name


def test_tensors_that_share_memory_have_one_storage_key() -> None:
    with FakeTensorMode():
        fake = torch.empty(4, 3)
        assert internals.storage_key(fake) == internals.storage_key(fake.t()) != internals.storage_key(fake.clone())
    real = torch.empty(4, 3)
    assert internals.storage_key(real) == internals.storage_key(real[1:]) != internals.storage_key(torch.empty(4, 3))


def test_watched_operators_are_told_with_arguments_and_results() -> None:
    seen = []
    x = torch.ones(3)
    with internals.watched_operators(lambda operator, args, result: seen.append((operator, args, result))):
        y = x + 1
        torch.mul(y, 2, out=x)
    assert [operator for operator, _, _ in seen] == [aten.add.Tensor, aten.mul.out]
    assert seen[0][1] == (x, 1) and seen[0][2] is y and seen[1][2] is x
    x + 1
    assert len(seen) == 2


def test_peak_allocation_counts_what_lives_at_once_and_is_not_given() -> None:
    given = torch.ones(1000)

    def action() -> None:
        first = given + 1
        view = first.view(10, 100)
        del first
        second = view * 2  # two at once: the view holds the first
        del view, second
        given.add_(given.exp())

    assert internals.peak_allocation(action, [given]) == 2 * 4000
    assert internals.peak_allocation(lambda: given.add_(1), [given]) == 0


def test_inductors_wrapper_can_be_run_on_fake_tensors() -> None:
    def region(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.mm(x.exp().sin(), y),)

    graph_module = make_fx(region, tracing_mode="fake")(torch.empty(4, 8), torch.empty(8, 5))
    mode = next(iter(graph_module.graph.nodes)).meta["val"].fake_mode
    args = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    compiled = internals.compile_with_inductor(graph_module, args, 1)
    code, namespace = internals.inductor_wrapper(compiled)
    assert code.name == "call"
    exec(compile(ast.Module([code], []), "<wrapper>", "exec"), namespace)
    given = list(args)
    with mode:
        (result,) = namespace["call"](None, given)
    assert result.shape == (4, 5) and result.fake_mode is mode and not given


@pytest.mark.parametrize("source", [None, "", "x = 1"])
def test_code_without_a_wrapper_in_python_is_refused(source: str | None) -> None:
    class Compiled:
        source_code = source

    with pytest.raises(ValueError, match="0 functions of the name 'call'"):
        internals.inductor_wrapper(Compiled())
