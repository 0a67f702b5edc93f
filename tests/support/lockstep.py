"""Two equal trainings side by side. One is disturbed: whatever happens, its state must be one that the other passes through."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import mirrorc

Maker = Callable[[], tuple[mirrorc.Step, nn.Module, torch.optim.Optimizer]]
State = dict[str, torch.Tensor]


class Training:
    def __init__(self, make: Maker) -> None:
        torch.manual_seed(0)
        self.step, self.model, self.optimizer = make()
        self._random = torch.get_rng_state()

    def run(self, batch: Mapping[str, Any], call: Callable[[Callable[[], Any]], Any] = lambda run: run()) -> Any:
        torch.set_rng_state(self._random)
        settings = thread_settings()
        try:
            return call(lambda: self.step(**batch))
        finally:
            self._random = torch.get_rng_state()
            found = thread_settings()
            torch.set_grad_enabled(settings[0])  # a failure here makes none elsewhere
            assert found == settings, "whether gradients are enabled, and the number of threads"

    def state(self) -> State:
        found = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        for i, parameter in enumerate(self.model.parameters()):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    found[f"{key} of {i}"] = torch.as_tensor(value).detach().clone()
        found["random stream"] = self._random.clone()
        return found

    def replicas(self) -> State:
        return {
            f"{name} on {replica}": value.detach().clone()
            for name, variable in self.step.variables.items()
            for replica, value in enumerate(variable.values)
        }


def thread_settings() -> tuple[bool, int]:
    """What the calling thread has set that a step sets for a while: whether gradients are enabled, and torch's threads."""
    return torch.is_grad_enabled(), torch.get_num_threads()


class Lockstep:
    def __init__(self, make: Maker, batch: Mapping[str, Any]) -> None:
        self._batch = batch
        self.undisturbed, self.disturbed = Training(make), Training(make)
        self._before = self.undisturbed.state()

    def close(self) -> None:
        self.undisturbed.step.close()
        self.disturbed.step.close()

    def go_on(self) -> None:
        """One step of both, without disturbance; all replicas must agree, too."""
        self.undisturbed.run(self._batch)
        self.disturbed.run(self._batch)
        self._before = self.undisturbed.state()
        differing = differences(self.disturbed.state(), self._before)
        differing += differences(self.disturbed.replicas(), self.undisturbed.replicas())
        assert not differing, f"the disturbed training goes on to another state: {differing}"

    def disturb(
        self, call: Callable[[Callable[[], Any]], Any] = lambda run: run()
    ) -> tuple[BaseException | None, bool]:
        """Runs one disturbed step: what it raised, and whether it has trained; both trainings are at the same step afterwards.

        The state must be that before the step or that after it.
        """
        raised: BaseException | None = None
        try:
            self.disturbed.run(self._batch, call)
        except AssertionError:
            raise
        except BaseException as error:  # noqa: BLE001 - told to the caller
            raised = error.with_traceback(None)
        found = self.disturbed.state()
        from_before = differences(found, self._before)
        if not from_before:
            return raised, False
        self.undisturbed.run(self._batch)
        self._before = self.undisturbed.state()
        from_after = differences(found, self._before)
        said = [repr(raised), *getattr(raised, "__notes__", ())]
        assert not from_after, f"after {said}: {from_before} differ from before, {from_after} from after the step"
        return raised, True


def differences(found: State, expected: State) -> list[str]:
    names = dict.fromkeys([*expected, *found])
    return [n for n in names if n not in found or n not in expected or not torch.equal(found[n], expected[n])]
