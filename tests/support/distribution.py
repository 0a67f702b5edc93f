"""Which tests one worker of pytest-xdist runs together, and which start first."""

from collections.abc import Iterable

from xdist.scheduler import LoadScopeScheduling

# Files whose tests share nothing: their functions are dealt out one by one, each with all of its parameters.
_DEALT_OUT = "tests/end_to_end/"

# Cases that share nothing, and take minutes each or are many: they are dealt out one by one.
_DEALT_OUT_BY_CASE = ("tests/end_to_end/test_fuzzed_training.py", "tests/zoo/test_zoo.py")

# What takes longest, longest first: whatever begins late ends late, while the other workers have nothing left to do.
_FIRST = (
    "tests/end_to_end/test_fuzzed_training.py",
    "tests/benchmarks/",
    "tests/runtime/workers/",
    "tests/verifier/",
    "tests/end_to_end/test_parity.py",
    "tests/test_golden.py",
    "tests/serialization/",
    "tests/printing/",
    "tests/loss_check/test_check.py",
    "tests/comparison/",
    "tests/zoo/",
    "tests/end_to_end/test_memory.py",
    "tests/passes/test_re",
    "tests/end_to_end/",
    "tests/testing/",
    "tests/cli/test_programs.py",
    "tests/pipeline/test_reproducer.py",
)


def scope(nodeid: str) -> str:
    """The tests that one worker runs together: a file, so that what its tests share is made once, or a function.

    Example:
        >>> scope("tests/cli/test_programs.py::test_show[1]"), scope("tests/end_to_end/test_parity.py::test_losses[2-4]")
        ('tests/cli/test_programs.py', 'tests/end_to_end/test_parity.py::test_losses')
    """
    path = nodeid.split("::", 1)[0]
    if path in _DEALT_OUT_BY_CASE:
        return nodeid
    return nodeid.split("[", 1)[0] if path.startswith(_DEALT_OUT) else path


def longest_first(nodeids: Iterable[str]) -> list[int]:
    def rank(nodeid: str) -> int:
        return next((i for i, start in enumerate(_FIRST) if nodeid.startswith(start)), len(_FIRST))

    ranks = [rank(nodeid) for nodeid in nodeids]
    return sorted(range(len(ranks)), key=ranks.__getitem__)


class Scheduler(LoadScopeScheduling):
    """Deals out scopes in the order of the tests.

    pytest-xdist's own groups are not used: it writes them into the ids of tests, which newer versions of pytest ignore.
    """

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)
