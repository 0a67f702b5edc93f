"""capture="auto": what Dynamo cannot read runs as plain PyTorch, and what is refused for its meaning stays refused."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from branching import SGD, TOLERANCE, Net, batches
from references import assert_same_training, assert_trains_alike, train_mirrored, train_shard_by_shard, unchanged
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc import CaptureError
from mirrorc.capture.diagnostics.capture_errors import LoneExampleError, UnreadableError
from mirrorc.capture.dynamo.dynamo_front_end import DynamoFrontEnd
from mirrorc.capture.front_ends.front_end import Ladder, front_end_named, ladder_named
from mirrorc.coordination.fingerprint import facts_of_program


def compiled(model: nn.Module, devices: int = 2, **options: Any) -> mirrorc.Step:
    return compiled_step(model, devices=devices, optimizer=SGD, **{"loss_fn": F.cross_entropy, **options})


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_what_dynamo_cannot_read_trains(num_devices: int) -> None:
    with pytest.warns(UserWarning, match="Net trains with capture='autograd'"):
        assert_trains_alike(Net(), SGD, batches(7, 6, 8, 2), num_devices, F.cross_entropy)


def test_a_remark_and_one_warning_say_which_front_end_it_was_and_why() -> None:
    data = batches(6, 8)
    with compiled(Net()) as step:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for batch in data:  # of two shapes
                step(**batch)
        (one,) = [one for one in told if "capture=" in str(one.message)]
        text = str(one.message)
        assert "branching.py" in text and "row.sum() > 0" in text and one.filename == __file__
        assert text.startswith("MC2701: ") and "capture='autograd'), for the same without this warning" in text
        for printed in (step.program.to_text(), " ".join(str(step.explain()).split())):
            assert "captured with capture='autograd', because 'dynamo' cannot capture Net: " in printed
    with compiled(Net(), capture="autograd") as step, warnings.catch_warnings():
        warnings.simplefilter("error")
        step(**data[0])
    with compiled(Net(most=0)) as step, warnings.catch_warnings():
        warnings.simplefilter("error")
        step(**data[0])
        assert "autograd" not in step.program.to_text()


SWITCHED = """
from torch import nn

class Switched(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4).double()

    def forward(self, x):
        BODY
        return self.layer(x)
