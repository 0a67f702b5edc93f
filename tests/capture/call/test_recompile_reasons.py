from typing import Any

import pytest
import torch

from mirrorc.capture.call.recompile_reasons import CallKind, changes_since


def kind(*tensors: tuple[str, torch.Tensor], plain: dict[str, str] | None = None, **constants: str) -> CallKind:
    return CallKind({name: (t.shape, t.stride(), t.dtype) for name, t in tensors}, constants, plain or {})


X, WIDE, LONG = torch.zeros(4, 3), torch.zeros(3, 4).t(), torch.zeros(9, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("old", "new", "texts"),
    [
        (kind(("x", X)), kind(("x", X)), []),
        (kind(("x", X)), kind(("x", LONG)), ["x i64[9, 3], was f32[4, 3]"]),
        (kind(("x", X)), kind(("x", WIDE)), ["x f32[4, 3] of strides [1, 4], was f32[4, 3] of strides [3, 1]"]),
        (kind(("x", X)), kind(("x", X), ("mask", X)), ["mask f32[4, 3], was no tensor"]),
        (kind(flag="True"), kind(flag="False", k="2"), ["flag=False, was True", "k=2, was nothing"]),
        (kind(plain={"read": "1", "other": "1"}), kind(plain={"read": "2", "other": "2"}), ["read=2, was 1"]),
        (
            kind(),
            kind(a="1", b="1", c="1", d="1", e="1"),
            [*(f"{name}=1, was nothing" for name in "abc"), "2 more changes"],
        ),
    ],
)
def test_changes_name_what_is_and_what_was(old: CallKind, new: CallKind, texts: list[Any]) -> None:
    assert changes_since(old, new, ("read",)) == texts
