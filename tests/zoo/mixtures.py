"""Mixtures of experts."""

from typing import Any

import torch
import torch.nn.functional as F
from hugging_face_text import DECODER, NO_DROPOUT, SEQ2SEQ, SPECIAL
from torch import nn
from zoo_models import CLASSES, FLOAT32_WITHIN, WORDS, ZooModel, features, of_hugging_face, text, translated

EXPERTS: dict[str, Any] = {
    **DECODER,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "experts_implementation": "eager",
}
ROUTES = "which experts run follows from the data"
ROUTED = {"rung": "autograd", "why": ROUTES, "run_by": "test-slow", "narrow": FLOAT32_WITHIN}
ROUTED_IN_32_BITS = {"rung": "autograd", "why": ROUTES, "dtype": torch.float32, "warns": "'input_dtype'"}


class Switched(nn.Module):
    """Sends each example to the expert that its router likes best, in a loop over the experts."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(6, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(num_experts)
        )
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            where = (chosen == i).nonzero().flatten()
            if len(where):
                out = out.index_add(0, where, expert(x[where]) * weights[where, None])
        return self.head(x + out)


class Blended(nn.Module):
    """Runs all experts and blends what they say."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(6, num_experts)
        self.up = nn.Parameter(torch.randn(num_experts, 6, 12) * 0.3)
        self.down = nn.Parameter(torch.randn(num_experts, 12, 6) * 0.3)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bi,eio->beo", x, self.up).relu()
        out = torch.einsum("beo,eoi->bei", hidden, self.down)
        return self.head(x + (self.router(x).softmax(-1)[..., None] * out).sum(1))


MODELS = [
    ZooModel("router of examples", Switched, features, F.cross_entropy, rung="autograd", why=ROUTES, run_by="test"),
    ZooModel("blended experts", Blended, features, F.cross_entropy, run_by="test-slow"),
    of_hugging_face("Mixtral", "MixtralForCausalLM", text, EXPERTS, ROUTED),
    of_hugging_face(
        "Mixtral, loss of the router",
        "MixtralForCausalLM",
        text,
        EXPERTS,
        ROUTED,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        couples="the router's balance",
    ),
    of_hugging_face(
        "Mixtral, batched experts",
        "MixtralForCausalLM",
        text,
        EXPERTS,
        experts_implementation="batched_mm",
        narrow=FLOAT32_WITHIN,
    ),
    of_hugging_face(
        "Qwen 3 MoE, grouped products",
        "Qwen3MoeForCausalLM",
        text,
        EXPERTS,
        experts_implementation="grouped_mm",
        dtype=torch.float32,
    ),
    of_hugging_face(
        "DeepSeek v3",
        "DeepseekV3ForCausalLM",
        text,
        EXPERTS,
        ROUTED,
        {"num_key_value_heads": 2, "num_hidden_layers": 2, "n_routed_experts": 4, "n_shared_experts": 1},
        {"n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "head_dim": 4},
        {"qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1},
    ),
    of_hugging_face("gpt-oss", "GptOssForCausalLM", text, EXPERTS, ROUTED, sliding_window=4),
    of_hugging_face("JetMoE", "JetMoeForCausalLM", text, EXPERTS, ROUTED, kv_channels=8),
    of_hugging_face(
        "Llama 4",
        "Llama4ForCausalLM",
        text,
        EXPERTS,
        intermediate_size_mlp=24,
        attention_chunk_size=8,
        narrow=FLOAT32_WITHIN,
    ),
    of_hugging_face(
        "Switch Transformer",
        "SwitchTransformersForConditionalGeneration",
        translated,
        NO_DROPOUT,
        SPECIAL,
        ROUTED_IN_32_BITS,
        {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2},
        {"num_heads": 2, "num_experts": 3, "expert_capacity": 4, "num_sparse_encoder_layers": 1},
        {"num_sparse_decoder_layers": 1, "router_jitter_noise": 0.0, "decoder_start_token_id": 0},
    ),
    of_hugging_face(
        "NLLB MoE",
        "NllbMoeForConditionalGeneration",
        translated,
        SEQ2SEQ,
        ROUTED_IN_32_BITS,
        {"encoder_layers": 2, "decoder_layers": 2, "num_experts": 3, "expert_capacity": 8, "encoder_sparse_step": 2},
        {"decoder_sparse_step": 2, "router_jitter_noise": 0.0, "moe_token_dropout": 0.0},
        couples="the capacity of experts",
    ),
]
