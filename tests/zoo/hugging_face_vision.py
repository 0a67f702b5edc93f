"""Models of Hugging Face on pictures and films."""

from typing import Any

import torch
import torch.nn.functional as F
from zoo_models import BATCH_NORM, CLASSES, Batch, ZooModel, classes, numbers, of_hugging_face, pictures

NO_DROPOUT: dict[str, Any] = dict.fromkeys(
    (
        "activation_dropout",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_dropout",
        "classifier_dropout_prob",
        "drop_path_rate",
        "dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
    ),
    0.0,
)
DEPTHS = {"pixel_values": (3, 32, 32), "target": (64, 64)}
VIT: dict[str, Any] = {
    **NO_DROPOUT,
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_labels": CLASSES,
}
SWIN: dict[str, Any] = {
    **NO_DROPOUT,
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 1],
    "num_heads": [1, 2],
    "window_size": 4,
    "num_labels": CLASSES,
}
CONVNEXT: dict[str, Any] = {
    **NO_DROPOUT,
    "num_stages": 2,
    "hidden_sizes": [8, 12],
    "depths": [1, 1],
    "patch_size": 2,
    "image_size": 16,
    "num_labels": CLASSES,
}
RESNET: dict[str, Any] = {
    "embedding_size": 4,
    "hidden_sizes": [4, 8],
    "depths": [1, 1],
    "layer_type": "basic",
    "num_labels": CLASSES,
}
PYRAMID: dict[str, Any] = {
    **NO_DROPOUT,
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [4, 8],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "num_labels": CLASSES,
}


def segmented(num_examples: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(CLASSES, (num_examples, 16, 16), generator=generator)
    return {"pixel_values": numbers(num_examples, generator, 3, 16, 16), "labels": labels}


def films(num_examples: int, generator: torch.Generator) -> Batch:
    return {"pixel_values": numbers(num_examples, generator, 2, 3, 8, 8), "labels": classes(num_examples, generator)}


def half_hidden(num_examples: int, generator: torch.Generator) -> Batch:
    """With the numbers whose order says which patches are hidden."""
    return {"pixel_values": numbers(num_examples, generator, 3, 8, 8), "noise": numbers(num_examples, generator, 4)}


def enlarged(num_examples: int, generator: torch.Generator) -> Batch:
    small, large = (numbers(num_examples, generator, 3, size, size) for size in (8, 16))
    return {"pixel_values": small, "target": large}


def with_depths(num_examples: int, generator: torch.Generator) -> Batch:
    return {name: numbers(num_examples, generator, *shape) for name, shape in DEPTHS.items()}


def pixels_as_words(num_examples: int, generator: torch.Generator) -> Batch:
    words = torch.randint(30, (num_examples, 10), generator=generator)
    return {"input_ids": words, "labels": classes(num_examples, generator)}


def difference(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.l1_loss(output.reconstruction, target)


def depth_error(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.predicted_depth, target)


def classifier(name: str, kind: str, size: int, *parts: dict[str, Any], **more: Any) -> ZooModel:
    return of_hugging_face(name, f"{kind}ForImageClassification", pictures(size), *parts, **more)


MODELS = [
    classifier("ViT", "ViT", 8, VIT, run_by="test-slow"),
    classifier("DeiT", "DeiT", 8, VIT),
    classifier("BEiT", "Beit", 8, VIT, use_relative_position_bias=True),
    classifier("DINOv2", "Dinov2", 8, VIT),
    of_hugging_face(
        "ViT MAE",
        "ViTMAEForPreTraining",
        half_hidden,
        VIT,
        {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2},
        {"decoder_intermediate_size": 24},
    ),
    classifier("Swin", "Swin", 16, SWIN, run_by="test-slow"),
    classifier("Swin v2", "Swinv2", 16, SWIN),
    classifier("ConvNeXt", "ConvNext", 16, CONVNEXT),
    classifier("ConvNeXt v2", "ConvNextV2", 16, CONVNEXT, run_by="test-slow"),
    classifier("ResNet", "ResNet", 16, RESNET, couples=BATCH_NORM, run_by="test-slow"),
    classifier("RegNet", "RegNet", 16, RESNET, groups_width=4, layer_type="y", couples=BATCH_NORM),
    classifier(
        "MobileNet v2",
        "MobileNetV2",
        32,
        NO_DROPOUT,
        {"depth_multiplier": 0.1, "depth_divisible_by": 4, "min_depth": 4, "image_size": 32, "num_labels": CLASSES},
        couples=BATCH_NORM,
    ),
    classifier(
        "MobileViT",
        "MobileViT",
        32,
        NO_DROPOUT,
        {"image_size": 32, "hidden_sizes": [8, 12, 12], "neck_hidden_sizes": [4, 4, 8, 8, 12, 12, 16]},
        {"num_attention_heads": 2, "patch_size": 2, "num_labels": CLASSES},
        couples=BATCH_NORM,
    ),
    of_hugging_face(
        "SegFormer",
        "SegformerForSemanticSegmentation",
        segmented,
        PYRAMID,
        {"sr_ratios": [2, 1], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 8},
        couples=BATCH_NORM,
        run_by="test-slow",
    ),
    classifier("PoolFormer", "PoolFormer", 16, PYRAMID, padding=[1, 1], mlp_ratio=2.0),
    of_hugging_face(
        "BEiT, segmentation",
        "BeitForSemanticSegmentation",
        segmented,
        VIT,
        {"image_size": 16, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "pool_scales": [1, 2]},
        {"auxiliary_channels": 8},
        couples=BATCH_NORM,
    ),
    of_hugging_face("VideoMAE", "VideoMAEForVideoClassification", films, VIT, num_frames=2, tubelet_size=2),
    of_hugging_face("TimeSformer", "TimesformerForVideoClassification", films, VIT, num_frames=2, drop_path_rate=0),
    classifier(
        "BiT",
        "Bit",
        16,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 2},
        {"layer_type": "preactivation", "num_labels": CLASSES},
        run_by="test-slow",
    ),
    classifier(
        "FocalNet",
        "FocalNet",
        16,
        NO_DROPOUT,
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        {"focal_levels": [1, 1], "focal_windows": [3, 3], "num_labels": CLASSES},
    ),
    of_hugging_face(
        "ImageGPT",
        "ImageGPTForImageClassification",
        pixels_as_words,
        {"vocab_size": 31, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "use_cache": False},
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "num_labels": CLASSES},
    ),
    of_hugging_face(
        "Swin2SR",
        "Swin2SRForImageSuperResolution",
        enlarged,
        NO_DROPOUT,
        {"image_size": 8, "patch_size": 1, "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4},
        {"upscale": 2, "mlp_ratio": 2.0},
        loss_fn=difference,
    ),
    of_hugging_face(
        "DPT",
        "DPTForDepthEstimation",
        with_depths,
        VIT,
        {"image_size": 32, "patch_size": 8, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
        {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "is_hybrid": False},
        loss_fn=depth_error,
    ),
]
