"""Events that change the optimizer: its state, its hyperparameters, its groups, and steps that the user makes with it."""

import copy
import io
from random import Random
from typing import Any

import torch

from fuzzed_training.comparison import Side
from fuzzed_training.events import draw_held, draw_name, draw_seed, event, normal, state_of
from fuzzed_training.pair import Pair


@event
def keep_states(pair: Pair, draw: Random) -> None:
    pair.kept = [copy.deepcopy((side.model.state_dict(), side.optimizer.state_dict())) for side in pair.sides]


@event
def load_kept_states(pair: Pair, draw: Random) -> None:
    if pair.kept is None or not pair.has_the_groups_of(pair.kept[0][1]):
        return
    is_whole, is_saved = draw.random() < 0.5, draw.random() < 0.5
    for side, (model, optimizer) in zip(pair.sides, pair.kept, strict=True):
        side.optimizer.load_state_dict(_through_a_file(optimizer) if is_saved else copy.deepcopy(optimizer))
        if is_whole:
            side.model.load_state_dict(model)


@event
def exchange_states(pair: Pair, draw: Random) -> None:
    mine, plain = (copy.deepcopy(side.optimizer.state_dict()) for side in pair.sides)
    pair.mine.optimizer.load_state_dict(plain)
    pair.twin.optimizer.load_state_dict(mine)


