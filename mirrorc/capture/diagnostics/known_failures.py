"""Known causes of tracer failures, for failures whose messages name none."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownFailure:
    """A cause of tracer exceptions.

    Attributes:
        reason: follows a colon in the message.
        words: lower-case texts. The exception's text must contain one.
        file: the end of a file name in the traceback.
        runs_as_pytorch: plain PyTorch runs the line with the right result.
    """

    reason: str
    remedy: str
    words: tuple[str, ...]
    line: str = ""
    file: str = ""
    runs_as_pytorch: bool = True

    def fits(self, text: str, frames: Sequence[traceback.FrameSummary]) -> bool:
        if not any(word in text.lower() for word in self.words):
            return False
        has_file = any(frame.filename.endswith(self.file) for frame in frames) or not self.file
        return has_file and any(self.line in (frame.line or "") for frame in frames or [_NO_FRAME])


_NO_FRAME = traceback.FrameSummary("", 0, "", line="")

INSTALLS_HOOKS = KnownFailure(
    "Hugging Face installs hooks for hidden states and attentions in the first call of a model, under a lock",
    "model(x), the plain model, once, with the same arguments, before the first compiled call",
    ("",),
    line="_hook_installation_lock",
    runs_as_pytorch=False,
)

DATA_DEPENDENT = ("data-dependent", "data dependent")
_KNOWN = (
    KnownFailure(
        "its mask is looked at to see whether it is causal, and the captured graph cannot branch on tensor values",
        "say whether it is, beside the mask: tgt_is_causal=True or False, or is_causal for the mask of an encoder",
        DATA_DEPENDENT,
        file="nn/modules/transformer.py",
    ),
    KnownFailure(
        "torch._assert of a tensor is not captured",
        'write a statement, assert condition, "text", which stops the call before anything has changed',
        DATA_DEPENDENT,
        line="_assert(",
    ),
    KnownFailure(
        "a CTC loss needs memory that depends on the values of lengths and labels, and shapes of a graph are fixed",
        "train another head of the same model, such as one that classifies sequences",
        ("_ctc_loss.tensor",),
    ),
    KnownFailure(
        "its CTC loss looks at the labels, and needs memory that depends on their values, and shapes of a graph are fixed",
        "train another head of the same model, such as one that classifies sequences",
        DATA_DEPENDENT,
        line="labels.max() >= self.config.vocab_size",
    ),
    KnownFailure(
        "it masks its input at random places, whose number and shapes follow random numbers of numpy",
        "switch that off, with apply_spec_augment = False in the model's configuration, and mask the batch before the call",
        DATA_DEPENDENT,
        line="_compute_mask_indices(",
        runs_as_pytorch=False,
    ),
    KnownFailure(
        "it decides by random numbers of Python or numpy that no call draws again, and a captured graph would go the same way in "
        "every call",
        "decide by single numbers, such as random.random() or np.random.rand(), which are drawn anew before each call; or "
        "compute both ways and choose in the graph, as in torch.where(torch.rand(()) < p, x, layer(x))",
        ("random.", *DATA_DEPENDENT),
        line="random.",
        runs_as_pytorch=False,
    ),
    KnownFailure(
        "it makes a Python number of a value of numpy, and those are traced as tensors",
        "make the number before the call, as in scale = float(array[0]), or compute with the array itself",
        ("wrapped_item",),
    ),
    KnownFailure(
        "it reads a tensor as a Python number, whose value is not known while the model is captured",
        "compute with tensors instead of Python numbers, use torch.where, or read the number before the call",
        ("_local_scalar_dense",),
    ),
    INSTALLS_HOOKS,
    KnownFailure(
        "it leaves layers out at random, and a captured graph would run the same layers in every call",
        "run all layers, with layerdrop = 0.0 in the model's configuration, or compute both ways and choose in the graph, as in "
        "torch.where(torch.rand(()) < p, x, layer(x))",
        DATA_DEPENDENT,
        line="skip_the_layer",
        runs_as_pytorch=False,
    ),
    KnownFailure(
        "it sets requires_grad of a tensor that was there before it, such as an argument, and there are gradients of "
        "parameters alone",
        "leave the line out: gradients of parameters are the same without it; for the gradient of an argument, run the model by "
        "itself",
        ("setattr() on tensor.requires_grad",),
    ),
    KnownFailure(
        "it enters a lock, and a captured graph does not do that again",
        "hold the lock around the call, if it guards what forward reads; if it guards what forward does once, call the model "
        "before its first compiled call, and leave out the lock where nothing is to be done",
        ("enter a `lock`", "enter a `rlock`"),
    ),
    KnownFailure(
        "the first states of a recurrent net have their examples in dim 1, where arguments are split along dim 0",
        "pass mirrorc.batch_dim(h, 1); or the examples first, as h.transpose(0, 1), and begin forward with "
        "h = h.transpose(0, 1).contiguous()",
        ("expected hidden",),
        runs_as_pytorch=False,
    ),
    KnownFailure(
        "pad_packed_sequence pads to the longest sequence of the batch, and a shard does not know how long that is",
        "say it, which gives the same in plain PyTorch if the batch is padded to its longest sequence: total_length=x.size(1), "
        "where x is the padded tensor (x.size(0), if time comes first). Where a PackedSequence is the argument, take the size of "
        "a tensor that is padded alike, such as target.size(1), or a number",
        ("pad_packed_sequence is given no total_length",),
        runs_as_pytorch=False,
    ),
    KnownFailure(
        "the parts of a packed sequence (data, batch_sizes) have shapes that follow the lengths, and those of a graph are fixed",
        "compute with the padded tensor, before pack_padded_sequence or after pad_packed_sequence; in place of a PackedSequence, "
        "pass the padded tensor and the lengths, and pack in forward",
        ("a part of a packed sequence is read",),
        runs_as_pytorch=False,
    ),
    KnownFailure(
        "pack_padded_sequence needs a length for each sequence of a shard, and got another number of them",
        "pass lengths as a tensor, which is split like the batch, where a list is not",
        ("pack_padded_sequence is given lengths of another batch",),
        runs_as_pytorch=False,
    ),
    KnownFailure(
        "a PackedSequence is made by hand, and its shapes follow the lengths",
        "make it with torch.nn.utils.rnn.pack_padded_sequence or pack_sequence",
        ("0-dim tensor",),
        line="PackedSequence(",
        runs_as_pytorch=False,
    ),
    KnownFailure(
        "it takes a gradient in forward with torch.autograd.grad, which is not captured",
        "take it with torch.func, which gives the same numbers: torch.func.grad(lambda x: net(x).sum())(x), or where net(x) is "
        "needed, too, y, backward = torch.func.vjp(net, x) and backward(torch.ones_like(y)), which calls the net once (dropout "
        "then drops the same for both)",
        ("autograd.grad",),
    ),
    KnownFailure(
        "torch.func takes the gradient of a net that writes a buffer, as a BatchNorm in train mode writes its statistics",
        "use a norm that writes none, such as nn.LayerNorm, nn.GroupNorm or a BatchNorm with track_running_stats=False; a "
        "BatchNorm in eval mode writes nothing either",
        ("would mutate a captured tensor",),
    ),
    KnownFailure(
        "torch.func takes the gradient of a recurrent layer, whose operator has no backward for that",
        "write the recurrence as a loop over nn.LSTMCell, nn.GRUCell or nn.RNNCell, which torch.func takes",
        ("must override the setup_context",),
    ),
    KnownFailure(
        "a module has a hook on its backward, which a captured graph does not call",
        "remove it (the handle that register_full_backward_hook gave has remove()), and change gradients in forward, in the loss "
        "or in a hook of the optimizer",
        ("backwards hooks require compiled autograd",),
    ),
    KnownFailure(
        "it writes in place to a tensor that is no buffer of a module",
        "make it a buffer with register_buffer, of the model, of the loss or of a module that they refer to",
        ("mutating a non-functional tensor", "entirely functional graph, but found"),
        runs_as_pytorch=False,
    ),
)


def known_failure(text: str, frames: Sequence[traceback.FrameSummary]) -> KnownFailure | None:
    return next((failure for failure in _KNOWN if failure.fits(text, frames)), None)
