"""A sketch of a step: a program with one sum over devices and nothing else, to look at an algorithm by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Slot
from mirrorc.ir.devices import parse_devices
from mirrorc.ir.graph_edits import call, insert
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.ir.variables import Role, UpdateRule, Variable
from mirrorc.passes.all_reduce.algorithm import AllReduceAlgorithm
from mirrorc.torch_internals import FakeTensorMode


def sketched(algorithm: AllReduceAlgorithm, num_devices: int, num_elements: int, link: str = "copy") -> Program:
    """A program in which some logical CPUs pack weights as their gradients, and update with the sum, which an algorithm makes.

    Args:
        algorithm: the algorithm.
        num_devices: how many devices there are, 2 or more.
        num_elements: the length of the bucket, of 32-bit numbers.
        link: the name of the link that carries the sum, or the messages.
    """
    name, shape, rule = "weight", (num_elements,), UpdateRule("SGD group 0", 0)
    slot = Slot(name, shape, (1,), 0, num_elements)
    program = Program(
        stage=Stage.SCHEDULED,
        devices=parse_devices([f"cpu:{i}" for i in range(num_devices)]),
        variables={name: Variable(name, shape, (1,), torch.float32, Role.PARAMETER, update=rule)},
        arguments=(),
        graph=fx.Graph(),
        buckets=(Bucket(0, torch.float32, (slot,), num_elements, rule),),
        properties=(Property.LINKED,),
    )
    graph = program.mirrored_graph
    end = graph.output({"losses": (None,) * num_devices})

    def put(target: Any, *args: fx.Node, **keywords: Any) -> fx.Node:
        return insert(program, end, target, args, {"bucket": 0, **keywords})

    with FakeTensorMode():
        weight = torch.empty(shape)
    packs = []
    for replica in range(num_devices):
        with graph.inserting_before(end):
            read = call(graph, ops.read, (), {"variable": name, "replica": replica})
        read.meta["val"] = weight
        packs.append(put(ops.pack, read, replica=replica))
    launch = put(ops.all_reduce, *packs, op="sum", link=link)
    for replica in range(num_devices):
        put(ops.update, put(ops.wait, launch, replica=replica), replica=replica)
    return algorithm.run(program)
