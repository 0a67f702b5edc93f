"""What torch keeps by itself: hooks, modes, an optimizer's steps, the structured trace."""

import functools
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook

from mirrorc import torch_internals as internals
from mirrorc.torch_internals import caches_parametrizations, parametrization_cache
from mirrorc.user.optimizer_kinds import ELEMENTWISE


def test_adagrad_is_fused_on_gpus_where_torch_permits_it() -> None:
    assert internals.adagrad_is_fused_on_gpus() == (torch.__version__ >= (2, 13))


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


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("maximize", [False, True])
def test_fused_kernels_divide_gradients(kind: Any, maximize: bool) -> None:
    """As if the gradient had been divided before, bit for bit, and the quotients are written back."""
    assert internals.takes_divisor(kind)
    results = []
    for divisor in (3.7, 1.0):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(37))  # also what is left over after whole vectors
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind([parameter], lr=0.1, fused=True, maximize=maximize, **more)
        for _ in range(3):
            gradient = torch.randn(37)
            parameter.grad = gradient.clone() if divisor != 1.0 else gradient / torch.tensor(3.7)
            with internals.dividing_gradients(optimizer, divisor):
                optimizer.step()
            assert torch.equal(parameter.grad, gradient / torch.tensor(3.7))
        assert not hasattr(optimizer, "grad_scale")
        results.append([parameter.detach(), *optimizer.state[parameter].values()])
    assert all(map(torch.equal, *(filter(torch.is_tensor, own) for own in results)))


def test_no_other_kind_divides_gradients() -> None:
    for kind in (kind for kind in ELEMENTWISE if internals.takes_divisor(kind)):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = kind([parameter], foreach=False)
        parameter.grad = torch.ones(3)
        with pytest.raises(AssertionError), internals.dividing_gradients(optimizer, 2.0):
            optimizer.step()
    assert not internals.takes_divisor(torch.optim.NAdam)


def test_has_step_hooks() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    assert not internals.has_step_hooks(optimizer)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(lambda *_: None)
        assert internals.has_step_hooks(optimizer)
        handle.remove()
    assert not internals.has_step_hooks(optimizer)


