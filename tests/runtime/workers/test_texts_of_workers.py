"""Workers whose texts have lengths of their own train as one process does, with few programs each."""

from collections.abc import Mapping
from typing import Any

import pytest
import selections
from worker_processes import LazyOutcomes, workers
from worker_texts import in_one_process, reference
from worker_training import assert_training

LENGTHS = [[6, 9], [7, 9], [11, 4], [5, 13], [8, 8], [12, 7]]
BATCHES = [[[4, one], [4, other]] for one, other in LENGTHS]
OF_THREE = [[[6, one], [4, other], [5, 3 + number]] for number, (one, other) in enumerate(LENGTHS)]
UNEVEN = [[[4 + number % 3, one], [6 - number % 2, other]] for number, (one, other) in enumerate(LENGTHS)]
WIDE: dict[str, Any] = {"width": 2800}
FOUR_AND_ONE = [[[4, one], [1, other]] for one, other in LENGTHS[:4]]
ONE_AND_FOUR = [[[1, one], [4, other]] for one, other in LENGTHS[:4]]
FOUR_AND_TWO = [[[4, one], [2, other]] for one, other in LENGTHS[:4]]
OF_ONE_LENGTH = [[[4, one], [1, one]] for one, _ in LENGTHS[:4]]  # as replicas of one process have it
ATTENDS: dict[str, Any] = {"devices": [1, 1], "model": {"attends": True}, "options": {"exchange": "dense"}}
DRAWS = {**ATTENDS, "model": {"attends": True, "draws": True}}
CASES: dict[str, dict[str, Any]] = {
    "lengths": {"devices": [1, 1], "batches": BATCHES},
    "2 x 2": {"devices": [2, 2], "batches": UNEVEN},
    "other devices": {"devices": [1, 2, 1], "batches": OF_THREE},
    "one changes": {"devices": [1, 1], "batches": [[[4, 6], one] for _, one in BATCHES]},
    "from the first on": {"devices": [1, 1], "batches": UNEVEN, "options": {"dynamic": True}},
    "few": {"devices": [2, 2], "batches": [*BATCHES[:3], [[1, 5], [2, 6]], *BATCHES[3:]]},
    "leaves": {
        "devices": [2, 1],
        "batches": [*BATCHES[:3], [BATCHES[3][0], []], [BATCHES[4][0], []]],
        "joins": True,
    },
    "factors from the first on": {
        "devices": [1, 1],
        "batches": BATCHES,
        "model": WIDE,
        "options": {"dynamic": True, "exchange": "factors"},
    },
    "bits": {"devices": [1, 1], "batches": BATCHES[:4], "model": WIDE, "options": {"exact_order": True}},
    "factors": {"devices": [1, 1], "batches": BATCHES[:4], "model": WIDE, "options": {"exchange": "factors"}},
    "rows": {"devices": [1, 1], "batches": BATCHES[:4], "model": {"takes_rows": True}},
    "dealt out": {"devices": [1, 1], "batches": BATCHES, "options": {"shard_optimizer": True}},
    "inductor": {"devices": [1, 1], "batches": BATCHES[:4], "options": {"backend": "inductor"}},
    "one text": {**ATTENDS, "batches": FOUR_AND_ONE},
    "one text first": {**ATTENDS, "batches": ONE_AND_FOUR},
    "parts of one": {**ATTENDS, "batches": FOUR_AND_TWO, "options": {"exchange": "dense", "microbatches": 2}},
    "draws": {**DRAWS, "batches": OF_ONE_LENGTH},
    "draws, each size": {**DRAWS, "batches": OF_ONE_LENGTH, "options": {"exchange": "dense", "dynamic": False}},
}
FAST = ("lengths", "2 x 2", "one text")
AS_NUMBERS = ("draws, each size",)
AT_RANDOM = ("draws", "draws, each size")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    cases = {name: workers("texts", given) for name, given in CASES.items()}
    return LazyOutcomes(tmp_path_factory.mktemp, cases, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("case", selections.slow_but(FAST, [name for name in CASES if name not in AT_RANDOM]))
def test_steps_are_those_of_one_process(found: Mapping[str, Any], case: str) -> None:
    given = CASES[case]
    losses, values = reference(given)
    for own in found[case][: len(given["devices"])]:
        assert_training(own, losses[: len(own["losses"])], values, rel=1e-10, abs=1e-12)
        assert own["values"] == found[case][0]["values"]


@pytest.mark.slow
@pytest.mark.parametrize("case", AT_RANDOM)
def test_random_streams_are_those_of_one_process(found: Mapping[str, Any], case: str) -> None:
    losses, values = in_one_process(CASES[case])
    for own in found[case][:2]:
        assert_training(own, losses, values, rel=1e-10, abs=1e-12)
        assert own["values"] == found[case][0]["values"]


@pytest.mark.slow
@pytest.mark.parametrize("case", selections.slow_but(FAST, [name for name in CASES if name not in AS_NUMBERS]))
def test_one_program_serves_all_lengths(found: Mapping[str, Any], case: str) -> None:
    for rank, own in enumerate(found[case][: len(CASES[case]["devices"])]):
        if case == "one changes" and rank == 0:
            assert own["programs"] == 1 and "i64[4, 6]" in own["text"]
        else:
            most = {"from the first on": 1, "factors from the first on": 1, "few": 4, "2 x 2": 4}.get(
                case, 3
            )  # batches of fewer texts come first, each alone
            assert own["programs"] <= most
            assert ": size[s0]" in own["text"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["factors from the first on", "factors", "rows"])
def test_numbers_of_factors_may_be_symbols(found: Mapping[str, Any], case: str) -> None:
    for own in found[case][:2]:
        assert "sent as factors" in own["text"] and ": size[s0]" in own["text"]
