"""The guides in examples/ run as they are printed, only for a shorter time, and reach what they are about."""

from __future__ import annotations

from pathlib import Path

import average_digits
import finetune_classifier
import gan_digits
import lstm_names
import pytest
import resume_digits

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


@pytest.mark.parametrize("page", ["README.md", "docs/guides.md"])
def test_every_example_is_on_the_page(page: str) -> None:
    text = (ROOT / page).read_text()
    guides = [average_digits, finetune_classifier, gan_digits, lstm_names, resume_digits]
    missing = [name for guide in guides if (name := Path(str(guide.__file__)).name) not in text]
    assert not missing
