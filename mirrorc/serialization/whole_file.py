"""Writes whole files or none."""

from __future__ import annotations

import gzip
import os
import secrets
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes) -> Path:
    """Writes a file, compressed if its name ends in ``.gz``. After an error, an earlier file stays. Creates missing
    folders.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.parent / f".mirrorc-{secrets.token_hex(4)}"
    try:
        unfinished.write_bytes(gzip.compress(content, mtime=0) if target.suffix == ".gz" else content)
        unfinished.replace(target)
    except OSError as error:  # it names a temporary file, which the user does not know
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return target
