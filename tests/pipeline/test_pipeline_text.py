import enum
import math
import sys
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mirrorc.compression import Collectives, Gradients, Payload, TopK
from mirrorc.ir.program import Program, Stage
from mirrorc.packing import ByBytes
from mirrorc.passes import ALGORITHMS, PASSES, LowerCollectives, OutlineRegions, PlanBuckets, default_pipeline
from mirrorc.pipeline.pipeline_text import format_passes, parse_passes
from mirrorc.pipeline.protocol import Pass


@dataclass(frozen=True)
class MyPass:
    words: tuple[str, ...] = ()
    name: str = field(default="mine", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)

    def run(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class Taking(MyPass):
    option: Any = torch.bfloat16
    made: dict[str, int] = field(default_factory=dict)


class Plain:
    name = "plain"
    input_stage = output_stage = Stage.CAPTURED

    def run(self, program: Program) -> Program:
        return program

    class Inner:
        name = "inner"
        input_stage = output_stage = Stage.CAPTURED

        def run(self, program: Program) -> Program:
            return program


class Keeping(Plain):
    def __init__(self, factor: int, power: int = 2) -> None:
        self.factor, self.power = factor, power


class Hiding(Plain):
    def __init__(self, factor: int = 1) -> None:
        self._factor = factor


class Changing(Plain):
    def __init__(self, factor: int) -> None:
        self.factor = factor * 2


class Stubborn(Plain):
    instances = 0

    def __init__(self) -> None:
        Stubborn.instances += 1
        if Stubborn.instances > 1:
            raise RuntimeError("only one")


class Variadic(Plain):
    def __init__(self, *factors: int) -> None:
        self.factors = factors


class Explicit(Pass):
    name = "explicit"
    input_stage = output_stage = Stage.CAPTURED

    def run(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class Forgetting(MyPass):
    seed: InitVar[int] = 0


class Color(enum.Enum):
    RED = 1


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Halves(Payload):
    def num_bytes(self, gradients: Gradients, num_workers: int) -> int:
        return sum(gradient.nbytes // 2 for gradient in gradients.values())

    def exchange(self, gradients: Gradients, sums: Gradients, state: Gradients, collectives: Collectives) -> None:
        raise AssertionError("nothing runs")


def test_every_pass_has_its_name() -> None:
    assert {name: make().name for name, make in PASSES.items()} == {name: name for name in PASSES}
    asked = {"max_grad_norm": 1.0, "scales_loss": True, "over_workers": True, "shard_optimizer": True}
    asked |= {"compression": "bfloat16", "chooses_checkpoints": True}
    asked |= {"pads_products": True}
    pipelines = [default_pipeline(microbatches=2, algorithm=algorithm(), **asked) for algorithm in ALGORITHMS.values()]
    pipelines.append(default_pipeline(placement="central"))
    pipelines += [default_pipeline(over_workers=True, compression=one) for one in (TopK(0.1), Halves())]
    names = [[compiler_pass.name for compiler_pass in passes] for passes in pipelines]
    assert all([name for name in PASSES if name in own] == own for own in names)
    assert {name for own in names for name in own} == set(PASSES)


@pytest.mark.slow
@given(
    st.floats(min_value=1e-6, allow_nan=False),
    st.floats(min_value=1e-6, allow_nan=False),
    st.sampled_from([None, "copy"]),
)
def test_a_pipeline_survives_as_text(cap: float, first: float, link: str | None) -> None:
    passes = default_pipeline(link=link, buckets=ByBytes(cap, first))
    assert parse_passes(format_passes(passes), PASSES) == passes


def test_defaults_are_left_out() -> None:
    text = format_passes([PlanBuckets(buckets=math.inf), OutlineRegions(), LowerCollectives(link="copy")])
    assert text == "plan-buckets{buckets=inf},outline-regions,lower-collectives{link='copy'}"


def test_a_pass_of_ones_own_is_named_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    mine: list[Pass] = [MyPass(("a", "b,c"))]
    text = format_passes(mine)
    assert text == f"{__name__}:MyPass{{words=('a', 'b,c')}}"
    assert parse_passes(text, PASSES) == mine


VALUES = (
    torch.float16, torch.float32, torch.channels_last, (torch.float16, torch.int8), {"a": torch.int8, "b": [1]}, {},
    math.inf, -math.inf, math.nan, (-math.inf, math.nan), [math.nan], -3, 2.5, True, None, 3 + 4j, {1, 2}, b"{",
    "a{b", "a}b", "}{", "it's", "\"'}{", "a\nb", "\\", "a,b=3", "\\'}", {"{": "}"}, (1,), ((1, 2), [3, {"x": (None,)}]),
)  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_plain_option_survives_as_text(value: object) -> None:
    text = format_passes([Taking(option=value), PlanBuckets(), Keeping(3)])
    again, plan, keeping = parse_passes(text, PASSES)
    assert isinstance(again, Taking) and type(again.option) is type(value) and repr(again.option) == repr(value)
    assert plan == PlanBuckets() and isinstance(keeping, Keeping) and (keeping.factor, keeping.power) == (3, 2)


@pytest.mark.slow
@given(
    st.recursive(st.none() | st.floats() | st.text() | st.integers(), lambda inner: st.tuples(inner) | st.lists(inner))
)
def test_whatever_plain_value_it_has_an_option_survives(value: object) -> None:
    (again,) = parse_passes(format_passes([Taking(option=value)]), PASSES)
    assert isinstance(again, Taking) and repr(again.option) == repr(value)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Plain, "Plain"),
        (Plain.Inner, "Plain.Inner"),
        (Explicit, "Explicit"),
        (lambda: Keeping(3, 4), "Keeping{factor=3,power=4}"),
        (lambda: Keeping(3), "Keeping{factor=3}"),
        (lambda: Taking(made={"a": 1}), "Taking{made={'a': 1}}"),
    ],
)
def test_passes_that_are_no_dataclasses_survive(make: Callable[[], Pass], text: str) -> None:
    made = make()
    assert format_passes([made]).replace("{made={}}", "") == f"{__name__}:{text}"
    (again,) = parse_passes(format_passes([made]), PASSES)
    assert type(again) is type(made) and vars(again) == vars(made)


