"""Events that change the model: writes of parameters and buffers, freezing, modes, copies and what is replaced."""

import copy
import io
from random import Random

import torch
from torch import nn

from fuzzed_training.comparison import Side
from fuzzed_training.events import draw_batch, draw_name, draw_seed, event, normal
from fuzzed_training.pair import Pair


@event
def write_in_place(pair: Pair, draw: Random) -> None:
    name, seed, how = draw_name(pair, draw), draw_seed(draw), draw.randrange(4)
    for side in pair.sides:
        parameter = side.parameters()[name]
        new = normal(seed, parameter)
        with torch.no_grad():
            if how == 0:
                parameter.copy_(new)
            elif how == 1:
                parameter.mul_(0.5).add_(new, alpha=0.1)
            elif how == 2:
                parameter[0] = 0.25
            else:
                nn.init.uniform_(parameter, generator=torch.Generator().manual_seed(seed))


@event
def write_data(pair: Pair, draw: Random) -> None:
    """Gives a parameter other memory, now and then with other strides or in the midst of a larger tensor.

    Not with other strides where torch's fused kernel updates it: that one takes the state for numbers in the order of the
    parameter's memory, and mixes them up.
    """
    name, seed, how = draw_name(pair, draw), draw_seed(draw), draw.randrange(3)
    if how == 2 and any(group.get("fused") for group in pair.twin.optimizer.param_groups):
        how = 1
    for side in pair.sides:
        parameter = side.parameters()[name]
        new = normal(seed, parameter)
        if how == 1:
            new = torch.stack([torch.zeros_like(new), new])[1]
        elif how == 2:
            new = new.t().contiguous().t()
        parameter.data = new


@event
def write_through_data(pair: Pair, draw: Random) -> None:
    """Writes in place through ``data``, which counts no version: this is seen where replicas share parameters."""
    name, seed = draw_name(pair, draw), draw_seed(draw)
    for side in pair.sides if pair.is_held_once(name) else ():
        side.parameters()[name].data.add_(normal(seed, side.parameters()[name]))


def _alike(side: Side) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    own = side.parameters()
    return own["hidden.bias"], own.get("trunk.bias", own.get("norm.weight"))


@event
def swap_data(pair: Pair, draw: Random) -> None:
    for side in pair.sides:
        one, other = _alike(side)
        if one is not None and other is not None:
            one.data, other.data = other.data, one.data


@event
def write_buffer(pair: Pair, draw: Random) -> None:
    name, how, value = _draw_buffer(pair, draw), draw.randrange(2), draw.choice((0.5, 1.0, 2.0))
    for side in pair.sides:
        buffer = dict(side.model.named_buffers())[name]
        if how == 0:
            buffer.fill_(value)
        else:
            buffer.data = torch.full_like(buffer, value)


@event
def write_buffer_through_data(pair: Pair, draw: Random) -> None:
    """Writes in place through ``data``, which counts no version."""
    name = _draw_buffer(pair, draw)
    for side in pair.sides:
        dict(side.model.named_buffers())[name].data.mul_(1.5)


def _draw_buffer(pair: Pair, draw: Random) -> str:
    return draw.choice([name for name, buffer in pair.twin.model.named_buffers() if buffer.is_floating_point()])


@event
def load_model(pair: Pair, draw: Random) -> None:
    seed, is_whole = draw_seed(draw), draw.random() < 0.5
    for side in pair.sides:
        state = {
            name: normal(seed + i, value).abs() if value.is_floating_point() else value + 1
            for i, (name, value) in enumerate(side.model.state_dict().items())
        }
        if not is_whole:
            state = {name: value for name, value in state.items() if name.startswith("hidden")}
        side.model.load_state_dict(state, strict=is_whole)


@event
def load_model_by_assignment(pair: Pair, draw: Random) -> None:
    before = [(side, _members(side.model)) for side in pair.sides]
    seed = draw_seed(draw)
    for side in pair.sides:
        state = {
            name: normal(seed, value) if value.is_floating_point() else value.clone()
            for name, value in side.model.state_dict().items()
        }
        side.model.load_state_dict(state, assign=True)

    def undo() -> None:
        for side, members in before:
            _put_back(side.model, members)

    pair.doubt("was replaced", undo)


def _members(model: nn.Module) -> list[tuple[nn.Module, dict[str, object], dict[str, object], dict[str, object]]]:
    return [(m, dict(m._parameters), dict(m._buffers), dict(m._modules)) for m in model.modules()]


def _put_back(model: nn.Module, members: list[tuple[nn.Module, dict, dict, dict]]) -> None:  # type: ignore[type-arg]
    for module, parameters, buffers, modules in members:
        module._parameters.update(parameters)
        module._buffers.update(buffers)
        module._modules.update(modules)


