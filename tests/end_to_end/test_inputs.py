"""Arguments of every shape and kind, and what makes a step compile anew."""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from references import assert_mirrored, assert_same_model, loss_of, unchanged
from small_modules import Parts
from tiny_models import make_mlp, mlp_batch
from torch import nn
from twins import MlpTwins, Twins, compiled_step

import mirrorc

logger = logging.getLogger(__name__)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
TOLERANCE = 1e-10


class Pair(NamedTuple):
    features: torch.Tensor
    weights: torch.Tensor


@dataclasses.dataclass
class Example:
    features: torch.Tensor
    mask: torch.Tensor
    power: int = 1


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


@dataclasses.dataclass
class Prepared:
    x: torch.Tensor
    weight: float = dataclasses.field(default=1.0, init=False)

    def __post_init__(self) -> None:
        self.x = self.x / 2
        self.weight = 3.0
        self.offsets = {"of": self.x[:, :1]}


class Keyed(dict[str, torch.Tensor]):
    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(x=x)
        self.offset = x[:, :1]

    def __getitem__(self, key: str) -> torch.Tensor:
        return super().__getitem__(key) * 2


class OrderedByName(OrderedDict[str, torch.Tensor]):
    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Listed(list[torch.Tensor]):
    weight = 1.0

    def append(self, item: torch.Tensor) -> None:
        raise TypeError("fixed")


class Doubled(Pair):
    def __new__(cls, features: torch.Tensor) -> Doubled:
        return super().__new__(cls, features * 2, features[:, :1])


def _listed(x: torch.Tensor) -> Listed:
    made = Listed([x])
    made.weight = 3.0
    return made


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[nn.Module, Any], torch.Tensor]]] = {
    "a dataclass": (Prepared, lambda mlp, b: mlp(b.x) * b.weight + b.offsets["of"]),
    "a kind of dict": (Keyed, lambda mlp, b: mlp(b["x"]) + b.offset),
    "a kind of OrderedDict": (lambda x: OrderedByName(x=x), lambda mlp, b: mlp(b["x"]) + b.x[:, :1]),
    "a kind of list": (_listed, lambda mlp, b: mlp(b[0]) * b.weight),
    "a kind of tuple": (Doubled, lambda mlp, b: mlp(b.features) + b.weights),
    "a defaultdict": (lambda x: defaultdict(list, {"x": x}), lambda mlp, b: mlp(b["x"]) + len(b["none"])),
    "a UserDict": (lambda x: UserDict({"x": x}), lambda mlp, b: mlp(b["x"]) + b.data["x"][:, :1]),
    "a deque": (lambda x: deque([x, x * 2], maxlen=1), lambda mlp, b: mlp(b[0]) * b.maxlen),
    "a result of torch": (lambda x: torch.sort(x, dim=1), lambda mlp, b: mlp(b.values) + b[1][:, :1]),
}


@pytest.mark.parametrize("devices", [2, 1])
def test_what_forward_gets_is_what_was_passed(devices: int) -> None:
    for i, (name, (make, body)) in enumerate(CONTAINERS.items()):
        batch = mlp_batch(7 if i % 8 == 0 else 6)  # where shards are uneven, two graphs are captured
        with Twins(OnAnything(body).double(), MOMENTUM, F.cross_entropy, devices) as pair:
            for _ in range(2):
                found = pair.step(make(batch["x"]), target=batch["target"])
                wanted = pair.plain(make(batch["x"]), target=batch["target"])
                assert abs(found - wanted) < TOLERANCE, f"{name}: {found} instead of {wanted}"
            assert_same_model(pair.model, pair.twin, TOLERANCE)


class OnAnything(Parts):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__(mlp=make_mlp(), body=body)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self.mlp, *args, **kwargs)


def check_parity(
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any] | None = None,
    num_devices: int = 2,
    plain: Callable[[Any], Any] = lambda value: value,
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> None:
    """Trains on the same arguments with mirrorc and on one device; ``plain`` makes an argument one for one device."""
    keywords = dict(keywords or {})
    with Twins(OnAnything(body), MOMENTUM, loss_fn, num_devices) as pair:
        for _ in range(3):
            loss = pair.step(*arguments, **keywords)
            own = {key: plain(value) for key, value in keywords.items()}
            expected = pair.plain(*[plain(value) for value in arguments], **own)
            assert loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)
            assert loss.shape == () and not loss.requires_grad
        assert_mirrored(pair.step, pair.model, num_devices)
        assert_same_model(pair.model, pair.twin, TOLERANCE)