"""


@pytest.mark.fast
@pytest.mark.parametrize("body", ["x = x.detach().requires_grad_()", "x = x * x.sum().item() ** 0"])
def test_code_without_a_source_file_trains_as_that_of_a_file(body: str, tmp_path: Path) -> None:
    code, (data,) = SWITCHED.replace("BODY", body), batches(6)
    (tmp_path / "switched.py").write_text(code)
    for name in (str(tmp_path / "switched.py"), "<string>"):
        scope: dict[str, Any] = {"__name__": "switched"}
        exec(compile(code, name, "exec"), scope)
        with pytest.warns(UserWarning, match="Switched trains with capture='autograd'"):
            assert_trains_alike(scope["Switched"](), SGD, [data], 2, F.cross_entropy)


def test_each_shape_has_the_first_front_end_that_takes_it_and_all_its_shards_the_same() -> None:
    data = batches(7, 12, 7, 11)  # shards of 3 and 4 branch, those of 5 and 6 do not
    expected = train_shard_by_shard(Net(most=4), SGD, data, 2, F.cross_entropy)
    with pytest.warns(UserWarning, match="trains with capture='autograd'"):
        found = train_mirrored(Net(most=4), SGD, data, 2, F.cross_entropy)
    with pytest.warns(UserWarning, match="trains with capture='autograd'"):
        train_mirrored(Net(most=5), SGD, batches(11), 2, F.cross_entropy)  # one shard branches
    assert_same_training(found, expected, TOLERANCE)


def test_numbers_of_the_model_and_plain_arguments_count_in_each_step() -> None:
    class Scales(Net):
        def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * factor

    (batch,) = batches(6)
    with (
        Twins(Scales(), SGD, F.cross_entropy, tolerance=TOLERANCE) as pair,
        pytest.warns(UserWarning, match="trains with capture='autograd'"),
    ):
        for scale, factor in ((1.0, 2.0), (3.0, 2.0), (3.0, 0.5), (1.0, 2.0)):
            pair.model.scale = pair.twin.scale = scale
            pair.train(batch["x"], factor, target=batch["target"])


class Assigns(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.last_seen = getattr(self, "last_seen", 0.0) + y.detach()
        return y


def test_what_no_front_end_takes_is_refused_by_the_last_one() -> None:
    model = Assigns()
    words = r"^MC2301: .* changes model\.last_seen, and each replica leaves another value"
    with compiled(model) as step:
        for _ in range(2):
            with unchanged(model), pytest.raises(CaptureError, match=words) as refused:
                step(**batches(6)[0])
            assert isinstance(refused.value.__cause__, UnreadableError) and "row.sum() > 0" in str(
                refused.value.__cause__
            )
    with compiled(Net(), capture="dynamo") as step, pytest.raises(UnreadableError, match="capture='autograd'"):
        step(**batches(6)[0])


@pytest.mark.fast
def test_what_is_refused_for_its_meaning_is_not_tried_again() -> None:
    (batch,) = batches(6)
    for loss_fn, words in (
        (lambda output, target: output, "no scalar"),
        (lambda output, target: output.detach().sum(), "does not depend on any trainable parameter"),
    ):
        with compiled(Net(most=0), loss_fn=loss_fn) as step, pytest.raises(CaptureError, match=words) as caught:
            step(**batch)
        assert "autograd" not in str(caught.value) and not isinstance(caught.value, UnreadableError)


@pytest.mark.fast
def test_a_batch_norm_over_all_steps_so_far_runs_as_plain_pytorch() -> None:
    class Averages(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4, momentum=None).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.last(self.first(x)))

    with pytest.warns(UserWarning, match="has momentum=None"):
        assert_trains_alike(Averages(), SGD, batches(6, 6), 1, F.cross_entropy)


def test_workers_whose_front_ends_differ_are_told_so_first() -> None:
    said = []
    for front_end in ("dynamo", "autograd"):
        with compiled(Net(most=0), capture=front_end) as step:
            step(**batches(6)[0])
            said.append(facts_of_program(step.program, needs_seed=False).texts)
    differing = [name for name in said[0] if said[0][name] != said[1].get(name)]
    assert differing[0] == "forward and backward" and "capture='autograd'" in said[1]["forward and backward"]


@pytest.mark.fast
def test_the_ladder_and_its_names() -> None:
    assert ladder_named("auto").names == ("dynamo", "autograd")
    assert ladder_named("autograd").names == ("autograd",) and front_end_named("auto").name == "dynamo"
    both = Ladder([front_end_named("dynamo"), front_end_named("autograd")])

    def attempt(front_end: Any) -> str:
        if front_end.name == "dynamo":
            raise UnreadableError("cannot capture it", "why")
        raise LoneExampleError("two examples or more")

    with pytest.raises(LoneExampleError, match=r"^two examples or more$") as refused:
        both.climb(attempt)
    assert isinstance(refused.value.__cause__, UnreadableError)
    with pytest.raises(ValueError, match=r"capture is 'traced': choose one of auto, dynamo, autograd$"):
        ladder_named("traced")


class Between(DynamoFrontEnd):
    name = "between"


@pytest.mark.fast
def test_whatever_a_front_end_in_between_refuses_the_next_one_tries() -> None:
    def attempt(front_end: Any) -> str:
        if front_end.name == "dynamo":
            raise UnreadableError("cannot capture it", "why")
        if front_end.name == "between":
            raise CaptureError("a loss that is no scalar")
        return front_end.name

    climbed = Ladder([front_end_named("dynamo"), Between(), front_end_named("autograd")]).climb(attempt)
    assert climbed.result == "autograd" and [why for _, why in climbed.failed] == ["why", "a loss that is no scalar"]
    first, second = climbed.remarks("Net")
    assert (
        "because 'dynamo' cannot capture Net: why" in first and "because 'between' cannot capture Net: a loss" in second
    )


@pytest.mark.fast
def test_what_the_users_code_raises_comes_first() -> None:
    class Misspelt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * undefined_factor  # type: ignore[name-defined]  # noqa: F821

    model = Misspelt()
    step = compiled_step(model, F.mse_loss)
    words = "^MC2103: Misspelt or its loss raised NameError: name 'undefined_factor' is not defined\n  at:   .*test_ladder.py"
    with step, pytest.raises(mirrorc.CaptureError, match=words) as caught:
        step(torch.ones(4, 3), target=torch.ones(4, 3))
    cause = caught.value.__cause__
    assert isinstance(cause, NameError) and isinstance(cause.__cause__, UnreadableError)


class OtherWayInTraces(Net):
    """Hugging Face's Autoformer fails so."""

    def __init__(self, raises: str = "", *, in_plain: str = "") -> None:
        super().__init__(most=0)
        self.raises, self.in_plain = raises, in_plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            x = x if self.raises else x.view(-1, 11)
            raise ValueError(self.raises)
        if self.in_plain:
            raise ValueError(self.in_plain)
        return super().forward(x)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_code_that_fails_only_while_it_is_traced_trains(num_devices: int) -> None:
    for raises, words in (("", "shape '.*' is invalid for input"), ("not compiled", "ValueError: not compiled")):
        with pytest.warns(UserWarning, match=f"MC2701: (?s:.*)test_ladder.py:(?s:.*){words}.* while it is traced"):
            assert_trains_alike(OtherWayInTraces(raises), SGD, batches(7, 8), num_devices, F.cross_entropy)


