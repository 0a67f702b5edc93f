"""Commands of the pages about several processes and machines are such that torchrun, the example and `TF_CONFIG` take them."""

import re
import shlex
from pathlib import Path

from torch.distributed.run import get_args_parser

from mirrorc.cluster import find_place

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("several-processes.md", "several-machines.md")
TEXT = "".join((DOCS / "how-to" / page).read_text(encoding="utf-8") for page in PAGES)
EXAMPLE = (DOCS.parent / "examples" / "train_workers.py").read_text(encoding="utf-8")


def commands(page: str) -> list[list[str]]:
    lines = re.findall(r"^(?:srun |OMP_NUM_THREADS=1 )?torchrun (--.*)$", page, flags=re.MULTILINE)
    listed = re.findall(r"command: \[torchrun, (.*)\]", page)
    return [shlex.split(line) for line in lines] + [[word.strip('"') for word in own.split(", ")] for own in listed]


def test_torchrun_and_the_example_take_the_options() -> None:
    found = commands(TEXT)
    scripts = []
    for words in found:
        given = get_args_parser().parse_args(words)
        scripts.append(given.training_script)
        for option in given.training_script_args:
            assert not option.startswith("--") or f'"{option}"' in EXAMPLE, option
        assert given.standalone or (given.rdzv_backend == "c10d" and given.rdzv_endpoint.endswith(":29400"))
    assert sorted(scripts) == ["examples/train_workers.py"] * 4 + ["train.py"], "the last is the user's own, on GPUs"


def test_the_described_cluster_is_understood() -> None:
    (text,) = re.findall(r"TF_CONFIG='(.*?)'", TEXT)
    place = find_place(variables={"TF_CONFIG": text})
    assert (place.rank, place.num_workers, place.address) == (1, 2, "host-0:29400")
