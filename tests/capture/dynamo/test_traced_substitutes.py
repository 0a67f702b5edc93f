"""Random spans are masked as Hugging Face's function masks them, with the same probabilities."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel
from transformers.models.hubert import modeling_hubert
from transformers.models.wav2vec2 import modeling_wav2vec2

from mirrorc.capture.dynamo.traced_substitutes import masked_spans, masking_functions

ROWS = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({"mask_prob": 0.5, "mask_length": 2}, None),
        ({"mask_prob": 0.5, "mask_length": 2}, ROWS),
        ({"mask_prob": 0.3, "mask_length": 1, "min_masks": 1}, ROWS),
        ({"mask_prob": 0.1, "mask_length": 3}, ROWS),
        ({"mask_prob": 1.0, "mask_length": 5, "min_masks": 4}, None),
    ],
)
def test_spans_have_the_probabilities_of_hugging_faces_function(options: dict[str, Any], mask: Any) -> None:
    """Of all three rows together: the rounding of the number of spans is the same for all rows of a call."""
    np.random.seed(0)
    torch.manual_seed(0)
    number, shape = 1000, (3, 5)
    theirs = Counter(
        modeling_wav2vec2._compute_mask_indices(shape, attention_mask=mask, **options).tobytes() for _ in range(number)
    )
    ours = Counter(masked_spans(shape, attention_mask=mask, **options).numpy().tobytes() for _ in range(number))
    often = {found for found, count in theirs.items() if count > 20}
    assert often <= ours.keys() and {found for found, count in ours.items() if count > 20} <= theirs.keys()
    for found in often:
        assert abs(ours[found] - theirs[found]) < 6 * (2 * theirs[found]) ** 0.5


def test_spans_that_cannot_be_are_refused_as_there() -> None:
    for options in ({"mask_length": 0}, {"mask_length": 6}):
        for function in (masked_spans, modeling_wav2vec2._compute_mask_indices):
            with pytest.raises(ValueError, match="`mask_length` has to be"):
                function((3, 5), mask_prob=0.5, **options)


def test_the_function_of_each_models_file_is_found() -> None:
    class Speech(nn.Module):
        __module__ = modeling_hubert.__name__

    found = masking_functions(nn.Sequential(Speech(), nn.Linear(2, 2)))
    assert list(found) == [modeling_hubert._compute_mask_indices] and [*found.values()] == [masked_spans]
    sizes = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 4}
    assert not masking_functions(BertModel(BertConfig(vocab_size=5, **sizes)))
