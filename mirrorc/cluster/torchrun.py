"""The variables that torchrun sets for each worker."""

from __future__ import annotations

from collections.abc import Mapping

from mirrorc.cluster.place import Place
from mirrorc.messages.problem import problem

SOURCE = "torchrun's variables"
_ALL = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
_REMEDY = f"start the script with torchrun, which sets {_ALL}, or unset them all"


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
        return Place(source=SOURCE, local_rank=local_rank, num_restarts=num_restarts)
    is_agents = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not variables.get("MASTER_ADDR", "").strip():
        raise _wrong(variables, "MASTER_ADDR", "give the name or address of the machine of worker 0")
    return Place(
        rank=rank,
        num_workers=num_workers,
        source=SOURCE,
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
