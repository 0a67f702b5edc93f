"""Ends commands that fail, with a message."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from mirrorc.messages.wording import printable


def fail(reason: Exception | str) -> NoReturn:
    complain(reason)
    raise typer.Exit(2) from None


def complain(reason: Exception | str) -> None:
    if isinstance(reason, FileNotFoundError):
        reason = f"there is no file {reason.filename}"
    elif isinstance(reason, OSError) and reason.filename is not None:
        reason = f"{reason.filename}: {reason.strerror}"
    sys.stderr.write(printable(f"mirrorc: {reason}\n"))


@contextmanager
def blamed_on(option: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
