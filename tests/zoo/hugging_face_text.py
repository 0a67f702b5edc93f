"""Encoders, decoders and both, of Hugging Face, on text."""

from __future__ import annotations

from typing import Any

import torch
from zoo_models import (
    CLASSES,
    FLOAT32_LOSS,
    FLOAT32_WITHIN,
    WORDS,
    Batch,
    ZooModel,
    classified_text,
    hugging_face,
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
    ZooModel("BERT", hugging_face("BertForSequenceClassification", ENCODER), classified_text, run_by="test-slow"),
    ZooModel("RoBERTa", hugging_face("RobertaForMaskedLM", ENCODER), text, run_by="test-slow"),
    ZooModel(
        "DistilBERT",
        hugging_face(
            "DistilBertForSequenceClassification",
            ENCODER,
            dim=16,
            n_layers=1,
            n_heads=2,
            hidden_dim=24,
            seq_classif_dropout=0.0,
        ),
        classified_text,
    ),
    ZooModel(
        "ALBERT",
        hugging_face("AlbertForSequenceClassification", ENCODER, embedding_size=8, classifier_dropout_prob=0.0),
        classified_text,
    ),
    ZooModel("ELECTRA", hugging_face("ElectraForSequenceClassification", ENCODER, embedding_size=8), classified_text),
    ZooModel(
        "DeBERTa v2",
        hugging_face("DebertaV2ForSequenceClassification", ENCODER, DEBERTA, share_att_key=True),
        classified_text,
        rung="autograd",
        why="its loss looks for labels",
        run_by="test-slow",
        narrow=FLOAT32_WITHIN,
    ),
    ZooModel(
        "ModernBERT",
        hugging_face("ModernBertForSequenceClassification", ENCODER, cls_token_id=1, sep_token_id=2, local_attention=4),
        classified_text,
        run_by="test-slow",
    ),
    ZooModel("FNet", hugging_face("FNetForSequenceClassification", ENCODER), unmasked_text),
    ZooModel(
        "Funnel",
        hugging_face(
            "FunnelForSequenceClassification",
            NO_DROPOUT,
            XLNET,
            block_sizes=[1, 1],
            num_decoder_layers=1,
            d_head=8,
            num_labels=CLASSES,
        ),
        classified_text,
        rung="autograd",
        why="it hands numbers from layer to layer in attributes",
        run_by="test-slow",
        warns="'pooling_mult', 'seq_len'",
    ),
    ZooModel(
        "XLNet",
        hugging_face("XLNetForSequenceClassification", NO_DROPOUT, XLNET, summary_last_dropout=0.0, num_labels=CLASSES),
        classified_text,
    ),
    ZooModel(
        "Longformer",
        hugging_face("LongformerForSequenceClassification", ENCODER, attention_window=4),
        classified_text,
        rung="autograd",
        why=BRANCHES_ON_MASK,
        run_by="test-slow",
    ),
    ZooModel(
        "BigBird",
        hugging_face("BigBirdForSequenceClassification", ENCODER, attention_type="original_full"),
        classified_text,
    ),
    ZooModel(
        "Reformer",
        hugging_face(
            "ReformerForSequenceClassification",
            NO_DROPOUT,
            SPECIAL,
            vocab_size=WORDS,
            hidden_size=16,
            num_attention_heads=2,
            attention_head_size=8,
            axial_pos_embds=False,
            attn_layers=["local"],
            feed_forward_size=24,
            local_attn_chunk_length=5,
            max_position_embeddings=32,
            local_attention_probs_dropout_prob=0.0,
            is_decoder=False,
            num_labels=CLASSES,
        ),
        classified_text,
        rung="autograd",
        why="it seeds torch's generator, for its reversible layers",
        run_by="test-slow",
        warns="'attention_seed', 'feed_forward_seed'",
    ),
    ZooModel(
        "ConvBERT",
        hugging_face("ConvBertForSequenceClassification", ENCODER, embedding_size=16, head_ratio=1, conv_kernel_size=3),
        classified_text,
    ),
    ZooModel(
        "ESM",
        hugging_face("EsmForSequenceClassification", ENCODER, mask_token_id=3),
        classified_text,
        run_by="test-slow",
    ),
    ZooModel("GPT-2", hugging_face("GPT2LMHeadModel", ENCODER), text, run_by="test-slow", narrow=FLOAT32_LOSS),
    ZooModel(
        "GPT-Neo",
        hugging_face(
            "GPTNeoForCausalLM",
            without(ENCODER, "num_hidden_layers"),
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
            window_size=4,
        ),
        text,
        narrow=FLOAT32_LOSS,
    ),
    ZooModel("GPT-NeoX", hugging_face("GPTNeoXForCausalLM", ENCODER), text, narrow=FLOAT32_LOSS, run_by="test-slow"),
    ZooModel(
        "OPT",
        hugging_face("OPTForCausalLM", ENCODER, ffn_dim=24, word_embed_proj_dim=16),
        text,
        narrow=FLOAT32_LOSS,
        run_by="test-slow",
    ),
    ZooModel(
        "BLOOM",
        hugging_face("BloomForCausalLM", ENCODER, n_layer=1, n_head=2),
        text,
        narrow=FLOAT32_LOSS,
        run_by="test-slow",
    ),
    ZooModel("Falcon", hugging_face("FalconForCausalLM", ENCODER), text, narrow=FLOAT32_LOSS, run_by="test-slow"),
    ZooModel(
        "MPT",
        hugging_face("MptForCausalLM", ENCODER, d_model=16, n_layers=1, n_heads=2, expansion_ratio=2, max_seq_len=32),
        text,
        narrow=FLOAT32_LOSS,
    ),
    ZooModel("Llama", hugging_face("LlamaForCausalLM", DECODER), text, run_by="test-slow", narrow=FLOAT32_WITHIN),
    ZooModel("Mistral", hugging_face("MistralForCausalLM", DECODER, sliding_window=4), text, narrow=FLOAT32_WITHIN),
    ZooModel(
        "Gemma 3",
        hugging_face("Gemma3ForCausalLM", DECODER, sliding_window=4, query_pre_attn_scalar=8),
        text,
        run_by="test-slow",
        narrow=FLOAT32_WITHIN,
    ),
    ZooModel("Qwen 3", hugging_face("Qwen3ForCausalLM", DECODER), text, run_by="test-slow", narrow=FLOAT32_WITHIN),
    ZooModel("Phi-3", hugging_face("Phi3ForCausalLM", DECODER), text, narrow=FLOAT32_WITHIN, run_by="test-slow"),
    ZooModel("OLMo 2", hugging_face("Olmo2ForCausalLM", DECODER), text, narrow=FLOAT32_WITHIN),
    ZooModel("SmolLM 3", hugging_face("SmolLM3ForCausalLM", DECODER), text, narrow=FLOAT32_WITHIN, run_by="test-slow"),
    ZooModel(
        "T5",
        hugging_face(
            "T5ForConditionalGeneration",
            NO_DROPOUT,
            SPECIAL,
            vocab_size=WORDS,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        ),
        translated,
        run_by="test-slow",
        narrow=FLOAT32_WITHIN,
    ),
    ZooModel("BART", hugging_face("BartForConditionalGeneration", SEQ2SEQ), translated, run_by="test-slow"),
    ZooModel("Pegasus", hugging_face("PegasusForConditionalGeneration", SEQ2SEQ), translated),
    ZooModel(
        "LED",
        hugging_face(
            "LEDForConditionalGeneration",
            SEQ2SEQ,
            attention_window=4,
            max_encoder_position_embeddings=32,
            max_decoder_position_embeddings=32,
        ),
        translated,
        rung="autograd",
        why=BRANCHES_ON_MASK,
        run_by="test-slow",
    ),
]
