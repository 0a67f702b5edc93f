"""State space models, linear attention, and hybrids of them with attention."""

from typing import Any

from hugging_face_text import DECODER, SPECIAL
from zoo_models import FLOAT32_WITHIN, WORDS, of_hugging_face, text

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
    of_hugging_face("Mamba", "MambaForCausalLM", text, MAMBA, narrow=FLOAT32_WITHIN),
    of_hugging_face(
        "Mamba 2",
        "Mamba2ForCausalLM",
        text,
        MAMBA,
        {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 5},
        run_by="test-slow",
        narrow=FLOAT32_WITHIN,
    ),
    of_hugging_face("Falcon Mamba", "FalconMambaForCausalLM", text, MAMBA, narrow=FLOAT32_WITHIN),
    of_hugging_face(
        "RecurrentGemma",
        "RecurrentGemmaForCausalLM",
        text,
        DECODER,
        {"num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 8, "conv1d_width": 3},
        {"block_types": ["recurrent", "recurrent", "attention"]},
        run_by="test-slow",
        narrow=FLOAT32_WITHIN,
        warns="'recurrent_states'",
    ),
    of_hugging_face(
        "Jamba",
        "JambaForCausalLM",
        text,
        HYBRID,
        {"num_experts": 2, "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "experts_implementation": "eager"},
        rung="autograd",
        why="which experts run follows from the data",
        narrow=FLOAT32_WITHIN,
        run_by="test-slow",
    ),
    of_hugging_face(
        "Bamba",
        "BambaForCausalLM",
        text,
        HYBRID,
        {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1},
        {"mamba_chunk_size": 5},
        narrow=FLOAT32_WITHIN,
    ),
    of_hugging_face(
        "Zamba 2",
        "Zamba2ForCausalLM",
        text,
        HYBRID,
        {"num_key_value_heads": 2, "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 8, "chunk_size": 5},
        {"hybrid_layer_ids": [1], "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4},
        {"time_step_limit": None},
        narrow=FLOAT32_WITHIN,
    ),
    of_hugging_face(
        "Qwen 3 Next",
        "Qwen3NextForCausalLM",
        text,
        DECODER,
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2},
        {"linear_num_key_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        {"linear_conv_kernel_dim": 3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        {"shared_expert_intermediate_size": 12, "experts_implementation": "batched_mm"},
        narrow=FLOAT32_WITHIN,
    ),
    of_hugging_face(
        "xLSTM",
        "xLSTMForCausalLM",
        text,
        SPECIAL,
        {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "chunk_size": 5},
        run_by="test-slow",
        narrow=FLOAT32_WITHIN,
    ),
    of_hugging_face(
        "LFM 2",
        "Lfm2ForCausalLM",
        text,
        DECODER,
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
        {"block_auto_adjust_ff_dim": False},
        run_by="test-slow",
        narrow=FLOAT32_WITHIN,
    ),
]
