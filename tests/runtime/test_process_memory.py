import subprocess
import sys

import pytest

from mirrorc.runtime.process_memory import return_freed_memory

KEEPS = """
import resource, torch
from mirrorc.runtime.process_memory import return_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

torch.ones(16 << 18).sum()  # a block of 16 MiB is freed: from now on glibc takes such blocks from its heap
blocks = [torch.ones(15 << 18) for _ in range(16)]
last = torch.ones(1 << 16)  # stands behind them
before = resident()
del blocks
return_freed_memory()
print(before - resident())
"""


def test_freed_memory_goes_back_to_the_system() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    done = subprocess.run([sys.executable, "-c", KEEPS], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) > 200 << 20


def test_it_does_nothing_where_the_c_library_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    return_freed_memory()
