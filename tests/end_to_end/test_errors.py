"""Every refusal says what, where and what to do, leaves model and optimizer as they are, and the step usable."""

import copy
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import unchanged
from selections import slow_but
from small_modules import Parts, module_of
from tiny_models import make_mlp, mlp_batch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from twins import MlpTwins, Twins, compiled_step

import mirrorc
from mirrorc import CaptureError, ExecutionError
from mirrorc.ir.program import Program, Stage
from mirrorc.options.table import grouped
from mirrorc.passes import Replicate
from mirrorc.runtime.execution import executor

pytestmark = pytest.mark.fast

ADAMW = partial(torch.optim.AdamW, lr=0.01)


def refuses(error: type[Exception] | tuple[type[Exception], ...], *words: str) -> Any:
    return pytest.raises(error, match="(?s)" + ".*".join(re.escape(word) for word in words))


def compile_mlp(model: nn.Module | None = None, devices: Any = 2, **options: Any) -> mirrorc.Step:
    model = model or make_mlp()
    options = {"optimizer": ADAMW(model.parameters()), "loss_fn": F.cross_entropy, "backend": "eager", **options}
    return mirrorc.compile(model, devices, **grouped(options))


# Arguments of compile


@pytest.mark.parametrize(
    ("devices", "error", "words"),
    [
        ([], ValueError, ("devices is empty", "cpu:0")),
        (0, ValueError, ("devices is empty", "cpu:0")),
        (-1, ValueError, ("devices", "cpu:0")),
        (True, TypeError, ("devices is True", "give a list of names")),
        ("cpu:0", TypeError, ("devices is 'cpu:0'", "give a list of names")),
        (1.5, TypeError, ("devices is 1.5", "give a list of names")),
        ([0, 1], TypeError, ("device 0 is a int", "cpu:0")),
        (["tpu:0"], ValueError, ("unknown device 'tpu:0'", "cpu:0")),
        (["cpu:0/1"], ValueError, ("unknown device 'cpu:0/1'",)),
        (["cpu:1", "cpu:1"], ValueError, ("device 'cpu:1' is named twice",)),
        (["cpu", "cpu:0"], ValueError, ("device 'cpu:0' is named twice",)),
    ],
    ids=str,
)
def test_wrong_devices(devices: Any, error: type[Exception], words: tuple[str, ...]) -> None:
    model = make_mlp()
    with unchanged(model), refuses(error, *words):
        compile_mlp(model, devices)


def test_an_absent_gpu() -> None:
    absent = f"cuda:{torch.cuda.device_count()}"
    with refuses(ValueError, f"device '{absent}' is absent", "this machine", "name devices like"):
        compile_mlp(devices=[absent])


def test_mixed_kinds_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_mlp()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with refuses(ValueError, "devices mix CPUs and GPUs (cpu:0, cuda:0)", "devices=['cpu:0', 'cpu:1']"):
        compile_mlp(model, devices=["cpu:0", "cuda:0"])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"backend": "tvm"}, ValueError, ("backend is 'tvm'", "inductor, eager")),
        ({"loss_reduction": "median"}, ValueError, ("loss_reduction is 'median'", "'mean' or 'sum'")),
        ({"loss_fn": 3}, TypeError, ("loss_fn is 3", "loss_fn(output, target)")),
        ({"loss_fn": nn.MSELoss}, TypeError, ("loss_fn is the class MSELoss", "loss_fn=MSELoss()")),
        ({"disable": ("fuse",)}, ValueError, ("disable names 'fuse'", "mirrorc passes")),
        ({"passes": [print]}, TypeError, ("is no pass",)),
        ({"link": "pigeon"}, ValueError, ("link is 'pigeon'", "shared-memory")),
        ({"buckets": -1}, ValueError, ("buckets is -1", "positive number of MiB")),
        ({"buckets": "big"}, TypeError, ("buckets='big' is neither", "in MiB", "EqualPacks(number)")),
        ({"timeout": 0}, ValueError, ("timeout is 0", "positive number of seconds")),
        ({"optimizer": torch.optim.SGD}, TypeError, ("optimizer is a type", "model.parameters()")),
        ({"optimizer": "adam"}, TypeError, ("optimizer is a str", "model.parameters()")),
        ({"dump": 3}, TypeError, ("dump is 3", "path of a directory")),
        ({"dump": __file__}, ValueError, (f"dump is {__file__!r}", "is a file", "give a directory")),
        ({"dump": Path(__file__) / "x"}, ValueError, (f"but {__file__} is a file", "give a directory")),
        ({"add": mirrorc.after("replicate", Replicate())}, TypeError, ("add is a Placed", "give a list")),
        ({"add": None}, TypeError, ("add is None", "[mirrorc.after('pack-gradients', it)]")),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    model = make_mlp()
    with unchanged(model), refuses(error, *words):
        compile_mlp(model, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": ADAMW(make_mlp().parameters())}, ("parameter 0 of group 0", "none of the model's")),
        ({"link": "nccl"}, ("link='nccl' cannot join cpu:0, cpu:1", "'copy'")),
        ({"algorithm": "copy"}, ("algorithm is 'copy', which is a link", "mirrorc.Communication(link='copy')")),
    ],
    ids=["another-model", "link", "algorithm"],
)
def test_what_does_not_go_with_model_or_devices(options: dict[str, Any], words: tuple[str, ...]) -> None:
    model = make_mlp()
    with unchanged(model), refuses(ValueError, *words):
        compile_mlp(model, **options)