X = mlp_batch(5)["x"]
Y = mlp_batch(5)["target"]
WEIGHTS = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
KEEP = torch.tensor([True, False, True, True, False])


def weighted(mlp: nn.Module, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (mlp(x).square().mean(dim=1) * weights).mean()


TABLE = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)


def logged(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    logger.warning("a batch of %d", x.size(0))
    return mlp(x).square().mean()


@pytest.mark.parametrize(
    ("args", "kwargs", "num_devices"),
    [
        ((X, WEIGHTS), {}, 2),
        ((X, WEIGHTS), {}, 1),
        ((), {"weights": WEIGHTS, "x": X}, 2),
        ((X,), {"weights": WEIGHTS}, 2),
        ((X.t().contiguous().t(), WEIGHTS.repeat_interleave(2)[::2]), {}, 2),  # not contiguous
        ((X[:1].expand(5, 6), WEIGHTS), {}, 2),
    ],
)
def test_positional_and_keyword_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], num_devices: int) -> None:
    check_parity(weighted, args, kwargs, num_devices)


BODIES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "nested containers": (
        lambda mlp, batch, pairs: weighted(mlp, batch["inner"]["x"] + pairs[0][1], batch["weights"][0]),
        ({"inner": {"x": X}, "weights": (WEIGHTS,)}, [(None, X)]),
    ),
    "a namedtuple": (lambda mlp, pair: weighted(mlp, pair.features, pair.weights), (Pair(X, WEIGHTS),)),
    "a dataclass": (
        lambda mlp, example: (mlp(example.features).mean(dim=1) ** example.power * example.mask).mean(),
        (Example(X, KEEP, power=2),),
    ),
    "an ordered dict": (lambda mlp, batch: weighted(mlp, *batch.values()), (OrderedDict(x=X, weights=WEIGHTS),)),
    "integers and booleans": (
        lambda mlp, x, y, keep: torch.where(keep, F.cross_entropy(mlp(x), y, reduction="none"), 0.0).mean(),
        (X, Y, KEEP),
    ),
    "a loss of one element": (lambda mlp, x: mlp(x).mean().reshape(1).sum(), (X,)),
    "a constant tensor": (lambda mlp, x: (mlp(x) * TABLE).square().mean(), (X,)),
    "a logger": (logged, (X,)),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_forward_takes_and_does(name: str) -> None:
    check_parity(*BODIES[name])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_tensors_that_are_lazily_negated_or_conjugated(backend: str) -> None:
    """Compiled regions read memory, which holds the numbers without their signs."""
    torch.manual_seed(0)
    model = OnAnything(lambda mlp, x, z: (mlp(x * 2).sin() * (z.real - z.imag)[:, :3]).square().mean())
    conjugated = torch.randn(6, 6, dtype=torch.complex128).conj()
    assert conjugated.imag.is_neg() and conjugated.is_conj()
    with Twins(model, MOMENTUM, backend=backend, tolerance=1e-9) as pair:
        for _ in range(2):
            pair.train(conjugated.imag, conjugated)


def test_arguments_that_are_no_tensors_are_specialized_on() -> None:
    def body(mlp: nn.Module, x: torch.Tensor, scale: float, name: str, flag: bool, nothing: None) -> torch.Tensor:
        hidden = mlp(x) if flag else -mlp(x)
        return getattr(hidden, name)().mean() * scale

    check_parity(body, (X, 2.0, "tanh", True, None))
    check_parity(body, (X, 3.0, "sin", False, None))

    model = OnAnything(body)
    with compiled_step(model, optimizer=MOMENTUM) as step:
        step(X, 2.0, "tanh", True, None)
        first = step.programs[-1]
        step(X, 2.0, "tanh", True, None)
        assert step.programs[-1] is first
        expected = model(X, 3.0, "sin", True, None).item()
        assert step(X, 3.0, "sin", True, None).item() == pytest.approx(expected, rel=TOLERANCE)
        assert step.programs[-1] is not first
        step(X, 2.0, "tanh", True, None)
        assert step.programs[-1] is first


