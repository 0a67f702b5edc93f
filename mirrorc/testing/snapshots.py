"""Snapshots for the pytest fixture ``mirror_snapshot``; syrupy finds, writes and counts their files."""

from __future__ import annotations

import difflib
import os
from typing import Any

from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from mirrorc.comparison.diff import diff_texts
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.step import Step

_SHOWN = 60  # the most lines that are shown of a program without a snapshot


class ProgramFiles(SingleFileSnapshotExtension):
    """Text files ``__snapshots__/<test file>/<test>.mirror``."""

    file_extension = "mirror"
    _write_mode = WriteMode.TEXT


class ProgramSnapshot:
    """The expected text of a program: ``assert step.program == mirror_snapshot``.

    A failing comparison raises AssertionError itself, because pytest would show only eight lines.

    Args:
        snapshot: syrupy's fixture of this name.
        name: the snapshot's name; unnamed snapshots of a test are numbered.
        regions: also compare bodies of regions.

    Raises:
        TypeError: ``snapshot`` is the fixture of another plugin, or ``name`` is not a string.
    """

    def __init__(self, snapshot: SnapshotAssertion, name: str | None = None, regions: bool = False) -> None:
        if not isinstance(snapshot, SnapshotAssertion):
            raise problem(
                TypeError,
                f"MC7201: the fixture 'snapshot' gives a {type(snapshot).__name__}, not syrupy's",
                "another plugin or a conftest.py has taken the name, and mirror_snapshot needs syrupy's fixture",
                ("pytest -p no:NAME, for that plugin", "rename the fixture of the conftest.py"),
            )
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"MC7201: name is {name!r}: give the snapshot's name, a string")
        is_ready = snapshot.extension_class is ProgramFiles
        self._assertion = snapshot if is_ready else snapshot.use_extension(ProgramFiles)
        self._name = name
        self._regions = regions

    def __call__(self, *, name: str | None = None, regions: bool = False) -> ProgramSnapshot:
        """Another snapshot of this test: with a name, or with bodies of regions."""
        return ProgramSnapshot(self._assertion, name, regions)

    def __eq__(self, program: object) -> bool:
        """Raises AssertionError, with the differing lines, if the program differs from the snapshot."""
        __tracebackhide__ = True
        if self._is_matched_by(program):
            return True
        raise AssertionError(self._explanation())

    def __ne__(self, program: object) -> bool:
        return not self._is_matched_by(program)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "mirror_snapshot" + (f"(name={self._name!r})" if self._name else "")

    def _is_matched_by(self, program: object) -> bool:
        if not isinstance(program, Program):
            remedy = "compare step.program" if isinstance(program, Step) else "compare a Program, such as step.program"
            raise TypeError(
                f"MC7201: mirror_snapshot holds the text of a program and is compared with a {type(program).__name__}: {remedy}"
            )
        schedule = program.evolve(optimizer_groups={})  # the text must not depend on the learning rate
        text = schedule.to_text(regions=self._regions, slots=True, sources=False)
        return bool((self._assertion(name=self._name) if self._name else self._assertion) == text)

    def _explanation(self) -> str:
        result: Any = self._assertion.executions[self._assertion.num_executions - 1]
        if result.exception is not None:
            raise result.exception
        path = os.path.relpath(result.snapshot_location)
        old, new = result.recalled_data, result.asserted_data
        if old is None:
            lines = new.splitlines()
            rest = [f"... and {len(lines) - _SHOWN} more lines"] if len(lines) > _SHOWN else []
            head = (
                f"the snapshot {path} does not exist: write it with pytest --snapshot-update, and read it. It would be:"
            )
            return "\n".join([head, "", *lines[:_SHOWN], *rest])
        head = (
            f"the program is not as in the snapshot {path}; if it should be, renew that with pytest --snapshot-update."
        )
        return f"{head}\n\n{_difference(old, new)}"


def _difference(old: str, new: str) -> str:
    try:
        return (
            diff_texts(old, new) or "only what does not count in a comparison differs, such as the user's source lines"
        )
    except ValueError as error:  # somebody has edited the snapshot
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), "old", "new", n=2, lineterm="")
        return "\n".join([str(error), "", *lines])
