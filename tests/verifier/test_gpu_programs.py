"""Programs for GPUs are compiled and proved where there is none: `make test-torch` runs this with CUDA builds of torch."""

from typing import Any

import pytest
import torch
from gpu_programs import gpus, on_gpus
from saved_programs import captured

from mirrorc.errors import VerifyError
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.variables import Role, Variable
from mirrorc.packing import ByBytes
from mirrorc.passes import default_pipeline, resolve_sharing
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.runtime.codegen.regions import retarget
from mirrorc.verifier.verifier import Verify, verify

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this build of torch knows no CUDA")

MODELS = ("mlp", "conv", "resnet", "dropout", "noisy")


def compiled(name: str, *names: str, **options: Any) -> Program:
    program = on_gpus(captured(name), gpus(*names))
    return run_passes(program, resolve_sharing(default_pipeline(**options)), [Verify()])


@pytest.mark.parametrize("name", MODELS)
def test_a_step_on_gpus_is_verified_after_every_pass(name: str) -> None:
    """Types are recomputed with fake tensors of CUDA, so a value that is made on the host by mistake is refused."""
    for names, link in ((("cuda:0", "cuda:1", "cuda:2"), "nccl"), (("cuda:0", "cuda:0/1", "cuda:1"), "copy")):
        check_finite = "skip" if link == "copy" else False
        program = compiled(name, *names, check_finite=check_finite, buckets=ByBytes(0.0005, 0.0001))
        assert program.stage is Stage.LOWERED and list(program.device_graphs) == list(names)
        launches = [n for m in program.device_graphs.values() for n in calls_to(m.graph, ops.all_reduce)]
        assert len(launches) > len(names) and {n.kwargs["link"] for n in launches} == {link}, "GPUs share no memory"
        for module in program.device_graphs.values():
            for node in calls_to(module.graph, ops.update):
                assert node.args[0].meta["val"].is_cuda


def test_a_value_on_the_wrong_device_is_refused() -> None:
    program = on_gpus(captured("mlp"), gpus("cuda:0", "cuda:1", "cuda:2"))
    node = next(n for n in program.shard_graphs[0].nodes if n.target is torch.ops.aten.tanh.default)
    mode = node.meta["val"].fake_mode
    with mode:
        node.meta["val"] = torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)
    with pytest.raises(VerifyError, match="tanh"):
        verify(program)


def test_a_number_of_the_host_is_read_there() -> None:
    """Operators of GPUs take a model's ``self.scale = torch.tensor(0.5)`` from there, and so does Inductor's code."""
    program = on_gpus(captured("mlp"), gpus("cuda:0", "cuda:1", "cuda:2"))
    for graph in program.shard_graphs:
        tanh = next(n for n in graph.nodes if n.target is torch.ops.aten.tanh.default)
        with graph.inserting_after(tanh):
            number = graph.call_function(ops.read, (), {"variable": "scale"})
        with tanh.meta["val"].fake_mode:
            number.meta["val"] = torch.empty((), dtype=tanh.meta["val"].dtype)
        user = next(n for n in tanh.users if n.target is torch.ops.aten.addmm.default)
        with graph.inserting_after(number):
            scaled = graph.call_function(torch.ops.aten.mul.Tensor, (tanh, number))
        scaled.meta = {**tanh.meta}
        user.replace_input_with(tanh, scaled)
    dtype = number.meta["val"].dtype
    for is_on_host in (True, False):
        constant = Variable("scale", (), (), dtype, Role.BUFFER, is_on_host=is_on_host)
        given = program.evolve(variables={**program.variables, "scale": constant})
        if not is_on_host:
            with pytest.raises(VerifyError, match="scale"):
                verify(given)
            continue
        lowered = run_passes(given, resolve_sharing(default_pipeline()), [Verify()])
        reads = [n for m in lowered.device_graphs.values() for n in calls_to(m.graph, ops.read)]
        assert {n.meta["val"].device.type for n in reads if n.kwargs["variable"] == "scale"} == {"cpu"}


def test_regions_are_moved_from_gpu_to_gpu() -> None:
    for region in compiled("dropout", "cuda:0", "cuda:1", "cuda:2").regions.values():
        moved = retarget(region.graph_module, torch.device("cuda", 1))
        values = [n.meta["val"] for n in moved.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        assert {str(value.device) for value in values} <= {"cuda:1", "cpu"}
        assert all(value.dtype is torch.int64 for value in values if not value.is_cuda), "seeds stay on the host"
