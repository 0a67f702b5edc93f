"""A remark: what a pass tells the reader of a program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Remark:
    """What a pass did or did not do, and why, in one or two sentences.

    Attributes:
        text: the sentences. The same program gives the same text.
        by: the name of the pass; empty if the remark is older than the first pass. The runner fills it in.
        is_kept: whether the remark is printed with the program from its pass on, to the last one. The others stand in the
            dump of their own pass alone: they say what that pass did, not what is true of every later program.
    """

    text: str
    by: str = ""
    is_kept: bool = True

    def __str__(self) -> str:
        return f"{self.by}: {self.text}" if self.by else self.text
