"""What all tests share."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mirrorc import reproducer

logging.getLogger("torch.__trace").propagate = False  # its thousands of records would drown a failure's report


@pytest.fixture(scope="session", autouse=True)
def _reproducers_go_with_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Reproducers of passes that fail in tests, which nobody gave a folder, do not pile up among the system's files."""
    folder = tmp_path_factory.mktemp("reproducers")

    def mkdtemp(*, prefix: str, dir: Any) -> str:
        return tempfile.mkdtemp(prefix=prefix, dir=dir or folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproducer, "tempfile", SimpleNamespace(mkdtemp=mkdtemp))
        yield
