"""What a placement of parameters says is all that the rest of the compiler asks."""

import dataclasses
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from outside_placement import CENTRAL
from tiny_programs import handmade, run_up_to

from mirrorc.ir.buckets import Bucket
from mirrorc.ir.variables import Placement, UpdateRule
from mirrorc.printing.bucket_table import table_lines
from mirrorc.serialization.literals import expression
from mirrorc.serialization.records import record_of, record_text

ROOT = Path(__file__).parents[2]
MAY_NAME_A_PLACEMENT = {
    "mirrorc/ir/variables.py",
    "mirrorc/ir/buckets.py",
    "passes/replicas/share_parameters.py",
    "passes/replicas/update_at_owner.py",
}


def test_only_the_pass_that_establishes_a_placement_names_one() -> None:
    member = re.compile(rf"\bPlacement\s*\.\s*({'|'.join(Placement.__members__)})\b")
    folders = [ROOT / folder for folder in ("mirrorc", "passes", "runtime")]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    naming = {path.relative_to(ROOT).as_posix() for path in files if member.search(path.read_text(encoding="utf-8"))}
    assert naming <= MAY_NAME_A_PLACEMENT and "passes/replicas/share_parameters.py" in naming


def test_placements_are_saved_by_name_and_pickled() -> None:
    assert [record_text(placement, Placement, "placement") for placement in Placement] == [
        "MIRRORED",
        "SHARED",
        "OWNED",
    ]
    assert [placement.value.word for placement in Placement] == ["mirrored", "shared", "owned"]
    for placement in Placement:
        assert record_of(expression(placement.name), Placement, "placement") is placement
        assert pickle.loads(pickle.dumps(placement)) is placement


def placed(placement: Any, *, elementwise: bool = True, num_elements: int = 200) -> Bucket:
    (bucket,) = run_up_to("plan-buckets", handmade()).buckets
    rule = UpdateRule("SGD group 0", 0, elementwise=elementwise)
    return dataclasses.replace(bucket, placement=placement, rule=rule, num_elements=num_elements)


def central(*, elementwise: bool = True) -> Bucket:
    return placed(cast(Placement, SimpleNamespace(value=CENTRAL)), elementwise=elementwise)


def test_a_bucket_answers_for_its_placement() -> None:
    for bucket, shares, owners, updating, by_shares, is_last in (
        (placed(Placement.MIRRORED), [(0, 200), (0, 200)], [0, 1], [True, True], False, False),
        (placed(Placement.MIRRORED, elementwise=False), [(0, 200), (0, 200)], [0, 1], [True, True], False, False),
        (placed(Placement.SHARED), [(0, 128), (128, 200)], [0, 0], [True, True], True, True),
        (placed(Placement.SHARED, num_elements=8), [(0, 0), (0, 8)], [0, 0], [False, True], True, True),
        (placed(Placement.SHARED, elementwise=False), [(0, 128), (128, 200)], [0, 0], [True, False], False, True),
        (central(), [(0, 200), (0, 0)], [0, 0], [True, False], False, True),
        (central(elementwise=False), [(0, 200), (0, 0)], [0, 0], [True, False], False, True),
    ):
        assert [bucket.share(replica, 2) for replica in range(2)] == shares
        assert [bucket.owner_of_parameters(replica) for replica in range(2)] == owners
        assert [bucket.is_updated_by(replica, 2) for replica in range(2)] == updating
        assert (bucket.reduces_by_shares, bucket.is_written_last) == (by_shares, is_last)


def test_the_table_of_buckets_prints_a_placement_by_its_word() -> None:
    program = run_up_to("plan-buckets", handmade())
    for bucket, word in (
        (placed(Placement.MIRRORED), ""),
        (placed(Placement.SHARED), "shared"),
        (central(), "central"),
    ):
        row = table_lines(program.evolve(buckets=(bucket,)), slots=False, fold=True)[0]
        assert row.endswith(f"SGD group 0 · {word}" if word else "SGD group 0")
