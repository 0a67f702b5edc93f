"""The pytest plugin: the fixture ``mirror_snapshot``.

The plugin is packaged as ``mirrorc_pytest``: pytest imports plugins at every start, and mirrorc imports torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

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
