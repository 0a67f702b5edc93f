"""Runs that are recorded in Python: what a step could not stand for is refused, and what code can read is watched."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import inspect
import itertools
import operator
import os
import random
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from selections import slow_but
from torch import nn
from torch.nn import functional as F

from mirrorc.capture.call.arguments import flatten_call
from mirrorc.capture.call.training_call import TrainingCall
from mirrorc.capture.diagnostics.errors import UnreadableError
from mirrorc.capture.front_ends.front_end import tracing
from mirrorc.capture.python_trace.call_observer import PythonCalls
from mirrorc.capture.python_trace.code_owner import is_watched_file
from mirrorc.capture.python_trace.recorder import Recorded, recorded

Deed = Callable[[Any, torch.Tensor], Any]


class Settings:
    """What a model is told."""

    of_class = 1.0

    def __init__(self) -> None:
        self.factor, self.table = 1.0, {"scale": [1.0, 2.0]}
        self.count, self.seen = 0, {}

    def doubled(self) -> float:
        return 2.0 * self.factor

    @property
    def halved(self) -> float:
        return self.factor / 2.0


class Slotted:
    """Keeps a number in no dict."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 1.0


FACTOR, TALLY, KEPT, SETTINGS = 1.0, {"n": 0}, [], Settings()
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
LOCAL = threading.local()
LOCAL.factor = 1.0
OTHER = types.ModuleType("other_settings")
OTHER.factor, OTHER.settings = 1.0, Settings()  # type: ignore[attr-defined]
sys.modules["other_settings"] = OTHER


def factor() -> float:
    return FACTOR


def rate(value: float = 1.0) -> float:
    return value


rate.value = 1.0  # type: ignore[attr-defined]


