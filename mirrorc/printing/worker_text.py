"""Says in a program's text which worker runs it, and what the others do."""

from __future__ import annotations

from collections import defaultdict

from mirrorc.analysis.communication.worker_schedule import schedule_hash
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.wording import counted
from mirrorc.printing.spans import range_text, spans

_LISTED = 4  # the most numbers of devices that are told one by one
_WIDTH = 40  # of the ranks of workers that have equal numbers of devices; more are counted


def worker_title(program: Program) -> str:
    """Which worker this is, of how many, and the numbers of its replicas."""
    workers, own = program.workers, program.own_replicas
    replicas = f"replica{'s' if len(own) > 1 else ''} {range_text(own.start, own.stop)}"
    return f"worker {workers.rank} of {workers.num_workers}, {replicas} of {workers.num_all_replicas}"


def worker_lines(program: Program) -> list[str]:
    """The line below the heading of a program of several workers."""
    workers = program.workers
    if not workers.are_several:
        return []
    by_number: dict[int, list[int]] = defaultdict(list)
    for rank, number in enumerate(workers.devices_per_worker):
        by_number[number].append(rank)
    if workers.are_alike:
        devices = counted(workers.devices_per_worker[0], "device")
        told = f"all {workers.num_workers} have {devices} and run this program, on examples of their own"
    else:
        groups = sorted(by_number.items())
        said = [f"{_whose(ranks)} {counted(number, 'device')}" for number, ranks in groups[:_LISTED]]
        more = ["others have more"] if len(groups) > _LISTED else []
        told = f"{', '.join([*said, *more])}; each runs the program of its devices, on examples of its own"
    if program.stage is Stage.LOWERED and program.buckets:
        told += f"; all exchange the same in the same order, schedule {schedule_hash(program)[:16]}"
    return [f"# workers: {told}"]


def _whose(ranks: list[int]) -> str:
    """The subject of a sentence: some workers by their ranks, or how many they are."""
    if len(ranks) == 1:
        return f"worker {ranks[0]} has"
    named = spans(ranks)
    return f"workers {named} have" if len(named) <= _WIDTH else f"{len(ranks)} workers have"
