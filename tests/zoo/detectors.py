"""Detectors, whose losses match predictions with boxes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from zoo_models import CLASSES, FLOAT32_WITHIN, Batch, BatchMaker, ZooModel, hugging_face, numbers

BOXES = 3
GRID = 4


def boxes_in(num_examples: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Boxes as (center x, center y, width, height) in 0 … 1, each of a class; how many of them there are differs."""
    center = 0.2 + 0.6 * torch.rand(num_examples, BOXES, 2, generator=generator, dtype=torch.float64)
    size = 0.1 + 0.3 * torch.rand(num_examples, BOXES, 2, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (num_examples, BOXES), generator=generator)
    count = torch.randint(1, BOXES + 1, (num_examples,), generator=generator)
    return {"boxes": torch.cat([center, size], -1), "classes": labels, "count": count}


def scenes(size: int, key: str = "x") -> BatchMaker:
    def batch(num_examples: int, generator: torch.Generator) -> Batch:
        pixels = numbers(num_examples, generator, 3, size, size)
        return {key: pixels, "target": boxes_in(num_examples, generator)}

    return batch


def labelled_scenes(size: int) -> BatchMaker:
    def batch(num_examples: int, generator: torch.Generator) -> Batch:
        made = scenes(size, "pixel_values")(num_examples, generator)
        return {"pixel_values": made["pixel_values"], **made["target"]}

    return batch


class Grid(nn.Module):
    """Predicts a box, and scores of classes, in each cell of a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.head = nn.Conv2d(8, 4 + CLASSES + 1, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.head(F.silu(self.second(F.silu(self.first(x))))).flatten(2).mT
        return found[..., :4].sigmoid(), found[..., 4:]


def corners(boxes: torch.Tensor) -> torch.Tensor:
    return torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)


def overlaps(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    one, other = corners(one)[..., :, None, :], corners(other)[..., None, :, :]
    shared = (
        (torch.minimum(one[..., 2:], other[..., 2:]) - torch.maximum(one[..., :2], other[..., :2]))
        .clamp(min=0)
        .prod(-1)
    )
    areas = [(box[..., 2:] - box[..., :2]).prod(-1) for box in (one, other)]
    return shared / (areas[0] + areas[1] - shared)


def anchors(like: torch.Tensor) -> torch.Tensor:
    places = (torch.arange(GRID, dtype=like.dtype) + 0.5) / GRID
    y, x = torch.meshgrid(places, places, indexing="ij")
    return torch.stack([x, y, torch.full_like(x, 0.3), torch.full_like(x, 0.3)], -1).view(-1, 4)


def hard_negatives(found: tuple[torch.Tensor, torch.Tensor], target: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of SSD: anchors take the box that overlaps most, and the worst of the others count, three for each match."""
    boxes, scores = found
    is_there = torch.arange(BOXES) < target["count"][:, None]
    overlap = overlaps(anchors(boxes), target["boxes"]).masked_fill(~is_there[:, None], -1.0)
    best, chosen = overlap.max(-1)
    is_match = best > 0.1
    wanted = target["boxes"].gather(1, chosen[..., None].expand(-1, -1, 4))
    labels = torch.where(is_match, target["classes"].gather(1, chosen), CLASSES)
    costs = F.cross_entropy(scores.mT, labels, reduction="none")
    order = costs.detach().masked_fill(is_match, -1.0).argsort(1, descending=True).argsort(1)
    counts = is_match | (order < 3 * is_match.sum(1, keepdim=True))
    places = F.smooth_l1_loss(boxes, wanted, reduction="none").sum(-1)
    per_example = (costs * counts).sum(1) + (places * is_match).sum(1)
    return (per_example / is_match.sum(1).clamp(min=1)).mean()