def test_a_model_that_is_none() -> None:
    optimizer = ADAMW(make_mlp().parameters())
    with refuses(TypeError, "model is a function", "torch.nn.Module"):
        mirrorc.compile(F.relu, 2, optimizer=optimizer)


def test_a_model_on_the_meta_device() -> None:
    model = make_mlp().to("meta")
    with refuses(ValueError, "'first.weight' is on the meta device", "to_empty"):
        compile_mlp(model)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_lazy_module() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with refuses(ValueError, "'0.weight'", "lazy module", "model(example_input)"):
        mirrorc.compile(model, 2, optimizer=ADAMW(model.parameters()))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_model_with_a_sparse_buffer(layout: str) -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("adjacency", getattr(torch.eye(3), layout)())
    with refuses(ValueError, "MC1203: 'adjacency' is a sparse tensor", "model.adjacency.to_dense()"):
        compile_mlp(model)


def test_a_model_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = make_mlp()
    with refuses(ValueError, "MC1203: 'first.weight' was made in inference mode", "copy.deepcopy(model)"):
        compile_mlp(model)
    copied = copy.deepcopy(model)
    with compile_mlp(copied) as step:
        step(**mlp_batch(4))
    assert not torch.equal(copied.first.weight, model.first.weight)


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.usefixtures("alone_in_a_group")
def test_a_model_that_another_library_trains_over_processes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is meant for GPUs
        sharded = FullyShardedDataParallel(make_mlp(), device_id=torch.device("cpu"))
    with refuses(ValueError, "the model is a FullyShardedDataParallel", "model.module"):
        compile_mlp(sharded)
    wrapped = nn.parallel.DistributedDataParallel(make_mlp())
    with unchanged(wrapped), refuses(ValueError, "the model is a DistributedDataParallel", "model.module"):
        compile_mlp(wrapped)
    within = nn.Sequential(wrapped)
    with unchanged(within), refuses(ValueError, "'0' of the model is a DistributedDataParallel", "model.0.module"):
        compile_mlp(within)
    dealt_out = make_mlp()
    fully_shard(dealt_out, mesh=init_device_mesh("cpu", (1,)))
    with refuses(ValueError, "'first.weight' is a DTensor", "leave fully_shard", "shard_optimizer=True"):
        compile_mlp(dealt_out)


@pytest.mark.usefixtures("alone_in_a_group")
def test_an_optimizer_that_deals_itself_out() -> None:
    model = make_mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW)
    with unchanged(model), refuses(ValueError, "ZeroRedundancyOptimizer deals", "shard_optimizer=True"):
        compile_mlp(model, optimizer=optimizer)


def test_a_model_without_a_trainable_parameter() -> None:
    model = make_mlp().requires_grad_(False)
    with unchanged(model), refuses(ValueError, "Mlp has no trainable parameter", "requires_grad"):
        compile_mlp(model)


@pytest.mark.slow
def test_no_cpp_compiler_falls_back_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirrorc.runtime.codegen.inductor.has_cpp_compiler", lambda: False)
    with pytest.warns(
        UserWarning,
        match=r"backend='eager' is used instead of 'inductor'\n  why:  no C\+\+ compiler was found\n  fix:  ",
    ):
        pair = MlpTwins(ADAMW, backend="inductor")
    with pair:
        pair.steps(1)
        pair.check()


# Arguments of a step