@pytest.mark.fast
def test_code_that_fails_in_traces_is_refused_there_alone() -> None:
    words = "^MC2103: .* raised ValueError: not compiled(?s:.*)in a trace of one shard(?s:.*)capture='autograd'"
    with (
        compiled(OtherWayInTraces("not compiled"), capture="dynamo") as step,
        pytest.raises(UnreadableError, match=words),
    ):
        step(**batches(6)[0])


@pytest.mark.fast
def test_an_exception_in_traces_and_in_plain_pytorch_is_told_once() -> None:
    class Raises(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such model")

    for model, words in (
        (Raises(), r"ValueError: no such model\n  at:   .*test_ladder.py"),
        (
            OtherWayInTraces("not compiled", in_plain="not trained"),
            r"ValueError: not trained\n  at:   .*test_ladder.py",
        ),
    ):
        with compiled(model) as step, pytest.raises(CaptureError, match=words) as caught:
            step(**batches(6)[0])
        text = str(caught.value)
        assert "why:  plain PyTorch raises the same on one shard, float64[3, 6], " in text and "traced" not in text
        assert isinstance(caught.value.__cause__, ValueError) and caught.value.__cause__.__cause__ is None


class _Between(Net):
    """Does something to the hidden value that Dynamo may not follow."""

    def __init__(self, does: Any) -> None:
        super().__init__(most=0)
        self.drop = nn.Dropout(0.5)
        self.does = does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(self.does(self, h))


def _appends_in_hook(model: Any, h: torch.Tensor) -> torch.Tensor:
    norms: list[torch.Tensor] = []
    h.register_hook(lambda gradient: norms.append(gradient.norm()))
    return h.tanh()


def _scales_in_hook(model: Any, h: torch.Tensor) -> torch.Tensor:
    h.register_hook(lambda gradient: 2 * gradient)
    return h.tanh()


def _retains_gradient(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.hidden = h
    model.hidden.retain_grad()
    return model.hidden.tanh()


def _drops_in_eval_mode(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.drop.eval()
    h = model.drop(h)
    model.drop.train()
    return h.tanh()


def _drops_without_training(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.drop.training = False
    return model.drop(h).tanh()


HABITS = [_appends_in_hook, _scales_in_hook, _retains_gradient, _drops_in_eval_mode, _drops_without_training]


@pytest.mark.filterwarnings("ignore:MC2701", "ignore:MC3304")
@pytest.mark.parametrize("does", HABITS, ids=lambda does: does.__name__)
def test_hooks_and_modes_inside_of_forward_train(does: Any) -> None:
    for num_devices in (1, 2, 3):
        assert_trains_alike(_Between(does), SGD, batches(7, 8), num_devices, F.cross_entropy)
