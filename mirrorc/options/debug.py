"""`Debug`: dumps, prints, progress and checks of a step."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from dataclasses import dataclass
from types import NoneType
from typing import ClassVar, Literal

from mirrorc.options.option import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class Debug(OptionGroup):
    """Dumps, prints, progress and checks of a step, for ``debug=`` of `mirrorc.compile`.

    Attributes:
        dump: a directory for a file per pass, its diff and an index; by default, the environment variable MIRRORC_DUMP.
        print_after: names of passes after which the program is printed on standard error; "all" for every pass.
        progress: show compilations on standard error: on a terminal after 2 s, in a line that disappears; elsewhere
            after 10 s. A log of level INFO gets the line instead, after 2 s.
        check_replicas_every: every so many steps, compare checksums of parameters and optimizer state of all replicas,
            and raise `ExecutionError` if they differ, as after a memory error; 0 for never. Devices with shared
            parameters have nothing to compare; a remark says so. Workers compare theirs, too, and all raise
            `CommunicationError`. Calls of `Step.gradients` compare nothing, because they copy the user's parameters to
            all devices.

    Raises:
        TypeError, ValueError: a field has another kind or value; names it and the remedy.
    """

    keyword: ClassVar[str] = "debug"

    dump: str | os.PathLike[str] | None = option(
        None, "give the path of a directory, or None", kinds=(str, os.PathLike, NoneType)
    )
    print_after: Sequence[str] | Literal["all"] = option(
        (), "give a sequence of names, such as ('replicate',), or 'all'", kinds=(Sequence, Set), texts=("all",)
    )
    progress: bool = option(True, "say True, to be told what takes long while it is compiled, or False", kinds=(bool,))
    check_replicas_every: int = option(
        0, "give a positive number of steps, or 0 for never", kinds=(int,), accepts=lambda steps: steps >= 0
    )
