from pathlib import Path

import pytest

from mirrorc.runtime.devices import machine
from mirrorc.runtime.devices.machine import processor_model

CORE = """processor\t: {0}
model name\t: Some Processor 9000
model\t\t: 17
cpu MHz\t\t: {1}
cache size\t: 512 KB
"""


def test_a_processor_is_known_by_its_model_not_by_what_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for mhz in (2600.1, 3100.7):
        (tmp_path / "cpuinfo").write_text("\n".join(CORE.format(core, mhz + core) for core in range(2)))
        monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
        names.append(processor_model())
    assert names[0] == names[1]
    assert names[0].endswith(", model name Some Processor 9000, model 17, cache size 512 KB")


def test_a_system_that_tells_nothing_still_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "none")
    assert processor_model()
