"""What all tests share."""

import logging
import random
import sys
import tempfile
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from distribution import Scheduler, longest_first
from garbage import collect_seldom, keep_what_is_there

from mirrorc.pipeline import reproducer

_TRACE = logging.getLogger("torch.__trace")


def _unless_pytests(handler: logging.Handler) -> None:
    """Adds a handler to torch's structured trace, unless it is pytest's: a trace that has one is written.

    It costs a fifth of the time of all tests, and its thousands of records would drown a failure's report.
    """
    if not type(handler).__module__.startswith("_pytest."):
        logging.Logger.addHandler(_TRACE, handler)


_TRACE.addHandler = _unless_pytests  # type: ignore[method-assign]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items[:] = [items[i] for i in longest_first(item.nodeid for item in items)]


def pytest_collection_finish() -> None:
    """What was imported for the tests stays until their end."""
    collect_seldom()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file's tests have left in the caches of torch and of ours stays, too: collections are asked for by many tests, and
    by the product, and would look through ever more."""
    if nextitem is None or nextitem.path != item.path:
        keep_what_is_there()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    return Scheduler(config, log)


@pytest.fixture(scope="session", autouse=True)
def _reproducers_go_with_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Reproducers of passes that fail in tests, which nobody gave a folder, do not pile up among the system's files."""
    folder = tmp_path_factory.mktemp("reproducers")

    def mkdtemp(*, prefix: str, dir: Any) -> str:
        return tempfile.mkdtemp(prefix=prefix, dir=dir or folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproducer, "tempfile", SimpleNamespace(mkdtemp=mkdtemp))
        yield


@pytest.fixture(scope="session", autouse=True)
def _shared_programs_stay_as_they_are() -> Iterator[None]:
    """Captured programs are made once for all tests of a process, so no test may change one."""
    yield
    shared = sys.modules.get("saved_programs")  # where no test has asked for one, it is not there
    changed = shared.changed_programs() if shared is not None else []
    assert not changed, f"some test has changed the programs of {', '.join(changed)}: let it copy them first"


@pytest.fixture(autouse=True)
def _tests_draw_the_same_numbers_alone(request: pytest.FixtureRequest) -> None:
    """Whatever ran before it in the same process, a test's random numbers follow from its name."""
    seed = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
