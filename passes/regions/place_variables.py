"""Gives each variable and each bucket an owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mirrorc.errors import PassError
from mirrorc.ir.buckets import Bucket, Slot
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted, listed
from mirrorc.printing.printed_values import size_text

LEAST_LOADED = "least-loaded"
"""The largest variables come first; each goes to the device with the fewest bytes so far."""

CENTRAL = "central"
"""All variables go to the first device."""

CACHED = "cached"
"""Small variables go to the first device; large ones follow `LEAST_LOADED`."""


@dataclass(frozen=True)
class PlaceVariables:
    """Gives every updated variable an owner, and splits buckets by owner::

        bucket 0  f32  fc2.weight[10, 512] fc2.bias[10]           bucket 0  f32  fc2.weight[10, 512] fc2.bias[10]  cpu:1
        bucket 1  f32  fc1.weight[512, 2048] fc1.bias[512]   ->   bucket 1  f32  fc1.weight[512, 2048]             cpu:0
                                                                  bucket 2  f32  fc1.bias[512]                     cpu:1

    Variables whose optimizer is not element-wise go to the first device, where it steps. Others follow ``owners``, or
    else the rule.

    Needs: a bucket plan; regions not yet cut.
    Guarantees: each bucket has one owner; buckets are numbered in the order in which they become ready.
    Source: TensorFlow's CentralStorageStrategy; tensorpack's LeastLoadedDeviceSetter and OverrideCachingDevice.

    Attributes:
        rule: "central", "least-loaded", "cached", or the name of a device.
        owners: pairs of a variable's name and a device's name.
        small_elements: for "cached", the size below which a variable is small.
    """

    rule: str = LEAST_LOADED
    owners: tuple[tuple[str, str], ...] = ()
    small_elements: int = 2**16
    name: str = field(default="place-variables", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)
    trains_only: ClassVar = True

    def run(self, program: Program) -> Program:
        if not program.buckets:
            raise PassError("MC4003: pass 'place-variables' needs a bucket plan: run 'plan-buckets' before it")
        if any(bucket.is_cut for bucket in program.buckets):
            raise problem(
                PassError,
                "MC4003: pass 'place-variables' needs whole gradients in each bucket, and a bucket ends within a gradient",
                "the owner of a parameter needs its whole gradient",
                "give 'plan-buckets' a plan that cuts no gradient, such as ByBytes",
            )
        owner_of = self._owners(program)
        parts = [part for bucket in program.buckets for part in _parts(bucket, owner_of)]
        output = program.shard_graphs[0].output_node().args[0]
        assert isinstance(output, dict)
        position = {name: i for i, name in enumerate(output["gradients"])}
        parts.sort(key=lambda bucket: max(position[slot.variable] for slot in bucket.slots))
        buckets = tuple(replace(bucket, index=i, packs=()) for i, bucket in enumerate(parts))
        return program.evolve(buckets=buckets).with_remarks(*self._remarks(program, buckets, owner_of))

    def _owners(self, program: Program) -> dict[str, int]:
        """Names in ``self.owners`` without a bucket are ignored, because a call may leave out a layer."""
        replicas = {device.name: replica for replica, device in enumerate(program.devices)}
        named = dict(self.owners)
        for name, device in named.items():
            if device not in replicas:
                raise PassError("MC4003: " + _unknown(f"{device!r}, as the owner of {name!r}", replicas))
        sizes = {slot.variable: (bucket, slot) for bucket in program.buckets for slot in bucket.slots}
        owner_of: dict[str, int] = {}
        for name, (bucket, _) in sizes.items():
            owner = replicas[named[name]] if name in named else 0
            if not bucket.rule.elementwise and owner != 0:
                raise problem(
                    PassError,
                    f"MC4003: {name!r} cannot be owned by {named[name]}",
                    f"{bucket.rule.why_by_itself}, so the optimizer runs on {program.devices[0]} and owns all that it updates",
                    f"leave {name!r} out of placement=",
                )
            if name in named or not bucket.rule.elementwise:
                owner_of[name] = owner
        rest = [name for name in sizes if name not in owner_of]
        if self.rule in (LEAST_LOADED, CACHED):
            small = [name for name in rest if self.rule == CACHED and sizes[name][1].num_elements < self.small_elements]
            owner_of |= dict.fromkeys(small, 0)
            loads = [0] * program.num_replicas
            for name, owner in owner_of.items():
                loads[owner] += _num_bytes(*sizes[name])
            large = [name for name in rest if name not in owner_of]
            for name in sorted(large, key=lambda name: -_num_bytes(*sizes[name])):
                owner = min(range(program.num_replicas), key=loads.__getitem__)
                owner_of[name] = owner
                loads[owner] += _num_bytes(*sizes[name])
            return owner_of
        if self.rule != CENTRAL and self.rule not in replicas:
            raise PassError(
                "MC4003: " + _unknown(f"the rule {self.rule!r}", {CENTRAL: 0, LEAST_LOADED: 0, CACHED: 0, **replicas})
            )
        return owner_of | dict.fromkeys(rest, replicas.get(self.rule, 0))

    def _remarks(self, program: Program, buckets: Sequence[Bucket], owner_of: Mapping[str, int]) -> list[str]:
        owned = []
        for replica, device in enumerate(program.devices):
            buckets_here = [bucket for bucket in buckets if bucket.owner == replica]
            size = size_text(sum(slot.num_elements * b.dtype.itemsize for b in buckets_here for slot in b.slots))
            number = sum(len(bucket.slots) for bucket in buckets_here)
            owned.append(f"{device} {counted(number, 'variable')} ({size})" if number else f"{device} nothing")
        rule = {
            LEAST_LOADED: "by their bytes, the largest first",
            CACHED: f"those of {self.small_elements} elements or more by their bytes, smaller ones from one place",
        }.get(self.rule, f"by the rule {self.rule}")
        rules = f"{rule}, {len(self.owners)} by name: " if self.owners else f"{rule}: "
        remarks = [f"what each device owns, {rules}{listed(owned, most=8)}"]
        if len(buckets) > len(program.buckets):
            remarks.append(
                f"{counted(len(program.buckets), 'bucket')} became {len(buckets)}, as all of a bucket has one owner"
            )
        unowned = [name for name, _ in self.owners if name not in owner_of]
        if unowned:
            has, them = ("has", "it") if len(unowned) == 1 else ("have", "them")
            remarks.append(f"{listed(unowned)} {has} no owner, as nothing updates {them}")
        return remarks


def _unknown(setting: str, known: Mapping[str, int]) -> str:
    return f"pass 'place-variables' is given {setting}: there are {', '.join(known)}"


def _num_bytes(bucket: Bucket, slot: Slot) -> int:
    return slot.num_elements * bucket.dtype.itemsize


def _parts(bucket: Bucket, owner_of: Mapping[str, int]) -> list[Bucket]:
    ends = [*(slot.offset for slot in bucket.slots[1:]), bucket.num_elements]
    owners = dict.fromkeys(owner_of[slot.variable] for slot in bucket.slots)
    if len(owners) == 1:
        return [replace(bucket, owner=next(iter(owners)))]
    parts = []
    for owner in owners:
        slots, place = [], 0
        for slot, end in zip(bucket.slots, ends, strict=True):
            if owner_of[slot.variable] == owner:
                slots.append(replace(slot, offset=place))
                place += end - slot.offset  # aligned as before
        parts.append(replace(bucket, slots=tuple(slots), num_elements=place, owner=owner))
    return parts
