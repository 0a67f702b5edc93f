"""Reads TF_CONFIG, which describes a cluster for TensorFlow's strategies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from mirrorc.cluster.place import Place
from mirrorc.messages.problem import problem

SOURCE = "TF_CONFIG"
_EXAMPLE = '{"cluster": {"worker": ["host-0:12345", "host-1:12345"]}, "task": {"type": "worker", "index": 0}}'
_FIX = f"give an object such as {_EXAMPLE}, or unset TF_CONFIG"
_TRAINING = ("chief", "worker")
_OTHERS = {
    "ps": "a parameter server, which is not needed: every worker keeps all parameters, and workers reduce gradients among "
    "themselves; describe a cluster of workers alone",
    "evaluator": "an evaluator, which is no worker: start it without TF_CONFIG, on checkpoints, or call step.evaluate() in all "
    "workers",
    "master": "what older releases of TensorFlow call the chief: name it 'chief'",
}


def place_by_tf_config(variables: Mapping[str, str]) -> Place | None:
    """The place described by ``TF_CONFIG``; None if it is not set.

    The chief, or else worker 0, has rank 0 and opens the store at its address. A description with at most one address
    means a process on its own; platforms write such ones for single machines.
    """
    text = variables.get("TF_CONFIG")
    if text is None:
        return None
    config = _parsed(text)
    cluster, task = config.get("cluster", {}), config.get("task", {})
    for field, value in (("cluster", cluster), ("task", task)):
        if not isinstance(value, dict):
            _refuse(field, value, "give an object")
    if not cluster and not task:
        return Place(source=SOURCE)
    kind, index = _checked_task(task)
    addresses = _checked_cluster(cluster)
    if kind not in addresses:
        _refuse("task.type", kind, f"the cluster has no {kind}; it has {' and '.join(addresses)}")
    if index >= len(addresses[kind]):
        most = len(addresses[kind]) - 1
        _refuse("task.index", index, f"give a number from 0 to {most}, as cluster.{kind} has {most + 1} of them")
    everyone = [address for task_kind in _TRAINING for address in addresses.get(task_kind, ())]
    rank = index if kind == "chief" else len(addresses.get("chief", ())) + index
    if len(everyone) == 1:
        return Place(source=SOURCE)
    host, port = everyone[0]
    return Place(rank, len(everyone), SOURCE, host, port, hosts_store=rank == 0)


def _parsed(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text or "{}")
    except ValueError as error:
        raise problem(ValueError, "MC6107: TF_CONFIG is no JSON", str(error), _FIX) from None
    if not isinstance(config, dict):
        raise problem(ValueError, f"MC6107: TF_CONFIG is {_shown(config)}, and no JSON object", fix=_FIX)
    return config


def _checked_task(task: dict[str, Any]) -> tuple[str, int]:
    kind, index = task.get("type"), task.get("index")
    if isinstance(kind, str) and kind in _OTHERS:
        _refuse("task.type", kind, f"this is {_OTHERS[kind]}")
    if kind not in _TRAINING:
        _refuse("task.type", kind, "give 'chief' or 'worker'", is_there="type" in task)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        _refuse("task.index", index, "give the number of this task among those of its type, from 0", "index" in task)
    return str(kind), index


def _checked_cluster(cluster: dict[str, Any]) -> dict[str, list[tuple[str, int]]]:
    if not cluster:
        _refuse("cluster", cluster, "give the addresses of the workers, as there is a task")
    taken: dict[tuple[str, int], str] = {}
    addresses_of: dict[str, list[tuple[str, int]]] = {}
    for kind, addresses in cluster.items():
        field = f"cluster.{kind}"
        if kind in _OTHERS and addresses:
            _refuse(field, addresses, f"this is {_OTHERS[kind]}")
        if kind not in (*_TRAINING, *_OTHERS):
            _refuse(field, addresses, "give the types 'chief' and 'worker' alone")
        if not isinstance(addresses, list):
            _refuse(field, addresses, "give a list of addresses, in the order of index")
        if kind == "chief" and len(addresses) > 1:
            _refuse(field, addresses, "give one address: there is one chief")
        for index, address in enumerate(addresses):
            place = f"{field}[{index}]"
            parsed = _checked_address(place, address)
            if parsed in taken:
                _refuse(place, address, f"{taken[parsed]} has the same address; give each its own")
            taken[parsed] = place
            addresses_of.setdefault(kind, []).append(parsed)
    if not addresses_of:
        _refuse("cluster", cluster, "give the address of a chief or of a worker")
    return addresses_of


def _checked_address(field: str, address: Any) -> tuple[str, int]:
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    is_bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if is_bracketed else host
    is_host = bool(bare.strip()) and "/" not in bare and (is_bracketed or ":" not in bare)
    if not is_host or not port.isdecimal() or not 0 < int(port) < 65536:
        _refuse(field, address, "give host and port, such as 'host-1:12345'")
    return bare, int(port)


def _refuse(field: str, value: object, expected: str, is_there: bool = True) -> NoReturn:
    is_so = f"is {_shown(value)}" if is_there else "is missing"
    raise problem(ValueError, f"MC6107: TF_CONFIG: {field} {is_so}: {expected}", fix=_FIX)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
