"""The guides in examples/ run as they are printed, only for a shorter time, and reach what they are about."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import average_digits
import contrastive_digits
import finetune_classifier
import gan_digits
import lstm_names
import pytest
import ragged_names
import resume_digits
import settling_digits
import torch
import train_workers
from worker_processes import ENVIRONMENT, free_port

from mirrorc.checkpoints.checkpoint import read

ROOT = Path(__file__).parents[2]
EAGER = ("--backend", "eager")


def test_a_classifier_of_hugging_face_with_metrics_clipping_and_a_scheduler() -> None:
    found = finetune_classifier.main([*EAGER, "--epochs", "1", "--per-package", "40", "--length", "16"])
    assert 0 <= found <= 1


def test_halves_of_digits_find_each_other() -> None:
    assert contrastive_digits.main([*EAGER, "--epochs", "0"]) < 0.1
    assert contrastive_digits.main([*EAGER, "--epochs", "5"]) > 0.4


def test_halves_of_digits_find_each_other_among_those_of_two_workers() -> None:
    options = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    script = [str(ROOT / "examples" / "contrastive_digits.py"), *EAGER, "--epochs", "5"]
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    command = [sys.executable, "-m", "torch.distributed.run", *options, *script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (share,) = re.findall(r"in (\d+)% of all cases", done.stdout)  # the chief alone says so
    assert int(share) > 40


def test_workers_that_send_factors_come_as_far() -> None:
    command = [sys.executable, str(ROOT / "examples" / "power_sgd.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exchange of PowerSGD(rank=2" in done.stdout
    rows = [
        [float(number) for number in line.split()] for line in done.stdout.splitlines() if line.lstrip()[:1].isdigit()
    ]
    (_, whole, factored), (_, whole_begin, _) = rows[-1], rows[0]
    assert whole_begin - factored > 0.8 * (whole_begin - whole)


def test_a_gan() -> None:
    untrained = gan_digits.main([*EAGER, "--epochs", "0"])
    assert gan_digits.main([*EAGER, "--epochs", "3", "--batch", "32"]) < untrained


def test_a_net_whose_control_flow_depends_on_data() -> None:
    untrained = settling_digits.main([*EAGER, "--epochs", "0"])
    assert settling_digits.main([*EAGER, "--epochs", "2", "--devices", "cpu:0", "cpu:1", "cpu:2"]) > untrained + 0.3


def test_an_lstm_on_ragged_text() -> None:
    assert lstm_names.main([*EAGER, "--epochs", "1", "--per-kind", "24", "--batch", "48"]) > 1 / len(lstm_names.KINDS)


def test_text_of_ragged_lengths() -> None:
    trained = ragged_names.main([*EAGER, "--epochs", "3", "--per-kind", "48", "--batch", "48"])
    assert trained > 2 / len(ragged_names.KINDS)


@pytest.mark.fast
def test_each_batch_of_ragged_text_is_as_long_as_its_longest_name() -> None:
    names = [("A" * (3 + i % 17), i % 8) for i in range(60)]
    batches = ragged_names.batches(names, 16)
    assert sorted(len(rows) for rows, _ in batches) == [12, 16, 16, 16]
    assert len({rows.size(1) for rows, _ in batches}) == 4
    assert all((rows[:, -1] > 0).any() for rows, _ in batches)
    assert sorted(kind for _, kinds in batches for kind in kinds.tolist()) == sorted(kind for _, kind in names)


def test_averages_of_weights_and_evaluation() -> None:
    assert min(average_digits.main([*EAGER, "--epochs", "2", "--decay", "0.8"])) > 0.5


def test_resuming_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    assert resume_digits.main([*EAGER, "--epochs", "2", "--batch", "256", "--checkpoint", str(path)])
    assert path.exists()


KILLED_ONCE = """
import os, signal, train_workers
from mirrorc.checkpoints import checkpoint
sync = checkpoint.sync
def sync_or_die(folder):
    sync(folder)
    if train_workers.number == 6 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.sync = sync_or_die
save = train_workers.Training.save
def save_number(training, folder):
    train_workers.number = training.num_steps
    save(training, folder)
train_workers.Training.save = save_number
train_workers.main()
"""
KEEPING = """
import shutil, train_workers
save = train_workers.Training.save
def save_and_keep(training, folder):
    save(training, folder)
    if training.num_steps == 12 and training.step.is_chief:
        shutil.copytree(folder, folder.parent / "twelve")
