"""Models of Hugging Face on several kinds of input."""

from collections.abc import Callable
from typing import Any

import torch
from hugging_face_text import DECODER, ENCODER, SPECIAL
from hugging_face_vision import VIT
from torch import nn
from zoo_models import (
    CLASSES,
    FLOAT32_LOSS,
    FLOAT32_WITHIN,
    LENGTH,
    WORDS,
    Batch,
    ZooModel,
    classes,
    numbers,
    of_hugging_face,
    tokens,
    without,
)

WORDS_IN = without(ENCODER, "num_labels")
PICTURES_IN = without(VIT, "num_labels")
NUM_PATCHES = 4
PICTURE = 3
"""The word in whose places the patches of a picture stand."""

CONTRAST = "contrast within the batch"
LAYOUT: dict[str, Any] = {**ENCODER, "max_2d_position_embeddings": 1024}


def pairs(num_examples: int, generator: torch.Generator) -> Batch:
    words = tokens(num_examples, generator)
    words[:, -1] = 2
    pixels = numbers(num_examples, generator, 3, 8, 8)
    return {"input_ids": words, "pixel_values": pixels, "attention_mask": torch.ones_like(words)}


def matching(num_examples: int, generator: torch.Generator) -> Batch:
    return {**pairs(num_examples, generator), "return_loss": True}


def captioned(num_examples: int, generator: torch.Generator) -> Batch:
    return {**pairs(num_examples, generator), "labels": tokens(num_examples, generator)}


def with_places(num_examples: int, generator: torch.Generator) -> Batch:
    batch = captioned(num_examples, generator)
    batch["input_ids"][:, 1 : 1 + NUM_PATCHES] = PICTURE
    return batch


def outlined(num_examples: int, generator: torch.Generator) -> Batch:
    return {**pairs(num_examples, generator), "labels": torch.rand(num_examples, 8, 8, generator=generator)}


def written_down(num_examples: int, generator: torch.Generator) -> Batch:
    return {"pixel_values": numbers(num_examples, generator, 3, 8, 8), "labels": tokens(num_examples, generator, 6)}


def answered(num_examples: int, generator: torch.Generator) -> Batch:
    """Questions about a picture, with a chance for each answer."""
    mask = torch.ones(num_examples, LENGTH, dtype=torch.int64)
    return {
        "input_ids": tokens(num_examples, generator),
        "attention_mask": mask,
        "visual_embeds": numbers(num_examples, generator, NUM_PATCHES, 6),
        "visual_attention_mask": mask[:, :NUM_PATCHES],
        "labels": numbers(num_examples, generator, CLASSES).softmax(-1),
    }


def boxed(num_examples: int, generator: torch.Generator) -> Batch:
    """Words with the places where they stand on a page."""
    low = torch.randint(0, 500, (num_examples, LENGTH, 2), generator=generator)
    high = low + torch.randint(1, 400, (num_examples, LENGTH, 2), generator=generator)
    return {
        "input_ids": tokens(num_examples, generator),
        "bbox": torch.cat([low, high], -1),
        "labels": classes(num_examples, generator),
    }


def boxed_on_pictures(num_examples: int, generator: torch.Generator) -> Batch:
    return {**boxed(num_examples, generator), "pixel_values": numbers(num_examples, generator, 3, 8, 8)}


def bytes_in(num_examples: int, generator: torch.Generator) -> Batch:
    return {"inputs": tokens(num_examples, generator), "labels": classes(num_examples, generator)}


def composed(kind: str, **config: Any) -> Callable[[], nn.Module]:
    """Makes a model of Hugging Face of which parts have configurations of other models: pairs of a class and its arguments."""

    def make() -> nn.Module:
        import transformers  # when the model is made: it takes seconds

        own = {
            key: getattr(transformers, value[0])(**value[1]) if isinstance(value, tuple) else value
            for key, value in config.items()
        }
        model = getattr(transformers, kind)
        made: nn.Module = model(model.config_class(**own))
        return made

    return make