@event
def replace_member(pair: Pair, draw: Random) -> None:
    seed, how = draw_seed(draw), draw.randrange(3)
    before = [(side, _members(side.model)) for side in pair.sides]
    for side in pair.sides:
        model = side.model
        if how == 0:
            model.hidden.weight = nn.Parameter(normal(seed, model.hidden.weight))
        elif how == 1:
            model.scale = torch.tensor(3.0)
        else:
            model.trunk = copy.deepcopy(model.trunk)

    def undo() -> None:
        for side, members in before:
            _put_back(side.model, members)

    pair.doubt("was replaced", undo)


@event
def share_memory(pair: Pair, draw: Random) -> None:
    """Two parameters, or a parameter and a buffer, come to share memory: refused, or trained as PyTorch does."""
    is_buffer = draw.random() < 0.3
    before = []
    for side in pair.sides:
        one, other = _alike(side)
        other = dict(side.model.named_buffers()).get("functional_norm.mean") if is_buffer else other  # type: ignore[assignment]
        if one is None or other is None:
            return
        before.append((other, other.data))
        other.data = one.data

    def undo() -> None:
        for other, data in before:
            other.data = data.clone()
            with torch.no_grad():
                other.add_(
                    0.0
                )  # a write for the twin, too, which sees no new address: all replicas have the same value then

    pair.doubt("share|same memory|storage", undo)


@event
def freeze(pair: Pair, draw: Random) -> None:
    name = draw.choice([name for name in pair.twin.parameters() if "head" not in name])
    is_trained = draw.random() < 0.4
    for side in pair.sides:
        side.parameters()[name].requires_grad_(is_trained)


@event
def unfreeze_all(pair: Pair, draw: Random) -> None:
    for side in pair.sides:
        side.model.requires_grad_(True)


@event
def freeze_all(pair: Pair, draw: Random) -> None:
    before = [p.requires_grad for p in pair.twin.model.parameters()]

    def undo() -> None:
        for side in pair.sides:
            for parameter, is_trained in zip(side.model.parameters(), before, strict=True):
                parameter.requires_grad_(is_trained)

    for side in pair.sides:
        side.model.requires_grad_(False)
    pair.doubt("trainable parameter|does not depend on any parameter", undo)


@event
def change_mode(pair: Pair, draw: Random) -> None:
    is_training, how = draw.random() < 0.5, draw.randrange(3)
    for side in pair.sides:
        modules = {0: side.model, 1: side.model.norm, 2: side.model.peak}
        modules[how].train(is_training)


@event
def run_forward(pair: Pair, draw: Random) -> None:
    batch = draw_batch(pair, draw)
    batch.pop("target")
    has_grad = draw.random() < 0.5
    for side in pair.sides:
        with torch.set_grad_enabled(has_grad), torch.random.fork_rng(devices=()):
            side.model(**batch)


@event
def copy_model(pair: Pair, draw: Random) -> None:
    copied = copy.deepcopy(pair.mine.model)
    file = io.BytesIO()
    torch.save(pair.mine.model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    for name, value in pair.mine.model.state_dict().items():
        assert torch.equal(copied.state_dict()[name], value) and torch.equal(loaded[name], value), name
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()


@event
def add_hook(pair: Pair, draw: Random) -> None:
    factor, is_added = draw.choice((0.5, 2.0)), draw.random() < 0.6
    for side in pair.sides:
        if is_added:
            side.model.hidden.register_forward_hook(lambda module, inputs, output: output * factor)
        else:
            side.model.hidden._forward_hooks.clear()


@event
def hook_an_accumulation(pair: Pair, draw: Random) -> None:
    """A hook on the AccumulateGrad node of a parameter, which is kept alive."""
    name = draw_name(pair, draw)
    if not pair.twin.parameters()[name].requires_grad:
        return
    nodes = [torch.autograd.graph.get_gradient_edge(side.parameters()[name]).node for side in pair.sides]
    handles = [node.register_prehook(lambda gradients: (gradients[0] * 2,)) for node in nodes]

    def undo() -> None:
        for handle in handles:
            handle.remove()
        nodes.clear()

    pair.doubt("hook on its gradient", undo)


@event
def hook_a_gradient(pair: Pair, draw: Random) -> None:
    name = draw_name(pair, draw)
    if not pair.twin.parameters()[name].requires_grad:
        return
    handles = [side.parameters()[name].register_hook(lambda gradient: gradient * 2) for side in pair.sides]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    pair.doubt("hook on its gradient", undo)
