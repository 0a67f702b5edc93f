"""Purposes of a step's calls, which select passes and the program's state."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from mirrorc.ir.program import Accumulation
from mirrorc.pipeline.pipeline_edits import for_accumulation, for_evaluation, for_gradients
from mirrorc.pipeline.protocol import Pass
from mirrorc.runtime.state.accumulation_state import AccumulationState, ProgramState
from mirrorc.runtime.state.evaluation_state import EvaluationState
from mirrorc.runtime.state.gradient_state import GradientState
from mirrorc.runtime.state.module_states import BackwardState, ForwardState
from mirrorc.runtime.state.step_state import StepState


class Purpose(enum.Enum):
    """Values are names in messages."""

    STEP = "step"  # to update with the gradients of its batch
    ACCUMULATION = "accumulation"  # to add the batch's gradients to the accumulated ones
    END_OF_ACCUMULATION = "step after accumulation"  # to update with the sum of accumulated and new gradients
    GRADIENTS = "call for gradients"  # to add the batch's gradients to those of the user's parameters
    FORWARD = "forward"  # of a module, before the caller computes a loss
    BACKWARD = "backward"  # from the gradients of a module's outputs, to those of its parameters
    EVALUATION = "evaluation"  # of forward alone

    @staticmethod
    def of_training(accumulation: Accumulation) -> Purpose:
        return next(purpose for purpose in Purpose if purpose.trains and purpose.accumulation is accumulation)

    @property
    def trains(self) -> bool:
        return self is not Purpose.EVALUATION

    @property
    def updates(self) -> bool:
        return self in (Purpose.STEP, Purpose.END_OF_ACCUMULATION)

    @property
    def has_optimizer(self) -> bool:
        return self.trains and self not in (Purpose.GRADIENTS, Purpose.FORWARD, Purpose.BACKWARD)

    @property
    def accumulation(self) -> Accumulation:
        return _ACCUMULATION.get(self, Accumulation.NONE)

    def passes_of(self, pipeline: Sequence[Pass]) -> list[Pass]:
        if self in (Purpose.EVALUATION, Purpose.FORWARD):
            return for_evaluation(pipeline)
        if self in (Purpose.GRADIENTS, Purpose.BACKWARD):
            return for_gradients(pipeline)
        return for_accumulation(pipeline) if self is Purpose.ACCUMULATION else list(pipeline)

    def of(self, model: str) -> str:
        """A program's name in messages, such as ``an evaluation of Net for cpu:0``."""
        article = "an" if self.value[0] in "ae" else "a"
        return model if self is Purpose.STEP else f"{article} {self.value} of {model}"


_ACCUMULATION = {
    Purpose.ACCUMULATION: Accumulation.ADDS,
    Purpose.END_OF_ACCUMULATION: Accumulation.ENDS,
    Purpose.GRADIENTS: Accumulation.GRADIENTS,
    Purpose.BACKWARD: Accumulation.GRADIENTS,
}


def states_of(state: StepState) -> dict[Purpose, ProgramState]:
    states: dict[Purpose, ProgramState] = {
        Purpose.ACCUMULATION: AccumulationState(state),
        Purpose.GRADIENTS: GradientState(state),
        Purpose.FORWARD: ForwardState(state),
        Purpose.BACKWARD: BackwardState(state),
        Purpose.EVALUATION: EvaluationState(state),
    }
    return {purpose: states.get(purpose, state) for purpose in Purpose}