PerReplica = mirrorc.PerReplica
NOT_SPLIT: list[tuple[Callable[[dict[str, Any]], dict[str, Any]], tuple[str, ...]]] = [
    (lambda b: {"x": b["x"][:0], "target": b["target"][:0]}, ("'x' has no examples", "leaves the empty batch")),
    (lambda b: {**b, "target": b["target"][:4]}, ("'x' has 5", "'target' has 4", "mirrorc.replicated")),
    (lambda b: {**b, "target": torch.tensor(1)}, ("'target' is a scalar tensor", "mirrorc.replicated(target)")),
    (lambda b: {"x": 1.0, "target": 2}, ("no tensor to split", "torch.tensor(batch), as an argument")),
    (
        lambda b: {k: mirrorc.replicated(v) for k, v in b.items()},
        ("no tensor to split", "leave mirrorc.replicated() out"),
    ),
    (
        lambda b: {**b, "x": PerReplica([b["x"]])},
        ("'x' is a PerReplica of 1 values", "3 replicas", "of 3 values, one for each device"),
    ),
    (lambda b: {**b, "x": PerReplica([])}, ("'x'", "one value for each replica")),
    (lambda b: {**b, "x": PerReplica([b["x"], [b["x"]], b["x"]])}, ("'x'", "all have the same structure")),
    (lambda b: {**b, "x": PerReplica([b["x"][:0]] * 3)}, ("disagree on dim 0", "'x' has 0 examples, 'target' has 5")),
    (lambda b: {k: PerReplica([v[:0]] * 3) for k, v in b.items()}, ("'x' has no examples on any replica",)),
    (lambda b: {**b, "x": PerReplica([torch.tensor(1.0)] * 3)}, ("'x' is a PerReplica of scalars", "dim 0")),
]
WRONG_BATCHES: list[tuple[Any, Any, tuple[str, ...]]] = [
    *((spoil, ValueError, words) for spoil, words in NOT_SPLIT),
    (lambda b: {"x": b["x"]}, TypeError, ("target is missing", "step(x, target=y)")),
    (lambda b: {**b, "x": b["x"][:, :4]}, CaptureError, ("MC2103: Mlp or its loss raised", "tiny_models.py", "fix:  ")),
    (lambda b: {**b, "unknown": 3}, (TypeError, CaptureError), ("'unknown'",)),
    (lambda b: {"target": b["target"]}, (TypeError, CaptureError), ("'x'",)),
]


@pytest.mark.slow
def test_wrong_batches() -> None:
    """Before the first step, between steps and after them."""
    with MlpTwins(ADAMW, devices=3) as pair:
        for number in range(3):
            for spoil, error, words in WRONG_BATCHES:
                with unchanged(pair.model, pair.optimizer), refuses(error, *words):
                    pair.step(**spoil(mlp_batch(5)))
            if number < 2:
                pair.steps(1)
        pair.check()


# What cannot be captured


class Bad(Parts):
    def __init__(self, fault: str) -> None:
        super().__init__(fault=fault, layer=nn.Linear(6, 3).double())
        self.register_buffer("seen", torch.zeros(3).double())

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        if self.fault == "control flow" and y.sum() > 0:
            y = y * 2
        if self.fault == "item":
            y = y * y.max().item()
        if self.fault == "raises":
            raise RuntimeError("the user's own words")
        if self.fault == "parameter in place":
            with torch.no_grad():
                self.layer.weight.mul_(0.9)
        if self.fault == "input in place":
            x.add_(1.0)
            y = self.layer(x)
        if self.fault == "a buffer with a gradient":
            self.seen[:2] = self.layer.bias[1:]
        if self.fault == "no scalar":
            return y.mean(dim=1)
        if self.fault == "detached":
            return y.detach().mean()
        if self.fault == "complex":
            return y.mean() * (1 + 1j)
        if self.fault == "nothing":
            return None
        if self.fault == "dict without loss":
            return {"logits": y}
        if self.fault == "number":
            return 3.0
        return y.square().mean()