def test_equal_numbers_of_different_types_are_different_constants() -> None:
    def body(mlp: nn.Module, x: torch.Tensor, k: Any) -> torch.Tensor:
        return mlp(x).mean() * (2.0 if isinstance(k, bool) else 1.0)

    model = OnAnything(body)
    with compiled_step(model, optimizer=MOMENTUM) as step:
        for k in (1, True, 1.0):
            expected = model(X, k).item()
            assert step(X, k).item() == pytest.approx(expected, rel=TOLERANCE)


def test_replicated_arguments() -> None:
    def body(mlp: nn.Module, x: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
        return (mlp(x) * scales["rows"] * scales["all"]).square().mean()

    scales = {"rows": torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64), "all": torch.tensor(0.5)}
    check_parity(
        body, (X, mirrorc.replicated(scales)), plain=lambda v: scales if not isinstance(v, torch.Tensor) else v
    )


@pytest.mark.parametrize("sizes", [(1, 1, 3), (1, 4), (3, 2)])
def test_per_replica_values_of_uneven_sizes(sizes: tuple[int, ...]) -> None:
    split = mirrorc.PerReplica(X.split(sizes)), mirrorc.PerReplica(WEIGHTS.split(sizes))
    check_parity(weighted, split, num_devices=len(sizes), plain=lambda value: torch.cat(value.values))


