"""Encoders, decoders and both, of Hugging Face, on text."""

from typing import Any

import torch
from zoo_models import (
    CLASSES,
    FLOAT32_LOSS,
    FLOAT32_WITHIN,
    WORDS,
    Batch,
    classified_text,
    of_hugging_face,
    text,
    translated,
    without,
)

SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
NO_DROPOUT: dict[str, Any] = dict.fromkeys(
    (
        "activation_dropout",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "classifier_dropout",
        "decoder_layerdrop",
        "dropout",
        "dropout_rate",
        "embd_pdrop",
        "embed_dropout",
        "embedding_dropout",
        "encoder_layerdrop",
        "hidden_dropout",
        "hidden_dropout_prob",
        "layerdrop",
        "resid_dropout",
        "resid_pdrop",
    ),
    0.0,
)
ENCODER: dict[str, Any] = {
    **SPECIAL,
    **NO_DROPOUT,
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "num_labels": CLASSES,
}
DECODER: dict[str, Any] = {**ENCODER, "num_key_value_heads": 1, "head_dim": 8}
SEQ2SEQ: dict[str, Any] = {
    **ENCODER,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 1,
}
XLNET: dict[str, Any] = {"vocab_size": WORDS, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 24}
DEBERTA: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
BRANCHES_ON_MASK = "it asks whether some word attends to all"


def unmasked_text(num_examples: int, generator: torch.Generator) -> Batch:
    return without(classified_text(num_examples, generator), "attention_mask")


