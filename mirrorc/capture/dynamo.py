"""The front end that traces with Dynamo and applies torch's joint export to the result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mirrorc.capture.asserts import refuse_effects
from mirrorc.capture.errors import check_loss, check_writes, explain
from mirrorc.capture.front_ends import FrontEnd, Traced
from mirrorc.capture.training_call import TrainingCall
from mirrorc.capture.weighted_means import weighted_means_of
from mirrorc.torch_internals import export_joint_graph, guards_of, trace_full_graph


class DynamoFrontEnd(FrontEnd):
    """Captures the whole call without a graph break, or says why it cannot."""

    name = "dynamo"

    def trace(
        self,
        stack: contextlib.ExitStack,
        call: TrainingCall,
        leaves: Sequence[torch.Tensor],
        decompositions: Mapping[Any, Callable[..., Any]],
    ) -> Traced:
        what = type(call.model).__name__
        try:
            traced = trace_full_graph(call, leaves)
        except Exception as error:
            raise explain(error, what) from error
        check_writes(traced, what)
        check_loss(traced, what)
        refuse_effects(traced.graph, what)
        try:
            joint = export_joint_graph(stack, traced, leaves, decompositions)
        except Exception as error:
            raise explain(error, what) from error
        joint.weighted_means = weighted_means_of(traced)
        return Traced(joint, guards_of(traced))
