"""Models of Hugging Face on series of numbers, and one on decisions."""

from typing import Any

import torch
import torch.nn.functional as F
from zoo_models import BATCH_NORM, Batch, numbers, of_hugging_face

PATCHES: dict[str, Any] = {
    "num_input_channels": 2,
    "context_length": 16,
    "prediction_length": 4,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": 8,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "num_attention_heads": 2,
    "ffn_dim": 12,
    "attention_dropout": 0.0,
    "ff_dropout": 0.0,
    "path_dropout": 0.0,
    "head_dropout": 0.0,
    "dropout": 0.0,
    "positional_dropout": 0.0,
}
SEQ2SEQ: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 10,
    "lags_sequence": [1, 2, 4],
    "num_time_features": 2,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "use_cache": False,
}


def series(num_examples: int, generator: torch.Generator) -> Batch:
    past, future = (numbers(num_examples, generator, length, 2) for length in (16, 4))
    return {"past_values": past, "future_values": future}


def dated_series(num_examples: int, generator: torch.Generator) -> Batch:
    return {
        "past_values": numbers(num_examples, generator, 14),
        "past_time_features": numbers(num_examples, generator, 14, 2),
        "past_observed_mask": torch.ones(num_examples, 14),
        "future_values": numbers(num_examples, generator, 4),
        "future_time_features": numbers(num_examples, generator, 4, 2),
    }


def decisions(num_examples: int, generator: torch.Generator) -> Batch:
    return {
        "states": numbers(num_examples, generator, 5, 3),
        "actions": numbers(num_examples, generator, 5, 2),
        "rewards": numbers(num_examples, generator, 5, 1),
        "returns_to_go": numbers(num_examples, generator, 5, 1),
        "timesteps": torch.arange(5).repeat(num_examples, 1),
        "attention_mask": torch.ones(num_examples, 5, dtype=torch.int64),
        "target": numbers(num_examples, generator, 5, 2),
    }


def of_actions(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.action_preds, target)


MODELS = [
    of_hugging_face("PatchTST", "PatchTSTForPrediction", series, PATCHES, couples=BATCH_NORM, run_by="test-slow"),
    of_hugging_face(
        "PatchTSMixer", "PatchTSMixerForPrediction", series, PATCHES, norm_mlp="LayerNorm", run_by="test-slow"
    ),
    of_hugging_face(
        "Time Series Transformer", "TimeSeriesTransformerForPrediction", dated_series, SEQ2SEQ, run_by="test-slow"
    ),
    of_hugging_face(
        "Informer", "InformerForPrediction", dated_series, SEQ2SEQ, attention_type="full", run_by="test-slow"
    ),
    of_hugging_face(
        "Decision Transformer",
        "DecisionTransformerModel",
        decisions,
        {"state_dim": 3, "act_dim": 2, "hidden_size": 8, "n_layer": 1, "n_head": 2, "n_inner": 12},
        {"n_positions": 32, "max_ep_len": 10, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        use_cache=False,
        loss_fn=of_actions,
        run_by="test-slow",
    ),
]
