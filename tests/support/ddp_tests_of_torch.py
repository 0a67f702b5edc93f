"""PyTorch's own tests of `DistributedDataParallel`, with a module of mirrorc in its place.

    python tests/support/ddp_tests_of_torch.py DDPTests.test_DistributedDataParallelCPU

They are in an installed torch, and run in two processes over gloo.
"""

import os
import tempfile
import unittest
from typing import Any

os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())

from torch import nn
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

import mirrorc

_OF_DDP = ("gradient_as_bucket_view", "find_unused_parameters")


class InPlaceOfDDP:
    """What `DistributedDataParallel` is in these tests; both options are what a module of mirrorc always does."""

    def __new__(cls, model: nn.Module, **options: Any) -> Any:
        unknown = options.keys() - _OF_DDP
        assert not unknown, f"no such options here: {unknown}"
        return mirrorc.data_parallel(model, 1, reduction="workers", compiler=mirrorc.Compiler(backend="eager"))


class DDPTests(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        nn.parallel.DistributedDataParallel = InPlaceOfDDP
        super()._run(*args, **kwargs)


if __name__ == "__main__":
    unittest.main()