def test_per_replica_values_of_nested_tensors() -> None:
    def body(mlp: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return weighted(mlp, batch["x"], batch["w"])

    shards = [{"x": X[:2], "w": WEIGHTS[:2]}, {"x": X[2:], "w": WEIGHTS[2:]}]
    check_parity(body, (mirrorc.PerReplica(shards),), plain=lambda value: {"x": X, "w": WEIGHTS})


@pytest.mark.fast
def test_per_replica_and_split_must_agree() -> None:
    model = OnAnything(weighted)
    with compiled_step(model, optimizer=MOMENTUM) as step, pytest.raises(ValueError, match="disagree on dim 0"):
        step(mirrorc.PerReplica(X.split((1, 4))), WEIGHTS)


@pytest.mark.parametrize("kind", ["tensor", "dict", "object"])
def test_kinds_of_output(kind: str) -> None:
    def body(mlp: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = mlp(x)
        loss = F.cross_entropy(logits, y)
        return {"tensor": loss, "dict": {"logits": logits, "loss": loss}, "object": Output(logits, loss)}[kind]

    check_parity(body, (X, Y))


def test_outputs_into_a_loss_function() -> None:
    def body(mlp: nn.Module, x: torch.Tensor) -> Output:
        return Output(mlp(x))

    def loss_fn(output: Output, target: dict[str, torch.Tensor]) -> torch.Tensor:
        return (F.cross_entropy(output.logits, target["classes"], reduction="none") * target["weights"]).mean()

    check_parity(body, (X,), {"target": {"classes": Y, "weights": WEIGHTS}}, loss_fn=loss_fn)


def test_a_loss_module_with_a_buffer() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (F.cross_entropy(output * self.scale, target)).mean()

    check_parity(lambda mlp, x: mlp(x), (X,), {"target": Y}, loss_fn=Weighted())


def test_inputs_that_require_gradients_are_refused() -> None:
    """A loop of one's own would give them gradients, and those of the model that has computed them."""
    before, model = nn.Linear(6, 6).double(), OnAnything(weighted)
    optimizer = MOMENTUM(model.parameters())
    leaf, computed = X.clone().requires_grad_(), before(X)
    with compiled_step(model, optimizer=optimizer) as step:
        step(X, WEIGHTS)
        for i, args in (
            (0, (leaf, WEIGHTS)),
            (1, (X, WEIGHTS.clone().requires_grad_())),
            (0, (mirrorc.replicated(computed), mirrorc.replicated(WEIGHTS))),
            (0, (mirrorc.PerReplica([computed[:2], X[2:]]), WEIGHTS)),
        ):
            with unchanged(model, optimizer), pytest.raises(ValueError) as raised:
                step(*args)
            assert f"'args[{i}]' requires a gradient" in str(raised.value) and ".detach()" in str(raised.value)
        expected = model(computed, WEIGHTS).item()
        assert step(computed.detach(), WEIGHTS).item() == pytest.approx(expected, rel=TOLERANCE)
        with torch.no_grad():
            step(before(X), WEIGHTS)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_new_shapes_are_specializations_over_the_same_variables(backend: str) -> None:
    with MlpTwins(MOMENTUM, backend=backend) as twins:
        programs = []
        for i, size in enumerate((4, 7, 4, 2, 7)):
            twins.train(**mlp_batch(size, seed=i))
            assert_mirrored(twins.step, twins.model, 2)
            programs.append(twins.step.programs[-1])
        assert programs[0] is programs[2] and programs[1] is programs[4]
        assert len({id(program) for program in programs}) == 3
        twins.check()


class Switched(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(x) * self.scale
        return y if self.training else y + 1.0 * x[:, :3]


def test_modes_and_plain_attributes_are_specialized_on() -> None:
    changes: list[Callable[[Any, Any], Any]] = [
        lambda model, _: None,
        lambda model, _: model.eval(),
        lambda model, _: setattr(model.train(), "scale", 2.0),
        lambda model, _: setattr(model, "scale", 1.0),
    ]
    with MlpTwins(MOMENTUM, model=Switched(mlp=make_mlp(), scale=1.0)) as twins:
        programs = []
        for change in changes:
            twins.on_both(change)
            twins.steps(1)
            programs.append(twins.step.programs[-1])
        first, second, third, last = programs
        assert last in (first, third), "a number that changes is an input of the third"
        assert len({id(first), id(second), id(third)}) == 3
        twins.check()


def test_dropout_is_off_in_eval() -> None:
    model = make_mlp(dropout=0.5)
    with compiled_step(model, F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), 1e-30)) as step:
        batch = mlp_batch(6)
        with_dropout = {step(**batch).item() for _ in range(3)}
        model.eval()
        without = {step(**batch).item() for _ in range(3)}
        expected = loss_of(model, batch, F.cross_entropy).item()
    assert len(with_dropout) == 3
    assert len(without) == 1
    assert without.pop() == pytest.approx(expected, rel=TOLERANCE)


def dtypes_in(program: mirrorc.Program) -> set[torch.dtype]:
    nodes = [node for region in program.regions.values() for node in region.graph_module.graph.nodes]
    return {node.meta["val"].dtype for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_autocast_around_the_call(backend: str) -> None:
    model, batch = make_mlp(torch.float32), mlp_batch(6, torch.float32)
    with MlpTwins(MOMENTUM, model=model, backend=backend, tolerance=2e-2) as pair:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                pair.train(**batch)
        assert torch.bfloat16 in dtypes_in(pair.step.programs[-1])
        pair.step(**batch)
        assert torch.bfloat16 not in dtypes_in(pair.step.programs[-1])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("form", ["keywords", "both", "positional"])
def test_preparing_compiles_at_once(form: str) -> None:
    model, batch, loss_fn = make_mlp(), mlp_batch(6), F.cross_entropy
    args, kwargs = {"keywords": ((), batch), "both": ((batch["x"],), {"target": batch["target"]})}.get(form, ((), {}))
    if form == "positional":
        model, loss_fn, args = OnAnything(weighted), None, (X, WEIGHTS)
    devices = ["cpu:5", torch.device("cpu:2")]
    before = [value.clone() for value in (*args, *kwargs.values())]
    with Twins(model, MOMENTUM, loss_fn, devices) as pair:
        program = pair.step.prepare(*args, **kwargs)
        assert list(pair.step.graphs) == ["cpu:5", "cpu:2"]
        assert_same_model(pair.model, pair.twin, 0.0)
        assert_mirrored(pair.step, pair.model, 2)
        pair.train(*args, **kwargs)
        assert pair.step.programs[-1] is program
        pair.check()
    assert all(map(torch.equal, (*args, *kwargs.values()), before)), "the batch is not changed"
