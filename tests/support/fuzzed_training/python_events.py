"""Events that change Python state which forward or the loss reads, and code."""

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fuzzed_training import models
from fuzzed_training.events import draw_seed, event, normal
from fuzzed_training.pair import Pair


@event
def change_loss_state(pair: Pair, draw: Random) -> None:
    loss, value, how = pair.loss_fn, draw.choice((0.0, 0.1, 0.3)), draw.randrange(2)
    kind = pair.setting.loss
    if kind == "closure" and how == 0:
        loss.warm["beta"] = value  # type: ignore[attr-defined]
    elif kind == "closure":
        loss.set_count(draw.choice((1, 2)))  # type: ignore[attr-defined]
    elif kind == "global":
        models.BETA = value
    elif kind == "object" and how == 0:
        loss.options["power"] = draw.choice((1, 2))  # type: ignore[attr-defined]
    elif kind == "module" and how == 0:
        loss.weight.fill_(value + 0.5)  # type: ignore[attr-defined]
    elif kind in ("object", "module"):
        loss.beta = value  # type: ignore[attr-defined]


@event
def replace_teacher(pair: Pair, draw: Random) -> None:
    how, seed = draw.randrange(5), draw_seed(draw)
    if pair.setting.loss != "teacher":
        return
    loss: Any = pair.loss_fn
    teacher = loss.teacher
    if how == 0:
        loss.teacher = loss.kind(seed)
    elif how == 1:
        teacher.layer = models.frozen_layer(seed)
    elif how == 2:
        teacher.layer.weight = torch.nn.Parameter(normal(seed, teacher.layer.weight), requires_grad=False)
    elif how == 3:
        teacher.shift = normal(seed, teacher.shift)
    else:
        teacher.load_state_dict({key: normal(seed, t) for key, t in teacher.state_dict().items()}, assign=True)
        teacher.requires_grad_(False)


@event
def hook_teacher(pair: Pair, draw: Random) -> None:
    how, factor = draw.randrange(4), draw.choice((0.5, 1.5))
    if pair.setting.loss != "teacher":
        return
    module: Any = pair.loss_fn.teacher if how % 2 else pair.loss_fn.teacher.layer  # type: ignore[attr-defined]
    if how < 2 and not module._forward_hooks:
        module.register_forward_hook(lambda module, given, output: output * factor)
    else:
        module._forward_hooks.clear()


@event
def patch_teacher(pair: Pair, draw: Random) -> None:
    name = draw.choice(("bent", "forward"))
    if pair.setting.loss != "teacher":
        return
    kind: Any = pair.loss_fn.kind  # type: ignore[attr-defined]
    if name in vars(kind):
        delattr(kind, name)
    else:
        setattr(kind, name, lambda self, x: getattr(models.Teacher, name)(self, x) * 0.5)


@event
def change_scalar(pair: Pair, draw: Random) -> None:
    slope, sign = draw.choice((0.5, 1.0, 2)), draw.choice((0.0, -0.0))
    for side in pair.sides:
        side.model.slope, side.model.sign = slope, sign


@event
def change_numpy_number(pair: Pair, draw: Random) -> None:
    value = np.linspace(0.5, 1.5, 5)[draw.randrange(5)]
    for side in pair.sides:
        side.model.factor = value


@event
def change_container(pair: Pair, draw: Random) -> None:
    how, value = draw.randrange(5), draw.choice((0.25, 0.75, 1.5))
    for side in pair.sides:
        model = side.model
        if how == 0:
            model.numbers["shift"] = value
        elif how == 1:
            model.layers.append(value)
        elif how == 2:
            model.settings.temperature = value
        elif how == 3:
            model.settings = SimpleNamespace(temperature=value)
        else:
            model.pair = (value, 1.0)


@event
def change_global(pair: Pair, draw: Random) -> None:
    models.SCALE = draw.choice((1.0, 0.5))


@event
def change_class_attribute(pair: Pair, draw: Random) -> None:
    type(pair.twin.model).gain = draw.choice((1.0, 0.5))  # both sides' models are of one class


@event
def patch_forward(pair: Pair, draw: Random) -> None:
    has: Any = pair.twin.model.has
    if has["counter"] or has["cache"]:
        return  # which run as plain PyTorch, where a parameter that an object holds is refused
    how = draw.randrange(3)
    for side in pair.sides:
        own: Any = side.model.hidden
        own.__dict__.pop("forward", None)
        if how == 0:
            own.forward = _Doubled(own)
        elif how == 1:
            own.forward = _Halved(own)


class _Doubled:
    def __init__(self, module: torch.nn.Linear) -> None:
        self._module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.nn.functional.linear(x, self._module.weight, self._module.bias)


class _Halved(_Doubled):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 0.25 * super().__call__(x)


@event
def patch_class(pair: Pair, draw: Random) -> None:
    own_class: Any = type(pair.twin.model)
    if "forward" in vars(own_class):
        del own_class.forward
    else:
        own_class.forward = lambda self, *args, **kwargs: models.Tiny.forward(self, *args, **kwargs) * 0.5


@event
def change_default_dtype_and_back(pair: Pair, draw: Random) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(torch.get_num_threads())


class _Branching(_Doubled):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) if self._module.weight.sum() > 0 else x


@event
def patch_with_a_branch(pair: Pair, draw: Random) -> None:
    """A forward that branches on values, and reaches the module by an attribute of its own: refused where a step does that."""
    before = [side.model.hidden.__dict__.get("forward") for side in pair.sides]
    for side in pair.sides:
        side.model.hidden.forward = _Branching(side.model.hidden)  # type: ignore[union-attr]

    def undo() -> None:
        for side, forward in zip(pair.sides, before, strict=True):
            side.model.hidden.__dict__.pop("forward", None)
            if forward is not None:
                side.model.hidden.forward = forward  # type: ignore[union-attr]

    pair.doubt("cannot capture|MC2103|MC2306", undo)
