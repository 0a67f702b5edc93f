"""The whole training state of a step, from which a new process can continue with the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from mirrorc.capture.call.changing_inputs import ChangingSizes
from mirrorc.capture.model.model_state import ModelState
from mirrorc.compilation.choices.saved_choices import SavedChoices
from mirrorc.errors import ExecutionError
from mirrorc.ir.devices import Device
from mirrorc.messages.problem import problem
from mirrorc.messages.source_lines import warn
from mirrorc.messages.wording import listed
from mirrorc.options.step_options import StepOptions
from mirrorc.passes import SendLargest, SendPayload
from mirrorc.runtime.state.step_state import StepState
from mirrorc.user.restore import put_back_after

KEYS = ("model", "loss_fn", "other_buffers", "optimizers", "scaler", "choices", "replica_buffers", "worker")
"""The keys of the state. ``other_buffers`` are missing in ``model.state_dict()``; ``worker`` is this process's part."""


class TrainingState:
    """The caller must hold the step's lock."""

    def __init__(
        self, options: StepOptions, model: ModelState, state: StepState, choices: SavedChoices, sizes: ChangingSizes
    ) -> None:
        self._options, self._model, self._state, self._choices, self._sizes = options, model, state, choices, sizes
        loss_fn = options.loss_fn
        self._modules = {"model": options.model} | ({"loss_fn": loss_fn} if isinstance(loss_fn, nn.Module) else {})
        workers = options.program_workers
        self._rank, self._num_workers = workers.rank, workers.num_workers

    def state_dict(self) -> dict[str, Any]:
        if self._state.accumulated.num_calls:
            raise problem(
                ExecutionError,
                f"MC7003: step.state_dict() was called in the middle of an accumulation, with {self._state.accumulated}",
                "a checkpoint has no place for them",
                ("call it after the step(x, y) that makes the update", "step.zero_grad(), to drop them"),
            )
        self._state.catch_up()  # values that the user has written are those of all replicas
        optimizers, scaler = self._state.optimizers.groups.optimizers, self._options.scaler
        return {
            "model": self._options.model.state_dict(),
            "loss_fn": self._modules["loss_fn"].state_dict() if "loss_fn" in self._modules else {},
            "other_buffers": {name: tensor.detach() for name, tensor in self._other_buffers().items()},
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "scaler": scaler.state_dict() if scaler is not None else {},
            "choices": self._choices.state_dict(),
            "replica_buffers": self._state.saved_buffers.state_dict(self._state.store),
            "worker": {
                "rank": self._rank,
                "num_workers": self._num_workers,
                "random": random_state(self._options.devices),
                "sizes": self._sizes.state_dict(),
                "unsent": self._state.unsent.values(),
                "state": self._state.unsent.state_values(),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        states = _checked(state)
        own = next((one for one in states if one["worker"]["rank"] == self._rank), None)
        common = own if own is not None else states[0]
        self._check(common)
        load_unsent = self._unsent_loader([one["worker"] for one in states], own)
        self._choices.load_state_dict(common["choices"])  # raises before it changes anything
        is_as_before = common["choices"]["devices_per_worker"] == self._choices.devices
        replicas = common["replica_buffers"] if is_as_before else {}
        self._state.saved_buffers.check(replicas, self._state.store)
        if common["replica_buffers"] and not is_as_before:
            text = (
                f"the state has buffers of each replica of a run on {common['choices']['devices_per_worker']} devices, and this "
                f"step has {self._choices.devices}: all replicas begin with the model's buffers"
            )
            warn(text)
        self._load_values(common)
        self._state.saved_buffers.load_state_dict(replicas, self._state.store)
        self._state.accumulated.clear()
        load_unsent()
        if own is not None:
            load_random_state(own["worker"]["random"], self._options.devices)
            self._sizes.load_state_dict(own["worker"]["sizes"])

    def _other_buffers(self) -> dict[str, torch.Tensor]:
        saved = {id(t) for module in self._modules.values() for t in module.state_dict(keep_vars=True).values()}
        return {name: t for name, t in self._model.tensors.items() if id(t) not in saved}

    def _check(self, state: Mapping[str, Any]) -> None:
        """Checks names and shapes before anything is changed."""
        for part, module in self._modules.items():
            _check_tensors(f"{part}.state_dict()", state[part], module.state_dict())
        _check_tensors("buffers that model.state_dict() leaves out", state["other_buffers"], self._other_buffers())
        optimizers = self._state.optimizers.groups.optimizers
        if len(state["optimizers"]) != len(optimizers):
            raise problem(
                ValueError,
                f"MC7001: the state has {len(state['optimizers'])} optimizers, and this step {len(optimizers)}",
                fix=f"mirrorc.compile(..., optimizer=[...]), with {len(state['optimizers'])} optimizers, as when it was saved",
            )
        if bool(state["scaler"]) != (self._options.scaler is not None):
            has, lacks = ("the state", "this step") if state["scaler"] else ("this step", "the state")
            why = "its loss scale belongs to the state"
            fix = "mirrorc.compile(..., scaler=torch.amp.GradScaler()), or without scaler=, as the state was saved"
            raise problem(ValueError, f"MC7001: {has} has a scaler and {lacks} has none", why, fix)

    def _load_values(self, state: Mapping[str, Any]) -> None:
        """Restores all values if one fails to load."""
        undo: list[Callable[[], object]] = []
        try:
            for part, module in self._modules.items():
                before = {name: _copied(value) for name, value in module.state_dict().items()}
                undo.append(partial(module.load_state_dict, before))
                module.load_state_dict(state[part])
            for name, buffer in self._other_buffers().items():
                undo.append(partial(buffer.detach().copy_, buffer.detach().clone()))
                buffer.detach().copy_(state["other_buffers"][name])
            holders: list[Any] = [*self._state.optimizers.groups.optimizers]
            saved = [*state["optimizers"]]
            if self._options.scaler is not None:
                holders.append(self._options.scaler)
                saved.append(state["scaler"])
            for holder, values in zip(holders, saved, strict=True):
                undo.append(partial(holder.load_state_dict, holder.state_dict()))
                holder.load_state_dict(values)
        except BaseException:
            with put_back_after(reversed(undo)):
                raise

    def _unsent_loader(
        self, workers: Sequence[Mapping[str, Any]], own: Mapping[str, Any] | None
    ) -> Callable[[], object]:
        is_compressed = any(isinstance(stage, SendLargest | SendPayload) for stage in self._options.pipeline)
        num_before = max(one["num_workers"] for one in workers)
        if not is_compressed or self._num_workers == 1:
            if any(value.count_nonzero() for one in workers for value in one["unsent"].values()):
                text = (
                    f"the state has gradients that {num_before} workers had not sent, and this step sends all of its gradients: "
                    "they are lost. Go on with the compression= of the earlier run, over several workers, to add them"
                )
                warn(text)
            return lambda: None
        values: dict[str, torch.Tensor] = {}
        payload: dict[str, torch.Tensor] = {}
        if not any(one["unsent"] or one["state"] for one in workers):
            pass  # the earlier run has no residuals
        elif own is not None and num_before == self._num_workers:
            worker = own["worker"]
            values, payload = unsent_of_worker([{**worker, "rank": 0, "num_workers": 1}], 0, 1, self._model.parameters)
        else:
            values, payload = unsent_of_worker(workers, self._rank, self._num_workers, self._model.parameters)
        return lambda: self._state.unsent.load(values, payload)


def _checked(state: Any) -> list[Mapping[str, Any]]:
    states = [state] if isinstance(state, Mapping) else state
    if not isinstance(states, Sequence) or isinstance(states, str) or not states:
        fix = ("step.load_state_dict(state), with state = step.state_dict()", "a list of these, one of each worker")
        raise problem(TypeError, f"MC7002: load_state_dict() of a step was given a {type(state).__name__}", fix=fix)
    for one in states:
        if not isinstance(one, Mapping):
            raise problem(
                TypeError,
                f"MC7002: one of the states is a {type(one).__name__}",
                fix="step.load_state_dict([...]), each item of which is what step.state_dict() returned",
            )
        if set(one) != set(KEYS):
            raise problem(
                ValueError,
                "MC7002: load_state_dict() of a step was given a dict that is no state of a step",
                f"its keys are {listed(map(str, one)) or 'none'}; those of a state are {listed(KEYS)}",
                (
                    "step.load_state_dict(state), with state = step.state_dict()",
                    "model.load_state_dict(state), for a state of the model alone",
                ),
            )
    return list(states)


def _check_tensors(what: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    missing, unknown = [n for n in own if n not in saved], [n for n in saved if n not in own]
    if missing or unknown:
        parts = _told("lacks", missing) + _told("has besides", unknown)
        raise problem(
            ValueError,
            f"MC7001: the state is of another model: in {what} it {' and '.join(parts)}",
            fix="build the model as it was when the state was saved",
            now="nothing was changed",
        )
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and getattr(saved[name], "shape", None) != value.shape:
            shape = list(saved[name].shape) if isinstance(saved[name], torch.Tensor) else type(saved[name]).__name__
            raise problem(
                ValueError,
                f"MC7001: the state is of another model: {name!r} has the shape {shape} there, and {list(value.shape)} here",
                f"{name!r} is one of {what}",
                "build the model as it was when the state was saved",
                now="nothing was changed",
            )


def _told(verb: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"{verb} {names[0]!r}{more}"] if names else []


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def unsent_of_worker(
    states: Sequence[Mapping[str, Any]], rank: int, num_workers: int, parameters: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Sums the residuals of each earlier rank r with ``r % num_workers == rank``. Returns them and the payloads' state.

    The states are the entry ``worker`` of `mirrorc.Step.state_dict`, from each worker of the earlier run, in any order.
    """
    of_ranks, first = _checked_workers(states, parameters)
    unsent: dict[str, torch.Tensor] = {}
    for other in range(rank, len(of_ranks), num_workers):
        for name, value in of_ranks[other].items():
            unsent[name] = unsent[name] + value if name in unsent else value.detach().clone()
    return unsent, {name: value.detach().clone() for name, value in first["state"].items()}


def _checked_workers(
    states: Sequence[Mapping[str, Any]], parameters: Mapping[str, torch.Tensor]
) -> tuple[dict[int, Mapping[str, torch.Tensor]], Mapping[str, Any]]:
    ranks, numbers = [state["rank"] for state in states], {state["num_workers"] for state in states}
    if len(numbers) != 1 or sorted(ranks) != list(range(*numbers)):
        raise problem(
            ValueError,
            "MC7006: the states are not those of all workers of one run, each once",
            f"they are of the ranks {', '.join(map(str, ranks))} of runs with "
            f"{', '.join(map(str, sorted(numbers)))} workers, so some gradients would be lost or added twice",
            "give a list with what step.state_dict() gave on every worker of the run",
        )
    for state in states:
        for name, value in state["unsent"].items():
            parameter = parameters.get(name)
            if (
                parameter is None
                or not isinstance(value, torch.Tensor)
                or (parameter.shape, parameter.dtype) != (value.shape, value.dtype)
            ):
                has = f"{list(parameter.shape)} of {parameter.dtype}" if parameter is not None else "no such parameter"
                raise problem(
                    ValueError,
                    f"MC7006: worker {state['rank']} had not sent all of the gradient of {name!r}, and its rest does not fit",
                    f"it is no tensor like this model's parameter ({has})",
                    "give states of a run of this model",
                )
        for name, value in state["state"].items():
            if name not in parameters or not isinstance(value, torch.Tensor):
                raise problem(
                    ValueError,
                    f"MC7006: worker {state['rank']} had a state of the payload of {name!r}, which does not fit",
                    "it is no tensor for a parameter of this model",
                    "give states of a run of this model",
                )
    first = next(state for state in states if state["rank"] == 0)
    return {state["rank"]: state["unsent"] for state in states}, first


def random_state(devices: Sequence[Device]) -> dict[str, Any]:
    """The states of the default generators, as tensors and numbers only, for ``weights_only=True``."""
    numpy_state = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(gpu) for gpu in _gpus(devices)],
        "python": random.getstate(),
        "numpy": numpy_state,
    }


def load_random_state(state: Mapping[str, Any], devices: Sequence[Device]) -> None:
    """GPUs without a state in the earlier run keep their streams."""
    numpy_state = {**state["numpy"], "state": {**state["numpy"]["state"]}}
    numpy_state["state"]["key"] = numpy_state["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state(numpy_state)
    random.setstate(_as_tuples(state["python"]))
    torch.set_rng_state(state["torch"])
    for gpu, own in zip(_gpus(devices), state["cuda"], strict=False):
        torch.cuda.set_rng_state(own, gpu)


def _gpus(devices: Sequence[Device]) -> list[torch.device]:
    return list(dict.fromkeys(device.torch_device for device in devices if device.torch_device.type == "cuda"))


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value