FAULTS = [
    ("control flow", ("test_errors.py:", 'if self.fault == "control flow" and y.sum() > 0', "torch.where")),
    ("item", ("test_errors.py:", "y.max().item()", "compute with tensors")),
    ("raises", ("test_errors.py:", "raise RuntimeError", "the user's own words", "fix:  ")),
    ("parameter in place", ("writes the parameter 'layer.weight' in place", "between calls")),
    ("input in place", ("writes its argument 'x' in place", "x = x.clone()")),
    ("a buffer with a gradient", ("requires a gradient to the buffer 'seen'", "detached", "seen = self.seen.clone()")),
    ("no scalar", ("is no scalar", "shape [3]", ".mean()", "loss_reduction")),
    ("detached", ("does not depend on any trainable parameter", ".detach()")),
    ("complex", ("the loss of Bad is a complex number", "loss.real")),
    ("nothing", ("Bad returns no loss", "'.loss'", "loss_fn")),
    ("dict without loss", ("Bad returns no loss", "'.loss'", "loss_fn")),
    ("number", ("Bad returns no loss", "'.loss'", "loss_fn")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "words"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_what_cannot_be_captured(fault: str, words: tuple[str, ...]) -> None:
    x = mlp_batch(6)["x"]
    before = x.clone()
    with Twins(Bad(fault), ADAMW, capture="dynamo") as pair:
        with unchanged(pair.model, pair.optimizer), refuses(CaptureError, *words):
            pair.step(x)
        assert torch.equal(x, before)
        pair.model.fault = pair.twin.fault = ""
        pair.train(x)
        pair.check()


def test_a_fault_is_raised_by_prepare() -> None:
    model = Bad("no scalar")
    optimizer = ADAMW(model.parameters())
    with (
        compiled_step(model, optimizer=optimizer) as step,
        unchanged(model, optimizer),
        refuses(CaptureError, "is no scalar"),
    ):
        step.prepare(mlp_batch(4)["x"])


def test_a_loss_that_no_optimized_parameter_reaches() -> None:
    model = nn.ModuleDict({"used": nn.Linear(6, 1), "other": nn.Linear(6, 1)})
    model.forward = lambda x: model["used"](x).mean()  # type: ignore[method-assign]
    optimizer = ADAMW(model["other"].parameters())
    with (
        compiled_step(model, optimizer=optimizer) as step,
        unchanged(model, optimizer),
        refuses(CaptureError, "does not depend on any parameter that the optimizer updates"),
    ):
        step(torch.ones(4, 6))


# Failures while a step runs


def embedder() -> nn.Module:
    return module_of(lambda self, x: self.layer(self.table(x)), table=nn.Embedding(5, 4), layer=nn.Linear(4, 3))


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [ADAMW, partial(torch.optim.Adadelta, lr=1.0)], ids=["adamw", "adadelta"])
@pytest.mark.parametrize("bad_example", [0, 3], ids=["first shard", "second shard"])
def test_a_failure_in_one_replica(make_optimizer: Callable[..., torch.optim.Optimizer], bad_example: int) -> None:
    torch.manual_seed(0)
    good = {"x": torch.tensor([0, 1, 2, 3]), "target": torch.tensor([0, 1, 2, 0])}
    bad = {"x": good["x"].clone(), "target": good["target"]}
    bad["x"][bad_example] = 9
    device = f"cpu:{bad_example // 2}"
    words = (
        "MC5001: replica",
        device,
        "embedding",
        "IndexError",
        "at:   test_errors.py:",
        "self.table(x)",
        "No parameter",
    )
    with Twins(embedder().double(), make_optimizer, F.cross_entropy) as pair:
        for _ in range(2):
            with unchanged(pair.model, pair.optimizer), refuses(ExecutionError, *words):
                pair.step(**bad)
            pair.train(**good)
            for variable in pair.step.variables.values():
                assert torch.equal(*variable.values)
        pair.check()


def test_after_a_failure_nothing_of_the_step_is_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs may still read and write the memory that the next step begins with."""
    waited: list[torch.device] = []
    is_done = [True]

    def wait_device(device: torch.device, timeout_seconds: float) -> bool:
        waited.append(device)
        return is_done[0]

    monkeypatch.setattr(executor, "wait_device", wait_device)
    model = embedder()
    with compiled_step(model, F.cross_entropy) as step:
        y = torch.zeros(4, dtype=torch.int64)
        step(torch.tensor([0, 1, 2, 3]), target=y)
        assert waited == []
        with pytest.raises(ExecutionError):
            step(torch.tensor([0, 1, 2, 100]), target=y)
        assert waited == [torch.device("cpu")], "each once, though two replicas share it"
        step(torch.tensor([0, 1, 2, 3]), target=y)
        is_done[0] = False
        with pytest.raises(ExecutionError, match="IndexError"):
            step(torch.tensor([0, 1, 2, 100]), target=y)
        with pytest.raises(ExecutionError, match="still busy with an earlier call"):
            step(torch.tensor([0, 1, 2, 3]), target=y)


@pytest.mark.slow
def test_a_failure_leaves_batch_norms_statistics_as_they_were() -> None:
    model = module_of(
        lambda self, features, x: self.norm(features).sum(dim=1, keepdim=True) + self.embed(x),
        norm=nn.BatchNorm1d(4),
        embed=embedder(),
    )
    optimizer = ADAMW(model.parameters())
    features, target = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])
    with compiled_step(model, F.cross_entropy, optimizer=optimizer) as step:
        step(features, torch.tensor([0, 1, 2, 3]), target=target)
        with unchanged(model, optimizer), refuses(ExecutionError, "cpu:1", "No parameter was changed"):
            step(features, torch.tensor([0, 1, 2, 9]), target=target)
        replicas = step.variables["norm.running_mean"].values
        assert torch.allclose(model.norm.running_mean, (replicas[0] + replicas[1]) / 2)


@pytest.mark.parametrize("is_called_before", slow_but([False], [True, False]))
def test_a_step_after_close(is_called_before: bool) -> None:
    model = make_mlp()
    optimizer = ADAMW(model.parameters())
    step = compile_mlp(model, optimizer=optimizer)
    if is_called_before:
        step(**mlp_batch(4))
    step.close()
    step.close()
    with unchanged(model, optimizer), refuses(ExecutionError, "MC5003", "the step is closed", "mirrorc.compile("):
        step(**mlp_batch(4))


def test_no_program_before_the_first_call() -> None:
    with compile_mlp() as step:
        for read in (lambda: step.program, lambda: step.graphs, lambda: step.variables, step.memory):
            with refuses(ExecutionError, "no program yet", "step.prepare(x, y)"):
                read()


@pytest.mark.slow
def test_an_unknown_device_of_a_variable() -> None:
    with compile_mlp() as step:
        step(**mlp_batch(4))
        variable = step.variables["first.weight"]
        assert torch.equal(variable.get("cpu:1"), variable.values[1])
        with refuses(ValueError, "'first.weight' is not on 'cpu:7'", "cpu:0, cpu:1"):
            variable.get("cpu:7")


ENTERED, RELEASE = threading.Event(), threading.Event()


@torch.library.custom_op("mirrorc_tests::hold", mutates_args=())
def hold(x: torch.Tensor) -> torch.Tensor:
    ENTERED.set()
    assert RELEASE.wait(120), "the test never let the step go on"
    return x.clone()


hold.register_fake(torch.empty_like)
hold.register_autograd(lambda ctx, grad: grad)


@pytest.mark.slow
def test_a_call_within_a_step() -> None:
    model, batch = make_mlp(), mlp_batch(4)
    optimizer = ADAMW(model.parameters())
    step = compile_mlp(model, optimizer=optimizer)

    class Calls:
        name, input_stage, output_stage = "calls", Stage.LOWERED, Stage.LOWERED

        def run(self, program: Program) -> Program:
            step(**batch)
            return program

    with step:
        handle = optimizer.register_step_pre_hook(lambda *_: step.evaluate(**batch))
        with refuses(
            ExecutionError,
            "a step was called while the step is running",
            "from within that call",
            "out of the hook or method",
        ):
            step(**batch)
        handle.remove()
    step = compile_mlp(model, add=[mirrorc.after("lower-devices", Calls())])
    with (
        step,
        refuses(
            ExecutionError, "a step was called while the step is running", "move the call out of the hook or method"
        ),
    ):
        step(**batch)


@pytest.mark.slow
def test_a_call_from_a_second_thread() -> None:
    ENTERED.clear(), RELEASE.clear()
    losses: list[torch.Tensor] = []
    with MlpTwins(
        ADAMW,
        model=module_of(lambda self, x: self.layer(torch.ops.mirrorc_tests.hold(x)), layer=nn.Linear(6, 3).double()),
    ) as pair:
        batch = pair.next_batch()
        thread = threading.Thread(target=lambda: losses.append(pair.step(**batch)))
        thread.start()
        try:
            assert ENTERED.wait(120)
            with refuses(ExecutionError, "the step is running in another thread", "lock"):
                pair.step(**batch)
        finally:
            RELEASE.set()
            thread.join(120)
        assert not thread.is_alive()
        torch.testing.assert_close(losses[0], pair.plain(**batch))  # RELEASE is set: it does not wait
        pair.steps(1)
        pair.check()


@pytest.mark.slow
def test_a_parameter_that_changed_its_shape() -> None:
    model = make_mlp()
    with compile_mlp(model) as step:
        step(**mlp_batch(4))
        model.last.bias.data = torch.ones(1, dtype=torch.float64)
        with refuses(ValueError, "'last.bias'", "[3]", "[1]", "compile the model anew"):
            step(**mlp_batch(4))
