"""The table of mutations: ways to break a valid program, and ways to change it that keep what it means."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mirrorc.ir.program import Program

Edit = Callable[[], object]
"""Changes a program at one place: its graphs, or by giving a program with other tables."""

Places = Callable[[Program], Iterator[Edit]]


@dataclass(frozen=True)
class Kind:
    """A way to change a program.

    Attributes:
        places: gives an edit for each place in a program where it applies, in the same order each time.
        is_harmless: whether the program means the same afterwards, so that it must be accepted; else it must be refused.
        is_judged: whether an edit counts only if `meaning` says that something else is computed (two values that are
            exchanged may be the same, such as a tensor and its detached self).
    """

    name: str
    description: str
    places: Places
    is_harmless: bool
    in_regions: bool
    is_judged: bool


KINDS: dict[str, Kind] = {}


def breaks(places: Places | None = None, *, in_regions: bool = False, is_judged: bool = False) -> Callable[..., Places]:
    """Enters a function into the table, as a kind that changes what programs mean or lets no program run."""
    return _enter(places, False, in_regions, is_judged)


def keeps(places: Places | None = None, *, in_regions: bool = False) -> Callable[..., Places]:
    """Enters a function into the table, as a kind that changes nothing of what programs mean."""
    return _enter(places, True, in_regions, False)


def _enter(places: Places | None, is_harmless: bool, in_regions: bool, is_judged: bool) -> Callable[..., Places]:
    def enter(function: Places) -> Places:
        name = function.__name__.replace("_", " ")
        assert name not in KINDS, name
        description = inspect.getdoc(function)
        assert description and "\n" not in description, f"{name} needs a description in a line"
        KINDS[name] = Kind(name, description, function, is_harmless, in_regions, is_judged)
        return function

    return enter if places is None else enter(places)
