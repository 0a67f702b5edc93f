"""State space models, linear attention, and hybrids of them with attention."""

from __future__ import annotations

from typing import Any

from hugging_face_text import DECODER, SPECIAL
from zoo_models import FLOAT32_WITHIN, WORDS, ZooModel, hugging_face, text

MAMBA: dict[str, Any] = {
    **SPECIAL,
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "state_size": 4,
    "conv_kernel": 3,
    "expand": 2,
    "time_step_rank": 4,
}
HYBRID: dict[str, Any] = {
    **DECODER,
    "num_hidden_layers": 2,
    "mamba_d_state": 4,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "use_mamba_kernels": False,
}


MODELS = [
    ZooModel("Mamba", hugging_face("MambaForCausalLM", MAMBA), text, narrow=FLOAT32_WITHIN),
    ZooModel(
        "Mamba 2",
        hugging_face("Mamba2ForCausalLM", MAMBA, num_heads=4, head_dim=8, n_groups=1, chunk_size=5),
        text,
        run_by="test-slow",
        narrow=FLOAT32_WITHIN,
    ),
    ZooModel("Falcon Mamba", hugging_face("FalconMambaForCausalLM", MAMBA), text, narrow=FLOAT32_WITHIN),
    ZooModel(
        "RecurrentGemma",
        hugging_face(
            "RecurrentGemmaForCausalLM",
            DECODER,
            num_hidden_layers=3,
            lru_width=16,
            attention_window_size=8,
            conv1d_width=3,
            block_types=["recurrent", "recurrent", "attention"],
        ),
        text,
        rung="autograd",
        why="it leaves its state in an attribute",
        run_by="test-slow",
        narrow=FLOAT32_WITHIN,
        warns="'recurrent_states'",
    ),
    ZooModel(
        "Jamba",
        hugging_face(
            "JambaForCausalLM",
            HYBRID,
            num_experts=2,
            num_experts_per_tok=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_dt_rank=4,
            experts_implementation="eager",
        ),
        text,
        rung="autograd",
        why="which experts run follows from the data",
        narrow=FLOAT32_WITHIN,
        run_by="test-slow",
    ),
    ZooModel(
        "Bamba",
        hugging_face(
            "BambaForCausalLM",
            HYBRID,
            attn_layer_indices=[1],
            mamba_n_heads=4,
            mamba_d_head=8,
            mamba_n_groups=1,
            mamba_chunk_size=5,
        ),
        text,
        narrow=FLOAT32_WITHIN,
    ),
    ZooModel(
        "Zamba 2",
        hugging_face(
            "Zamba2ForCausalLM",
            HYBRID,
            num_key_value_heads=2,
            mamba_ngroups=1,
            n_mamba_heads=4,
            mamba_headdim=8,
            chunk_size=5,
            hybrid_layer_ids=[1],
            layers_block_type=["mamba", "hybrid"],
            num_mem_blocks=1,
            adapter_rank=4,
            time_step_limit=None,
        ),
        text,
        narrow=FLOAT32_WITHIN,
    ),
    ZooModel(
        "Qwen 3 Next",
        hugging_face(
            "Qwen3NextForCausalLM",
            DECODER,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=2,
            linear_num_key_heads=1,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=3,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=12,
            experts_implementation="batched_mm",
        ),
        text,
        narrow=FLOAT32_WITHIN,
    ),
    ZooModel(
        "xLSTM",
        hugging_face(
            "xLSTMForCausalLM",
            SPECIAL,
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=1,
            num_heads=2,
            chunk_size=5,
        ),
        text,
        run_by="test-slow",
        narrow=FLOAT32_WITHIN,
    ),
    ZooModel(
        "LFM 2",
        hugging_face(
            "Lfm2ForCausalLM",
            DECODER,
            num_hidden_layers=2,
            layer_types=["conv", "full_attention"],
            conv_L_cache=3,
            block_auto_adjust_ff_dim=False,
        ),
        text,
        run_by="test-slow",
        narrow=FLOAT32_WITHIN,
    ),
]
