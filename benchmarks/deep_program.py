"""Makes a deep synthetic program by hand, because capturing one would take minutes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mirrorc.ir import ops
from mirrorc.ir.devices import parse_devices
from mirrorc.ir.program import Argument, ArgumentKind, Program, Stage
from mirrorc.ir.variables import Role, UpdateRule, Variable

WIDTH, ROWS = 64, 8
NODES_PER_LAYER = 10
aten = torch.ops.aten


class DeepNet:
    """Builds the captured graph of a stack of layers."""

    def __init__(self, num_layers: int) -> None:
        self.graph, self.mode, self.num_layers = fx.Graph(), FakeTensorMode(), num_layers
        self.variables: dict[str, Variable] = {}

    def call(self, target: Any, *args: Any, name: str) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        with self.mode:
            node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def argument(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def read(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.create_node("call_function", ops.read, (), {"variable": name}, name=name.replace(".", "_"))
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        strides = tuple(node.meta["val"].stride())
        rule = UpdateRule("SGD group 0", 0)
        self.variables[name] = Variable(name, shape, strides, torch.float32, Role.PARAMETER, update=rule)
        return node

    def build(self) -> fx.Graph:
        hidden, weight = self.argument("x", ROWS, WIDTH), self.argument("loss_weight")
        saved = []
        for i in range(self.num_layers):
            w, b = self.read(f"layers.{i}.weight", WIDTH, WIDTH), self.read(f"layers.{i}.bias", WIDTH)
            transposed = self.call(aten.t.default, w, name=f"layers_{i}_t")
            product = self.call(aten.addmm.default, b, hidden, transposed, name=f"layers_{i}_addmm")
            saved.append((hidden, w, product))
            hidden = self.call(aten.relu.default, product, name=f"layers_{i}_relu")
        loss = self.call(aten.sum.default, hidden, name="sum_1")
        d_hidden = self.call(aten.expand.default, weight, [ROWS, WIDTH], name="d_expand")
        gradients = {}
        for i in reversed(range(self.num_layers)):
            given, w, product = saved[i]
            name = f"d_layers_{i}"
            d_product = self.call(aten.threshold_backward.default, d_hidden, product, 0, name=f"{name}_relu")
            d_hidden = self.call(aten.mm.default, d_product, w, name=f"{name}_mm")
            transposed = self.call(aten.t.default, d_product, name=f"{name}_t")
            gradients[f"layers.{i}.weight"] = self.call(aten.mm.default, transposed, given, name=f"{name}_mm_2")
            gradients[f"layers.{i}.bias"] = self.call(aten.sum.dim_IntList, d_product, [0], name=f"{name}_sum")
        self.graph.output({"loss": loss, "gradients": gradients, "writes": {}})
        return self.graph


def deep_program(num_nodes: int, num_devices: int) -> Program:
    """A CAPTURED program with about that many nodes."""
    net = DeepNet(num_nodes // NODES_PER_LAYER)
    graph = net.build()
    return Program(
        stage=Stage.CAPTURED,
        devices=parse_devices(num_devices if num_devices > 1 else ["cpu:0"]),
        variables=net.variables,
        arguments=(Argument("x", ArgumentKind.BATCH, 0), Argument("loss_weight", ArgumentKind.LOSS_WEIGHT)),
        shard_graphs=(graph,),
        shard_of_replica=(0,) * num_devices,
    )