def focal(found: tuple[torch.Tensor, torch.Tensor], target: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of RetinaNet, divided by the number of matches in the batch."""
    boxes, scores = found
    is_there = torch.arange(BOXES) < target["count"][:, None]
    overlap = overlaps(anchors(boxes), target["boxes"]).masked_fill(~is_there[:, None], -1.0)
    best, chosen = overlap.max(-1)
    is_match = best > 0.1
    labels = F.one_hot(torch.where(is_match, target["classes"].gather(1, chosen), CLASSES), CLASSES + 1).to(
        scores.dtype
    )
    chance = scores.sigmoid()
    costs = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
    costs = costs * (chance - labels).abs().square()
    overlap = overlaps(boxes.unsqueeze(2), target["boxes"].gather(1, chosen[..., None].expand(-1, -1, 4)).unsqueeze(2))
    return (costs.sum() + ((1.0 - overlap.flatten(1)) * is_match).sum()) / is_match.sum().clamp(min=1)


def matched(found: tuple[torch.Tensor, torch.Tensor], target: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of DETR: each box gets the prediction that scipy's assignment gives it."""
    from scipy.optimize import linear_sum_assignment

    boxes, scores = found
    losses = []
    for own, own_scores, wanted, labels, count in zip(
        boxes, scores, target["boxes"], target["classes"], target["count"].tolist(), strict=True
    ):
        wanted, labels = wanted[:count], labels[:count]
        with torch.no_grad():
            costs = torch.cdist(own, wanted, p=1) - own_scores.softmax(-1)[:, labels]
        rows, columns = (torch.as_tensor(one) for one in linear_sum_assignment(costs.numpy()))
        classes = torch.full((len(own),), CLASSES).index_put((rows,), labels[columns])
        losses.append(F.cross_entropy(own_scores, classes) + F.l1_loss(own[rows], wanted[columns]))
    return torch.stack(losses).mean()


def suppressed(found: tuple[torch.Tensor, torch.Tensor], target: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss on the boxes that a suppression of overlapping ones leaves, in a Python loop."""
    losses = []
    for own, scores, wanted in zip(*found, target["boxes"], strict=True):
        left, kept = scores.detach().max(-1).values.argsort(descending=True).tolist(), []
        overlap = overlaps(own, own).detach()
        while left and len(kept) < BOXES:
            kept.append(left.pop(0))
            left = [one for one in left if overlap[kept[-1], one] < 0.3]
        losses.append(F.smooth_l1_loss(own[kept], wanted[: len(kept)]) + scores[kept].logsumexp(-1).mean())
    return torch.stack(losses).mean()


class Listed(nn.Module):
    """Gives a detector of Hugging Face its labels as a list of dicts, made of padded tensors."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(
        self, pixel_values: torch.Tensor, boxes: torch.Tensor, classes: torch.Tensor, count: torch.Tensor
    ) -> Any:
        each = zip(boxes, classes, count.tolist(), strict=True)
        labels = [{"boxes": own[:n], "class_labels": kinds[:n]} for own, kinds, n in each]
        return self.detector(pixel_values=pixel_values, labels=labels).loss


def listed(kind: str, **config: Any) -> Any:
    return lambda: Listed(hugging_face(kind, **config)())


class Masked(nn.Module):
    """Gives a MaskFormer its masks and classes as lists, made of tensors."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_size": 2, "patch_size": 2}
        stages = [f"stage{i}" for i in range(1, 5)]
        backbone = {"model_type": "swin", "image_size": 32, "drop_path_rate": 0.0, "out_features": stages, **sizes}
        decoder = {key: DETR[key] for key in DETR if "backbone" not in key}
        decoder |= {"model_type": "detr", "d_model": 32}
        self.net = hugging_face(
            "MaskFormerForInstanceSegmentation",
            fpn_feature_size=32,
            mask_feature_size=32,
            backbone_config=backbone,
            decoder_config=decoder,
            num_labels=CLASSES,
        )()

    def forward(self, pixel_values: torch.Tensor, masks: torch.Tensor, classes: torch.Tensor) -> Any:
        return self.net(pixel_values=pixel_values, mask_labels=list(masks), class_labels=list(classes)).loss


def masked_scenes(num_examples: int, generator: torch.Generator) -> Batch:
    return {
        "pixel_values": numbers(num_examples, generator, 3, 32, 32),
        "masks": (numbers(num_examples, generator, 2, 32, 32) > 0).double(),
        "classes": torch.randint(CLASSES, (num_examples, 2), generator=generator),
    }


RESNET: dict[str, Any] = {
    "model_type": "resnet",
    "embedding_size": 4,
    "hidden_sizes": [4, 8],
    "depths": [1, 1],
    "layer_type": "basic",
    "out_features": ["stage2"],
}
DETR: dict[str, Any] = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": RESNET,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_queries": 5,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "num_labels": CLASSES,
}
ASSIGNS = "its loss assigns boxes with scipy"
COUNTS = "it divides by the number of boxes in the batch"

MODELS = [
    ZooModel("SSD, hard negatives", Grid, scenes(16), hard_negatives, run_by="test-slow"),
    ZooModel("RetinaNet, focal loss", Grid, scenes(16), focal, couples=COUNTS, run_by="test-slow"),
    ZooModel("set prediction", Grid, scenes(16), matched, rung="autograd", why=ASSIGNS, run_by="test"),
    ZooModel(
        "suppression of overlaps",
        Grid,
        scenes(16),
        suppressed,
        rung="autograd",
        why="it compares boxes in a Python loop",
        run_by="test",
    ),
    ZooModel(
        "YOLOS",
        listed(
            "YolosForObjectDetection",
            image_size=[16, 16],
            patch_size=4,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            num_detection_tokens=5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
        ),
        labelled_scenes(16),
        rung="autograd",
        why=ASSIGNS,
        couples=COUNTS,
        dtype=torch.float32,
        run_by="test-slow",
    ),
    ZooModel(
        "DETR",
        listed("DetrForObjectDetection", **DETR),
        labelled_scenes(32),
        rung="autograd",
        why=ASSIGNS,
        couples=COUNTS,
        dtype=torch.float32,
        run_by="test-slow",
    ),
    ZooModel(
        "Conditional DETR",
        listed("ConditionalDetrForObjectDetection", **DETR),
        labelled_scenes(32),
        rung="autograd",
        why=ASSIGNS,
        couples=COUNTS,
        narrow=FLOAT32_WITHIN,
        run_by="test-slow",
    ),
    ZooModel("MaskFormer", Masked, masked_scenes, rung="autograd", why=ASSIGNS, couples=COUNTS),
]
