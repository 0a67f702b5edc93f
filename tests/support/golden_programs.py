"""Makes the lowered programs of whole models and a captured one, whose texts are kept in tests/golden.

python tests/support/golden_programs.py                 prints what differs from the files, and exits with 1 if anything does
python tests/support/golden_programs.py --update        writes the files anew
python tests/support/golden_programs.py --into FOLDER   writes them elsewhere
"""

import argparse
import functools
import importlib.util
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from broken_meetings import meeting_stages
from module_programs import cut_module, lowered
from tiny_programs import captured_call
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer, SparseAdam
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import mirrorc
from mirrorc.comparison.diff import diff_texts
from mirrorc.ir.devices import parse_devices
from mirrorc.ir.program import Program
from mirrorc.ir.workers import Workers, World
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes, EqualPacks
from mirrorc.passes import (
    ChooseCheckpoints,
    DecomposeGelu,
    LayChannelsLast,
    RecomputeCheckpoints,
    default_pipeline,
    resolve_sharing,
)
from mirrorc.pipeline.pass_manager import run_passes

GOLDEN = Path(__file__).parents[1] / "golden"
DIGITS = Path(__file__).parents[2] / "examples" / "train_digits.py"
CAPTURED = "convnet-captured.txt"  # the file with a captured program after the passes before the bucket plan
CHECKPOINTS = "checkpoints-captured.txt"  # the file with a captured program whose backward computes two blocks again
CHOSEN = "chosen-checkpoints-captured.txt"  # the file with one that computes again what a bound for its memory leaves no room for
CHECKED = "digits-2-checked.txt"  # the file with a lowered program that is compiled with check_finite=True
WORKER = "digits-worker-1-of-3.txt"  # the file with the program of one of three workers, which has two of four devices
VERSIONS = "versions"  # the file in tests/golden that says with what the others were made
FACTORS = "digits-worker-1-of-2-factors.txt"  # the file with the program of one of two workers that send factors
DEALT = "digits-worker-1-of-2-dealt.txt"  # the file with the program of one of two workers that each have a part of the optimizer
PARTS_OF_FACTORS = "digits-worker-1-of-2-dealt-factors.txt"  # as the former two at once
GATHERED = (
    "words-2-gathered.txt"  # the file with a program whose devices gather rows of a table, and factors of products
)
PLACED = {"digits-2-mirrored.txt": 2, "digits-2-least-loaded.txt": 2, "digits-3-central.txt": 3}
"""The files with programs whose parameters are placed as their names say, and the numbers of devices."""
PACKS = "digits-2-packs.txt"  # the file with the program of two devices, whose one bucket is cut into three packs
PACKS_OVER_WORKERS = "digits-worker-0-of-2-packs.txt"  # the same of one of two workers
MEETINGS = "meetings-2.txt"  # the file with a program whose replicas meet in forward and backward
FORWARD = "digits-2-forward.txt"  # the file with the program of forward of a module, whose loss is the caller's
BACKWARD = "digits-2-backward.txt"  # the file with that of its backward
PLAIN = "digits-worker-1-of-2-plain.txt"  # the file with that of one of two workers whose backward is plain PyTorch
NUM_DEVICES = (1, 2, 4)
UPDATE = "python tests/support/golden_programs.py --update"


