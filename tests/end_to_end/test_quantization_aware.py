"""Quantization-aware training: observers keep ranges in buffers, to the bit on one device, and of each shard on several."""

import warnings

import pytest
import torch
from references import unchanged
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

from mirrorc.errors import CaptureError

quantization = pytest.importorskip("torch.ao.quantization")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def observed(*, is_warm: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)
    model = nn.Sequential(quantization.QuantStub(), *layers, quantization.DeQuantStub()).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.prepare_qat(model, inplace=True)
    if is_warm:
        model(torch.randn(6, 3))
    return model


def test_one_device_has_the_bits_of_plain_pytorch() -> None:
    with Twins(observed(is_warm=True), loss_fn=F.mse_loss, devices=1, capture="autograd", tolerance=0.0) as pair:
        for _ in range(4):
            x, target = torch.randn(6, 3), torch.randn(6, 2)
            assert torch.equal(pair.step(x, target=target), pair.plain(x, target=target))
        pair.check()
        for name, value in pair.twin.state_dict().items():
            assert torch.equal(pair.model.state_dict()[name], value), name


def test_ranges_are_means_of_those_of_the_shards() -> None:
    model = observed(is_warm=True)
    observer = model[0].activation_post_process.activation_post_process
    before, x = observer.min_val.clone(), torch.randn(6, 3)
    with compiled_step(model, F.mse_loss, 2, capture="autograd") as step:
        step(x, target=torch.randn(6, 2))
    smallest = torch.stack([shard.min() for shard in x.chunk(2)]).mean()
    torch.testing.assert_close(observer.min_val, before + 0.01 * (smallest - before))


def test_ranges_that_have_no_size_yet_are_refused_with_the_call_that_gives_it() -> None:
    model = observed(is_warm=False)
    text = r"(?s)MC2304.*changes the size of the buffer.*model\(x\) on a batch, once"
    step = compiled_step(model, F.mse_loss, capture="autograd")
    with step, unchanged(model), pytest.raises(CaptureError, match=text):
        step(torch.randn(6, 3), target=torch.randn(6, 2))
