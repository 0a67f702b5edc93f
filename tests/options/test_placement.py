"""What `mirrorc.Memory(placement=...)` makes, and what it refuses."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_steps import step_of_world
from saved_programs import assert_same, reload
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc import World
from mirrorc.errors import PassError
from mirrorc.ir.devices import Device
from mirrorc.options.option import Request
from mirrorc.options.table import OPTIONS, grouped
from mirrorc.passes import PlaceVariables, default_pipeline


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.table(x)))


def step_of(placement: Any, model: nn.Module | None = None, **options: Any) -> mirrorc.Step:
    model = model or Tied()
    options = {"devices": 2, "backend": "eager", **options}
    optimizer = options.pop("optimizer", None) or torch.optim.AdamW(model.parameters())
    given = {"optimizer": optimizer, "loss_fn": F.cross_entropy, "placement": placement, **options}
    return step_of_world(model, **given) if "world" in given else mirrorc.compile(model, **grouped(given))


def owners(placement: Any, **options: Any) -> dict[str, int | None]:
    program = step_of(placement, **options).prepare(torch.tensor([0, 1, 2]), target=torch.tensor([0, 1, 2]))
    return {slot.variable: bucket.owner for bucket in program.buckets for slot in bucket.slots}


@pytest.mark.slow
def test_each_placement_has_its_program() -> None:
    assert owners("central") == {"table.weight": 0, "body.weight": 0, "body.bias": 0}
    assert owners("least-loaded") == {"table.weight": 0, "body.weight": 1, "body.bias": 1}
    for placement in ("auto", "mirrored", "shared"):
        assert set(owners(placement).values()) == {None}
    words = {
        placement: step_of(placement)
        .prepare(torch.tensor([0, 1]), target=torch.tensor([0, 1]))
        .buckets[0]
        .placement.name
        for placement in ("auto", "mirrored", "shared", "central")
    }
    assert words == {"auto": "SHARED", "mirrored": "MIRRORED", "shared": "SHARED", "central": "OWNED"}


@pytest.mark.slow
def test_a_dict_names_owners_and_tied_parameters_have_all_their_names() -> None:
    assert owners({"head.weight": "cpu:1", "*": "central"}) == {"table.weight": 1, "body.weight": 0, "body.bias": 0}
    assert owners({"table.weight": "cpu:1"}) == {"table.weight": 1, "body.weight": 0, "body.bias": 0}
    assert owners({"body.bias": "cpu:0", "*": "cpu:1"}) == {"table.weight": 1, "body.weight": 1, "body.bias": 0}


@pytest.mark.slow
def test_a_program_with_owners_is_saved_and_loaded(tmp_path: Path) -> None:
    program = step_of("least-loaded", devices=3).prepare(torch.tensor([0, 1, 2]), target=torch.tensor([0, 1, 2]))
    loaded = reload(program, tmp_path)
    assert_same(loaded, program)
    assert [bucket.owner for bucket in loaded.buckets] == [bucket.owner for bucket in program.buckets]


@pytest.mark.slow
def test_what_nothing_updates_has_no_owner_and_a_remark_says_so() -> None:
    model = Tied()
    model.body.weight.requires_grad_(False)
    program = step_of({"body.weight": "cpu:1"}, model).prepare(torch.tensor([0, 1]), target=torch.tensor([0, 1]))
    assert "body.weight has no owner, as nothing updates it" in str(program)


@pytest.mark.parametrize(
    ("placement", "options", "said"),
    [
        (
            {"tabel.weight": "cpu:0"},
            {},
            "placement names 'tabel.weight', which is no parameter of the model; the closest name",
        ),
        (
            {"table.weight": "cpu:2"},
            {},
            "placement gives 'table.weight' to 'cpu:2', which is none of the devices\n  fix:  name one",
        ),
        (
            {"*": "mirrored"},
            {},
            "is 'mirrored', which is neither a rule nor a device of this step\n  why:  '*' stands for all parameters",
        ),
        (
            {"table.weight": "cpu:0", "head.weight": "cpu:1"},
            {},
            "both names are of the same tensor\n  fix:  placement={",
        ),
        ("central", {"passes": default_pipeline()}, "placement='central' and passes= cannot be combined"),
        ("central", {"disable": ["place-variables"]}, "needs the pass 'place-variables', which disable= switches"),
        ("least-loaded", {"disable": ["update-at-owner"]}, "needs the pass 'update-at-owner', which disable="),
        ("shared", {"disable": ["share-parameters"]}, "needs the pass 'share-parameters', which disable="),
        (
            "central",
            {"world": World(2, 1)},
            "cannot be used over several workers\n  why:  an owner updates for the devices",
        ),
        (
            "mirrored",
            {"world": World(2, 2)},
            "placement='mirrored' cannot be used for several devices of one of several workers yet",
        ),
        (
            "near",
            {},
            "placement is 'near': say 'auto', 'mirrored', 'shared', 'central', 'least-loaded' or 'cached', or give a dict",
        ),
    ],
)
def test_what_cannot_be_is_refused(placement: Any, options: dict[str, Any], said: str) -> None:
    if "world" in options:
        options = {**options, "devices": None}
    with pytest.raises(ValueError, match=re.escape(said)):
        step_of(placement, **options)


def test_sharing_is_refused_where_devices_have_memories_of_their_own() -> None:
    gpus = [Device(f"cuda:{i}", torch.device("cuda", i)) for i in range(2)]
    asked = {**OPTIONS.defaults, "placement": "shared"}
    message = "placement='shared' cannot be used on cuda:0, cuda:1\n  why:  the devices do not share one memory"
    with pytest.raises(ValueError, match=re.escape(message)):
        OPTIONS.check_exclusions(Request(asked, devices=tuple(gpus)))


@pytest.mark.slow
def test_owners_may_be_devices_of_torch() -> None:
    owners = {"body.weight": torch.device("cpu", 1), "*": torch.device("cpu")}
    program = step_of(owners).prepare(torch.tensor([0, 1]), target=torch.tensor([0, 1]))
    found = {slot.variable: bucket.owner for bucket in program.buckets for slot in bucket.slots}
    assert found.pop("body.weight") == 1 and set(found.values()) == {0}
    said = r"placement gives 'body.weight' to device\(type='cpu', index=7\).*\n  fix:  name one of cpu:0"
    with pytest.raises(ValueError, match=said):
        step_of({"body.weight": torch.device("cpu", 7)})
    with pytest.raises(
        ValueError, match=r"is device\(type='cuda', index=1\), .*\n.*\n  fix:  give 'central', 'least-loaded'"
    ):
        step_of({"*": torch.device("cuda", 1)})


def test_another_kind_of_value_is_refused() -> None:
    with pytest.raises(TypeError, match=re.escape("placement is 3: say 'auto', 'mirrored'")):
        step_of(3)


def test_what_steps_by_itself_cannot_be_given_away() -> None:
    model = Tied()
    step = step_of({"body.weight": "cpu:1"}, model, optimizer=torch.optim.Muon([model.body.weight]))
    with pytest.raises(
        PassError,
        match=r"'body.weight' cannot be owned by cpu:1\n  why:  Muon group 0 does not work element by element",
    ):
        step.prepare(torch.tensor([0, 1]), target=torch.tensor([0, 1]))


@pytest.mark.slow
def test_passes_with_owners_can_be_put_into_a_pipeline_of_ones_own() -> None:
    from mirrorc.passes import UpdateAtOwner

    own = [mirrorc.after("plan-buckets", PlaceVariables("central")), mirrorc.after("schedule-overlap", UpdateAtOwner())]
    options: dict[str, Any] = {"add": own, "disable": ["share-parameters"]}
    assert owners("auto", **options) == owners("central")
