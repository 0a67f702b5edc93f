"""Models of Hugging Face on sounds."""

from typing import Any

import torch
from hugging_face_text import SPECIAL
from zoo_models import (
    BATCH_NORM,
    CLASSES,
    FLOAT32_LOSS,
    WORDS,
    Batch,
    BatchMaker,
    classes,
    numbers,
    of_hugging_face,
    tokens,
)

NO_DROPOUT: dict[str, Any] = dict.fromkeys(
    (
        "activation_dropout",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "conformer_conv_dropout",
        "decoder_layerdrop",
        "dropout",
        "encoder_layerdrop",
        "feat_proj_dropout",
        "feat_quantizer_dropout",
        "final_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "layerdrop",
        "mask_feature_prob",
        "mask_time_prob",
    ),
    0.0,
)
SPEECH: dict[str, Any] = {
    **NO_DROPOUT,
    "vocab_size": 8,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "conv_dim": (6, 6),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 6,
    "num_labels": CLASSES,
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
    "pad_token_id": 0,
}
SEQ2SEQ: dict[str, Any] = {
    **NO_DROPOUT,
    **SPECIAL,
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_source_positions": 10,
    "max_target_positions": 12,
    "decoder_start_token_id": 1,
    "num_mel_bins": 6,
}
CTC = "its CTC loss looks at the labels"


def sounds(num_examples: int, generator: torch.Generator) -> Batch:
    return {"input_values": numbers(num_examples, generator, 220), "labels": classes(num_examples, generator)}


def spelled_sounds(num_examples: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(1, 8, (num_examples, 3), generator=generator)
    return {"input_values": numbers(num_examples, generator, 220), "labels": labels}


def classified(key: str, *shape: int) -> BatchMaker:
    def batch(num_examples: int, generator: torch.Generator) -> Batch:
        return {key: numbers(num_examples, generator, *shape), "labels": classes(num_examples, generator)}

    return batch


def written_down(key: str, *shape: int) -> BatchMaker:
    def batch(num_examples: int, generator: torch.Generator) -> Batch:
        return {key: numbers(num_examples, generator, *shape), "labels": tokens(num_examples, generator, 6)}

    return batch


MODELS = [
    of_hugging_face("Wav2Vec2", "Wav2Vec2ForSequenceClassification", sounds, SPEECH, run_by="test-slow"),
    of_hugging_face(
        "Wav2Vec2, CTC",
        "Wav2Vec2ForCTC",
        spelled_sounds,
        SPEECH,
        rung="autograd",
        why=CTC,
        narrow=FLOAT32_LOSS,
        run_by="test-slow",
    ),
    of_hugging_face("HuBERT", "HubertForSequenceClassification", sounds, SPEECH),
    of_hugging_face(
        "HuBERT, CTC",
        "HubertForCTC",
        spelled_sounds,
        SPEECH,
        rung="autograd",
        why=CTC,
        narrow=FLOAT32_LOSS,
        run_by="test-slow",
    ),
    of_hugging_face("WavLM", "WavLMForSequenceClassification", sounds, SPEECH, num_buckets=8, max_bucket_distance=16),
    of_hugging_face("SEW-D", "SEWDForSequenceClassification", sounds, SPEECH, squeeze_factor=2),
    of_hugging_face(
        "Wav2Vec2 Conformer",
        "Wav2Vec2ConformerForSequenceClassification",
        sounds,
        SPEECH,
        position_embeddings_type="relative",
        couples=BATCH_NORM,
    ),
    of_hugging_face(
        "Wav2Vec2-BERT",
        "Wav2Vec2BertForSequenceClassification",
        classified("input_features", 20, 6),
        SPEECH,
        feature_projection_input_dim=6,
    ),
    of_hugging_face(
        "Whisper", "WhisperForConditionalGeneration", written_down("input_features", 6, 20), SEQ2SEQ, run_by="test-slow"
    ),
    of_hugging_face(
        "Whisper, classification",
        "WhisperForAudioClassification",
        classified("input_features", 6, 20),
        SEQ2SEQ,
        num_labels=CLASSES,
    ),
    of_hugging_face(
        "Audio Spectrogram Transformer",
        "ASTForAudioClassification",
        classified("input_values", 12, 8),
        NO_DROPOUT,
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24},
        {"patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 12, "num_mel_bins": 8},
        {"num_labels": CLASSES},
    ),
    of_hugging_face(
        "Speech2Text",
        "Speech2TextForConditionalGeneration",
        written_down("input_features", 20, 6),
        SEQ2SEQ,
        {"max_source_positions": 32, "num_conv_layers": 2, "conv_kernel_sizes": [3, 3], "conv_channels": 8},
        {"input_feat_per_channel": 6, "input_channels": 1},
    ),
    of_hugging_face(
        "Moonshine",
        "MoonshineForConditionalGeneration",
        written_down("input_values", 2000),
        SEQ2SEQ,
        {"hidden_size": 16, "encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 1},
        {"encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2, "intermediate_size": 24},
        {"max_position_embeddings": 64},
        narrow=FLOAT32_LOSS,
    ),
]
