"""Steps of workers that are not there: what `mirrorc.plan` compiles a program with, for tests that look at more of it."""

from typing import Any

from torch import nn

import mirrorc
from mirrorc.api import make_step
from mirrorc.coordination.compile_round import JointCompilation
from mirrorc.options.table import OPTIONS, grouped


def step_of_world(
    model: nn.Module, devices: Any = None, *, world: mirrorc.World, rank: int = 0, **options: Any
) -> mirrorc.Step:
    """A step that can be prepared, and not called; options by name, as `grouped` takes them."""
    arguments = {**OPTIONS.keywords, **grouped(options), "model": model, "devices": devices}
    return make_step(arguments, {}, JointCompilation(), world.worker(rank))
