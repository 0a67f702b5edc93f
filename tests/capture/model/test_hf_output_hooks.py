"""Models of Hugging Face that collect hidden states and attentions train without having been called before."""

import copy
from typing import Any

import pytest
import torch
from selections import slow
from tiny_programs import sgd_step
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from mirrorc.capture.model.hf_output_hooks import install_capturing_hooks

TOKENS, LABELS = torch.arange(20).view(4, 5), torch.tensor([0, 1, 2, 0])


def make(num_layers: int = 1, **options: Any) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": num_layers, "num_attention_heads": 2, "intermediate_size": 8}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=30, num_labels=3, **sizes, **rates, **options)).double()


def num_hooks(model: nn.Module) -> list[int]:
    return [len(module._forward_hooks) for module in model.modules()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_called_before"), [("hidden_states", False), *slow(("hidden_states", True), ("attentions", False))]
)
def test_what_is_collected_is_that_of_one_device(name: str, is_called_before: bool) -> None:
    more: dict[str, Any] = {"attn_implementation": "eager", "num_layers": 2} if name == "attentions" else {}
    model = make(**{f"output_{name}": True}, **more)
    plain = copy.deepcopy(model)
    expected = plain(TOKENS, labels=LABELS)
    if is_called_before:
        model(TOKENS)
    with sgd_step(model, 2, return_outputs=True) as step:
        loss, outputs = step(TOKENS, labels=LABELS)
        torch.testing.assert_close(loss, expected.loss.detach(), rtol=1e-5, atol=1e-6)
        assert len(outputs[name]) == len(expected[name]) >= 2
        for own, other in zip(outputs[name], expected[name], strict=True):
            torch.testing.assert_close(own, other.detach(), rtol=1e-10, atol=1e-12)
        program = step.program
        step(TOKENS, labels=LABELS)
        assert step.program is program, "the hooks compile nothing anew"
    assert num_hooks(model) == num_hooks(plain)


def test_hooks_are_installed_where_forward_runs_as_plain_pytorch() -> None:
    model = make(output_hidden_states=True)
    plain = copy.deepcopy(model)
    expected = plain(TOKENS, labels=LABELS).loss
    with sgd_step(model, 2, capture="autograd") as step:
        torch.testing.assert_close(step(TOKENS, labels=LABELS), expected.detach(), rtol=1e-5, atol=1e-6)
    assert num_hooks(model) == num_hooks(plain)


def test_hooks_are_installed_once_and_only_where_forward_collects() -> None:
    model, plain = make(output_hidden_states=True), make(output_hidden_states=True)
    plain(TOKENS)
    assert install_capturing_hooks(model) and num_hooks(model) == num_hooks(plain)
    assert not install_capturing_hooks(model) and num_hooks(model) == num_hooks(plain)
    assert not install_capturing_hooks(nn.Linear(2, 2))


@pytest.mark.slow
def test_nothing_is_installed_where_nothing_is_collected() -> None:
    model = make()
    with sgd_step(model, 2) as step:
        step(TOKENS, labels=LABELS)
    assert not any(num_hooks(model))
