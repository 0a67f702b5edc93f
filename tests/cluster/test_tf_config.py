"""What is read from TF_CONFIG, and what is refused in each of its fields."""

import json
import re
from typing import Any

import pytest

from mirrorc.cluster.place import Place, place_by_tf_config

CLUSTER = {"chief": ["host-0:1"], "worker": ["host-1:2", "[::1]:3"]}
WORKERS = {"worker": ["host-0:1", "host-1:1"]}


def place(config: Any) -> Place | None:
    return place_by_tf_config({"TF_CONFIG": config if isinstance(config, str) else json.dumps(config)})


def of(cluster: Any, kind: Any, index: Any) -> dict[str, Any]:
    return {"cluster": cluster, "task": {"type": kind, "index": index}}


def test_chief_has_rank_0_and_workers_follow() -> None:
    chief = place(of(CLUSTER, "chief", 0))
    assert chief == Place(0, 3, "TF_CONFIG", "host-0", 1, hosts_store=True)
    assert str(chief) == "worker 0 of 3 by TF_CONFIG"
    assert place(of(CLUSTER, "worker", 0)) == Place(1, 3, "TF_CONFIG", "host-0", 1)
    assert place(of(CLUSTER, "worker", 1)) == Place(2, 3, "TF_CONFIG", "host-0", 1)


def test_without_a_chief_worker_0_is_it() -> None:
    assert place(of(WORKERS, "worker", 0)) == Place(0, 2, "TF_CONFIG", "host-0", 1, hosts_store=True)
    assert place(of(WORKERS, "worker", 1)) == Place(1, 2, "TF_CONFIG", "host-0", 1)


def test_fields_of_platforms_and_empty_lists_are_passed_over() -> None:
    config = {**of({**WORKERS, "ps": [], "chief": []}, "worker", 1), "environment": "cloud", "rpc_layer": "grpc"}
    assert place(config) == Place(1, 2, "TF_CONFIG", "host-0", 1)


def test_single_machine_is_a_process_on_its_own() -> None:
    assert place_by_tf_config({}) is None
    for config in ("", "{}", {"environment": "cloud", "cluster": {}, "task": {}}, of({"chief": ["a:1"]}, "chief", 0)):
        found = place(config)
        assert found is not None and (found.rank, found.num_workers, found.host) == (0, 1, "")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{", "TF_CONFIG is no JSON\n  why:  Expecting property name enclosed in double quotes"),
        ("[1]", "TF_CONFIG is [1], and no JSON object\n  fix:  give an object such as"),
        (of(["a:1"], "worker", 0), 'cluster is ["a:1"]: give an object'),
        ({"cluster": WORKERS, "task": "worker"}, 'task is "worker": give an object'),
        ({"cluster": WORKERS, "task": None}, "task is null: give an object"),
        ({"cluster": WORKERS}, "task.type is missing: give 'chief' or 'worker'"),
        ({"cluster": WORKERS, "task": {"type": "worker"}}, "task.index is missing: give the number"),
        (of(WORKERS, "Worker", 0), "task.type is \"Worker\": give 'chief' or 'worker'"),
        (of(WORKERS, 3, 0), "task.type is 3: give"),
        (of(WORKERS, "ps", 0), 'task.type is "ps": this is a parameter server, which is not needed'),
        (of(WORKERS, "evaluator", 0), 'task.type is "evaluator": this is an evaluator, which is no worker'),
        (of(WORKERS, "master", 0), 'task.type is "master": this is what older releases of TensorFlow call the chief'),
        (of(WORKERS, "chief", 0), 'task.type is "chief": the cluster has no chief; it has worker'),
        (of(WORKERS, "worker", 2), "task.index is 2: give a number from 0 to 1, as cluster.worker has 2 of them"),
        (of(WORKERS, "worker", -1), "task.index is -1: give the number"),
        (of(WORKERS, "worker", "0"), 'task.index is "0": give the number'),
        (of(WORKERS, "worker", True), "task.index is true: give the number"),
        (of({}, "worker", 0), "cluster is {}: give the addresses of the workers, as there is a task"),
        (of({"worker": []}, "worker", 0), 'cluster is {"worker": []}: give the address of a chief or of a worker'),
        (
            of({"workers": ["a:1"]}, "worker", 0),
            "cluster.workers is [\"a:1\"]: give the types 'chief' and 'worker' alone",
        ),
        (of({**WORKERS, "ps": ["p:1"]}, "worker", 0), 'cluster.ps is ["p:1"]: this is a parameter server'),
        (of({**WORKERS, "chief": ["a:1", "b:1"]}, "worker", 0), "give one address: there is one chief"),
        (of({"worker": "a:1"}, "worker", 0), 'cluster.worker is "a:1": give a list of addresses'),
        (of({"worker": {"0": "a:1"}}, "worker", 0), 'cluster.worker is {"0": "a:1"}: give a list of addresses'),
        (of({"worker": ["a:1", "a:1"]}, "worker", 0), 'cluster.worker[1] is "a:1": cluster.worker[0] has the same'),
        *[
            (
                of({"worker": ["a:1", wrong]}, "worker", 0),
                f"cluster.worker[1] is {json.dumps(wrong)}: give host and port",
            )
            for wrong in ("a", "a:", ":1", "a:0", "a:65536", "a:b", "grpc://a:1", "::1:1", "[]:1", 1, None)
        ],
    ],
)
def test_wrong_field_is_named_with_its_value_and_an_example(config: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)) as raised:
        place(config)
    assert '{"cluster": {"worker": ["host-0:12345"' in str(raised.value)