def local_pass() -> Pass:
    class Local(Plain):
        pass

    return Local()


PLAIN_VALUES = "only numbers, strings, booleans, None, torch's dtypes, and tuples, lists, sets and dicts of them"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Taking(option=Color.RED), f"its option 'option' is a Color: {PLAIN_VALUES}"),
        (lambda: Taking(option=Stage.CAPTURED), "its option 'option' is a Stage"),
        (lambda: Taking(option=lambda x: x), "its option 'option' is a function"),
        (lambda: Taking(option={"a": {"b": len}}), "its option 'option' is a dict"),
        (lambda: Taking(option=torch.ones(2)), "its option 'option' is a Tensor"),
        (lambda: Taking(option=Path("x")), "its option 'option' is a PosixPath"),
        (lambda: Taking(option=[Incomparable()]), "its option 'option' is a list"),
        (local_pass, "its class local_pass.<locals>.Local is not found by its name: define it at the top of a module"),
        (lambda: Hiding(3), "Hiding does not keep its argument 'factor' under that name: make it a dataclass"),
        (lambda: Forgetting(seed=1), "Forgetting does not keep its argument 'seed' under that name"),
        (lambda: Variadic(3), "Variadic does not keep its argument 'factors'"),
        (lambda: Changing(3), "Changing, made again from its options, has another 'factor'"),
        (Stubborn, "Stubborn cannot be made again: RuntimeError: only one"),
    ],
)
def test_what_cannot_be_made_again_is_refused(make: Callable[[], Pass], reason: str) -> None:
    made = make()
    with pytest.raises(ValueError) as caught:
        format_passes([PlanBuckets(), made])
    assert str(caught.value).startswith(f"MC4004: the pass {made.name!r} cannot be written as text: {reason}")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("/x/train.py", "train:MyPass"),
        ("/x/my train.py", None),
        ("/x/a.b.py", None),
        ("/x/__main__.py", None),
        (None, None),
    ],
)
def test_a_pass_of_a_script_is_named_by_its_file(
    script: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = type(sys)("__main__")
    main.__dict__.update(MyPass=MyPass, __file__=script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(MyPass, "__module__", "__main__")
    if expected is not None:
        assert format_passes([MyPass()]) == expected
        return
    with pytest.raises(ValueError, match=r"its class is defined in .*: put it in a module of its own"):
        format_passes([MyPass()])


def test_a_pass_of_a_module_that_is_run_is_named_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    main = type(sys)("__main__")
    main.__dict__.update(MyPass=MyPass, __file__="/x/package/train.py", __spec__=type(sys)("spec"))
    main.__dict__["__spec__"].name = "package.train"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(MyPass, "__module__", "__main__")
    assert format_passes([MyPass()]) == "package.train:MyPass"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "raise RuntimeError('trained\\nagain')",
            r"importing a_script failed: RuntimeError: trained\n  fix:  put the pass in a",
        ),
        (
            "raise SystemExit(2)",
            "importing a_script failed: SystemExit: 2\n  fix:  put the pass in a module of its own",
        ),
        (
            "import not_there",
            "importing a_script failed: ModuleNotFoundError: No module named 'not_there'\n  fix:  put the pass",
        ),
        (
            "def",
            "importing a_script failed: SyntaxError: .*\n  fix:  put the pass in a module of its own",
        ),
        ("def MyPass(): raise KeyError('x')", "making the pass 'a_script:MyPass' failed: KeyError: 'x'"),
        ("MyPass = 3", "'a_script:MyPass' is a int, not a class: write module:Class"),
        ("def MyPass(): return int", "'a_script:MyPass' gives a type, which is no pass: a pass has name, input_stage"),
    ],
)
def test_what_goes_wrong_in_a_script_is_explained(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_script.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "a_script", raising=False)
    with pytest.raises(ValueError, match=message):
        parse_passes("a_script:MyPass", PASSES)
    sys.modules.pop("a_script", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan", r"there is no pass 'plan': did you mean 'plan-buckets'\?$"),
        ("nix", r"there is no pass 'nix': `mirrorc passes` lists them; write module:Class for one of your own$"),
        (
            "plan-buckets{cap=3}",
            r"'plan-buckets' does not take these options .*cap.*; it has: buckets, order",
        ),
        (
            "plan-buckets{buckets}",
            r"the options of pass 'plan-buckets' cannot be read: 'buckets'\n  why:  an option has no name",
        ),
        (
            "plan-buckets{buckets=open('x')}",
            r"cannot be read(?s:.*)  why:  open\('x'\) is no plain value",
        ),
        ("plan-buckets{buckets=torch.ones}", r"cannot be read(?s:.*)  why:  torch.ones is no plain"),
        ("plan-buckets{buckets={**x}}", r"cannot be read(?s:.*)\{\*\*x\} is no plain value"),
        ("plan-buckets{buckets={[]: 1}}", r"cannot be read(?s:.*)  why:  unhashable"),
        ("plan-buckets{**{'a': 1}}", r"cannot be read(?s:.*)  why:  \*\* gives no option a name"),
        ("plan-buckets{a=1)(b=2}", r"cannot be read"),
        ("plan-buckets{buckets='}", r"cannot be read(?s:.*)unterminated string literal"),
        ("json:JSONDecoder", r"'json:JSONDecoder' gives a JSONDecoder, which is no pass: a pass has name, input_stage"),
        ("plan-buckets{buckets=-1}", r"buckets is -1: give a positive number"),
        ("plan-buckets outline", r"is no pass: write name, or name\{option=value"),
        ("plan-buckets{", r"is no pass"),
        (
            "nowhere.at.all:Pass",
            r"the pass 'nowhere.at.all:Pass' cannot be imported\n  why:  .*\n  fix:  start Python in the folder of nowhere",
        ),
        (f"{__name__}:Missing", r"cannot be imported: .*Missing.*; write module:Class"),
        (
            "json.gone:Pass",
            r"cannot be imported\n  why:  there is no module 'json.gone'\n  fix:  start Python in the folder of json.gone.py",
        ),
    ],
)
def test_malformed_pipelines_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_passes(text, PASSES)


def test_nothing_is_no_pass() -> None:
    assert parse_passes("", PASSES) == [] and parse_passes("replicate,", PASSES)[0].name == "replicate"