@dataclass(frozen=True)
class GoldenModel:
    """A model to compile.

    Attributes:
        buckets: caps of buckets that are small enough for several.
        uneven_on: the number of devices on which shards are of two sizes.
    """

    make: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    inputs: Callable[[int], dict[str, torch.Tensor]]
    loss_fn: Any = None
    buckets: Mapping[str, float] = field(default_factory=dict)
    uneven_on: int = 0

    def num_examples(self, num_devices: int) -> int:
        return 2 * num_devices + (2 if num_devices == self.uneven_on else 0)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample = None
        if stride > 1 or channels != out_channels:
            shortcut = nn.Conv2d(channels, out_channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(out_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(hidden + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """The 18-layer ResNet (He et al., 2016), an eighth as wide."""

    def __init__(self, width: int = 8, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        for i, (channels, out_channels) in enumerate(itertools.pairwise(widths), 1):
            first = ResidualBlock(channels, out_channels, stride=1 if i == 1 else 2)
            setattr(self, f"layer{i}", nn.Sequential(first, ResidualBlock(out_channels, out_channels, stride=1)))
        self.fc = nn.Linear(8 * width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.fc = nn.Conv2d(4, 4, 3), nn.Linear(4 * 4 * 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.conv1(x)), approximate="tanh")
        return self.fc(F.relu(self.conv2(x)).flatten(1))


class Words(nn.Module):
    """Bags of words, whose table has sparse gradients, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(200, 8, padding_idx=0, sparse=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x))


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_positions=16, n_embd=32, n_layer=12, n_head=4, eos_token_id=0, bos_token_id=0)
    )


def _bert() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 128}
    return BertForSequenceClassification(BertConfig(vocab_size=97, max_position_embeddings=16, num_labels=3, **sizes))


def _digits() -> nn.Module:
    if "train_digits" not in sys.modules:
        spec = importlib.util.spec_from_file_location("train_digits", DIGITS)
        assert spec is not None and spec.loader is not None
        sys.modules["train_digits"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["train_digits"])
    return sys.modules["train_digits"].DigitNet()


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3)


def _adamw_in_groups(model: nn.Module) -> Optimizer:
    """Weight decay for matrices alone, as BERT is trained."""
    parameters = list(model.parameters())
    decayed = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01}
    return AdamW([decayed, {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}], lr=1e-3)


def _sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)


def _tokens(number: int) -> torch.Tensor:
    return torch.zeros(number, 12, dtype=torch.int64)


def _classes(number: int) -> torch.Tensor:
    return torch.zeros(number, dtype=torch.int64)


def _bert_inputs(number: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": _tokens(number),
        "attention_mask": torch.ones_like(_tokens(number)),
        "labels": _classes(number),
    }


def _small_buckets(first: float, others: float) -> dict[str, float]:
    return {"buckets": ByBytes(others, first)}


MODELS = {
    "gpt2": GoldenModel(
        _gpt2, _adamw, lambda n: {"input_ids": _tokens(n), "labels": _tokens(n)}, buckets=_small_buckets(0.02, 0.2)
    ),
    "bert": GoldenModel(_bert, _adamw_in_groups, _bert_inputs, buckets=_small_buckets(0.02, 0.2)),
    "resnet18": GoldenModel(
        ResNet18,
        _sgd,
        lambda n: {"x": torch.zeros(n, 3, 32, 32), "target": _classes(n)},
        F.cross_entropy,
        _small_buckets(0.045, 0.3),
    ),
    "digits": GoldenModel(
        _digits,
        _sgd,
        lambda n: {"images": torch.zeros(n, 1, 8, 8), "target": _classes(n)},
        F.cross_entropy,
        _small_buckets(0.0085, 0.0085),
        uneven_on=4,
    ),
}
"""What is compiled, by name."""


CONVNET = GoldenModel(ConvNet, _sgd, lambda n: {"x": torch.zeros(n, 2, 8, 8), "target": _classes(n)}, F.cross_entropy)
"""What is captured, and of which `CAPTURED` shows how its convolutions and GELUs are written."""


CHECKPOINTED = GoldenModel(
    Checkpointed, _sgd, lambda n: {"x": torch.zeros(n, 4), "target": _classes(n)}, F.cross_entropy
)
"""What is captured, and of which `CHECKPOINTS` shows what backward computes again."""


BLOCKS = GoldenModel(
    lambda: nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)), nn.Linear(16, 3)),
    _sgd,
    lambda n: {"input": torch.zeros(32 * n, 16), "target": _classes(32 * n)},
    F.cross_entropy,
)
"""What is captured, and of which `CHOSEN` shows what backward computes again so that activations fit into `_BOUND_OF_BLOCKS`."""
_BOUND_OF_BLOCKS = 24 * 2**10  # bytes; keeping everything takes 32 KiB


@functools.cache
def _captured(name: str, num_devices: int) -> Program:
    return _capture(MODELS[name], num_devices)


def _capture(golden: GoldenModel, num_devices: int) -> Program:
    torch.manual_seed(0)
    model = golden.make().train()
    inputs, optimizer = golden.inputs(golden.num_examples(num_devices)), golden.optimizer(model)
    with warnings.catch_warnings(action="ignore"):  # of the tracer, about side effects in transformers
        return captured_call(model, golden.loss_fn, (), inputs, num_devices, optimizer=optimizer)


def _devices(number: int) -> Any:
    return parse_devices([f"cpu:{i}" for i in range(number)])


def golden_program(
    name: str, num_devices: int, *, check_finite: bool = False, workers: Workers | None = None, placement: str = "auto"
) -> Program:
    program = golden_program_before(name, num_devices, workers=workers)
    options = {"check_finite": check_finite, "over_workers": program.workers.are_several, "placement": placement}
    pipeline = default_pipeline(**MODELS[name].buckets, **options)  # type: ignore[arg-type]
    return run_passes(program, resolve_sharing(pipeline))


def golden_program_before(name: str, num_devices: int, *, workers: Workers | None = None) -> Program:
    """A model's captured program; captured once for all numbers of devices that have shards of one size."""
    if num_devices == MODELS[name].uneven_on:
        program = _captured(name, num_devices)
    else:
        program = _captured(name, 1)
        each = program.num_examples[0]
        program = program.evolve(
            devices=_devices(num_devices), shard_of_replica=(0,) * num_devices, num_examples=(each,) * num_devices
        )
    return program if workers is None else program.evolve(workers=workers)


def golden_texts() -> Iterator[tuple[str, str]]:
    for name in MODELS:
        for num_devices in NUM_DEVICES:
            yield f"{name}-{num_devices}.txt", golden_program(name, num_devices).to_text(slots=True, sources=False)
    for file in PLACED:
        yield file, placed_text(file)
    for file, make in MADE_BY.items():
        yield file, make()


def module_text(way: str) -> str:
    """The lowered program of forward or of backward of a module."""
    golden = MODELS["digits"]
    images = golden.inputs(golden.num_examples(2))["images"]
    program = getattr(cut_module(golden.make().train(), images, differentiated=[0]), way)
    return lowered(program, **golden.buckets).to_text(slots=True, sources=False)


def meetings_text() -> str:
    """A lowered program whose replicas ask each other for values, in forward and in backward."""
    return meeting_stages()["lower-devices"].to_text(slots=True, sources=False)


def packs_text() -> str:
    """A lowered program whose bucket is cut into packs of equal length."""
    return run_passes(golden_program_before("digits", 2), default_pipeline(buckets=EqualPacks(3))).to_text(
        slots=True, sources=False
    )


def packs_over_workers_text() -> str:
    """The same of one of two workers, which exchange the packs."""
    program = golden_program_before("digits", 1, workers=World(2).worker(0))
    pipeline = default_pipeline(over_workers=True, buckets=EqualPacks(3))
    return run_passes(program, pipeline).to_text(slots=True, sources=False)


def gathered_text() -> str:
    """The lowered program of two devices with a copy of the parameters each."""
    model = Words()
    optimizers = [SparseAdam(model.table.parameters()), _adamw(model.head)]
    inputs = {"x": torch.zeros(4, 6, dtype=torch.int64), "target": _classes(4)}
    where = {"link": "copy", "disable": ["share-parameters"], "exchange": "factors", "backend": "eager"}
    with mirrorc.compile(model, 2, optimizer=optimizers, loss_fn=F.cross_entropy, **grouped(where)) as step:  # type: ignore[arg-type]
        return step.prepare(**inputs).to_text(slots=True, sources=False)


def checked_text() -> str:
    """A lowered program whose steps take place only if all is finite."""
    return golden_program("digits", 2, check_finite=True).to_text(slots=True, sources=False)


def placed_text(file: str) -> str:
    """The lowered program whose parameters are placed as the name of its file says."""
    name, _, placement = file.removesuffix(".txt").split("-", 2)
    return golden_program(name, PLACED[file], placement=placement).to_text(slots=True, sources=False)


def worker_text() -> str:
    """The lowered program of a worker whose world has workers of other sizes."""
    workers = World(3, (1, 2, 1)).worker(1)
    return golden_program("digits", 2, workers=workers).to_text(slots=True, sources=False)


def factors_text() -> str:
    """The lowered program of one of two workers that send each other factors in place of all gradients that have some."""
    return _text_of_worker(exchange="factors")


def dealt_text() -> str:
    """The lowered program of one of two workers that each update a part of every bucket, with gradients that are clipped."""
    return _text_of_worker(shard_optimizer=True, clip_grad_norm=1.0)


def parts_of_factors_text() -> str:
    """As `factors_text`, of workers that each make, and update, a part of every bucket."""
    return _text_of_worker(shard_optimizer=True, exchange="factors")


def _text_of_worker(**asked: Any) -> str:
    golden = MODELS["digits"]
    model = golden.make().train()
    options = {"loss_fn": golden.loss_fn, "optimizer": golden.optimizer(model), "backend": "eager"}
    keywords = grouped({**options, **golden.buckets, **asked})
    program = mirrorc.plan(model, golden.inputs(golden.num_examples(1)), world=World(2), rank=1, **keywords)
    return program.to_text(slots=True, sources=False)


def captured_text() -> str:
    """A captured program as Inductor wants it: in channels-last format, and without the tanh in GELU."""
    program = run_passes(_capture(CONVNET, 1), [DecomposeGelu(), LayChannelsLast()])
    return program.to_text(sources=False)


def checkpoints_text() -> str:
    """A captured program whose backward computes what is within checkpoints again."""
    return run_passes(_capture(CHECKPOINTED, 1), [RecomputeCheckpoints()]).to_text(sources=False)


def chosen_text() -> str:
    """A captured program with a choice of what backward computes again, by a bound that keeping everything would exceed."""
    return run_passes(_capture(BLOCKS, 1), [ChooseCheckpoints(_BOUND_OF_BLOCKS), RecomputeCheckpoints()]).to_text(
        sources=False
    )


def versions() -> str:
    """What decides, besides mirrorc, how a model is cut into operators, and so how many values are saved."""
    return "".join(
        f"{package.__name__} {'.'.join(package.__version__.split('.')[:2])}\n" for package in (torch, transformers)
    )


def difference(file: str, text: str) -> str:
    """What a program's text has that its file has not; empty if they are equal."""
    path = GOLDEN / file
    if not path.exists():
        return f"tests/golden/{file} does not exist: make it with {UPDATE}"
    found = diff_texts(path.read_text(encoding="utf-8"), text)
    return f"the program is not as in tests/golden/{file}; if it should be, run {UPDATE}\n\n{found}" if found else ""


MADE_BY: Mapping[str, Callable[[], str]] = {
    CAPTURED: captured_text,
    CHECKED: checked_text,
    CHECKPOINTS: checkpoints_text,
    CHOSEN: chosen_text,
    DEALT: dealt_text,
    FACTORS: factors_text,
    GATHERED: gathered_text,
    FORWARD: functools.partial(module_text, "forward"),
    BACKWARD: functools.partial(module_text, "backward"),
    MEETINGS: meetings_text,
    PACKS: packs_text,
    PACKS_OVER_WORKERS: packs_over_workers_text,
    PARTS_OF_FACTORS: parts_of_factors_text,
    PLAIN: functools.partial(_text_of_worker, capture="autograd"),
    WORKER: worker_text,
}
"""What makes each file that shows one program of a kind of its own."""


def main() -> int:
    """Compares or writes the files; the exit status says whether they were as they should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--into", type=Path)
    options = parser.parse_args()
    folder = options.into or (GOLDEN if options.update else None)
    status = 0
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / VERSIONS).write_text(versions(), encoding="utf-8", newline="\n")
    for file, text in golden_texts():
        if folder is not None:
            (folder / file).write_text(text, encoding="utf-8", newline="\n")
        elif found := difference(file, text):
            sys.stdout.write(found + "\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
