"""How often Python looks for garbage in tests."""

import gc

_COLLECTED_AFTER = 100_000  # objects, of which the compilation of a small net makes about as many


def keep_what_is_there() -> None:
    """What is there stays: no garbage collection looks through it again."""
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """Keeps what is there, and collects seldom: what a step was compiled from is garbage at its end, and is looked through
    once, not on the way."""
    keep_what_is_there()
    gc.set_threshold(_COLLECTED_AFTER, 10, 10)
