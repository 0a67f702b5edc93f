import pytest
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mirrorc.torch_internals import checkpoint_tag


def tagged(**meta: object) -> fx.Node:
    node = fx.Graph().call_function(torch.sin, ())
    node.meta.update(meta)
    return node


def test_a_tag_has_the_number_of_its_checkpoint_and_what_the_policy_says() -> None:
    assert checkpoint_tag(tagged()) is None
    assert checkpoint_tag(tagged(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=3)) == (3, False)
    assert checkpoint_tag(tagged(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=3)) == (3, False)
    assert checkpoint_tag(tagged(recompute=CheckpointPolicy.MUST_SAVE, ac_graph_id=4)) == (4, True)
    assert checkpoint_tag(tagged(recompute=CheckpointPolicy.PREFER_SAVE, ac_graph_id=4)) == (4, True)


@pytest.mark.skipif(not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="this torch has no such policy")
def test_a_policy_that_moves_values_is_told() -> None:
    with pytest.raises(ValueError, match="MUST_CPU_OFFLOAD"):
        checkpoint_tag(tagged(recompute=CheckpointPolicy.MUST_CPU_OFFLOAD, ac_graph_id=4))