def _through_a_file(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def _tensors(side: Side, name: str) -> list[str]:
    state = state_of(side, name)
    return sorted(key for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim() > 0)


@event
def replace_state(pair: Pair, draw: Random) -> None:
    name, seed = draw_held(pair, draw), draw_seed(draw)
    if name is None or not _tensors(pair.twin, name):
        return
    key = draw.choice(_tensors(pair.twin, name))
    for side in pair.sides:
        state = state_of(side, name)
        state[key] = normal(seed, state[key]).abs()  # type: ignore[arg-type]


@event
def replace_all_state(pair: Pair, draw: Random) -> None:
    name = draw_held(pair, draw)
    if name is not None:
        for side in pair.sides:
            side.optimizer.state[side.parameters()[name]] = copy.deepcopy(dict(state_of(side, name)))


@event
def write_state(pair: Pair, draw: Random) -> None:
    _write_state(pair, draw, is_counted=True)


@event
def write_state_through_data(pair: Pair, draw: Random) -> None:
    """The same through ``data``, which counts no version: this is seen where replicas share parameters."""
    _write_state(pair, draw, is_counted=False)


def _write_state(pair: Pair, draw: Random, *, is_counted: bool) -> None:
    name, seed = draw_held(pair, draw), draw_seed(draw)
    if name is None or not _tensors(pair.twin, name) or not (is_counted or pair.is_held_once(name)):
        return
    key = draw.choice(_tensors(pair.twin, name))
    for side in pair.sides:
        value = state_of(side, name)[key]
        assert isinstance(value, torch.Tensor)
        (value if is_counted else value.data).copy_(normal(seed, value).abs())


@event
def replace_count(pair: Pair, draw: Random) -> None:
    name, count, how = draw_held(pair, draw), float(draw.randrange(1, 50)), draw.randrange(3)
    if name is None:
        return
    for side in pair.sides:
        names = (
            [name] if draw_is_one(count) else [n for n, p in side.parameters().items() if side.optimizer.state.get(p)]
        )
        for each in names:
            state = state_of(side, each)
            if "step" not in state:
                continue
            if how == 0 and isinstance(state["step"], torch.Tensor):
                state["step"].fill_(count)
            elif how == 1 and isinstance(state["step"], torch.Tensor):
                state["step"] = torch.full_like(state["step"], count)
            else:
                state["step"] = torch.tensor(count)


def draw_is_one(count: float) -> bool:
    return int(count) % 2 == 0


@event
def clear_state(pair: Pair, draw: Random) -> None:
    name, how = draw_held(pair, draw), draw.randrange(4)
    if name is None:
        return
    for side in pair.sides:
        if how == 0:
            side.optimizer.state.clear()
        elif how == 1:
            state_of(side, name).clear()
        elif how == 2:
            side.optimizer.state.pop(side.parameters()[name])
        else:
            side.optimizer.state[side.parameters()[name]] = {}


@event
def pop_momentum(pair: Pair, draw: Random) -> None:
    name = draw_held(pair, draw)
    if name is not None:
        for side in pair.sides:
            if isinstance(side.optimizer, torch.optim.SGD):
                state_of(side, name).pop("momentum_buffer", None)


HYPERPARAMETERS: dict[str, tuple[Any, ...]] = {
    "lr": (0.005, 0.02, 0.0),
    "weight_decay": (0.0, 0.1),
    "betas": ((0.8, 0.99), (0.9, 0.999)),
    "momentum": (0.5, 0.9),
    "nesterov": (True, False),
    "maximize": (True, False),
    "eps": (1e-8, 1e-3),
    "rho": (0.5,),
    "beta": (0.5,),
    "alpha": (0.9,),
    "lr_decay": (0.1,),
    "foreach": (True, None),
    "fused": (True, None),
}


@event
def change_hyperparameter(pair: Pair, draw: Random) -> None:
    index = draw.randrange(len(pair.twin.optimizer.param_groups))
    own = pair.twin.optimizer.param_groups[index]
    known = [key for key in HYPERPARAMETERS if key in own]
    key = draw.choice(known)
    value = draw.choice(HYPERPARAMETERS[key])
    is_momentum = own.get("momentum", 0) > 0 and own.get("dampening", 0) == 0
    if (key == "nesterov" and not is_momentum) or (key == "foreach" and own.get("fused")):
        return
    if key == "fused" and (own.get("foreach") or type(pair.twin.optimizer) not in FUSED):
        return
    for side in pair.sides:
        side.optimizer.param_groups[index][key] = value


FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


@event
def turn_on_amsgrad(pair: Pair, draw: Random) -> None:
    """PyTorch fails if there is state already; a step must refuse it then."""
    indices = [i for i, group in enumerate(pair.twin.optimizer.param_groups) if group.get("amsgrad") is False]

    had_it = [id(group) for side in pair.sides for group in side.optimizer.param_groups if group.get("amsgrad")]
    for side in pair.sides:
        for index in indices:
            side.optimizer.param_groups[index]["amsgrad"] = True

    def turn_off() -> None:
        """Also for groups that were made from these since."""
        for side in pair.sides:
            for group in side.optimizer.param_groups:
                group.update({"amsgrad": False} if "amsgrad" in group and id(group) not in had_it else {})

    if indices and any(pair.twin.optimizer.state.values()):
        pair.doubt("amsgrad|max_exp_avg_sq", turn_off)


@event
def add_the_rest(pair: Pair, draw: Random) -> None:
    if pair.doubts:  # one of them may be put back
        return
    for side in pair.sides:
        held = {id(p) for group in side.optimizer.param_groups for p in group["params"]}
        rest = [p for p in side.model.parameters() if id(p) not in held]
        if rest:
            side.optimizer.add_param_group({"params": rest, "lr": 0.02})


@event
def move_between_groups(pair: Pair, draw: Random) -> None:
    """Moves a parameter to a group with another learning rate; there is a second group from then on."""
    name = draw_name(pair, draw)
    for side in pair.sides:
        parameter, groups = side.parameters()[name], side.optimizer.param_groups
        own = next((group for group in groups if any(p is parameter for p in group["params"])), None)
        other = next((group for group in groups if group is not own), None)
        if own is None or len(own["params"]) == 1:
            return
        if other is not None and other.get("amsgrad") != own.get("amsgrad"):  # it may lack state there
            return
        own["params"] = [p for p in own["params"] if p is not parameter]
        if other is None:
            groups.append({**own, "params": [parameter], "lr": 0.015})
        else:
            other["params"] = [*other["params"], parameter]


@event
def schedule(pair: Pair, draw: Random) -> None:
    how = draw.randrange(6)
    for side in pair.sides:
        if how < 3 and not side.schedulers:
            side.schedulers.append(_scheduler(side.optimizer, how))
        for scheduler in side.schedulers:
            side.optimizer._opt_called = True  # type: ignore[attr-defined]  # or it warns if no step was made before
            scheduler.step()


def _scheduler(optimizer: torch.optim.Optimizer, how: int) -> Any:
    if how == 0:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    if how == 1:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
