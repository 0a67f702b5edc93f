"""A remark: what a pass tells the reader of a program."""

from __future__ import annotations

from dataclasses import dataclass

CAPTURE = "capture"
"""Stands in the place of a pass in remarks on how a program was captured: by which front end, if it was not the first one, and
which sizes are numbers in it although they change."""


@dataclass(frozen=True)
class Remark:
    """What a pass did or did not do, and why, in one or two sentences.

    Attributes:
        text: the sentences. The same program gives the same text.
        by: the name of the pass, which the runner sets; empty for a remark from before the first pass.
        is_kept: whether the remark is printed with the program after this pass and all later ones. Other remarks are only
            in the dump of their own pass: they say what that pass did, and need not be true of later programs.
    """

    text: str
    by: str = ""
    is_kept: bool = True

    def __str__(self) -> str:
        return f"{self.by}: {self.text}" if self.by else self.text
