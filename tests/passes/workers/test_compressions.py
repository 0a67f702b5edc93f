"""What the passes that compress what workers send have in common."""

from typing import Any

import pytest
from payloads import FirstElements
from tiny_programs import SMALL_BUCKETS, Weight, every_stage, handmade, handmade_of_worker, targets

from mirrorc import World
from mirrorc.compression import TopK
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.passes import CompressExchange, SendLargest, SendPayload, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.protocol import Pass

WEIGHTS = [Weight("a", (300,)), Weight("b", (300,)), Weight("c", (2,))]


@pytest.mark.parametrize(
    ("compression", "operation"),
    [("bfloat16", ops.compress), (TopK(0.1), ops.gather_largest), (FirstElements(), ops.exchange_payload)],
    ids=["bfloat16", "top-k", "payload"],
)
def test_one_worker_compresses_nothing(compression: Any, operation: Any) -> None:
    program = run_passes(handmade(2, WEIGHTS), default_pipeline(compression=compression, **SMALL_BUCKETS))
    assert not any(targets(graph, operation) for graph in program.graphs())
    said = [remark.text for remark in program.remarks if "compressed" in remark.text]
    assert said == ["nothing is compressed: there is one worker, and nothing is sent to others"]


@pytest.mark.parametrize("compiler_pass", [CompressExchange(), SendLargest(), SendPayload(FirstElements())], ids=str)
def test_they_need_exchanges(compiler_pass: Pass) -> None:
    captured = handmade_of_worker(World(2), weights=WEIGHTS)
    before = every_stage(captured, over_workers=True, **SMALL_BUCKETS)["share-parameters"]
    with pytest.raises(PassError, match="must come after 'reduce-over-workers'"):
        compiler_pass.run(before)
