"""Chooses bucket sizes for a machine by measuring, once, the costs of several sizes."""

from __future__ import annotations

import functools
import math
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from mirrorc.errors import ExecutionError
from mirrorc.ir.program import Program
from mirrorc.runtime.devices.machine import device_model, num_cores
from mirrorc.runtime.tuning.cache import Entry, MeasurementCache
from mirrorc.runtime.tuning.microbenchmark import Configuration, Layout, free_memory, measured_seconds
from mirrorc.user.optimizer_groups import OptimizerGroups

LADDER_MB = (1.0, 4.0, 16.0, 25.0, 64.0)
"""The caps to choose from. With the largest one, all measured gradients are in one bucket."""
NOISE = 0.03
"""The smallest relative difference by which one cap counts as better than another."""
_MOST_BYTES = 64 * 2**20  # the most bytes of gradients that are measured; beyond it, costs are proportional
_FORMAT = 1  # the version of the stored entries; also increases when the measurement changes
_GRAIN = 64  # elements; the sizes of buckets are multiples of it


@dataclass(frozen=True)
class BucketSizes:
    """Options of `mirrorc.passes.PlanBuckets`, in MiB."""

    bucket_cap_mb: float
    first_bucket_mb: float

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name):g}" for field in fields(self))


@dataclass(frozen=True)
class ChosenSizes:
    """Bucket sizes, and a remark that says why they were chosen."""

    sizes: BucketSizes
    remark: str


@dataclass(frozen=True)
class Setting:
    """The setting on which bucket sizes depend.

    Attributes:
        configuration: devices, link and optimizer.
        num_bytes: the bytes of all gradients of a replica.
    """

    configuration: Configuration
    num_bytes: int

    @property
    def class_bytes(self) -> int:
        """The largest power of two that is at most ``num_bytes``; settings with the same one share a measurement."""
        return 1 << (self.num_bytes.bit_length() - 1)

    @property
    def measured_bytes(self) -> int:
        """The bytes of gradients that are measured: never more than a step has."""
        return min(self.class_bytes, _MOST_BYTES)

    def key(self) -> Entry:
        """A key that is equal for settings that get equal sizes."""
        configuration = self.configuration
        return {
            "format": _FORMAT,
            "ladder_mb": list(LADDER_MB),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "devices": [device_model(device.torch_device) for device in configuration.devices],
            "distinct_devices": len({device.torch_device for device in configuration.devices}),
            "cores": num_cores(),
            "threads_per_device": configuration.num_threads,
            "link": configuration.link,
            "shares_parameters": configuration.shares_parameters,
            "dtype": str(configuration.dtype),
            "optimizer": _class_name(configuration.optimizer) if configuration.group is not None else None,
            "hyperparameters": _deciding(configuration.optimizer, configuration.group)
            if configuration.group is not None
            else {},
            "gradient_bytes": self.class_bytes,
        }


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _deciding(optimizer: torch.optim.Optimizer, group: int) -> dict[str, bool | None]:
    """The hyperparameters on which the choice of kernels depends: flags, and which numbers are zero.

    Numbers that schedulers change are left out.
    """
    values = {name: optimizer.param_groups[group].get(name) for name in sorted(optimizer.defaults) if name != "lr"}
    plain = {name: value for name, value in values.items() if value is None or isinstance(value, bool | int | float)}
    return {name: value if value is None else bool(value) for name, value in plain.items()}


def setting_of(
    program: Program,
    groups: OptimizerGroups,
    *,
    num_threads: int,
    link: str,
    shares_parameters: bool,
    timeout_seconds: float,
) -> Setting:
    """The setting of a captured program.

    Gradients of several dtypes and parameter groups are measured as if all were of the kind that has the most bytes.

    Args:
        program: a CAPTURED program, which has the devices and the gradients.
        groups: the user's optimizers.
        num_threads: the number of threads that torch's operators use on each CPU device.
        link: the link that will join the devices.
        shares_parameters: whether devices will share one copy of the parameters that are updated element by element.
        timeout_seconds: the longest time of every wait.
    """
    bytes_of: Counter[tuple[torch.dtype, int | None]] = Counter()
    for variable in program.variables.values():
        if variable.update is not None:
            group = variable.update.group if variable.update.elementwise else None
            bytes_of[(variable.dtype, group)] += math.prod(variable.shape) * variable.dtype.itemsize
    dtype, number = max(bytes_of, key=bytes_of.__getitem__)
    shares = shares_parameters and number is not None
    optimizer, group = groups[number] if number is not None else (groups.optimizers[0], None)
    configuration = Configuration(program.devices, num_threads, link, shares, dtype, optimizer, group, timeout_seconds)
    return Setting(configuration, max(1, bytes_of.total()))


