"""Models of timm and torchvision, for environments in which both are installed (`make test-all` makes one)."""

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from zoo_models import BATCH_NORM, CLASSES, ZooModel, pictures


@functools.cache
def declare_operators() -> None:
    """Declares operators of torchvision whose C++ library cannot be loaded, as that for CUDA beside a torch for CPUs.

    Without them torchvision cannot be imported. These models call none of them.
    """
    found = importlib.util.find_spec("torchvision")
    assert found is not None and found.submodule_search_locations
    for path in Path(found.submodule_search_locations[0]).glob("_C*"):
        try:
            ctypes.CDLL(str(path))
        except OSError:
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float most) -> Tensor")


def of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        declare_operators()
        import timm  # when the model is made: it is not everywhere

        made: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
        return made

    return make


def of_mixer() -> nn.Module:
    """One block: the models of this kind that timm has by name are large."""
    declare_operators()
    from timm.models.mlp_mixer import MlpMixer  # when the model is made: it is not everywhere

    made: nn.Module = MlpMixer(num_classes=CLASSES, img_size=32, patch_size=8, num_blocks=1, embed_dim=32)
    return made


def of_torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        declare_operators()
        import torchvision  # when the model is made: it is not everywhere

        made: nn.Module = torchvision.models.get_model(name, num_classes=CLASSES, **options)
        return made

    return make


def entry(name: str, make: Callable[[], nn.Module], size: int, couples: str = "") -> ZooModel:
    return ZooModel(name, make, pictures(size, "x", "target"), F.cross_entropy, couples=couples)


SMALL: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1}

MODELS = [
    entry("timm, ViT", of_timm("vit_tiny_patch16_224", **SMALL, num_heads=2), 16),
    entry("timm, ResNet", of_timm("resnet10t", channels=(4, 8, 8, 8), stem_width=4), 32, BATCH_NORM),
    entry("timm, EfficientNet", of_timm("test_efficientnet"), 32, BATCH_NORM),
    entry("timm, ConvNeXt", of_timm("test_convnext"), 32),
    entry("timm, MLP-Mixer", of_mixer, 32),
    entry("torchvision, ResNet", of_torchvision("resnet18", width_per_group=64), 32, BATCH_NORM),
    entry(
        "torchvision, MobileNet v3", of_torchvision("mobilenet_v3_small", width_mult=0.25, dropout=0.0), 32, BATCH_NORM
    ),
    # of 32 x 32, the last stage would normalize a shard's two numbers, of which the gradients are all but zero
    entry("torchvision, ShuffleNet v2", of_torchvision("shufflenet_v2_x0_5"), 64, BATCH_NORM),
]