MODELS = [
    of_hugging_face(
        "CLIP",
        "CLIPModel",
        matching,
        {"text_config": {**WORDS_IN, "projection_dim": 8}, "vision_config": {**PICTURES_IN, "projection_dim": 8}},
        {"projection_dim": 8},
        couples=CONTRAST,
        run_by="test-slow",
    ),
    of_hugging_face(
        "SigLIP", "SiglipModel", matching, text_config=WORDS_IN, vision_config=PICTURES_IN, couples=CONTRAST
    ),
    of_hugging_face(
        "Chinese-CLIP",
        "ChineseCLIPModel",
        matching,
        {"text_config": WORDS_IN, "vision_config": PICTURES_IN, "projection_dim": 8},
        couples=CONTRAST,
    ),
    of_hugging_face(
        "CLIPSeg",
        "CLIPSegForImageSegmentation",
        outlined,
        {"text_config": {**WORDS_IN, "projection_dim": 8}, "vision_config": {**PICTURES_IN, "num_hidden_layers": 2}},
        {"projection_dim": 8, "extract_layers": [0, 1], "reduce_dim": 8, "decoder_num_attention_heads": 2},
        {"decoder_attention_dropout": 0.0, "decoder_hidden_dropout_prob": 0.0, "decoder_intermediate_size": 16},
    ),
    of_hugging_face(
        "BLIP",
        "BlipForConditionalGeneration",
        captioned,
        {"text_config": {**WORDS_IN, "projection_dim": 8, "encoder_hidden_size": 16, "label_smoothing": 0.0}},
        {"vision_config": PICTURES_IN, "projection_dim": 8, "image_text_hidden_size": 8},
    ),
    of_hugging_face("GIT", "GitForCausalLM", captioned, WORDS_IN, vision_config=PICTURES_IN, narrow=FLOAT32_LOSS),
    of_hugging_face(
        "ViLT",
        "ViltForQuestionAnswering",
        lambda n, g: {**pairs(n, g), "labels": torch.rand(n, CLASSES, generator=g)},
        ENCODER,
        image_size=8,
        patch_size=4,
        rung="autograd",
        why="it takes as many patches as the largest picture has",
        run_by="test-slow",
    ),
    ZooModel(
        "LLaVA",
        composed(
            "LlavaForConditionalGeneration",
            text_config=("LlamaConfig", DECODER),
            vision_config=("CLIPVisionConfig", {**PICTURES_IN, "projection_dim": 8}),
            image_token_id=PICTURE,
            image_token_index=PICTURE,
            vision_feature_layer=-1,
        ),
        with_places,
        narrow=FLOAT32_WITHIN,
    ),
    of_hugging_face("LayoutLM", "LayoutLMForSequenceClassification", boxed, LAYOUT),
    of_hugging_face(
        "LayoutLMv3",
        "LayoutLMv3ForSequenceClassification",
        boxed_on_pictures,
        LAYOUT,
        {"coordinate_size": 2, "shape_size": 4, "input_size": 8, "patch_size": 4, "num_channels": 3},
        {"rel_pos_bins": 8, "max_rel_pos": 16, "rel_2d_pos_bins": 8, "max_rel_2d_pos": 16},
    ),
    of_hugging_face("VisualBERT", "VisualBertForQuestionAnswering", answered, ENCODER, visual_embedding_dim=6),
    of_hugging_face(
        "ViT and TrOCR",
        "VisionEncoderDecoderModel",
        written_down,
        encoder={**VIT, "model_type": "vit"},
        decoder={
            **SPECIAL,
            "model_type": "trocr",
            "vocab_size": WORDS,
            "d_model": 16,
            "decoder_layers": 1,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 24,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "is_decoder": True,
            "add_cross_attention": True,
            "cross_attention_hidden_size": 16,
        },
        decoder_start_token_id=1,
        pad_token_id=0,
    ),
    of_hugging_face(
        "Perceiver",
        "PerceiverForSequenceClassification",
        bytes_in,
        {"num_latents": 4, "d_latents": 8, "d_model": 8, "num_blocks": 1, "num_self_attends_per_block": 1},
        {"num_self_attention_heads": 2, "num_cross_attention_heads": 2, "attention_probs_dropout_prob": 0.0},
        {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "num_labels": CLASSES},
        run_by="test-slow",
    ),
]