def test_calls_step_hooks() -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.param_groups = []

    assert internals.calls_step_hooks(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    assert not internals.calls_step_hooks(Bare()) and not internals.has_step_hooks(Bare())


def test_hook_tables_are_live() -> None:
    layer = torch.nn.Linear(2, 2)
    tables = internals.hook_tables(layer)
    layer.register_forward_hook(lambda *_: None)
    layer.register_forward_pre_hook(lambda *_: None)
    layer.register_full_backward_hook(lambda *_: None)
    assert sum(len(table) for table in tables) == 3


def test_global_hook_tables_are_live() -> None:
    tables = internals.global_hook_tables()
    handles = [
        register(lambda *_: None)
        for register in (
            register_module_forward_hook,
            register_module_forward_pre_hook,
            register_module_full_backward_hook,
        )
    ]
    assert sum(len(table) for table in tables) == 3
    for handle in handles:
        handle.remove()
    assert sum(len(table) for table in tables) == 0


def test_has_gradient_hooks() -> None:
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    assert not internals.has_gradient_hooks(first)
    first.register_hook(lambda gradient: gradient)
    second.register_post_accumulate_grad_hook(lambda parameter: None)
    assert internals.has_gradient_hooks(first) and internals.has_gradient_hooks(second)


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_has_gradient_hooks_of_the_node_that_accumulates(register: str) -> None:
    parameter, called = torch.nn.Parameter(torch.zeros(2)), []
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    assert not internals.has_gradient_hooks(parameter)
    handle = getattr(node, register)(lambda *_: called.append(1))
    with torch.inference_mode():
        assert internals.has_gradient_hooks(parameter)
    parameter.sum().backward()
    assert called == [1]
    handle.remove()
    assert not internals.has_gradient_hooks(parameter)
    getattr(node, register)(lambda *_: called.append(1))
    del node
    assert not internals.has_gradient_hooks(parameter), "nothing keeps the node, so that torch calls no hook either"
    parameter.sum().backward()
    assert called == [1]


def test_torch_modes_follow_the_user() -> None:
    before = internals.torch_modes()
    with torch.autocast("cpu", torch.bfloat16):
        assert internals.torch_modes() != before
    assert internals.torch_modes() == before


PRECISIONS = """
import torch
import torch.nn.functional as F
from torch import nn

import mirrorc
from mirrorc.torch_internals import torch_modes

b = torch.backends


def attribute(owner, name, value):
    return lambda: setattr(owner, name, value)


spellings = {
    "all": attribute(b, "fp32_precision", "tf32"),
    "mkldnn": attribute(b.mkldnn, "fp32_precision", "bf16"),
    "cudnn": attribute(b.cudnn, "fp32_precision", "ieee"),
    "cuda": attribute(b.cuda.matmul, "fp32_precision", "tf32"),
    "exact on cuda": attribute(b.cuda.matmul, "fp32_precision", "ieee"),
    "mkldnn.matmul": attribute(b.mkldnn.matmul, "fp32_precision", "bf16"),
    "mkldnn.conv": attribute(b.mkldnn.conv, "fp32_precision", "bf16"),
    "mkldnn.rnn": attribute(b.mkldnn.rnn, "fp32_precision", "tf32"),
    "cudnn.conv": attribute(b.cudnn.conv, "fp32_precision", "ieee"),
    "cudnn.rnn": attribute(b.cudnn.rnn, "fp32_precision", "ieee"),
    "older, of matrix products": attribute(b.cuda.matmul, "allow_tf32", True),
    "older, of convolutions": attribute(b.cudnn, "allow_tf32", False),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
}
owners = [b, b.mkldnn, b.cudnn, b.cuda.matmul, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn, b.cudnn.conv, b.cudnn.rnn]


def put_back():
    torch.set_float32_matmul_precision("highest")
    for owner, value in before:
        owner.fp32_precision = value


before = [(owner, owner.fp32_precision) for owner in owners]
put_back()  # what torch takes for its defaults cannot be written again
seen = {torch_modes()}
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = {"input": torch.ones(4, 4), "target": torch.zeros(4, 1)}
compiler = mirrorc.Compiler(backend="eager")
with mirrorc.compile(model, 2, optimizer=optimizer, loss_fn=F.mse_loss, compiler=compiler) as step:
    for name, change in spellings.items():
        step(**batch)
        as_before = torch_modes()
        change()
        assert torch_modes() != as_before, name
        seen.add(torch_modes())
        step(**batch)
        assert step._specializer.num_programs == len(seen), name
        put_back()
        assert torch_modes() == as_before, name
print("programs:", len(seen))
"""


@pytest.mark.slow
def test_the_precision_of_float32_products_is_seen_however_it_is_set() -> None:
    """In a process of its own: what torch takes for its defaults cannot be put back. Torch itself refuses to tell all of them in
    one word (`get_float32_matmul_precision`) once some were set in the newer way."""
    done = subprocess.run([sys.executable, "-c", PRECISIONS], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "programs: 13", done.stderr


def test_is_plain_thread() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    assert internals.is_plain_thread()
    for mode in (torch.autocast("cpu"), torch.device("meta"), TorchDispatchMode()):
        with mode:
            assert not internals.is_plain_thread()
    assert internals.is_plain_thread()


def test_modes_of_dispatch_are_named_and_left_for_a_while() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Doubles(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {})) * 2

    one, found = torch.ones(()), []
    assert internals.dispatch_modes() == []
    with Doubles():
        assert internals.dispatch_modes() == ["Doubles"]
        found.append(one + one)
        with internals.without_dispatch_modes():
            assert internals.dispatch_modes() == []
            found.append(one + one)
        assert internals.dispatch_modes() == ["Doubles"]
    assert found == [4, 2]


def test_hooks_on_saved_tensors_are_seen() -> None:
    assert not internals.has_hooks_on_saved_tensors()
    with torch.autograd.graph.save_on_cpu():
        assert internals.has_hooks_on_saved_tensors()
    assert not internals.has_hooks_on_saved_tensors()


def test_is_dense() -> None:
    assert internals.is_dense(torch.zeros(3, 4).t())
    assert internals.is_dense(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert not internals.is_dense(torch.zeros(3, 1).expand(3, 4))
    assert not internals.is_dense(torch.zeros(4, 4)[:, ::2])


TRACES = """
import os
from torch._logging import _internal
from mirrorc.torch_internals import is_structured_trace_on

for folder in ("", "{folder}"):
    os.environ.pop("TORCH_TRACE", None)
    os.environ.update(dict(TORCH_TRACE=folder) if folder else dict())
    _internal.LOG_TRACE_HANDLER = None
    _internal._init_logs()  # as when torch is imported
    print(is_structured_trace_on())
"""


@pytest.mark.slow
def test_the_structured_trace_is_on_where_it_has_a_folder(tmp_path: Path) -> None:
    code = TRACES.format(folder=tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_what_pytest_keeps_of_logs_is_no_structured_trace(caplog: pytest.LogCaptureFixture) -> None:
    """Or every test of a user's would pay for texts of every pass."""
    from torch._logging._internal import trace_log

    logging.Logger.addHandler(trace_log, caplog.handler)
    try:
        assert not internals.is_structured_trace_on()
    finally:
        trace_log.removeHandler(caplog.handler)


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


def test_hooks_of_mirrorcs_own_are_called_and_not_counted() -> None:
    optimizer, calls = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), []
    optimizer.register_step_pre_hook(internals.UncountedHook(calls.append))
    optimizer.register_step_post_hook(internals.UncountedHook(calls.append))
    assert not internals.has_step_hooks(optimizer)
    on_all = register_optimizer_step_post_hook(internals.UncountedHook(calls.append))
    assert not internals.has_step_hooks(optimizer)
    optimizer.step()
    on_all.remove()
    assert calls == [optimizer, optimizer, optimizer]
    on_all = register_optimizer_step_post_hook(lambda *_: None)
    assert internals.has_step_hooks(optimizer)
    on_all.remove()
    assert not internals.has_step_hooks(optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert internals.has_step_hooks(optimizer)


def test_has_torchs_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)

    optimizer = make()
    original = optimizer.step
    assert internals.has_torchs_step(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    assert "step" in vars(optimizer) and internals.has_torchs_step(optimizer)
    for plain in (original, torch.compile(original)):
        optimizer.step = plain
        assert internals.has_torchs_step(optimizer)
    patches: list[Any] = [
        lambda: None,
        functools.wraps(original)(lambda: original()),
        functools.partial(original),
        MethodType(lambda self: None, optimizer),
        make().step,
    ]
    for patch in patches:
        optimizer.step = patch
        assert not internals.has_torchs_step(optimizer), patch
    optimizer.step = MethodType(lambda self: None, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    assert not internals.has_torchs_step(optimizer)
    of_class = torch.optim.SGD.step
    for patch in (lambda self: None, functools.wraps(of_class)(lambda self: of_class(self))):
        monkeypatch.setattr(torch.optim.SGD, "step", patch)
        assert not internals.has_torchs_step(make())


def test_the_bare_step_of_an_optimizer_updates_as_its_step_does() -> None:
    """The step itself, out of its file, whatever torch wraps around it."""
    for kind in ELEMENTWISE:
        step = internals.bare_step(kind)
        assert step is not kind.step and step.__qualname__.endswith(".step")
        assert Path(step.__code__.co_filename).parent.name == "optim"  # type: ignore[attr-defined]
        pair = [torch.nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2)]
        optimizers = [kind([parameter], lr=0.1) for parameter in pair]  # type: ignore[call-arg]
        for i in range(3):
            for parameter in pair:
                parameter.grad = torch.linspace(0, i, 5)
            optimizers[0].step()
            with torch.no_grad():
                step(optimizers[1])
        assert torch.equal(*pair) and not torch.equal(pair[0], torch.linspace(-1, 1, 5))


def test_operators_on_a_subclass_without_torch_function_give_plain_tensors() -> None:
    class Subclass(torch.Tensor):
        __torch_function__ = internals.no_torch_function

    changed = internals.as_subclass(torch.ones(2), Subclass)
    changed += torch.ones(2, requires_grad=True)
    assert type(changed) is Subclass and changed.requires_grad
    assert type(internals.as_subclass(torch.ones(2), Subclass) + 1) is torch.Tensor


def test_a_backward_is_known_from_within() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append((internals.backward_keeps_graph(), internals.current_backward())))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert [keeps for keeps, _ in seen] == [True, False]
    assert len({number for _, number in seen}) == 2 and -1 not in {number for _, number in seen}
    assert internals.current_backward() == -1


def test_transforms_are_seen_from_within() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(internals.runs_transform())
        return x.sum()

    function(torch.ones(2))
    torch.func.grad(function)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        function(torch.ones(2))
    assert seen == [False, True, True] and not internals.runs_transform()
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(internals.runs_transform(gradient)))
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True)
    assert seen[-1]


class Doubled(nn.Module):
    def forward(self, weight: nn.Parameter) -> nn.Parameter:
        return weight * 2


def test_a_cache_is_seen_and_replaced() -> None:
    layer = parametrize.register_parametrization(nn.Linear(2, 2), "weight", Doubled())
    before = parametrization_cache()
    assert not caches_parametrizations()
    with parametrize.cached():
        assert caches_parametrizations() and layer.weight is layer.weight
        assert parametrization_cache() is before and len(before) == 1
    assert not caches_parametrizations() and parametrization_cache() is not before
