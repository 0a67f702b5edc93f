"""The option ``algorithm``: its short forms, and options that it excludes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.links import best_link, carrier_of, link_names
from mirrorc.messages.problem import problem, with_line
from mirrorc.options.option import Request
from mirrorc.passes.all_reduce import ALGORITHMS, AllReduceAlgorithm
from mirrorc.passes.all_reduce.auto import Auto
from mirrorc.pipeline.pipeline_text import parse_passes


def checked_algorithm(request: Request) -> AllReduceAlgorithm | None:
    """The all-reduce algorithm for devices; None for the link's own.

    Raises:
        TypeError, ValueError: the value is not an algorithm, or does not fit the devices or another option.
    """
    workers, devices, asked = request.workers, request.devices, request.asked
    algorithm = algorithm_of(asked["algorithm"])
    if objection := algorithm.objection(len(devices)):
        fix = "leave algorithm= out: 'native' fits all devices"
        raise problem(
            ValueError, f"MC1503: algorithm={algorithm.name!r} cannot be used on {_names(devices)}", objection, fix
        )
    if algorithm.name == "native":
        return None
    if asked["exact_order"] and isinstance(algorithm, Auto):
        algorithm = replace(algorithm, exact_order=True)
    name = algorithm.name
    if asked["exact_order"] and algorithm.changes_bits:
        raise problem(
            ValueError,
            f"MC1003: algorithm={name!r} as it is given cannot be used with exact_order=True",
            algorithm.changes_bits,
            (
                "algorithm='reduce-to-one' or 'round-robin', which add up in the order of replicas",
                "leave exact_order= out",
            ),
        )
    if algorithm.sends and asked["placement"] not in ("auto", "mirrored", "shared"):
        raise problem(
            ValueError,
            f"MC1003: algorithm={name!r} cannot be used with placement={asked['placement']!r}",
            "with a placement, each gradient is reduced to the owner of its parameter alone",
            ("leave algorithm= out", "leave placement= out"),
        )
    if workers.are_several and algorithm.sends:
        why = "it sums among the devices of one process; over workers gloo or NCCL sums"
        fix = "leave algorithm= out"
        raise problem(ValueError, f"MC1003: algorithm={name!r} cannot be used over several workers", why, fix)
    if algorithm.sends and len(devices) > 1:
        link = asked["link"] or best_link(devices)[0]
        try:
            carrier_of(link, ops.send)
        except ValueError as error:
            raise ValueError(with_line(str(error), "why", f"algorithm={name!r} needs sends")) from error
    return algorithm


def algorithm_of(algorithm: Any) -> AllReduceAlgorithm:
    """The algorithm of a name, which may have options: ``"reduce-to-one{device=1}"``. Algorithms are returned as they
    are.

    Raises:
        TypeError, ValueError: the argument is not an algorithm.
    """
    if isinstance(algorithm, AllReduceAlgorithm):
        return algorithm
    fix = (
        f"give one of {', '.join(map(repr, ALGORITHMS))}",
        "give an object of mirrorc.all_reduce_algorithms, such as ReduceToOne(device=1)",
    )
    if not isinstance(algorithm, str):
        raise problem(TypeError, f"MC1001: algorithm is {algorithm!r}, which is no algorithm", fix=fix)
    name = algorithm.partition("{")[0].strip()
    if name in link_names():
        raise problem(
            ValueError,
            f"MC1002: algorithm is {algorithm!r}, which is a link and not an algorithm",
            fix=(f"communication=mirrorc.Communication(link={algorithm!r})", *fix),
        )
    if name not in ALGORITHMS and ":" not in name:
        raise problem(ValueError, f"MC1002: algorithm is {algorithm!r}, which is no algorithm", fix=fix)
    try:
        made = parse_passes(algorithm, ALGORITHMS)
    except ValueError as error:
        raise problem(ValueError, f"MC1002: algorithm is {algorithm!r}", str(error), fix) from error
    if len(made) != 1 or not isinstance(made[0], AllReduceAlgorithm):
        raise problem(ValueError, f"MC1002: algorithm is {algorithm!r}, which is not one algorithm", fix=fix)
    return made[0]


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(device.name for device in devices)