class Net(nn.Module):
    """Two layers, and what a function does between them."""

    by_class = 1.0

    def __init__(self, deed: Deed) -> None:
        super().__init__()
        self.first, self.last, self.deed = nn.Linear(6, 8), nn.Linear(8, 4), deed
        self.scale, self.count, self.kept, self.settings = 1.0, 0, [1.0], Settings()
        self.numbers, self.slotted, self.iterator = itertools.count(), Slotted(), iter([1.0] * 100)
        self.reference, self.generator, self.held = weakref.ref(self.settings), torch.Generator(), torch.ones(8)
        self.teachers = [nn.Linear(8, 8).requires_grad_(False)]
        self.many = [[[[[[[[[[1.0]]]]]]]]]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        found = self.deed(self, h)
        return self.last(found if isinstance(found, torch.Tensor) else h).tanh()

    def method(self) -> float:
        return 1.0


def call_of(model: nn.Module) -> tuple[TrainingCall, list[torch.Tensor]]:
    x, target = torch.ones(3, 6), torch.zeros(3, dtype=torch.int64)
    call = flatten_call(["x"], (x,), {"target": target})
    return TrainingCall(model, F.cross_entropy, call.structure), [x, target]


def trace(model: nn.Module) -> Recorded:
    call, leaves = call_of(model)
    with tracing(call):
        return recorded(call, leaves, {}, "Net")


# What is refused


def counts_in_a_global(model: Any, h: torch.Tensor) -> torch.Tensor:
    global FACTOR
    FACTOR += 1.0
    return h


def counts_in_a_closure() -> Deed:
    count = 0

    def deed(model: Any, h: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return h

    return deed


def reads_a_file(model: Any, h: torch.Tensor) -> torch.Tensor:
    with open(os.devnull, encoding="utf-8") as file:
        return h * (1 + len(file.read()))


def assigns(owner: str, name: str) -> Deed:
    return lambda model, h: setattr(eval_free[owner](model), name, getattr(eval_free[owner](model), name) + 1)


eval_free: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: model,
    "settings": lambda model: model.settings,
    "class": lambda model: Settings,
    "function": lambda model: rate,
}


def made(*parts: str) -> str:
    """A name that does not stand in the code which calls this."""
    return "".join(parts)


REFUSED: dict[str, tuple[Deed, str]] = {
    "count in an attribute": (assigns("model", "count"), "assigns an attribute of a module, 'count'"),
    "count in an object": (assigns("settings", "count"), "changes 'settings'"),
    "count in a class": (assigns("class", "of_class"), "changes 'Settings.of_class'"),
    "count in a dict": (lambda model, h: TALLY.update(n=TALLY["n"] + 1), "changes 'TALLY'"),
    "count in a global": (counts_in_a_global, "changes 'FACTOR'"),
    "count in a closure": (counts_in_a_closure(), "changes 'count'"),
    "count in a function": (assigns("function", "value"), "changes 'rate"),
    "list of the model": (lambda model, h: model.kept.append(1.0), "changes 'kept', a collection"),
    "list elsewhere": (lambda model, h: KEPT.append(1.0), "changes 'KEPT'"),
    "tensor that is kept": (lambda model, h: KEPT.append(h), "changes 'KEPT'|keeps a tensor"),
    "iterator": (lambda model, h: h * next(model.iterator), "reads 'iterator', .*list_iterator, which cannot be watched"),
    "counter": (lambda model, h: h * (1 + next(model.numbers) // 100), "'numbers', which holds a itertools.count"),
    "weak reference": (lambda model, h: h * model.reference().factor, "'reference', which holds a weakref"),
    "thread's own": (lambda model, h: h * LOCAL.factor, "'LOCAL', which holds a _thread._local"),
    "context": (lambda model, h: (VARIABLE.set(1.0), h)[1], "calls ContextVar.set"),
    "clock": (lambda model, h: h * (1 + time.time() // 1e12), "calls time.time"),
    "write to the environment": (lambda model, h: (os.unsetenv("MIRRORC_TEST_BETA"), h)[1], "calls posix.unsetenv"),
    "file": (reads_a_file, "calls .*open"),
    "eval": (lambda model, h: h * eval("FACTOR"), "calls eval"),
    "all attributes": (lambda model, h: h * vars(model)["scale"], "reads 'numbers', .*cannot be watched"),
    "dict of another object": (lambda model, h: h * model.settings.__dict__["factor"], "by '__dict__' in <lambda>"),
    "dict of a class": (lambda model, h: h * vars(Settings)["of_class"], "by '__dict__' of a builtins.type in <lambda>"),
    "dict of a module": (lambda model, h: h * getattr(OTHER, made("__dict", "__"))["factor"], "'__dict__' of a builtins.module"),
    "variables": (lambda model, h: h * vars()["model"].scale, "by 'vars' in"),
    "other dict": (lambda model, h: setattr(model.settings, made("__dict", "__"), {"factor": 1.0}), "changes 'settings'"),
    "lookup by its name": (lambda model, h: h * getattr(model, made("__get", "attribute__"))("scale"), "'__getattribute__'"),
    "getter": (lambda model, h: h * operator.attrgetter("sca" + h.__class__.__name__[:0] + "le")(model), "by 'attrgetter'"),
    "names": (lambda model, h: h * globals()["FACTOR"], "calls globals"),
    "names of a function": (lambda model, h: h * factor.__globals__["FACTOR"], "by '__globals__'"),
    "names of a frame": (lambda model, h: h * inspect.currentframe().f_globals["FACTOR"], "by 'currentframe'|by 'f_globals'"),
    "all modules": (lambda model, h: h * sys.modules["other_settings"].factor, "reads 'sys.modules'"),
    "module by its name": (lambda model, h: h * importlib.import_module("other_settings").factor, "by 'import_module'"),
    "random": (lambda model, h: h * random.random(), "random"),
    "numpy's random": (lambda model, h: h * float(numpy.random.rand()), "random"),
    "own generator": (lambda model, h: h * torch.rand(8, generator=model.generator), "generator"),
    "new generator": (lambda model, h: h * float(numpy.random.default_rng().random()), "calls"),
    "seed": (lambda model, h: (torch.manual_seed(1), h)[1], "seeds torch's generator"),
    "seed that is read": (lambda model, h: h * (torch.initial_seed() % 7), "seeds torch's generator"),
    "branch": (lambda model, h: h if h.sum() > 0 else 2 * h, "goes by values of data"),
    "number": (lambda model, h: h * h.sum().item(), "goes by values of data"),
    "nonzero": (lambda model, h: h[h.nonzero()[:, 0]], "goes by values of data"),
    "numpy": (lambda model, h: h + torch.from_numpy(h.detach().numpy()), "numpy|without values|data"),
    "list of data": (lambda model, h: h * h.sum().tolist(), "values of data|do not hold"),
    "other tensor": (lambda model, h: h * model.held.numpy().sum(), "numpy|without values|data"),
    "write to what is no buffer": (lambda model, h: (model.held.add_(1.0), h)[1], "no parameter or buffer"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """Cases start alike."""
    yield
    _HOLDER[0] = SETTINGS.table["scale"][0] = 1.0
    assert FACTOR == 1.0 and TALLY == {"n": 0} and KEPT == [] and Settings.of_class == 1.0


FAST_REFUSED = (
    "count in an object",
    "count in a global",
    "list elsewhere",
    "counter",
    "clock",
    "random",
    "branch",
    "numpy",
)


@pytest.mark.parametrize("kind", slow_but(FAST_REFUSED, REFUSED))
def test_what_a_step_could_not_stand_for_is_refused(kind: str) -> None:
    deed, words = REFUSED[kind]
    model = Net(deed)
    before, state = dict(vars(model)), torch.get_rng_state()
    with pytest.raises(UnreadableError, match=words):
        trace(model)
    assert vars(model) == before and model.kept == [1.0] and model.settings.count == 0
    assert torch.equal(torch.get_rng_state(), state)


# What is watched


def times(model: Any, h: torch.Tensor, number: float) -> torch.Tensor:
    return h * number


SETTINGS_OF, TEACHER_OF = operator.attrgetter("settings"), lambda model: model.teachers[0]


def imports(model: Any, h: torch.Tensor) -> torch.Tensor:
    from other_settings import factor as own  # type: ignore[import-not-found]
    from other_settings import settings

    return h * own * settings.factor


def teaches(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h + model.teachers[0](h)


def in_a_closure(holder: list[float]) -> Deed:
    return lambda model, h: h * holder[0]


def number_of_a_closure() -> tuple[Deed, Callable[[float], None]]:
    number = 1.0

    def change(value: float) -> None:
        nonlocal number
        number = value

    return lambda model, h: h * number, change


_HOLDER = [1.0]
_NUMBER, _change_number = number_of_a_closure()


Change = Callable[[Any, pytest.MonkeyPatch], None]


def sets(name: str, value: Any, of: Callable[[Any], Any] = lambda model: model) -> Change:
    return lambda model, patch: patch.setattr(of(model), name, value, raising=False)


def sets_global(name: str, value: Any) -> Change:
    return lambda model, patch: patch.setitem(globals(), name, value)


def sets_item(value: Any, of: Callable[[Any], Any]) -> Change:
    return lambda model, patch: of(model).__setitem__(0, value)


def sets_variable(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("MIRRORC_TEST_BETA", "long")


def deepest(found: Any) -> Any:
    while isinstance(found[0], list):
        found = found[0]
    return found


WATCHED: dict[str, tuple[Deed, Change]] = {
    "global": (lambda model, h: h * FACTOR, sets_global("FACTOR", 2.0)),
    "global of a function": (lambda model, h: h * factor(), sets_global("FACTOR", 2.0)),
    "function": (lambda model, h: h * factor(), sets_global("factor", lambda: 2.0)),
    "closure": (_NUMBER, lambda model, patch: _change_number(2.0)),
    "closure's list": (in_a_closure(_HOLDER), sets_item(2.0, lambda model: _HOLDER)),
    "attribute": (lambda model, h: h * model.scale, sets("scale", 2.0)),
    "attribute by its name": (lambda model, h: h * getattr(model, "".join(("sc", "ale"))), sets("scale", 2.0)),
    "attribute that is new": (lambda model, h: h * hasattr(model, "late"), sets("late", torch.ones(1))),
    "of a class": (lambda model, h: h * model.by_class, sets("by_class", 2.0, type)),
    "method": (lambda model, h: h * model.method(), sets("method", lambda self: 2.0, type)),
    "method of the model alone": (lambda model, h: h * model.method(), sets("method", lambda: 2.0)),
    "object": (lambda model, h: h * model.settings.factor, sets("factor", 2.0, SETTINGS_OF)),
    "method of an object": (lambda model, h: h * model.settings.doubled(), sets("factor", 2.0, SETTINGS_OF)),
    "its class's": (
        lambda model, h: h * model.settings.doubled(),
        sets("doubled", lambda self: 3.0, lambda model: Settings),
    ),
    "property": (
        lambda model, h: h * model.settings.halved,
        sets("halved", property(lambda self: 3.0), lambda model: Settings),
    ),
    "class": (lambda model, h: h * Settings.of_class, sets("of_class", 2.0, lambda model: Settings)),
    "object that shadows it": (lambda model, h: h * SETTINGS.of_class, sets("of_class", 2.0, lambda model: SETTINGS)),
    "deep": (lambda model, h: h * SETTINGS.table["scale"][0], sets_item(2.0, lambda model: SETTINGS.table["scale"])),
    "deeper": (lambda model, h: h * deepest(model.many)[0], sets_item(2.0, lambda model: deepest(model.many))),
    "module": (lambda model, h: h * OTHER.factor, sets("factor", 2.0, lambda model: OTHER)),
    "module that is imported": (imports, sets("factor", 2.0, lambda model: OTHER)),
    "object of such a module": (imports, sets("factor", 2.0, lambda model: OTHER.settings)),
    "mode of a module elsewhere": (teaches, sets("training", False, TEACHER_OF)),
    "its weight": (teaches, sets("weight", nn.Parameter(torch.ones(8, 8), requires_grad=False), TEACHER_OF)),
    "its hook": (teaches, lambda model, patch: TEACHER_OF(model).register_forward_hook(lambda own, given, y: 2 * y)),
    "attribute of a function": (lambda model, h: h * rate.value, sets("value", 2.0, lambda model: rate)),
    "default of a function": (lambda model, h: h * rate(), sets("__defaults__", (2.0,), lambda model: rate)),
    "partial": (functools.partial(times, number=1.0), sets("deed", functools.partial(times, number=2.0))),
    "object that is replaced": (lambda model, h: h * model.settings.factor, sets("settings", Settings())),
    "environment": (lambda model, h: h * len(os.environ.get("MIRRORC_TEST_BETA", "1")), sets_variable),
    "variable of the environment": (lambda model, h: h * len(os.getenv("MIRRORC_TEST_BETA", "1")), sets_variable),
    "size of the environment": (lambda model, h: h * len(os.environ), sets_variable),
    "names of the environment": (lambda model, h: h * len([*os.environ]), sets_variable),
    "whether a variable is there": (lambda model, h: h * ("MIRRORC_TEST_BETA" in os.environ), sets_variable),
    "tensor that is replaced": (lambda model, h: h * model.held, sets("held", torch.zeros(8))),
}


class Looks:
    """Is read by ways that do not name what they read, as the configurations of some libraries are."""

    by_class, aliases = 1.0, {"width": "size"}

    def __init__(self, inner: Any = None) -> None:
        self.size, self.table, self.inner = 1.0, {"factor": [1.0]}, inner

    def __getattribute__(self, name: str) -> Any:
        if super().__getattribute__("__dict__").get("".join(("hid", "den"))) is not None:
            return 2.0
        return super().__getattribute__(super().__getattribute__("aliases").get(name, name))

    def __getattr__(self, name: str) -> Any:
        if name in self.table:
            return self.table[name][0]
        raise AttributeError(name)

    def by_dict(self, name: str) -> Any:
        return self.__dict__[name]

    def sum(self) -> float:
        return sum(self.__dict__[name] for name in vars(self) if isinstance(self.__dict__[name], float))

    def by_object(self, name: str) -> Any:
        return object.__getattribute__(self, name)


class Whole(Net):
    """Holds nothing that cannot be watched, but such an object, and one within it."""

    def __init__(self, deed: Deed) -> None:
        super().__init__(deed)
        for name in ("numbers", "iterator", "reference", "generator"):
            delattr(self, name)
        self.looks = Looks(Looks())


LOOKS, INNER = operator.attrgetter("looks"), operator.attrgetter("looks.inner")
WHOLE: dict[str, tuple[Deed, Change]] = {
    "attribute": (lambda model, h: h * model.looks.width, sets("size", 2.0, LOOKS)),
    "attribute of an object within": (lambda model, h: h * model.looks.inner.width, sets("size", 2.0, INNER)),
    "attribute that is added": (lambda model, h: h * model.looks.width, sets("hidden", 1.0, LOOKS)),
    "attribute that is deleted": (
        lambda model, h: h * hasattr(model.looks, made("si", "ze")),
        lambda model, patch: patch.delattr(model.looks, "size"),
    ),
    "object that is replaced": (lambda model, h: h * model.looks.width, sets("looks", Looks())),
    "object within that is replaced": (lambda model, h: h * model.looks.inner.width, sets("inner", Looks(), LOOKS)),
    "item": (lambda model, h: h * model.looks.factor, sets_item(2.0, lambda model: model.looks.table["factor"])),
    "of a class": (lambda model, h: h * model.looks.by_object(made("by", "_class")), sets("by_class", 2.0, lambda model: Looks)),
    "alias": (
        lambda model, h: h * model.looks.width,
        lambda model, patch: patch.setitem(Looks.aliases, "width", "by_class"),
    ),
    "other dict": (lambda model, h: h * model.settings.factor, sets("__dict__", {"factor": 2.0}, SETTINGS_OF)),
    "dict": (lambda model, h: h * model.looks.by_dict(made("si", "ze")), sets("size", 2.0, LOOKS)),
    "sum": (lambda model, h: h * model.looks.sum(), sets("another", 2.0, LOOKS)),
    "dict of the model": (lambda model, h: h * model.__dict__[made("sc", "ale")], sets("scale", 2.0)),
    "all of the model": (lambda model, h: h * vars(model)[made("sc", "ale")], sets("scale", 2.0)),
    "dict by its name": (lambda model, h: h * getattr(model, made("__di", "ct__"))[made("sc", "ale")], sets("scale", 2.0)),
    "dict of the loss's argument": (
        lambda model, h: (lambda own: h * own.__dict__[made("si", "ze")])(model.looks),
        sets("size", 2.0, LOOKS),
    ),
    "slot": (lambda model, h: h * model.slotted.number, sets("number", 2.0, lambda model: model.slotted)),
    "pattern": (lambda model, h: h * matched(model), sets("scale", 2.0)),
    "context": (lambda model, h: h * VARIABLE.get(), lambda model, patch: _TOKENS.append(VARIABLE.set(2.0))),
    "order": (
        lambda model, h: h * next(iter(model.settings.table)).count("s"),
        lambda model, patch: model.settings.table.update(scale=model.settings.table.pop("scale")),
    ),
    "name of a class": (lambda model, h: h * hasattr(model.settings, "late"), sets("late", 1.0, lambda model: Settings)),
    "name of a module elsewhere": (lambda model, h: h * hasattr(model.teachers[0], "late"), sets("late", 1.0, TEACHER_OF)),
}  # fmt: skip
_TOKENS: list[Any] = []


def matched(model: Any) -> float:
    match model:
        case Whole(scale=number):
            return number
    return 0.0


FAST_WHOLE = ("attribute of an object within", "attribute that is added", "sum", "dict of the model", "slot")


@pytest.mark.parametrize("kind", slow_but(FAST_WHOLE, WHOLE))
def test_a_change_of_what_code_reads_without_its_name_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deed, change = WHOLE[kind]
    model = Whole(deed)
    model.settings.table["other"] = [2.0, 1.0]
    found = trace(model)
    assert found.state.hold() and found.state.changed() == []
    try:
        change(model, monkeypatch)
        assert not found.state.hold() and found.state.changed() != []
    finally:
        monkeypatch.undo()
        while _TOKENS:
            VARIABLE.reset(_TOKENS.pop())


def test_an_attribute_that_forward_assigns_is_not_read_with_all_others() -> None:
    class Hands(Whole):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x) * len([name for name in vars(self) if name == "between"])
            self.between = h
            return self.last(self.between)

    with pytest.raises(UnreadableError, match="assigns the attribute 'between' of a module, and reads all attributes"):
        trace(Hands(lambda model, h: h))


FAST_WATCHED = ("global of a function", "closure", "attribute by its name", "method of an object", "deeper")


@pytest.mark.parametrize("kind", slow_but(FAST_WATCHED, WATCHED))
def test_a_change_of_what_code_reads_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deed, change = WATCHED[kind]
    model = Net(deed)
    found = trace(model)
    assert found.state.hold() and found.state.changed() == []
    try:
        change(model, monkeypatch)
        assert not found.state.hold() and found.state.changed() != []
    finally:
        monkeypatch.undo()
        _change_number(1.0)


def test_what_a_module_sets_when_it_is_imported_stays(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "class Late:\n    pass\n\ndef own():\n    setattr(Late, 'factor', 2.0)\n\nown()\n"
    (tmp_path / "mirrorc_late_settings.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def deed(model: Any, h: torch.Tensor) -> torch.Tensor:
        from mirrorc_late_settings import Late  # type: ignore[import-not-found]

        return h * Late.factor

    try:
        trace(Net(deed))
        assert sys.modules["mirrorc_late_settings"].Late.factor == 2.0
    finally:
        sys.modules.pop("mirrorc_late_settings", None)


def test_what_is_set_by_its_name_in_a_trace_is_put_back() -> None:
    def deed(model: Any, h: torch.Tensor) -> torch.Tensor:
        setattr(getattr(model, made("set", "tings")), made("la", "te"), 1.0)
        return h

    model = Net(deed)
    with contextlib.suppress(UnreadableError):
        trace(model)
    assert not hasattr(model.settings, "late")


def test_what_no_code_names_may_change() -> None:
    model = Net(lambda model, h: h * 2.0)
    found = trace(model)
    model.scale, model.numbers, SETTINGS.factor = 3.0, itertools.count(5), 7.0
    try:
        assert found.state.hold()
    finally:
        SETTINGS.factor = 1.0


def test_what_is_reached_by_two_names_is_watched_by_each() -> None:
    model = Net(lambda model, h: h * model.settings.factor)
    vars(model)["another"] = model.settings
    vars(model).update({key: vars(model).pop(key) for key in ("settings",)})  # so that it is found after the other
    found = trace(model)
    model.settings.factor = 2.0
    assert not found.state.hold()


def test_what_is_found_out_once_may_be_noted() -> None:
    def deed(model: Any, h: torch.Tensor) -> torch.Tensor:
        if "width" not in model.settings.seen:
            model.settings.seen["width"] = h.shape[1]
        return h * model.settings.seen["width"]

    model = Net(deed)
    found = trace(model)
    assert found.changed == {"settings"} and model.settings.seen == {}


def test_attributes_that_hand_values_on_are_not_watched() -> None:
    class Hands(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.between = self.first(x)
            return self.last(self.between)

    model = Hands(lambda model, h: h)
    model(torch.ones(2, 6))
    found = trace(model)
    assert {name for _, name in found.trace.passing} == {"between"}
    model(torch.ones(3, 6))
    assert found.state.hold()


# What is observed


def test_code_is_the_users_unless_it_is_a_librarys() -> None:
    others = (
        torch.nn.__file__,
        os.__file__,
        numpy.__file__,
        "<frozen importlib._bootstrap>",
        recorded.__code__.co_filename,
    )
    assert not any(map(is_watched_file, others))
    site = os.path.dirname(os.path.dirname(torch.__file__))
    assert all(map(is_watched_file, (__file__, "<stdin>", "<ipython-input-1>", f"{site}/torchvision/ops/boxes.py")))


def test_the_profiler_of_the_user_is_put_back() -> None:
    def own(frame: Any, event: str, called: Any) -> None:
        pass

    sys.setprofile(own)
    try:
        with PythonCalls() as calls:
            factor()
        assert sys.getprofile() is own and factor.__code__ in calls.codes
    finally:
        sys.setprofile(None)
