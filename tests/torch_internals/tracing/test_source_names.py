"""What is told of Python objects that a trace reads or changes has the user's names, and none of Dynamo's expressions."""

import collections
import functools
import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from mirrorc import torch_internals as internals

RAW = re.compile(r"__|L\[|G\[|_hooks|cell_contents|_modules|check_|type=<|HINT")
seen: list[torch.Tensor] = []


class Store:
    def __init__(self) -> None:
        self.items: list[Any] = [1.0]
        self.table: dict[str, Any] = {"inner": []}
        self.last: Any = None
        self.scale = 1.0

    def __call__(self, module: nn.Module, given: Any, output: torch.Tensor) -> None:
        self.items.append(output)

    def note(self, module: nn.Module, given: Any, output: torch.Tensor) -> None:
        self.last = output

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * self.scale


class Other(Store):
    pass


class Net(nn.Module):
    everything: ClassVar[list[torch.Tensor]] = []

    def __init__(self, does: Callable[[Any, torch.Tensor], object] = lambda net, x: None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3)])
        self.does, self.store, self.lists = does, Store(), [[1.0], [2.0]]
        self.blocks[0].kept = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks[0](x)
        self.does(self, y)
        return y * self.store.scale


class Call(nn.Module):
    """As `mirrorc.capture.call.traced_loss.TracedLoss` calls a model and its loss: with leaves."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(self.model(leaves[0]), leaves[1])


def traced(model: nn.Module, loss_fn: Any = F.mse_loss) -> Any:
    return internals.trace_full_graph(Call(model, loss_fn), (torch.ones(2, 3), torch.zeros(2, 3)))


def hooked(register: Callable[[Net], Any]) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        model = Net()
        register(model)
        return model, F.mse_loss

    return make


def appending(acts: list[Any], module: nn.Module, given: Any, output: torch.Tensor) -> None:
    acts.append(output)


def closure_hook() -> Callable[..., None]:
    acts: list[Any] = []
    return lambda module, given, output: acts.append(output)


def nonlocal_hook() -> Callable[..., None]:
    last = None

    def hook(module: nn.Module, given: Any, output: torch.Tensor) -> None:
        nonlocal last
        last = output

    return hook


def closure_loss(of_inner: bool) -> Callable[..., torch.Tensor]:
    acts: dict[str, Any] = {}

    def keep(output: torch.Tensor) -> None:
        acts["output"] = output

    def direct(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        acts["output"] = output
        return F.mse_loss(output, target)

    def inner(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        keep(output)
        return F.mse_loss(output, target)

    return inner if of_inner else direct


def loss_with(acts: Any, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    acts.append(output)
    return F.mse_loss(output, target)


def loss_with_default(output: torch.Tensor, target: torch.Tensor, acts: Any = [], *, more: Any = []) -> torch.Tensor:  # noqa: B006
    acts.append(output)
    return F.mse_loss(output, target)


BLOCK, LOSS = "a forward hook of module 'blocks.0'", "loss_fn"
CHANGES: list[tuple[Callable[[], tuple[nn.Module, Any]], tuple[str, str]]] = [
    (hooked(lambda m: m.blocks[0].register_forward_hook(closure_hook())), ("acts", BLOCK)),
    (hooked(lambda m: m.blocks[0].register_forward_hook(nonlocal_hook())), ("last", BLOCK)),
    (hooked(lambda m: m.register_forward_hook(closure_hook())), ("acts", "a forward hook of the model")),
    (
        hooked(lambda m: m.blocks[0].register_forward_pre_hook(lambda module, given: store.items.append(given[0]))),
        ("store.items", ""),
    ),
    (
        hooked(lambda m: m.blocks[0].register_forward_hook(lambda module, given, output: seen.append(output))),
        ("seen", ""),
    ),
    (hooked(lambda m: m.blocks[0].register_forward_hook(Store().note)), ("self.last", BLOCK)),
    (hooked(lambda m: m.blocks[0].register_forward_hook(Store())), ("self.items", BLOCK)),
    (hooked(lambda m: m.blocks[0].register_forward_hook(functools.partial(appending, []))), ("acts", BLOCK)),
    (
        hooked(
            lambda m, acts=[]: m.blocks[0].register_forward_pre_hook(
                lambda m, x, k: acts.append(x[0]), with_kwargs=True
            )
        ),
        ("acts", "a forward pre-hook of module 'blocks.0'"),
    ),
    (lambda: (Net(lambda net, y: net.store.items.append(y)), F.mse_loss), ("model.store.items", "")),
    (lambda: (Net(lambda net, y: net.store.table["inner"].append(y)), F.mse_loss), ("model.store.table['inner']", "")),
    (lambda: (Net(lambda net, y: net.lists[1].append(y)), F.mse_loss), ("model.lists[1]", "")),
    (lambda: (Net(lambda net, y: net.blocks[0].kept.update(y=y)), F.mse_loss), ("model.blocks.0.kept['y']", "")),
    (lambda: (Net(lambda net, y: net.everything.append(y)), F.mse_loss), ("Net.everything", "")),
    (lambda: (Net(), closure_loss(of_inner=False)), ("acts['output']", LOSS)),
    (lambda: (Net(), closure_loss(of_inner=True)), ("acts['output']", "keep()")),
    (lambda: (Net(), functools.partial(loss_with, [])), ("acts", LOSS)),
]
OF_DEFAULTS: list[tuple[Callable[[], tuple[nn.Module, Any]], tuple[str, str]]] = [
    (
        hooked(
            lambda m: m.blocks[0].register_forward_hook(lambda m, x, k, y, acts=[]: acts.append(y), with_kwargs=True)
        ),
        ("acts", BLOCK),
    ),
    (lambda: (Net(), loss_with_default), ("acts", LOSS)),
]
store = Store()


@pytest.mark.slow
def test_what_is_changed_is_named_as_the_user_names_it() -> None:
    for make, expected in (*CHANGES, *OF_DEFAULTS):
        writes = internals.python_effects_of(traced(*make())).writes
        assert all(isinstance(write.words, internals.SourceWords) for write in writes)
        is_unseen = (make, expected) in OF_DEFAULTS and torch.__version__.startswith("2.11.")
        assert [write.words for write in writes] == ([] if is_unseen else [expected])


def test_hooks_of_all_modules_are_named() -> None:
    acts: list[Any] = []
    for register, hook, kind in (
        (register_module_forward_hook, lambda module, given, output: acts.append(output), "forward hook"),
        (register_module_forward_pre_hook, lambda module, given: acts.append(given[0]), "forward pre-hook"),
    ):
        handle = register(hook)  # type: ignore[arg-type]
        try:
            (write,) = internals.python_effects_of(traced(Net())).writes
        finally:
            handle.remove()
        assert write.words == ("acts", f"a {kind} of all modules")


def closure_numbers() -> tuple[Any, Callable[[], object]]:
    weights, teacher = [1.0], nn.Linear(3, 3)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * (weights[0] if teacher.training else 2.0)

    return loss, lambda: weights.__setitem__(0, 2.0)


def scaling_hook(model: Net) -> Callable[[], object]:
    factors = collections.OrderedDict(a=2.0)
    model.blocks[0].register_forward_hook(lambda module, given, output: output * factors["a"])
    return lambda: factors.update(a=3.0)


def read_and_changed(net: Net) -> list[tuple[Any, Callable[[], object], str]]:
    """A loss, what changes, and how it is told."""
    own, (loss, change) = Store(), closure_numbers()
    return [
        (loss, change, "weights[0] == 1.0 in loss_fn, read at "),
        (own.loss, lambda: setattr(own, "scale", 2.0), "self.scale == 1.0 in loss_fn, read at "),
        (F.mse_loss, lambda: setattr(net.store, "scale", 2.0), "model.store.scale == 1.0, read at "),
        (F.mse_loss, lambda: setattr(net, "store", Other()), "type(model.store), read at "),
        (F.mse_loss, scaling_hook(net), f"factors['a'] == 2.0 in {BLOCK}, read at "),
    ]


@pytest.mark.slow
def test_what_was_read_and_has_changed_is_named_as_the_user_names_it() -> None:
    for i in range(len(read_and_changed(Net()))):
        model = Net()
        loss, change, expected = read_and_changed(model)[i]
        guards = internals.guards_of(traced(model, loss))
        assert guards.hold()
        change()
        assert not guards.hold() and guards.broken().startswith(expected), guards.broken()
        assert "test_source_names.py:" in guards.broken() and not RAW.search(guards.broken()), guards.broken()


@pytest.mark.slow
def test_no_guard_is_told_in_dynamos_words() -> None:
    for make, _ in (*CHANGES, *OF_DEFAULTS):
        module = Call(*make())
        guards = internals.guards_of(internals.trace_full_graph(module, (torch.ones(2, 3), torch.zeros(2, 3))))
        for name in guards.names:
            told = internals.source_words(name, guards._scope).name
            assert not RAW.search(told.replace("__call__", "")), f"{told} of {name}"


def test_other_forms_of_guards() -> None:
    scope = {"L": {"self": Call(Net(), F.mse_loss)}, "G": {}}
    model = "L['self']._modules['model']"
    for guard, expected in (
        (
            f"___check_obj_id({model}.store, 140), type=<class 'x.Store'>  # y()  # a/b.py:3 in f",
            "model.store, read at b.py:3 in f",
        ),
        (f"KeyError on {model}.store", "model.store is gone"),
        (f"not {model}._forward_hooks", "not the hooks of the model"),
        (f"not ___dict_contains('a', {model}.store.table)", "not 'a' in model.store.table"),
        (f"0/1: len({model}.store.items) == 2", "len(model.store.items) == 2"),
        (f"list(dict.keys({model}.store.table))[0] == 'b'", "keys(model.store.table)[0] == 'b'"),
        ("L['self'].plain['head'] == 'a'", "head == 'a'"),
        (f"dict(type({model}).__dict__)['everything'] is None", "Net.everything is None"),
        ("L['self']._modules['model']._modules['fc'].p == 2.0", "model.fc.p == 2.0"),
        ("G['__import_my_dot_net'].warm['beta']", "warm['beta']"),
        ("what cannot be parsed (", "what cannot be parsed ("),
    ):
        assert internals.in_users_words(guard, scope) == expected


@pytest.mark.parametrize(
    "expression", ["L['self']", "G['__import_a'].b.c", "L['self'].loss_fn.__closure__[7].cell_contents"]
)
def test_what_cannot_be_looked_up_is_told_without_dynamos_words(expression: str) -> None:
    told = internals.source_words(expression, {"L": {"self": Call(Net(), F.mse_loss)}, "G": {}})
    assert not RAW.search(told.name + told.place)
