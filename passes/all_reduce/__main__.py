"""``python -m mirrorc.passes.all_reduce docs/compiler/all-reduce`` draws every algorithm."""

from __future__ import annotations

import sys
from pathlib import Path

from mirrorc.passes.all_reduce import ALGORITHMS
from mirrorc.passes.all_reduce.sketch import message_picture, sketched

NUM_ELEMENTS = 960  # divisible by 2, 3, 4, 5, 6 and 8 devices


def pictures() -> dict[str, str]:
    drawn = [(name, 4) for name, algorithm in ALGORITHMS.items() if algorithm().sends]
    drawn.append(("halving-doubling", 6))
    num_buckets = {"round-robin": 2}  # with one bucket it would be the picture of reduce-to-one
    return {
        f"{name}-{number}.svg": message_picture(
            sketched(ALGORITHMS[name](), number, NUM_ELEMENTS, num_buckets=num_buckets.get(name, 1))
        )
        for name, number in drawn
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
