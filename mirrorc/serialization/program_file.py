"""Saves programs to files and loads them: the complete text, compressed with gzip if the file's name ends in ``.gz``."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import os
import re
import secrets
import sys
import zipfile
import zlib
from pathlib import Path

import torch

from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import as_single_line
from mirrorc.serialization.literals import TextError, UnknownOperatorError
from mirrorc.serialization.parser import parse_program
from mirrorc.serialization.printer import VERSION, complete_text

_GZIP_MAGIC = b"\x1f\x8b"
_VERSION = re.compile(r"# complete form (\d{1,9}) · mirrorc ([\w.+-]{1,40}) · torch ([\w.+-]{1,40})")
_FIX = "give a file that Program.save has written, or a text of program.to_text(complete=True)"
_NAMED = "compiler=mirrorc.Compiler(capture='dynamo'), with functions and classes at the top of a module"
_WIDTH = 120  # the most characters of a line in an error


def text_of(program: Program) -> str:
    """Raises ValueError if a node calls or holds an object without an importable name."""
    try:
        return complete_text(program)
    except TextError as error:
        raise problem(ValueError, "MC7101: the program has no complete text", str(error), _NAMED) from error


def save_program(program: Program, path: str | os.PathLike[str]) -> None:
    """Writes a whole file or none; see `Program.save`."""
    try:
        text = complete_text(program)
    except TextError as error:
        raise problem(ValueError, f"MC7101: cannot save the program to {path}", str(error), _NAMED) from error
    write_whole(path, text.encode())


def load_program(path: str | os.PathLike[str]) -> Program:
    """See `Program.load`."""
    name = "standard input" if os.fspath(path) == "-" else os.fspath(path)
    return parse(_text_in(path, name), name)


def parse(text: str, name: str = "the text") -> Program:
    """Reads a program from its complete text, `Program.to_text` with ``complete=True``. Nothing in it is run.

    Args:
        name: the text's name in errors.

    Raises:
        TypeError: ``text`` is not a string.
        ValueError: it is not the complete text of a program, or calls unknown operators; names line and column.
    """
    if not isinstance(text, str):
        raise problem(TypeError, f"MC7102: the text is a {type(text).__name__}, not a string", fix=_FIX)
    text = text.replace("\r\n", "\n")
    torch_version = _checked_version(text, name)
    try:
        return parse_program(text)
    except (RecursionError, MemoryError) as error:
        raise problem(ValueError, f"MC7102: cannot read {name}: it is nested too deeply", fix=_FIX) from error
    except TextError as error:
        fix: tuple[str, ...] = ("mend this line, or save the program again",)
        if isinstance(error, UnknownOperatorError):
            fix = ("import the library that registers it first; on the command line, --import MODULE",)
            if torch_version != str(torch.__version__):
                fix += (f"use torch {torch_version}, which has written it; this is torch {torch.__version__}",)
        place = f", line {error.line}, column {error.column + 1}" if error.line is not None else ""
        why = f"{error}{_shown(error, text)}"
        raise problem(ValueError, f"MC7102: cannot read {name}{place}", why, fix) from error


def _checked_version(text: str, name: str) -> str:
    first, _, rest = text.partition("\n")
    second = _VERSION.fullmatch(rest.partition("\n")[0])
    if not first.startswith("# mirrorc · "):
        raise problem(ValueError, f"MC7102: cannot read {name}: it is no program", f"line 1 is {first[:60]!r}", _FIX)
    if second is None:
        raise problem(
            ValueError,
            f"MC7102: cannot read {name}: it is the short form of a program, in which repeated lines are folded",
            fix=("print it with program.to_text(complete=True)", "on the command line, mirrorc show FILE --complete"),
        )
    version, by, torch_version = int(second[1]), second[2], second[3]
    if version != VERSION:
        is_later = version > VERSION
        raise problem(
            ValueError,
            f"MC7102: cannot read {name}: it has version {version} of the form, this mirrorc reads version {VERSION}",
            fix=(f"use mirrorc {by}, which has written it", *(() if is_later else ("save the program again",))),
        )
    return torch_version


def _shown(error: TextError, text: str) -> str:
    lines = text.split("\n")
    if error.line is None or not 0 < error.line <= len(lines):
        return ""
    line, start = lines[error.line - 1], max(0, error.column - _WIDTH // 2)
    shown = as_single_line(line[start : start + _WIDTH])
    before = len(as_single_line(line[start : error.column]))
    return f"\n\n    {shown}\n    {' ' * before}^"


def _text_in(path: str | os.PathLike[str], name: str) -> str:
    with contextlib.nullcontext(sys.stdin.buffer) if os.fspath(path) == "-" else Path(path).open("rb") as file:
        pieces = itertools.islice(iter(lambda: file.read(_PIECE), b""), _MOST_BYTES // _PIECE + 1)
        encoded = b"".join(pieces)
    if len(encoded) > _MOST_BYTES:
        why = f"it is larger than {_MOST_BYTES >> 20} MiB; a program of 50,000 nodes has some 20 MiB"
        raise problem(ValueError, f"MC7102: cannot read {name}: it is too large for a program", why, _FIX)
    if _is_torch_checkpoint(encoded):
        raise problem(ValueError, f"MC7102: cannot read {name}: this is a torch checkpoint, not a program", fix=_FIX)
    try:
        return (_decompressed(encoded) if encoded.startswith(_GZIP_MAGIC) else encoded).decode()
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise problem(
            ValueError, f"MC7102: cannot read {name}: it is no text, or not all of it", str(error), _FIX
        ) from error


def _is_torch_checkpoint(encoded: bytes) -> bool:
    if not encoded.startswith(b"PK") or not zipfile.is_zipfile(io.BytesIO(encoded)):
        return False
    with zipfile.ZipFile(io.BytesIO(encoded)) as archive:
        return any(name.endswith("/data.pkl") for name in archive.namelist())


_MOST_BYTES = 2**29  # of a file
_PIECE = 2**20  # that is read at once
_ALWAYS_READ = 2**24
_MOST_EXPANSION = 100  # programs are compressed to a tenth or so; gzip can make a thousandth of zeros


def _decompressed(encoded: bytes) -> bytes:
    """Limits the size, against decompression bombs."""
    most = min(_ALWAYS_READ + _MOST_EXPANSION * len(encoded), _MOST_BYTES)
    with gzip.GzipFile(fileobj=io.BytesIO(encoded)) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(
            f"it decompresses to more than {most >> 20} MiB, which no program of {len(encoded)} bytes does"
        )
    return content


def write_whole(path: str | os.PathLike[str], content: bytes) -> Path:
    """Writes a file and missing folders, compressed if its name ends in ``.gz``. An error leaves an earlier file."""
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
