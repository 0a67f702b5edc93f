"""What a trace is seen to do to Python objects, and which prints and logs it calls."""

import collections
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.side_effects import SideEffects

from mirrorc import torch_internals as internals

NAME = "mirrorc_tests.effects"
LOGGER = logging.getLogger(NAME)
seen: list[torch.Tensor] = []


class Config:
    steps = 0


class OwnDict(dict[str, Any]):
    pass


class Does(nn.Module):
    def __init__(self, does: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(3, 3), does
        self.acts: list[Any] = []
        self.table: dict[str, Any] = {"a": 1}
        self.last: collections.deque[Any] = collections.deque(maxlen=2)
        self.config, self.flag = Config(), True
        self.missing: dict[str, Any] = collections.defaultdict(list)
        self.ordered, self.counts, self.own = collections.OrderedDict(a=1), collections.Counter(a=1), OwnDict(a=1)
        self.register_buffer("kept", torch.ones(3))

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        y = self.layer(leaves[0])
        self.does(self, y)
        return y.sum()


def flip(model: Any, y: torch.Tensor) -> None:
    model.flag = False
    model.flag = True


def use_up(model: Any, y: torch.Tensor) -> None:
    model.acts.append(y)
    model.acts.clear()


def keep(model: Any, y: torch.Tensor) -> None:
    model.kept = model.kept


def set_flag(model: Any, y: torch.Tensor) -> None:
    model.flag = False


def set_table(model: Any, y: torch.Tensor) -> None:
    model.table["b"] = y


def set_config(model: Any, y: torch.Tensor) -> None:
    model.config.steps += 1


def set_ordered(model: Any, y: torch.Tensor) -> None:
    model.ordered["b"] = 2


def set_own(model: Any, y: torch.Tensor) -> None:
    model.own["a"] = 2


def set_own_as_before(model: Any, y: torch.Tensor) -> None:
    model.own["a"] = 2
    model.own["a"] = 1


WRITES: list[tuple[Callable[[Any, torch.Tensor], object], list[tuple[str, tuple[str, ...]]]]] = [
    (lambda model, y: None, []),
    (flip, []),
    (use_up, []),
    (keep, []),
    (set_flag, [("L['self']", (".flag",))]),
    (lambda model, y: model.acts.append(y), [("L['self'].acts", ("[",))]),
    (lambda model, y: model.last.append(y), [("L['self'].last", ("[",))]),
    (set_table, [("L['self'].table", ("['b']",))]),
    (set_config, [("L['self'].config", (".steps",))]),
    (lambda model, y: seen.append(y), [("G['seen']", ("[",))]),
    (lambda model, y: model.missing["k"], [("L['self'].missing", ("['k']",))]),
    (lambda model, y: model.missing["k"].append(1), [("L['self'].missing", ("['k']",))]),
    (set_ordered, [("L['self'].ordered", ("['b']",))]),
    (lambda model, y: model.counts.update(["b"]), [("L['self'].counts", ("['b']",))]),
    (set_own, [("L['self'].own", ("['a']",))]),
    (set_own_as_before, []),
]


def effects_of(does: Callable[[Any, torch.Tensor], object]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said in torch's own words
        return internals.python_effects_of(internals.trace_full_graph(Does(does), (torch.ones(2, 3),)))


@pytest.mark.slow
def test_writes_are_found_with_their_lines_unless_they_change_nothing() -> None:
    clear = SideEffects.clear
    for does, expected in WRITES:
        writes = effects_of(does).writes
        assert [(write.source, write.parts) for write in writes] == expected
        assert all({__file__, nn.modules.module.__file__} & {frame.filename for frame in w.stack} for w in writes)
    assert seen == [] and SideEffects.clear is clear


def test_loggers_are_found_by_name_while_they_are_traced(caplog: Any) -> None:
    def says(model: Any, y: torch.Tensor) -> None:
        logging.getLogger(NAME).warning("of %s", "words")
        logging.getLogger(f"{NAME}.{type(model).__name__}").error("of a name")
        logger = logging.getLogger(name=__name__)
        logger.debug("switched off")
        logging.getLogger().warning("of the root")

    calls = effects_of(says).calls
    assert [(call.name, call.has_run, call.repeats) for call in calls] == [
        ("logger.warning", True, True),
        ("logger.error", True, True),
        ("logger.debug", True, False),
        ("logger.warning", True, True),
    ]
    names = [(record.name, record.getMessage()) for record in caplog.records]
    for expected in ((NAME, "of words"), (f"{NAME}.Does", "of a name"), ("root", "of the root")):
        assert expected in names


def test_what_the_tracer_says_of_itself_is_not_passed_on() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for refused in (lambda model, y: time.thread_time_ns(), lambda model, y: time.clock_gettime(0)):
            with pytest.raises(Exception, match="trace"):
                internals.trace_full_graph(Does(refused), (torch.ones(2, 3),))
    assert caught == []


def test_prints_and_logs_run_while_they_are_traced(capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    def says(model: Any, y: torch.Tensor) -> None:
        print("a shape", y.shape, f"{y}")  # noqa: T201 - forward does
        LOGGER.warning("of %s", "words")
        LOGGER.debug("switched off")

    calls = effects_of(says).calls
    assert [(call.name, call.has_run, call.repeats) for call in calls] == [
        ("print", True, True),
        ("logger.warning", True, True),
        ("logger.debug", True, False),
    ]
    assert "a shape torch.Size([2, 3]) FakeTensor" in capsys.readouterr().out
    assert [record.getMessage() for record in caplog.records if record.name == LOGGER.name] == ["of words"]


def test_a_warning_is_given_at_its_own_line() -> None:
    def warns(model: Any, y: torch.Tensor) -> None:
        warnings.warn("of the user's", DeprecationWarning, stacklevel=2)

    with pytest.warns(DeprecationWarning, match="of the user's") as caught:
        internals.trace_full_graph(Does(warns), (torch.ones(2, 3),))
    assert [warning.filename for warning in caught] == [__file__]
