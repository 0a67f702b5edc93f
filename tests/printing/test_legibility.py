import pytest
from legibility_dump import dumped_program

SAID = (
    "loss_weight = 2/6, its part of the batch",
    "loss_weight = 1/6",
    "cpu:0 0 … 1, cpu:1 2 … 3",
    "cpu:2 4, cpu:3 5",
    "seed = mix(seed of the step, number of the replica)",
    "cpu:2 524288 … 786431",
    "parameters may be written from here on",
    "# optimizer AdamW group 1: weight_decay=0.0, lr=0.001, betas=(0.9, 0.95)",
    "ready after d(transformer.h.1.mlp.c_fc.weight) in bwd_1",
    "# backward of h.1.mlp.c_fc … h.0.attn.c_attn",
    "# f32[256, 32] @ f32[32, 1024], made by shares at the wait",
    "# f32[256, 16] @ f32[16, 1024], made by shares at the wait",
    "# 2 in place, 0 copied, 4 factored",
    "# -- a slot is a gradient's place in its bucket's memory",
    "d(transformer.h.2.mlp.c_proj.weight) = product(bucket=0, left, right)",
    "# as cpu_0, but for these lines; fwd_0.shard1 is fwd_0 for this shape of a shard",
    "bwd_1.shard1(",
)


@pytest.mark.slow
def test_the_dump_of_the_questions_has_what_they_ask_for() -> None:
    text = dumped_program().to_text()
    assert [said for said in SAID if said not in text] == []
