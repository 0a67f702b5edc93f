"""Copies of modules have objects of their own wherever the originals refer to one another."""

import functools
from collections import OrderedDict

import pytest
import torch
from torch import nn

from mirrorc.capture.eager.module_copies import ModuleCopy
from mirrorc.capture.model.transient_attributes import ReadBeforeAssignedError


class Refers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.two.weight = self.one.weight
        self.again = self.one
        self.register_buffer("total", torch.zeros(()))
        self.listed = [self.one, (self.two, 3)]
        self.named = OrderedDict(one=self.one)
        self.bound = self.double
        self.partial = functools.partial(self.double, self.two)
        self.options = {"scale": 2.0}
        self.circle: list[object] = [self.one]
        self.circle.append(self.circle)

    def double(self, layer: nn.Module) -> nn.Module:
        return layer

    def forward(self) -> None:
        pass


def tensors_of(module: nn.Module) -> dict[int, torch.Tensor]:
    return {id(tensor): tensor.detach().clone() for tensor in (*module.parameters(), *module.buffers())}


def test_references_lead_to_copies() -> None:
    original = Refers()
    copied = ModuleCopy(original)
    given = tensors_of(original)
    copied.load(given)
    root = copied.root
    assert isinstance(root, Refers) and root is not original
    assert root.one is root.again and root.one is not original.one
    assert root.one.weight is root.two.weight is given[id(original.one.weight)]
    assert root.listed[0] is root.one and root.listed[1] == (root.two, 3)
    assert list(root.named.values()) == [root.one] and type(root.named) is OrderedDict
    assert root.bound.__self__ is root and root.partial() is root.two
    assert root.options is original.options
    assert root.circle[0] is root.one
    assert original.listed[0] is original.one and original.bound.__self__ is original


def test_attributes_are_taken_over_at_each_load() -> None:
    original = Refers()
    copied = ModuleCopy(original)
    copied.load(tensors_of(original))
    original.options = {"scale": 3.0}
    original.listed.append(original.two)
    original.named = OrderedDict(two=original.two)
    original.eval()
    copied.load(tensors_of(original))
    root = copied.root
    assert root.options == {"scale": 3.0} and not root.training and not root.one.training
    assert root.listed[2] is root.two and root.named["two"] is root.two
    copied.unload()
    assert vars(root) == {}


@pytest.mark.parametrize(
    ("assign", "assigned", "replaced"),
    [
        (lambda root: setattr(root, "options", {}), [(0, "options")], None),
        (lambda root: setattr(root.one, "seen", 1), [(1, "seen")], None),
        (lambda root: delattr(root, "listed"), [(0, "listed")], None),
        (lambda root: setattr(root, "total", root.total + 1), [], "total"),
        (lambda root: root.total.add_(1), [], None),
    ],
)
def test_what_is_assigned_is_named(assign: object, assigned: list[object], replaced: str | None) -> None:
    original = Refers()
    copied = ModuleCopy(original)
    copied.load(tensors_of(original))
    assert copied.assigned() == [] and copied.replaced() is None
    assign(copied.root)  # type: ignore[operator]
    assert (copied.assigned(), copied.replaced()) == (assigned, replaced)
    assert original.total.item() == 0.0


def test_transient_attributes_are_assigned_before_they_are_read() -> None:
    original = Refers()
    copied = ModuleCopy(original)
    one = copied.root.one if hasattr(copied.root, "one") else None
    assert one is None, "nothing is there before load"
    for _ in range(2):
        copied.load(tensors_of(original), {(0, "options"), (1, "seen")})
        root = copied.root
        assert type(root).__name__ == "Refers" and isinstance(root, Refers) and isinstance(root.one, nn.Linear)
        for read in (
            lambda root: root.options,
            lambda root: hasattr(root, "options"),
            lambda root: getattr(root.one, "seen", None),
            lambda root: delattr(root.one, "seen"),
        ):
            with pytest.raises(
                ReadBeforeAssignedError,
                match=r"MC2301: .* sets its attribute '(options|seen)'\n  why:  it reads the attribute before",
            ):
                read(root)
        root.options, root.one.seen = {"scale": 1.0}, 3
        assert root.options == {"scale": 1.0} and root.one.seen == 3 and copied.assigned() == []
        root.other = 1
        assert copied.assigned() == [(0, "other")]
    assert original.options == {"scale": 2.0} and not hasattr(original.one, "seen")
    copied.load(tensors_of(original))
    assert copied.root.options is original.options and type(copied.root) is Refers
