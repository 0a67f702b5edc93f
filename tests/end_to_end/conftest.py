"""Whole training runs are slow, but for those that are marked ``fast``."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("fast") is None:
            item.add_marker(pytest.mark.slow)
