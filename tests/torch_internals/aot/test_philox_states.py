"""Joint export makes states of random numbers on GPUs only where its graphs have them."""

import contextlib

import torch
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._functorch import config
from traced_graphs import Small

from mirrorc import torch_internals as internals
from mirrorc.torch_internals.aot.philox_states import no_states_of_gpus


def test_no_tensor_is_made_in_the_block_and_those_of_others_are_made_behind_it() -> None:
    with no_states_of_gpus(), PhiloxStateTracker():
        assert PhiloxStateTracker.fwd_state.seed is None
    with PhiloxStateTracker():
        assert PhiloxStateTracker.fwd_state.seed.numel() == 0


def test_they_are_made_where_graphs_have_them() -> None:
    with config.patch(functionalize_rng_ops=True), no_states_of_gpus(), PhiloxStateTracker():
        assert PhiloxStateTracker.fwd_state.seed.numel() == 0


def test_an_export_and_the_end_of_its_contexts_make_none() -> None:
    leaves = (torch.ones(2, 3), torch.ones(1))
    with contextlib.ExitStack() as stack:
        internals.export_joint_graph(stack, internals.trace_full_graph(Small(), leaves), leaves, {})
        assert PhiloxStateTracker.fwd_state.seed is None
    assert PhiloxStateTracker.fwd_state.seed is None
