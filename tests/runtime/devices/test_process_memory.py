import subprocess
import sys

import pytest

from mirrorc.runtime.devices.process_memory import cache_freed_memory, return_freed_memory

GIVES_BACK = """
import resource, sys, threading, torch
from mirrorc.runtime.devices.process_memory import cache_freed_memory, return_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def give_back():
    torch.ones(16 << 18).sum()  # a block of 16 MiB is freed: from now on glibc takes such blocks from its heap
    blocks = [torch.ones(15 << 18) for _ in range(16)]
    last = torch.ones(1 << 16)  # stands behind them
    before = resident()
    del blocks
    return_freed_memory()
    print(before - resident())

if sys.argv[1] == "in a thread":
    cache_freed_memory()
    thread = threading.Thread(target=give_back)
    thread.start()
    thread.join()
else:
    give_back()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("where", "least"), [("in the first thread", 200 << 20), ("in a thread", 160 << 20)])
def test_freed_memory_goes_back_to_the_system(where: str, least: int) -> None:
    """The last heap of a thread may stay."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    command = [sys.executable, "-c", GIVES_BACK, where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) > least


FAULTS = """
import ctypes, resource, sys, threading
from mirrorc.runtime.devices.process_memory import cache_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(2 << 20) for _ in range(int(sys.argv[2]))]
    for block in blocks:
        ctypes.memset(block, 1, 2 << 20)
    for block in reversed(blocks):
        libc.free(block)
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

found = []
if sys.argv[1] == "kept":
    cache_freed_memory()
thread = threading.Thread(target=lambda: [faults_of_a_step() for _ in range(4)])  # as a device's thread
thread.start()
thread.join()
print(found[0], found[-1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [8, 80])  # of one heap of a thread, and of three
def test_a_step_finds_the_memory_that_the_last_one_freed(num_blocks: int) -> None:
    """Blocks of two MiB; a page has four KiB or more."""
    if not sys.platform.startswith("linux"):
        pytest.skip("counts page faults of glibc's allocator")
    for asked, least, most in (("kept", 0, 50), ("not kept", 1000, 10**9)):
        command = [sys.executable, "-c", FAULTS, asked, str(num_blocks)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        first, last = map(int, done.stdout.split())
        assert first > 1000 and least <= last <= most


def test_it_does_nothing_where_the_c_library_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    return_freed_memory()
    cache_freed_memory()