train_workers.Training.save = save_and_keep
train_workers.main()
"""


def trained_by_workers(folder: Path, *more: str, script: Path | None = None, workers: int = 2) -> dict[str, Any]:
    options = [f"--nproc-per-node={workers}", "--max-restarts=1", "--master-addr=127.0.0.1"]
    launcher = ["-m", "torch.distributed.run", *options, f"--master-port={free_port()}"] if workers > 1 else []
    script = script or ROOT / "examples" / "train_workers.py"
    given = [
        *EAGER,
        "--epochs",
        "2",
        "--batch",
        "200",
        "--save-every",
        "3",
        "--dtype",
        "float64",
        "--checkpoints",
        str(folder),
        *more,
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    environment["PYTHONPATH"] = str(ROOT / "examples")
    command = [sys.executable, *launcher, str(script), *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "held out: accuracy" in done.stdout, done.stdout + done.stderr
    return dict(flat(read(folder / "last")))


def flat(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, list | tuple):
        yield from flat(dict(enumerate(state)), name)
    else:
        yield name, state


@pytest.mark.exhaustive
def test_workers_go_on_from_their_last_checkpoint(tmp_path: Path) -> None:
    """When one was killed while it saved, bit for bit; and in one process with as many replicas."""
    (tmp_path / "killed.py").write_text(KILLED_ONCE)
    (tmp_path / "keeping.py").write_text(KEEPING)
    undisturbed = trained_by_workers(tmp_path / "one", script=tmp_path / "keeping.py")
    killed = trained_by_workers(tmp_path / "two", script=tmp_path / "killed.py")
    assert undisturbed.keys() == killed.keys() and undisturbed["num_steps"] == 14
    for name, value in undisturbed.items():
        assert torch.equal(killed[name], value) if isinstance(value, torch.Tensor) else killed[name] == value, name
    go_on_from(tmp_path / "one" / "twelve", tmp_path / "three")
    other = trained_by_workers(tmp_path / "three", "--devices", "2", workers=1)
    for name, value in undisturbed.items():
        if isinstance(value, torch.Tensor) and not name.startswith("replica_buffers"):
            torch.testing.assert_close(other[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.exhaustive
def test_workers_go_on_with_what_they_had_not_sent(tmp_path: Path) -> None:
    """When one was killed while it saved, bit for bit; and one process more, as what all had is dealt out."""
    (tmp_path / "killed.py").write_text(KILLED_ONCE)
    more = ("--compression", "power-sgd")
    (tmp_path / "keeping.py").write_text(KEEPING)
    undisturbed = trained_by_workers(tmp_path / "one", *more, script=tmp_path / "keeping.py")
    killed = trained_by_workers(tmp_path / "two", *more, script=tmp_path / "killed.py")
    for name, value in undisturbed.items():
        assert torch.equal(killed[name], value) if isinstance(value, torch.Tensor) else killed[name] == value, name
    parts = [read(tmp_path / "two" / "last" / f"worker-{rank}")["worker"] for rank in range(2)]
    assert all(own["num_workers"] == 2 and own["state"] for own in parts)
    assert any(bool(value.any()) for own in parts for value in own["unsent"].values())
    go_on_from(tmp_path / "one" / "twelve", tmp_path / "three")
    other = trained_by_workers(tmp_path / "three", *more, workers=3)
    assert other["num_steps"] == 14
    assert read(tmp_path / "three" / "last" / "worker-2")["worker"]["num_workers"] == 3


def go_on_from(checkpoint: Path, folder: Path) -> None:
    folder.mkdir()
    checkpoint.rename(folder / "last")


@pytest.mark.fast
@pytest.mark.parametrize("page", ["README.md", "docs/examples/gallery.md"])
def test_every_example_is_on_the_page(page: str) -> None:
    text = (ROOT / page).read_text()
    guides = [
        average_digits,
        contrastive_digits,
        finetune_classifier,
        gan_digits,
        lstm_names,
        ragged_names,
        resume_digits,
        settling_digits,
        train_workers,
    ]
    missing = [name for guide in guides if (name := Path(str(guide.__file__)).name) not in text]
    assert not missing
