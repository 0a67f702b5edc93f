"""The place of this process among the workers that train together, from torchrun's variables or TF_CONFIG."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from mirrorc.messages.problem import problem

_TORCHRUN = "torchrun's variables"
_ALL = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
_REMEDY = f"start the script with torchrun, which sets {_ALL}, or unset them all"

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


@dataclass(frozen=True)
class Place:
    """A worker's place, known before any contact with other workers.

    Attributes:
        source: ``torchrun's variables``, ``TF_CONFIG``, ``the process group``, or empty for a process on its own.
        host, port: address of the workers' store; the host is empty if the process group has a store.
        hosts_store: this worker opens the store.
        store_persists: the store may have keys of an earlier start.
    """

    rank: int = 0
    num_workers: int = 1
    source: str = ""
    host: str = ""
    port: int = 0
    hosts_store: bool = False
    local_rank: int | None = None
    num_restarts: int = 0
    store_persists: bool = False

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        if not self.source:
            return "a process on its own"
        return f"worker {self.rank} of {self.num_workers} by {self.source}"


def place_by_torchrun(variables: Mapping[str, str]) -> Place | None:
    """The place in torchrun's variables, which other launchers also set. None without ``RANK`` and ``WORLD_SIZE``."""
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        return None
    num_workers = _number(variables, "WORLD_SIZE", 1)
    rank = _number(variables, "RANK", 0, num_workers - 1, "WORLD_SIZE")
    num_restarts = _number(variables, "TORCHELASTIC_RESTART_COUNT", 0, default=0)
    num_local = _number(variables, "LOCAL_WORLD_SIZE", 1, num_workers, "WORLD_SIZE", default=num_workers)
    has_local = "LOCAL_RANK" in variables
    local_rank = _number(variables, "LOCAL_RANK", 0, num_local - 1, "LOCAL_WORLD_SIZE") if has_local else None
    if num_workers == 1:
        return Place(source=_TORCHRUN, local_rank=local_rank, num_restarts=num_restarts)
    is_agents = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not variables.get("MASTER_ADDR", "").strip():
        raise _wrong(variables, "MASTER_ADDR", "give the name or address of the machine of worker 0")
    return Place(
        rank=rank,
        num_workers=num_workers,
        source=_TORCHRUN,
        host=variables["MASTER_ADDR"].strip(),
        port=_number(variables, "MASTER_PORT", 1, 65535),
        hosts_store=rank == 0 and not is_agents,
        local_rank=local_rank,
        num_restarts=num_restarts,
        store_persists=is_agents,
    )


def _number(
    variables: Mapping[str, str],
    name: str,
    least: int,
    most: int | None = None,
    of: str = "",
    *,
    default: int | None = None,
) -> int:
    """``of`` names the variable that sets ``most``."""
    text = variables.get(name)
    if text is None and default is not None:
        return default
    number = int(text) if text is not None and text.strip().isdecimal() else None
    if number is None or number < least or (most is not None and number > most):
        bound = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise _wrong(variables, name, f"give a whole number {bound}" + (f", as {of} is" if of else ""))
    return number


def _wrong(variables: Mapping[str, str], name: str, expected: str) -> ValueError:
    is_so = f"is {variables[name]!r}" if name in variables else "is not set, but others of torchrun's variables are"
    return problem(ValueError, f"MC6107: the environment variable {name} {is_so}", "", (expected, _REMEDY))


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
        return Place(source="TF_CONFIG")
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
        return Place(source="TF_CONFIG")
    host, port = everyone[0]
    return Place(rank, len(everyone), "TF_CONFIG", host, port, hosts_store=rank == 0)


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
