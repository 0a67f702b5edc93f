"""Stores results of measurements on disk, each in a small JSON file, so that a machine measures each setting only once."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Entry = Mapping[str, Any]  # of JSON's types
_REMEDY = "set MIRRORC_CACHE_DIR to a directory that can be written"


def cache_directory() -> Path:
    """The directory of results: MIRRORC_CACHE_DIR, else ``mirrorc`` in XDG_CACHE_HOME, else ``~/.cache/mirrorc``.

    Raises:
        OSError: there is no home directory.
    """
    if own := os.environ.get("MIRRORC_CACHE_DIR"):
        return Path(own)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "mirrorc"
    try:
        return Path.home() / ".cache" / "mirrorc"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error


class MeasurementCache:
    """Stores the result for one key. If its file cannot be read or written, a warning says so, and no error is raised.

    Each key has a file of its own, so that processes that measure different settings at once cannot lose each other's results.

    Args:
        kind: what is measured; the first part of the file's name.
        key: everything that the result depends on, of JSON's types.
    """

    def __init__(self, kind: str, key: Entry) -> None:
        self.key = dict(key)
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        self._name = f"{kind}-{digest[:16]}.json"

    def read(self, is_whole: Callable[[Entry], bool]) -> Entry | None:
        """The stored result, if there is one.

        Args:
            is_whole: whether a result is complete.
        """
        result, problem = self._load(is_whole)
        if problem:
            warnings.warn(problem, stacklevel=2)
        return result

    def _load(self, is_whole: Callable[[Entry], bool]) -> tuple[Entry | None, str]:
        """The result, or what is wrong with it."""
        try:
            path = cache_directory() / self._name
            text = path.read_bytes()
        except FileNotFoundError:
            return None, ""
        except OSError as error:
            return None, f"the cache cannot be read, so it is measured again: {error}; {_REMEDY}"
        try:
            kept = json.loads(text)
            if kept["key"] == self.key and is_whole(kept["result"]):
                return kept["result"], ""
            why = "its key or its result is not what was written"
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:  # it may hold any JSON
            why = f"{type(error).__name__}: {error}"
        return None, f"{path} is damaged, so it is measured again, and written over: {why}"

    def keep(self, result: Entry, is_whole: Callable[[Entry], bool]) -> Entry:
        """Stores a result unless another process has stored one meanwhile; returns the stored one.

        A process that reads at the same time finds a complete file or none.
        """
        theirs, _ = self._load(is_whole)
        if theirs is not None:
            return theirs
        text = json.dumps({"key": self.key, "result": dict(result)}, indent=2) + "\n"
        try:
            directory = cache_directory()
            directory.mkdir(parents=True, exist_ok=True)
            _replace(directory / self._name, text)
        except OSError as error:
            warnings.warn(
                f"what was measured cannot be kept, so it will be measured again: {error}; {_REMEDY}", stacklevel=2
            )
        return result


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