MODELS = [
    of_hugging_face("BERT", "BertForSequenceClassification", classified_text, ENCODER, run_by="test-slow"),
    of_hugging_face("RoBERTa", "RobertaForMaskedLM", text, ENCODER, run_by="test-slow"),
    of_hugging_face(
        "DistilBERT",
        "DistilBertForSequenceClassification",
        classified_text,
        ENCODER,
        {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24, "seq_classif_dropout": 0.0},
    ),
    of_hugging_face(
        "ALBERT",
        "AlbertForSequenceClassification",
        classified_text,
        ENCODER,
        embedding_size=8,
        classifier_dropout_prob=0.0,
    ),
    of_hugging_face("ELECTRA", "ElectraForSequenceClassification", classified_text, ENCODER, embedding_size=8),
    of_hugging_face(
        "DeBERTa v2",
        "DebertaV2ForSequenceClassification",
        classified_text,
        ENCODER,
        DEBERTA,
        share_att_key=True,
        rung="autograd",
        why="its loss looks for labels",
        run_by="test-slow",
        narrow=FLOAT32_WITHIN,
    ),
    of_hugging_face(
        "ModernBERT",
        "ModernBertForSequenceClassification",
        classified_text,
        ENCODER,
        {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4},
        run_by="test-slow",
    ),
    of_hugging_face("FNet", "FNetForSequenceClassification", unmasked_text, ENCODER),
    of_hugging_face(
        "Funnel",
        "FunnelForSequenceClassification",
        classified_text,
        NO_DROPOUT,
        XLNET,
        {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_head": 8, "num_labels": CLASSES},
        run_by="test-slow",
        warns="'pooling_mult', 'seq_len'",
    ),
    of_hugging_face(
        "XLNet",
        "XLNetForSequenceClassification",
        classified_text,
        NO_DROPOUT,
        XLNET,
        summary_last_dropout=0.0,
        num_labels=CLASSES,
    ),
    of_hugging_face(
        "Longformer",
        "LongformerForSequenceClassification",
        classified_text,
        ENCODER,
        attention_window=4,
        rung="autograd",
        why=BRANCHES_ON_MASK,
        run_by="test-slow",
    ),
    of_hugging_face(
        "BigBird", "BigBirdForSequenceClassification", classified_text, ENCODER, attention_type="original_full"
    ),
    of_hugging_face(
        "Reformer",
        "ReformerForSequenceClassification",
        classified_text,
        NO_DROPOUT,
        SPECIAL,
        {"vocab_size": WORDS, "hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8},
        {"axial_pos_embds": False, "attn_layers": ["local"], "feed_forward_size": 24, "local_attn_chunk_length": 5},
        {"max_position_embeddings": 32, "local_attention_probs_dropout_prob": 0.0, "is_decoder": False},
        {"num_labels": CLASSES},
        rung="autograd",
        why="it seeds torch's generator, for its reversible layers",
        run_by="test-slow",
        warns="'attention_seed', 'feed_forward_seed'",
    ),
    of_hugging_face(
        "ConvBERT",
        "ConvBertForSequenceClassification",
        classified_text,
        ENCODER,
        {"embedding_size": 16, "head_ratio": 1, "conv_kernel_size": 3},
    ),
    of_hugging_face(
        "ESM", "EsmForSequenceClassification", classified_text, ENCODER, mask_token_id=3, run_by="test-slow"
    ),
    of_hugging_face("GPT-2", "GPT2LMHeadModel", text, ENCODER, run_by="test-slow", narrow=FLOAT32_LOSS),
    of_hugging_face(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        text,
        without(ENCODER, "num_hidden_layers"),
        {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
        narrow=FLOAT32_LOSS,
    ),
    of_hugging_face("GPT-NeoX", "GPTNeoXForCausalLM", text, ENCODER, narrow=FLOAT32_LOSS, run_by="test-slow"),
    of_hugging_face(
        "OPT",
        "OPTForCausalLM",
        text,
        ENCODER,
        ffn_dim=24,
        word_embed_proj_dim=16,
        narrow=FLOAT32_LOSS,
        run_by="test-slow",
    ),
    of_hugging_face(
        "BLOOM", "BloomForCausalLM", text, ENCODER, n_layer=1, n_head=2, narrow=FLOAT32_LOSS, run_by="test-slow"
    ),
    of_hugging_face("Falcon", "FalconForCausalLM", text, ENCODER, narrow=FLOAT32_LOSS, run_by="test-slow"),
    of_hugging_face(
        "MPT",
        "MptForCausalLM",
        text,
        ENCODER,
        {"d_model": 16, "n_layers": 1, "n_heads": 2, "expansion_ratio": 2, "max_seq_len": 32},
        narrow=FLOAT32_LOSS,
    ),
    of_hugging_face("Llama", "LlamaForCausalLM", text, DECODER, run_by="test-slow", narrow=FLOAT32_WITHIN),
    of_hugging_face("Mistral", "MistralForCausalLM", text, DECODER, sliding_window=4, narrow=FLOAT32_WITHIN),
    of_hugging_face(
        "Gemma 3",
        "Gemma3ForCausalLM",
        text,
        DECODER,
        sliding_window=4,
        query_pre_attn_scalar=8,
        run_by="test-slow",
        narrow=FLOAT32_WITHIN,
    ),
    of_hugging_face("Qwen 3", "Qwen3ForCausalLM", text, DECODER, run_by="test-slow", narrow=FLOAT32_WITHIN),
    of_hugging_face("Phi-3", "Phi3ForCausalLM", text, DECODER, narrow=FLOAT32_WITHIN, run_by="test-slow"),
    of_hugging_face("OLMo 2", "Olmo2ForCausalLM", text, DECODER, narrow=FLOAT32_WITHIN),
    of_hugging_face("SmolLM 3", "SmolLM3ForCausalLM", text, DECODER, narrow=FLOAT32_WITHIN, run_by="test-slow"),
    of_hugging_face(
        "T5",
        "T5ForConditionalGeneration",
        translated,
        NO_DROPOUT,
        SPECIAL,
        {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2},
        {"decoder_start_token_id": 0},
        run_by="test-slow",
        narrow=FLOAT32_WITHIN,
    ),
    of_hugging_face("BART", "BartForConditionalGeneration", translated, SEQ2SEQ, run_by="test-slow"),
    of_hugging_face("Pegasus", "PegasusForConditionalGeneration", translated, SEQ2SEQ),
    of_hugging_face(
        "LED",
        "LEDForConditionalGeneration",
        translated,
        SEQ2SEQ,
        {"attention_window": 4, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32},
        rung="autograd",
        why=BRANCHES_ON_MASK,
        run_by="test-slow",
    ),
]
