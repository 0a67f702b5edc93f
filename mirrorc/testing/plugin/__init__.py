"""The pytest plugin: the fixture ``mirror_snapshot``.

It is installed as ``mirrorc_pytest``, beside the package mirrorc and not in it, because pytest imports its plugins whenever it
starts, and whoever imports a part of mirrorc has imported torch.
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
    """``assert step.program == mirror_snapshot``: the program's text is that of the snapshot beside the test.

    ``mirror_snapshot(name="...")`` is a further snapshot of the test by a name, ``mirror_snapshot(regions=True)`` one that has
    the bodies of the regions as well. ``pytest --snapshot-update`` writes snapshots.
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
    """Whether somebody has asked torch for its trace."""
    return "TORCH_TRACE" in os.environ
