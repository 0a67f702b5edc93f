"""PyTorch's own tests of training by `DistributedDataParallel` that need no GPU, with a module of `mirrorc.data_parallel`.

Left out are test_DistributedDataParallel_requires_grad (a model without gradients is taken, as its arguments may get one),
test_ddp_create_graph (gradients of gradients are refused), and what is about DDP itself: test_ddp_logging_data_cpu,
test_dump_DDP_relevant_env_vars and test_static_graph_api_cpu.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "support" / "ddp_tests_of_torch.py"
PASSING = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_grads_same_across_ranks_with_no_sync",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSING)
def test_it_passes(name: str) -> None:
    pytest.importorskip("expecttest", reason="torch's own tests need it")
    command = [sys.executable, str(SCRIPT), f"DDPTests.{name}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONWARNINGS": "ignore"}
    )
    assert done.returncode == 0 and "OK" in done.stderr and "skipped" not in done.stderr, done.stderr[-3000:]