def choose_bucket_sizes(setting: Setting, default: BucketSizes) -> ChosenSizes:
    """The bucket sizes that cost least. They are measured now, or looked up if an equal setting was measured before.

    Of caps whose costs are equal within `NOISE`, the one nearest to the default is chosen. On links that add in the wait, nothing
    begins early, and the first bucket is as large as the others. On links that move by themselves, it has the default size.

    Args:
        setting: the setting to choose for.
        default: the sizes to use if nothing needs to be measured.

    Raises:
        ExecutionError: the devices cannot be measured.
    """
    if len(setting.configuration.devices) == 1:
        return _unmeasured(default, "one device has nobody to communicate with")
    candidates = _candidates(setting, default)
    if len(candidates) == 1:
        sizes = _with_first(default.bucket_cap_mb, setting, default)
        return _unmeasured(sizes, "all caps give the same buckets")
    cache = MeasurementCache("buckets", setting.key())
    is_whole = functools.partial(_is_whole, candidates)
    kept = cache.read(is_whole)
    if kept is None:
        measured = _measure(setting, candidates, default)
        kept = cache.keep({"milliseconds": {f"{cap:g}": ms for cap, ms in measured.items()}}, is_whole)
    milliseconds = {cap: float(kept["milliseconds"][f"{cap:g}"]) for cap in candidates}
    sizes = _with_first(_best(milliseconds, default.bucket_cap_mb), setting, default)
    return ChosenSizes(sizes, _remark(sizes, milliseconds, setting))


def _unmeasured(sizes: BucketSizes, why: str) -> ChosenSizes:
    return ChosenSizes(sizes, f"bucket sizes not measured, as {why}: {sizes}")


def measure_ladder(setting: Setting, default: BucketSizes) -> dict[float, float]:
    """The milliseconds per step that each cap of `LADDER_MB` would cost; of caps that give equal buckets, only one is measured.

    Raises:
        ExecutionError: the devices cannot be measured.
    """
    return _measure(setting, _candidates(setting, default), default)


def _candidates(setting: Setting, default: BucketSizes) -> dict[float, Layout]:
    """Caps with the buckets that they give; of caps that give equal buckets, the one nearest to the default."""
    nearest_first = sorted(LADDER_MB, key=lambda cap: _distance(cap, default.bucket_cap_mb))
    cap_of: dict[Layout, float] = {}
    for cap in nearest_first:
        cap_of.setdefault(_layout(setting, _with_first(cap, setting, default)), cap)
    return dict(sorted((cap, layout) for layout, cap in cap_of.items()))


def _distance(cap_mb: float, default_mb: float) -> float:
    return abs(math.log(cap_mb / default_mb))


def _with_first(cap_mb: float, setting: Setting, default: BucketSizes) -> BucketSizes:
    first_mb = min(cap_mb, default.first_bucket_mb) if setting.configuration.moves_by_itself else cap_mb
    return BucketSizes(cap_mb, first_mb)


def _layout(setting: Setting, sizes: BucketSizes) -> Layout:
    """The number of elements of each bucket.

    All buckets are equal except for a smaller first one. The smaller last bucket of a real plan is not imitated, because its size
    differs from model to model.
    """
    itemsize, cap_bytes = setting.configuration.dtype.itemsize, int(sizes.bucket_cap_mb * 2**20)
    first_bytes = int(sizes.first_bucket_mb * 2**20)
    head = [min(first_bytes, setting.measured_bytes)] if first_bytes < cap_bytes else []
    rest = setting.measured_bytes - sum(head)
    num_equal = -(-rest // cap_bytes)
    parts = [*head, *([rest // num_equal] * num_equal if num_equal else [])]
    return tuple(max(1, part // itemsize // _GRAIN) * _GRAIN for part in parts)


def _measure(setting: Setting, candidates: Mapping[float, Layout], default: BucketSizes) -> dict[float, float]:
    """Milliseconds by cap, to three digits."""
    scale = setting.class_bytes / setting.measured_bytes
    try:
        seconds = measured_seconds(setting.configuration, list(candidates.values()), scale)
    except Exception as error:
        names = ", ".join(map(str, setting.configuration.devices))
        raise ExecutionError(
            f"bucket_cap_mb='auto' could not measure bucket sizes on {names}: {type(error).__name__}: {error}. Nothing has "
            f"changed; give numbers instead, such as {default}"
        ) from error
    finally:
        free_memory(setting.configuration)
    return {cap: float(f"{1e3 * own:.3g}") for cap, own in zip(candidates, seconds, strict=True)}


def _best(milliseconds: Mapping[float, float], default_mb: float) -> float:
    limit = min(milliseconds.values()) * (1 + NOISE)
    return min((cap for cap, ms in milliseconds.items() if ms <= limit), key=lambda cap: _distance(cap, default_mb))


def _is_whole(candidates: Mapping[float, Layout], result: Any) -> bool:
    times = [result["milliseconds"][f"{cap:g}"] for cap in candidates]
    return all(isinstance(ms, float | int) and 0 < ms < math.inf for ms in times)


def _remark(sizes: BucketSizes, milliseconds: Mapping[float, float], setting: Setting) -> str:
    times = ", ".join(f"{cap:g} MiB {ms:g}" for cap, ms in milliseconds.items())
    return (
        f"bucket sizes by measurement: {sizes} (give these to pin them); ms a step for {setting.class_bytes / 2**20:g} MiB of "
        f"gradients on {len(setting.configuration.devices)} devices over {setting.configuration.link}, by cap: {times}"
    )
