"""A model that mirrorc trains and its twin that plain PyTorch trains, through the same events."""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import mirrorc
from fuzzed_training import models
from fuzzed_training.comparison import TOLERANCE, Side, Snapshot, differences, is_close
from fuzzed_training.plain_training import PlainTraining
from fuzzed_training.python_features import PYTHON_FEATURES
from fuzzed_training.repetition import Repetition
from fuzzed_training.settings import OPTIMIZERS, Distribution, Setting
from mirrorc import MirrorcError

REFUSALS = (MirrorcError, ValueError, TypeError)
_KEPT_IN_VAIN = "has kept a gradient of .*, which this step does not train"


@dataclass(frozen=True)
class Doubt:
    """Something that the next step may refuse, with a message of this pattern; ``undo`` takes it back, on both sides."""

    pattern: str
    undo: Callable[[], None]

    def matches(self, error: BaseException) -> bool:
        return re.search(self.pattern, f"{type(error).__name__}: {error}") is not None


class Refusal(Exception):
    """A model with a feature that a step may refuse was refused, by the error of this code."""


class Pair:
    """Both sides of a run; ``num_calls`` and ``num_steps_of_step`` count those of the present step object."""

    def __init__(self, setting: Setting) -> None:
        models.SCALE, models.BETA = 1.0, 0.0
        self.setting = setting
        self._is_sum = setting.loss == "sum"
        self._tolerance = 0.0 if setting.is_repeated else TOLERANCE
        self._trainer: PlainTraining | Repetition
        self.loss_fn = models.LOSSES[setting.loss]()
        first = models.make_model(frozenset(setting.features), setting.seed)
        self.mine, self.twin = self._side(first), self._side(copy.deepcopy(first))
        self.log: list[str] = []
        self.refusal = ""  # the code of the error that has ended the run
        self.num_steps = 0
        self.doubts: list[Doubt] = []
        self._generator = torch.random.get_rng_state()  # before the last call
        self.kept: list[tuple[Any, Any]] | None = None  # state_dicts of both sides' models and optimizers
        self._compile(setting.distribution)

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.mine, self.twin

    def _side(self, model: nn.Module) -> Side:
        heads = [p for name, p in model.named_parameters() if "head" in name]
        held = list(model.parameters()) if self.setting.holds_all else heads
        return Side(model, OPTIMIZERS[self.setting.optimizer](held), [])

    def _compile(self, distribution: Distribution) -> None:
        self.distribution = distribution
        self.num_calls = self.num_steps_of_step = 0
        self.has_run = False
        self.step = self._step_for(self.mine, distribution)
        if self.setting.is_repeated:
            self._trainer = Repetition(self._step_for(self.twin, distribution))
        else:
            own = self.twin
            self._trainer = PlainTraining(own.model, own.optimizer, distribution, not self._is_sum)

    def _step_for(self, side: Side, distribution: Distribution) -> mirrorc.Step:
        reduction = "sum" if self._is_sum else "mean"
        return distribution.compile(
            side.model, optimizer=side.optimizer, loss_fn=self.loss_fn, loss_reduction=reduction
        )

    def compile_again(self, distribution: Distribution) -> None:
        self.take_back_doubts()
        self.close()
        self._compile(distribution)

    def close(self) -> None:
        self.step.close()
        self._trainer.close()

    def is_held_once(self, name: str) -> bool:
        """Whether all replicas read the user's own memory of a parameter, so that writes that no version counts reach them."""
        own = self.mine.parameters()[name]
        if not self.has_run:
            return True
        if self.doubts or not self.step.programs:  # what looks at the variables may refuse, as the next step would
            return False
        variable = self.step.variables.get(name)  # None if the last program does not read it
        return variable is not None and all(value.data_ptr() == own.data_ptr() for value in variable.values)

    def doubt(self, pattern: str, undo: Callable[[], None]) -> None:
        self.doubts.append(Doubt(pattern, undo))

    def expects(self, error: BaseException) -> bool:
        """Tests for an error that a step may end with."""
        return any(doubt.matches(error) for doubt in self.doubts) or bool(self._code(error))

    def _code(self, error: BaseException) -> str:
        """The code of an error, if the model has a feature that may be refused."""
        code = re.search(r"MC\d{4}", str(error))
        return code[0] if code and not set(PYTHON_FEATURES).isdisjoint(self.setting.features) else ""

    def train(self, batch: Mapping[str, Any]) -> None:
        """Trains both on a batch. What is refused has changed nothing; it is taken back, and the step is repeated."""
        lost = self._kept_in_vain(batch)
        loss = self._call("", batch)
        assert self._runs_plainly or not lost or not self.doubts, f"a step that does not train {lost} was not refused"
        self.follow(batch, loss)

    @property
    def _runs_plainly(self) -> bool:
        """True where a step trains what any step uses: gradients that are kept are used, too."""
        return "as plain PyTorch" in str(self.step.program)

    def accumulate(self, batch: Mapping[str, Any]) -> None:
        self._follow("accumulate", batch, self._call("accumulate", batch))

    def leave_gradients(self, batch: Mapping[str, Any]) -> None:
        """Adds the gradient of a batch to those of both models, which agree."""
        self._follow("gradients", batch, self._call("gradients", batch))
        own, expected = (
            {name: p.grad for name, p in side.parameters().items() if p.grad is not None} for side in self.sides
        )
        found = differences(own, expected, self._tolerance)
        assert not found, "\n  ".join(["the gradients differ:", *found])

    def evaluate(self, batch: Mapping[str, Any]) -> None:
        self._follow("evaluate", batch, self._call("evaluate", batch))

    def _call(self, what: str, batch: Mapping[str, Any]) -> float:
        while True:
            before, call = self.begin(None if what else batch), getattr(self.step, what or "__call__")
            try:
                loss: float = call(**_marked(batch)).item()
            except REFUSALS as error:
                self.take_back_what_was_refused(error, before)
            else:
                return loss

    def _kept_in_vain(self, batch: Mapping[str, Any]) -> list[str]:
        """The parameters of which gradients are kept, but which a step on a batch does not train."""
        own = {id(p): name for name, p in self.twin.parameters().items()}
        names = {own[id(p)]: p for p in self._trainer.kept() if id(p) in own}
        heads = {"a": "head.", "b": "other_head."}
        unused = tuple(start for key, start in heads.items() if "head" in batch and key != batch["head"])
        return [name for name, p in names.items() if not p.requires_grad or name.startswith(unused)]

    def keeps_the_same(self) -> bool:
        return self.step.num_accumulated == self._trainer.num_accumulated

    def drop_accumulated(self, side: Side, module: nn.Module | None = None) -> None:
        module = side.model if module is None else module
        module.zero_grad()
        if side is self.twin:
            self._trainer.drop(list(module.parameters()))

    def drop_accumulated_by_optimizer(self, side: Side) -> None:
        side.optimizer.zero_grad()
        if side is self.twin:
            self._trainer.drop([p for group in side.optimizer.param_groups for p in group["params"]])

    def drop_all_accumulated(self) -> None:
        self.step.zero_grad()
        self._trainer.drop_all()

    def begin(self, batch: Mapping[str, Any] | None = None) -> Snapshot:
        """Before a call: what it may have to leave as it is. A step, which has a batch, may refuse what is kept."""
        self.num_calls += 1
        self.has_run = True  # a call that fails may have laid out copies
        is_unknown = self.setting.is_repeated and self.step.num_accumulated
        if batch is not None and (is_unknown or self._kept_in_vain(batch)):
            self.doubt(_KEPT_IN_VAIN, self.drop_all_accumulated)
        self._generator = torch.random.get_rng_state()
        return Snapshot(self.mine)

    def has_drawn(self) -> bool:
        return not torch.equal(self._generator, torch.random.get_rng_state())

    def follow(self, batch: Mapping[str, Any], loss: float | None = None) -> None:
        """Makes the step that mirrorc has made on the other side, and checks that they agree."""
        self._follow("step", batch, loss)
        self.num_steps += 1
        self.num_steps_of_step += 1
        if self.distribution.max_grad_norm is not None:
            own, expected = self.step.grad_norm, self._trainer.grad_norm
            assert is_close(own, expected, self._tolerance), f"the norm is {own}, not {expected}"
        self.check_replicas()

    def _follow(self, what: str, batch: Mapping[str, Any], loss: float | None) -> None:
        after = torch.random.get_rng_state()
        torch.random.set_rng_state(self._generator)
        expected = getattr(self._trainer, what)(batch, self.loss_fn)
        assert torch.equal(after, torch.random.get_rng_state()), "random streams differ"
        assert loss is None or is_close(loss, expected, self._tolerance), f"the loss is {loss}, not {expected}"
        self.check()

    def must_refuse(self, batch: Mapping[str, Any], pattern: str) -> None:
        """A call that is refused, whatever state the run is in."""
        before = self.begin(batch)
        try:
            self.step(**batch)
        except REFUSALS as error:
            assert self.expects(error) or re.search(pattern, str(error)), f"refused for another reason: {error}"
        else:
            raise AssertionError("a call was not refused")
        before.assert_unchanged("a refused call")

    def has_the_groups_of(self, state: Mapping[str, Any]) -> bool:
        own = [len(group["params"]) for group in self.twin.optimizer.param_groups]
        return own == [len(group["params"]) for group in state["param_groups"]]

    def take_back_what_was_refused(self, error: Exception, before: Snapshot) -> None:
        """After a refusal: it must have been expected and have changed nothing."""
        message = f"{type(error).__name__}: {error}"
        if not any(doubt.matches(error) for doubt in self.doubts):
            if code := self._code(error):
                before.assert_unchanged("a refused step")
                raise Refusal(code) from error
            raise AssertionError(f"a step was refused without need: {message}") from error
        before.assert_unchanged("a refused step")
        self.log.append(f"refused: {message[:200]}")
        self.take_back_doubts()

    def take_back_doubts(self) -> None:
        for doubt in reversed(self.doubts):
            doubt.undo()
        self.doubts.clear()

    def check(self) -> None:
        found = self.differences()
        if not self.keeps_the_same():
            found.append(f"{self.step.num_accumulated} examples are kept, not {self._trainer.num_accumulated}")
        assert not found, "\n  ".join(["mirrorc and plain PyTorch differ:", *found])

    def differences(self) -> list[str]:
        return differences(self.mine.state(), self.twin.state(), self._tolerance)

    def check_replicas(self) -> None:
        own = self.mine.parameters()
        for name, variable in self.step.variables.items():
            if name in own:
                values = [variable.value, *variable.values]
                assert all(torch.equal(value, own[name]) for value in values), f"{name} differs among replicas"


def _marked(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {key: mirrorc.examples(value) if isinstance(value, list) else value for key, value in batch.items()}
