"""The guides in examples/ run as they are printed, only for a shorter time, and reach what they are about."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import average_digits
import finetune_classifier
import gan_digits
import lstm_names
import pytest
import resume_digits
import torch
import train_workers
from worker_processes import ENVIRONMENT, free_port

ROOT = Path(__file__).parents[2]
EAGER = ("--backend", "eager")


@pytest.mark.slow
def test_a_classifier_of_hugging_face_with_metrics_clipping_and_a_scheduler() -> None:
    found = finetune_classifier.main([*EAGER, "--epochs", "1", "--per-package", "40", "--length", "16"])
    assert 0 <= found <= 1


@pytest.mark.slow
def test_a_gan() -> None:
    untrained = gan_digits.main([*EAGER, "--epochs", "0"])
    assert gan_digits.main([*EAGER, "--epochs", "3", "--batch", "32"]) < untrained


@pytest.mark.slow
def test_an_lstm_on_ragged_text() -> None:
    assert lstm_names.main([*EAGER, "--epochs", "1", "--per-kind", "24", "--batch", "48"]) > 1 / len(lstm_names.KINDS)


@pytest.mark.slow
def test_averages_of_weights_and_evaluation() -> None:
    assert min(average_digits.main([*EAGER, "--epochs", "2", "--decay", "0.8"])) > 0.5


@pytest.mark.slow
def test_resuming_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    assert resume_digits.main([*EAGER, "--epochs", "2", "--batch", "256", "--checkpoint", str(path)])
    assert path.exists()


KILLED_ONCE = """
import os, signal, train_workers
save = train_workers.save
def save_and_end(path, state):
    save(path, state)
    if state["epoch"] == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
train_workers.save = save_and_end
train_workers.main()
"""


@pytest.mark.slow
def test_workers_go_on_when_one_was_killed(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED_ONCE)

    def run(script: Path, folder: str) -> dict[str, torch.Tensor]:
        options = ["--nproc-per-node=2", "--max-restarts=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        given = [*EAGER, "--batch", "200", "--epochs", "3", "--checkpoints", str(tmp_path / folder)]
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), *given]
        environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
        environment["PYTHONPATH"] = str(ROOT / "examples")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0 and "held out: accuracy" in done.stdout, done.stdout + done.stderr
        return torch.load(tmp_path / folder / "last.pt", weights_only=True)["model"]

    undisturbed, killed = run(ROOT / "examples" / "train_workers.py", "one"), run(tmp_path / "killed.py", "two")
    for name, value in undisturbed.items():
        if "running" in name:  # replicas' statistics go on from the mean of all
            torch.testing.assert_close(killed[name], value)
        else:
            assert torch.equal(killed[name], value), name


@pytest.mark.parametrize("page", ["README.md", "docs/guides.md"])
def test_every_example_is_on_the_page(page: str) -> None:
    text = (ROOT / page).read_text()
    guides = [average_digits, finetune_classifier, gan_digits, lstm_names, resume_digits, train_workers]
    missing = [name for guide in guides if (name := Path(str(guide.__file__)).name) not in text]
    assert not missing
