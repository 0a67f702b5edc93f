"""Options that `mirrorc.compile` no longer takes."""

from __future__ import annotations

from collections.abc import Iterable

_REASONS = {"overlap_next_step": "it gained nothing on any machine measured"}


def check_names(unknown: Iterable[str]) -> None:
    """Refuses options that do not exist, or no longer.

    Args:
        unknown: the names of keyword arguments that `mirrorc.compile` does not have.

    Raises:
        TypeError: names the first of them; of a withdrawn one also the reason and the remedy.
    """
    for option in unknown:
        if option in _REASONS:
            raise TypeError(f"{option}= was withdrawn from mirrorc.compile: {_REASONS[option]}; leave it out")
        raise TypeError(f"mirrorc.compile() got an unexpected keyword argument {option!r}")
