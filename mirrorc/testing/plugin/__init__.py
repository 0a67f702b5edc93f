"""The pytest plugin: the fixture ``mirror_snapshot``, and tests of passes by texts.

It is packaged as ``mirrorc_pytest``, because pytest imports plugins at every start, and mirrorc imports torch.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mirrorc.testing.snapshots import ProgramSnapshot


@pytest.fixture
def mirror_snapshot(request: pytest.FixtureRequest) -> Iterator[ProgramSnapshot]:
    """Compares a program with a snapshot stored beside the test: ``assert step.program == mirror_snapshot``.

    ``mirror_snapshot(name="...")`` is another snapshot of the same test. ``mirror_snapshot(regions=True)`` also compares the
    bodies of regions. ``pytest --snapshot-update`` writes snapshots.
    """
    if not request.config.pluginmanager.hasplugin("syrupy"):
        pytest.fail(
            "the fixture mirror_snapshot needs the pytest plugin syrupy, which is not installed or switched off: "
            "pip install 'mirrorc[testing]', and leave out -p no:syrupy",
            pytrace=False,
        )
    from mirrorc.testing.snapshots import ProgramSnapshot

    snapshot = ProgramSnapshot(request.getfixturevalue("snapshot"))
    trace = logging.getLogger("torch.__trace")  # pytest would show its thousands of records on a failure
    trace.addFilter(_is_wanted)
    yield snapshot
    trace.removeFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return "TORCH_TRACE" in os.environ


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.File | None:
    """Collects programs with ``# RUN: PASSES`` in the comments at their top: see
    `mirrorc.testing.pass_cases.check_case`.

    ``pytest --snapshot-update`` generates the ``CHECK`` lines of those with ``# UPDATE:`` again.
    """
    if file_path.suffix != ".mirror" or not _has_passes(file_path):
        return None
    case: pytest.File = _CaseFile.from_parent(parent, path=file_path)
    return case


def _has_passes(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as lines:
        return any(line.startswith("# RUN:") for line in itertools.takewhile(lambda line: line.startswith("#"), lines))


class _CaseFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield _Case.from_parent(self, name="passes")


class _Case(pytest.Item):
    def runtest(self) -> None:
        from mirrorc.testing.pass_cases import check_case

        check_case(self.path, renews=self.config.getoption("update_snapshots", default=False))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from mirrorc.errors import PassError, VerifyError

        crashed = isinstance(excinfo.value, PassError) and excinfo.value.__cause__ is not None
        if crashed or not isinstance(excinfo.value, AssertionError | ValueError | PassError | VerifyError):
            return super().repr_failure(excinfo, style)
        return f"{os.path.relpath(self.path)}: {excinfo.value}"

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{self.parent.name if self.parent else ''} {self.name}"
