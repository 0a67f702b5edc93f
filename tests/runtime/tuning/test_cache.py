import json
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mirrorc.runtime.tuning.cache import Entry, MeasurementCache, cache_directory

KEY = {"devices": ["a", "a"], "bytes": 1024}


def has_time(result: Entry) -> bool:
    return result["ms"] > 0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MIRRORC_CACHE_DIR", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # where a test expects none
        yield tmp_path / "cache"


def test_what_is_kept_is_read_by_the_next(folder: Path) -> None:
    assert MeasurementCache("buckets", KEY).read(has_time) is None
    assert MeasurementCache("buckets", KEY).keep({"ms": 1.5}, has_time) == {"ms": 1.5}
    assert MeasurementCache("buckets", dict(reversed(KEY.items()))).read(has_time) == {"ms": 1.5}
    (file,) = folder.iterdir()  # nothing temporary is left
    assert json.loads(file.read_text()) == {"key": KEY, "result": {"ms": 1.5}}


def test_each_key_and_each_kind_has_a_file_of_its_own(folder: Path) -> None:
    for number, (kind, key) in enumerate([("buckets", KEY), ("buckets", {**KEY, "bytes": 2048}), ("links", KEY)], 1):
        assert MeasurementCache(kind, key).read(has_time) is None
        MeasurementCache(kind, key).keep({"ms": number}, has_time)
        assert MeasurementCache(kind, key).read(has_time) == {"ms": number}
    assert len(list(folder.iterdir())) == 3


def test_who_comes_second_takes_what_the_first_has_kept() -> None:
    MeasurementCache("buckets", KEY).keep({"ms": 1.0}, has_time)
    assert MeasurementCache("buckets", KEY).keep({"ms": 2.0}, has_time) == {"ms": 1.0}
    assert MeasurementCache("buckets", KEY).read(has_time) == {"ms": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'"key"',
        json.dumps({"key": KEY}).encode(),
        json.dumps({"key": KEY, "result": {}}).encode(),
        json.dumps({"key": KEY, "result": {"ms": "fast"}}).encode(),
        json.dumps({"key": KEY, "result": {"ms": -1}}).encode(),
        json.dumps({"key": {}, "result": {"ms": 1}}).encode(),
        b"[" * 100_000,
    ],
    ids=lambda text: text[:40].decode(errors="replace"),
)
def test_a_damaged_file_is_reported_and_written_over(folder: Path, text: bytes) -> None:
    cache = MeasurementCache("buckets", KEY)
    cache.keep({"ms": 1.0}, has_time)
    (file,) = folder.iterdir()
    file.write_bytes(text)
    with pytest.warns(UserWarning, match=f"{file} is damaged, so it is measured again, and written over: ."):
        assert cache.read(has_time) is None
    assert cache.keep({"ms": 2.0}, has_time) == {"ms": 2.0}  # without another warning
    assert cache.read(has_time) == {"ms": 2.0}


def test_a_directory_that_cannot_be_made_is_reported(folder: Path) -> None:
    folder.write_text("a file in its place")
    cache = MeasurementCache("buckets", KEY)
    with pytest.warns(UserWarning, match=r"the cache cannot be read.*set MIRRORC_CACHE_DIR to a directory"):
        assert cache.read(has_time) is None
    with pytest.warns(UserWarning, match=r"cannot be kept, so it will be measured again.*set MIRRORC_CACHE_DIR"):
        assert cache.keep({"ms": 1.0}, has_time) == {"ms": 1.0}
    assert folder.read_text() == "a file in its place"


def test_a_write_that_fails_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        MeasurementCache("buckets", KEY).keep({"ms": 1.0}, has_time)
    assert list(folder.iterdir()) == []


def test_the_directory_is_the_users_unless_the_environment_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.setenv("MIRRORC_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "mirrorc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "mirrorc"


def test_without_a_home_nothing_is_kept_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MIRRORC_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.warns(UserWarning, match="Could not determine home directory"):
        assert MeasurementCache("buckets", KEY).keep({"ms": 1.0}, has_time) == {"ms": 1.0}


def _keep_often(number: int, start: Any, answers: Any) -> None:
    start.wait(60)
    for i in range(30):
        result = {"ms": float(number), "padding": "x" * 20_000}
        answers.put((i, MeasurementCache("buckets", {"i": i}).keep(result, has_time)["ms"]))
    answers.put(None)


@pytest.mark.slow
def test_two_processes_at_once_leave_whole_files(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_keep_often, args=(number, start, answers)) for number in (1, 2)]
    for process in processes:
        process.start()
    found: dict[int, set[float]] = {}
    for _ in processes:
        while (answer := answers.get(timeout=120)) is not None:
            found.setdefault(answer[0], set()).add(answer[1])
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(list(folder.iterdir())) == len(found) == 30
    for i, seen in found.items():
        kept = MeasurementCache("buckets", {"i": i}).read(has_time)
        assert kept is not None and kept["ms"] in seen and len(kept["padding"]) == 20_000
