"""`Debug`: what a step writes, prints and checks beside its work."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from dataclasses import dataclass
from types import NoneType
from typing import ClassVar, Literal

from mirrorc.options.option import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class Debug(OptionGroup):
    """What a step writes, prints and checks beside its work, for ``debug=`` of `mirrorc.compile`.

    Attributes:
        dump: a directory for one file per pass, its diff and an index; default: the environment variable MIRRORC_DUMP.
        print_after: names of passes after which the program is printed, on standard error; "all" for each of them.
        progress: report a compilation on standard error: on a terminal after 2 s, in a line that goes away; elsewhere after
            10 s, in one line. A log of level INFO gets the line in its place, after 2 s.
        check_replicas_every: every so many steps, compare checksums of parameters and optimizer state of all replicas, and
            raise `ExecutionError` if the memory of one has gone bad; 0 for never. Devices that share their parameters have
            nothing to compare, with a remark. Several workers compare theirs, and all raise `CommunicationError`. Calls of
            `Step.gradients` compare nothing: they copy the user's parameters to all devices.

    Raises:
        TypeError, ValueError: a field has another kind or value; names it and the remedy.
    """

    keyword: ClassVar[str] = "debug"

    dump: str | os.PathLike[str] | None = option(
        None, "give the path of a directory, or None", kinds=(str, os.PathLike, NoneType)
    )
    print_after: Sequence[str] | Literal["all"] = option(
        (),
        "give a sequence of names, such as ('replicate',), or 'all'",
        kinds=(Sequence, Set),
        texts=("all",),
    )
    progress: bool = option(True, "say True, to be told what takes long while it is compiled, or False", kinds=(bool,))
    check_replicas_every: int = option(
        0,
        "give a positive number of steps, or 0 for never",
        kinds=(int,),
        accepts=lambda steps: steps >= 0,
    )
