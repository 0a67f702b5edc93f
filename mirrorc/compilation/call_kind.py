"""What a call of a step is for, which decides how it is compiled and on what it runs."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from mirrorc.ir.program import Accumulation
from mirrorc.pipeline.pipeline_edits import for_accumulation, for_evaluation
from mirrorc.pipeline.protocol import Pass
from mirrorc.runtime.state.accumulation_state import AccumulationState, ProgramState
from mirrorc.runtime.state.evaluation_state import EvaluationState
from mirrorc.runtime.state.step_state import StepState


class Purpose(enum.Enum):
    """What a call is for; the values are what it is called."""

    STEP = "step"  # to update with the gradients of its batch
    ACCUMULATION = "accumulation"  # to add these to what is kept
    END_OF_ACCUMULATION = "step after accumulation"  # to update with these and with what is kept
    EVALUATION = "evaluation"  # of forward alone

    @staticmethod
    def of_training(accumulation: Accumulation) -> Purpose:
        """That of a training call whose program does so with the gradients of several calls."""
        return next(one for one in Purpose if one.trains and one.accumulation is accumulation)

    @property
    def trains(self) -> bool:
        """Whether it has a backward."""
        return self is not Purpose.EVALUATION

    @property
    def updates(self) -> bool:
        """Whether it ends with an update."""
        return self in (Purpose.STEP, Purpose.END_OF_ACCUMULATION)

    @property
    def accumulation(self) -> Accumulation:
        """What its program does with the gradients of several calls."""
        adds, ends = self is Purpose.ACCUMULATION, self is Purpose.END_OF_ACCUMULATION
        return Accumulation.ADDS if adds else Accumulation.ENDS if ends else Accumulation.NONE

    def passes_of(self, pipeline: Sequence[Pass]) -> list[Pass]:
        """The passes of a step's pipeline that its program goes through."""
        if self is Purpose.EVALUATION:
            return for_evaluation(pipeline)
        return for_accumulation(pipeline) if self is Purpose.ACCUMULATION else list(pipeline)

    def of(self, what: str) -> str:
        """Names what is compiled, such as ``an evaluation of Net for cpu:0``."""
        article = "an" if self.value[0] in "ae" else "a"
        return what if self is Purpose.STEP else f"{article} {self.value} of {what}"


def states_of(state: StepState) -> dict[Purpose, ProgramState]:
    """What the programs of each purpose run on, over the state of a step."""
    own: dict[Purpose, ProgramState] = {
        Purpose.ACCUMULATION: AccumulationState(state),
        Purpose.EVALUATION: EvaluationState(state),
    }
    return {purpose: own.get(purpose, state) for purpose in Purpose}
