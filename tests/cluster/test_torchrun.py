"""What is read from torchrun's variables, and what is refused in them."""

import re

import pytest

from mirrorc.cluster.place import Place, place_by_torchrun

SET = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host-0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_place_has_all_that_torchrun_says() -> None:
    found = place_by_torchrun(SET)
    expected = Place(5, 8, "torchrun's variables", "host-0", 29500, local_rank=1, num_restarts=2, store_persists=True)
    assert found == expected
    assert str(found) == "worker 5 of 8 by torchrun's variables"


def test_four_variables_are_enough_and_worker_0_opens_the_store() -> None:
    least = {"WORLD_SIZE": "8", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
    chief = place_by_torchrun({**least, "RANK": "0"})
    assert chief == Place(0, 8, "torchrun's variables", "::1", 29500, hosts_store=True)
    assert chief.address == "[::1]:29500"
    other = place_by_torchrun({**least, "RANK": "1"})
    assert other is not None and not other.hosts_store
    agents = place_by_torchrun({**SET, "RANK": "0"})
    assert agents is not None and not agents.hosts_store


def test_without_them_there_is_no_place_and_one_worker_needs_no_address() -> None:
    assert place_by_torchrun({"MASTER_ADDR": "host-0", "LOCAL_RANK": "x"}) is None
    alone = place_by_torchrun({"RANK": "0", "WORLD_SIZE": "1"})
    assert alone is not None and (alone.rank, alone.num_workers) == (0, 1)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (
            "RANK",
            None,
            "RANK is not set, but others of torchrun's variables are\n  fix:  give a whole number from 0 to 7",
        ),
        ("RANK", "", "RANK is ''\n  fix:  give a whole number from 0 to 7, as WORLD_SIZE is"),
        ("RANK", "8", "RANK is '8'\n  fix:  give a whole number from 0 to 7"),
        ("RANK", "-1", "RANK is '-1'\n  fix:  give"),
        ("WORLD_SIZE", None, "WORLD_SIZE is not set"),
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two'\n  fix:  give a whole number of at least 1"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is '0'\n  fix:  give"),
        ("LOCAL_RANK", "4", "LOCAL_RANK is '4'\n  fix:  give a whole number from 0 to 3, as LOCAL_WORLD_SIZE is"),
        ("LOCAL_WORLD_SIZE", "9", "LOCAL_WORLD_SIZE is '9'\n  fix:  give a whole number from 1 to 8, as WORLD_SIZE is"),
        ("MASTER_ADDR", None, "MASTER_ADDR is not set"),
        ("MASTER_ADDR", " ", "MASTER_ADDR is ' '\n  fix:  give the name or address of the machine of worker 0"),
        ("MASTER_PORT", None, "MASTER_PORT is not set"),
        ("MASTER_PORT", "65536", "MASTER_PORT is '65536'\n  fix:  give a whole number from 1 to 65535"),
        (
            "TORCHELASTIC_RESTART_COUNT",
            "1.5",
            "TORCHELASTIC_RESTART_COUNT is '1.5'\n  fix:  give a whole number of at least 0",
        ),
    ],
)
def test_wrong_variable_is_named_with_its_value_and_the_remedy(name: str, value: str | None, expected: str) -> None:
    given = {k: v for k, v in {**SET, name: value}.items() if v is not None}
    with pytest.raises(
        ValueError, match=f"(?s)the environment variable {re.escape(expected)}.*start the script with torchrun"
    ):
        place_by_torchrun(given)
