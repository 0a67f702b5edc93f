"""Programs that only reduce, to study an algorithm."""

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


def sketched(
    algorithm: AllReduceAlgorithm, num_devices: int, num_elements: int, link: str = "copy", *, num_buckets: int = 1
) -> Program:
    """A program on logical CPUs that all-reduces its weights."""
    names, shape, rule = [f"weight_{i}" for i in range(num_buckets)], (num_elements,), UpdateRule("SGD group 0", 0)
    slots = [Slot(name, shape, (1,), 0, num_elements) for name in names]
    program = Program(
        stage=Stage.SCHEDULED,
        devices=parse_devices([f"cpu:{i}" for i in range(num_devices)]),
        variables={name: Variable(name, shape, (1,), torch.float32, Role.PARAMETER, update=rule) for name in names},
        arguments=(),
        graph=fx.Graph(),
        buckets=tuple(Bucket(i, torch.float32, (slot,), num_elements, rule) for i, slot in enumerate(slots)),
        properties=(Property.LINKED,),
    )
    graph = program.mirrored_graph
    end = graph.output({"losses": (None,) * num_devices})

    def put(target: Any, *args: fx.Node, **keywords: Any) -> fx.Node:
        return insert(program, end, target, args, keywords)

    with FakeTensorMode():
        weight = torch.empty(shape)
    launches = []
    for bucket, name in enumerate(names):
        packs = []
        for replica in range(num_devices):
            with graph.inserting_before(end):
                read = call(graph, ops.read, (), {"variable": name, "replica": replica})
            read.meta["val"] = weight
            packs.append(put(ops.pack, read, bucket=bucket, replica=replica))
        launches.append(put(ops.all_reduce, *packs, bucket=bucket, op="sum", link=link))
    for bucket, launch in enumerate(launches):
        for replica in range(num_devices):
            put(ops.update, put(ops.wait, launch, bucket=bucket, replica=replica), bucket=bucket, replica=replica)
    return algorithm.run(program)
