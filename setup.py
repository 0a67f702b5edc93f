"""Finds the packages: `passes/` and `runtime/` stand beside `mirrorc/` here, and are its subpackages when installed."""

from setuptools import find_packages, setup

BESIDE = ("passes", "runtime")


def packages() -> list[str]:
    """Every folder with an ``__init__.py``, under the name that it is imported by."""
    own = [name for name in find_packages(include=["mirrorc", "mirrorc.*"]) if name != "mirrorc.testing.plugin"]
    beside = find_packages(include=[pattern for name in BESIDE for pattern in (name, f"{name}.*")])
    return [*own, *(f"mirrorc.{name}" for name in beside), "mirrorc_pytest"]


setup(
    packages=packages(),
    package_dir={
        "mirrorc": "mirrorc",
        **{f"mirrorc.{name}": name for name in BESIDE},
        "mirrorc_pytest": "mirrorc/testing/plugin",  # by itself, so that pytest can load it without importing torch
    },
)
