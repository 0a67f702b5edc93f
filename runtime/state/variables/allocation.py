"""Allocation of memory for buckets and per-replica variables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.ir.devices import Device
from mirrorc.ir.variables import Aggregation, Variable
from mirrorc.messages.problem import problem
from mirrorc.runtime.state.variables.layout import FlatBucket, Layout, memory_for_gradients, slot_views
from mirrorc.runtime.state.variables.user_buffers import ShownBuffers
from mirrorc.user.aliased_tensors import refuse_memory_of_processes, refuse_shared_memory


def allocate_buckets(
    layout: Layout, plan: Sequence[Bucket], tensors: Mapping[str, torch.Tensor], devices: Sequence[Device]
) -> list[FlatBucket]:
    gradients = [[memory_for_gradients(bucket, device.torch_device) for device in devices] for bucket in plan]
    return [_bucket(layout, *pair, tensors, devices) for pair in zip(plan, gradients, strict=True)]


def _bucket(
    layout: Layout,
    bucket: Bucket,
    gradients: list[torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    devices: Sequence[Device],
) -> FlatBucket:
    owners = [bucket.owner_of_parameters(replica) for replica in range(len(devices))]
    copies = {
        owner: torch.zeros(bucket.num_elements, dtype=bucket.dtype, device=devices[owner].torch_device)
        for owner in dict.fromkeys(owners)
    }
    parameters = [copies[owner] for owner in owners]
    views = [slot_views(flat, bucket) for flat in parameters]
    for i, slot in enumerate(bucket.slots):
        views[0][i].copy_(tensors[slot.variable].detach())
        layout.values[slot.variable] = [view[i] for view in views]
        layout.homes[slot.variable] = views[0][i]
    mirror_first(parameters)
    slots = [slot_views(flat, bucket) if not bucket.rule.takes_rows else [] for flat in gradients]
    return FlatBucket(bucket, parameters, gradients, slots)


def mirror_first(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors[1:]:
        if tensor is not tensors[0]:
            tensor.copy_(tensors[0])


def allocate_per_replica(
    layout: Layout,
    variables: Sequence[Variable],
    tensors: Mapping[str, torch.Tensor],
    devices: Sequence[Device],
    counted: Collection[str],
) -> None:
    """Allocates buffers of one dtype side by side, so that one addition aggregates them."""
    kinds: dict[tuple[torch.dtype, Aggregation], list[Variable]] = {}
    for variable in variables:
        kinds.setdefault((variable.dtype, variable.aggregation), []).append(variable)
    for (dtype, _), members in kinds.items():
        sizes = [tensors[v.name].numel() for v in members]
        flats = [torch.empty(sum(sizes), dtype=dtype, device=device.torch_device) for device in devices]
        seen = flats[0] if len(flats) == 1 else torch.empty_like(flats[0])
        offset = 0
        for variable, size in zip(members, sizes, strict=True):
            value = tensors[variable.name].detach()
            views = [flat[offset : offset + size].view(variable.shape) for flat in flats]
            shown = seen[offset : offset + size].view(variable.shape)
            for view in (*views, shown):
                view.copy_(value)
            layout.values[variable.name], layout.homes[variable.name] = views, shown
            layout.separate.add(variable.name)
            offset += size
        if len(flats) > 1:
            by_name = {variable.name: size for variable, size in zip(members, sizes, strict=True)}
            layout.aggregates.append(ShownBuffers(by_name, seen, flats, counted))


def shared_copies(tensor: torch.Tensor, devices: Sequence[Device]) -> list[torch.Tensor]:
    """A tensor per replica: the user's, and a copy per other torch device."""
    original, copies = tensor.detach(), {}
    copies[original.device] = original
    for device in devices:
        if device.torch_device not in copies:
            copies[device.torch_device] = original.to(device.torch_device)
    return [copies[device.torch_device] for device in devices]


def check_members(plan: Sequence[Bucket], tensors: Mapping[str, torch.Tensor]) -> None:
    planned = {slot.variable: (slot.shape, bucket.dtype) for bucket in plan for slot in bucket.slots}
    members = [name for name in tensors if name in planned]
    for name in members:
        check_type(name, tensors[name], *planned[name])
    refuse_shared_memory(tensors, members)
    refuse_memory_of_processes(tensors, members)


def check_type(name: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tensor.shape != torch.Size(shape) or tensor.dtype != dtype:
        raise problem(
            ValueError,
            f"MC1206: the model's {name!r} was {dtype}{list(shape)} and has become "
            f"{tensor.dtype}{list(tensor.shape)} since it was compiled",
            fix="make a new optimizer over model.parameters(), and compile the model anew",
        )
