import dataclasses

import pytest
from tiny_programs import PASS_NAMES, FunctionPass, captured_two_layers, core_pipeline, handmade, run_up_to

from mirrorc.errors import PassError, VerifyError
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.passes import LowerCollectives, OutlineRegions, PlanBuckets, Replicate, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.pipeline_edits import select_passes
from mirrorc.pipeline.protocol import Instrument, Pass, Traits, traits_of


class Recorder(Instrument):
    def __init__(self, label: str, calls: list[tuple[object, ...]]) -> None:
        self.label, self.calls = label, calls

    def start(self, program: Program) -> None:
        self.calls.append((self.label, "start", program.stage))

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        assert seconds >= 0.0
        self.calls.append((self.label, compiler_pass.name, before.stage, after.stage))


def test_the_default_pipeline_reaches_lowered_in_the_order_of_the_design() -> None:
    names = [compiler_pass.name for compiler_pass in default_pipeline()]
    assert [name for name in names if name in PASS_NAMES] == list(PASS_NAMES)
    assert run_passes(handmade(), default_pipeline()).stage is Stage.LOWERED


def test_passes_are_frozen_dataclasses_named_after_their_files() -> None:
    for compiler_pass in default_pipeline():
        assert isinstance(compiler_pass, Pass)
        assert type(compiler_pass).__module__.rpartition(".")[2] == compiler_pass.name.replace("-", "_")
        with pytest.raises(dataclasses.FrozenInstanceError):
            compiler_pass.name = "other"  # type: ignore[misc]


def test_instruments_are_called_in_order() -> None:
    calls: list[tuple[object, ...]] = []
    run_passes(handmade(), core_pipeline()[:2], [Recorder("a", calls), Recorder("b", calls)])
    assert calls == [
        ("a", "start", Stage.CAPTURED),
        ("b", "start", Stage.CAPTURED),
        ("a", "plan-buckets", Stage.CAPTURED, Stage.CAPTURED),
        ("b", "plan-buckets", Stage.CAPTURED, Stage.CAPTURED),
        ("a", "outline-regions", Stage.CAPTURED, Stage.OUTLINED),
        ("b", "outline-regions", Stage.CAPTURED, Stage.OUTLINED),
    ]


def test_an_error_of_an_instrument_stops_the_compilation() -> None:
    class Refuses(Instrument):
        def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
            raise VerifyError(compiler_pass.name)

    with pytest.raises(VerifyError, match=r"decompose-gelu"):
        run_passes(handmade(), default_pipeline(), [Refuses()])


def test_a_program_too_early_for_a_pass_names_the_pass_to_run_before() -> None:
    pipeline = [PlanBuckets(), Replicate(), OutlineRegions()]
    with pytest.raises(
        PassError,
        match=r"'replicate' takes .* OUTLINED to REPLICATED.* at CAPTURED\n  fix:  run 'outline-regions' before",
    ):
        run_passes(handmade(), pipeline)


def test_a_program_too_early_with_no_pass_to_help_asks_for_one() -> None:
    with pytest.raises(PassError, match=r"add a pass that gives OUTLINED"):
        run_passes(handmade(), [Replicate()])


def test_a_program_too_late_for_a_pass_asks_to_move_it() -> None:
    pipeline = [PlanBuckets(), OutlineRegions(), Replicate(), OutlineRegions()]
    with pytest.raises(PassError, match=r"'outline-regions' .* at REPLICATED\n  fix:  move it to an earlier place"):
        run_passes(handmade(), pipeline)


def test_a_pass_is_not_given_what_a_pass_of_its_stage_has_made() -> None:
    program = handmade()
    for place, compiler_pass in enumerate(core_pipeline()):
        program = run_passes(program, [compiler_pass])
        first, last = compiler_pass.input_stage, compiler_pass.output_stage
        if first is last or compiler_pass.name == "lower-collectives":  # takes SCHEDULED, from 'schedule-overlap'
            continue
        with pytest.raises(PassError) as caught:
            run_passes(handmade(), [*core_pipeline()[: place + 1], compiler_pass])
        if compiler_pass.name == "schedule-overlap":
            assert str(caught.value) == (
                "MC4002: pass 'schedule-overlap' takes programs that are not ordered yet\n  why:  this one is already\n"
                "  fix:  leave 'schedule-overlap' out"
            )
            continue
        assert str(caught.value) == (
            f"MC4002: pass {compiler_pass.name!r} takes programs from {first.name} to {last.name}, but the program is already "
            f"{last.name}\n  fix:  leave {compiler_pass.name!r} out"
        )


def test_whatever_takes_updated_programs_takes_scheduled_ones() -> None:
    for without in ("schedule-overlap", "lower-collectives"):
        assert run_passes(handmade(1), select_passes(core_pipeline(), [without])).stage is Stage.LOWERED


@pytest.mark.slow
def test_passes_say_what_must_be_true_of_a_program_and_the_runner_notes_it() -> None:
    options = {"max_grad_norm": 1.0, "scales_loss": True, "over_workers": True, "shard_optimizer": True}
    asked = default_pipeline(**options, compression="bfloat16")  # type: ignore[arg-type]
    assert run_passes(handmade(), asked).properties == tuple(Property)
    on_request = (
        Property.EXCHANGED,
        Property.COMPRESSED,
        Property.SHARDED,
        Property.CLIPPED,
        Property.UNSCALED,
        Property.CHECKED,
    )
    unasked = tuple(each for each in Property if each not in on_request)
    assert run_passes(handmade(), default_pipeline()).properties == unasked
    assert run_passes(handmade(), core_pipeline()).properties == (Property.ORDERED, Property.LINKED)
    pipeline = {compiler_pass.name: compiler_pass for compiler_pass in asked}
    names = ["plan-buckets", "outline-regions", "replicate", "pack-gradients", "insert-all-reduce", "insert-update"]
    for late, early, word in (
        ("share-parameters", "lower-collectives", "linked"),
        ("schedule-overlap", "lower-collectives", "linked"),
        ("schedule-overlap", "share-parameters", "placed"),
        ("share-parameters", "check-finite", "checked"),
        ("schedule-overlap", "check-finite", "checked"),
        ("check-finite", "lower-collectives", "linked"),
        ("clip-gradients", "lower-collectives", "linked"),
        ("clip-gradients", "check-finite", "checked"),
        ("share-parameters", "clip-gradients", "clipped"),
        ("schedule-overlap", "unscale-gradients", "unscaled"),
        ("share-parameters", "reduce-over-workers", "exchanged"),
        ("reduce-over-workers", "clip-gradients", "clipped"),
    ):
        with pytest.raises(
            PassError,
            match=f"{late!r} takes programs that are not {word} yet\n  why:  .*\n  fix:  move it to an earlier place",
        ):
            run_passes(handmade(), [pipeline[name] for name in (*names, early, late)])


def test_a_pass_may_require_a_property() -> None:
    class NeedsOrder(FunctionPass):
        requires = (Property.ORDERED,)

    needy = NeedsOrder(lambda program: program, "needy", Stage.UPDATED, Stage.SCHEDULED)
    until_update = core_pipeline()[:6]
    assert until_update[-1].name == "insert-update"
    with pytest.raises(
        PassError, match="'needy' takes ordered programs, but this one is not\n  fix:  add a pass that establishes"
    ):
        run_passes(handmade(), [*until_update, needy])
    schedule = core_pipeline()[6]
    with pytest.raises(
        PassError, match=r"'needy' takes ordered programs, .*\n  fix:  run 'schedule-overlap' before it"
    ):
        run_passes(handmade(), [*until_update, needy, schedule])
    assert run_passes(handmade(), [*until_update, schedule, needy]).stage is Stage.SCHEDULED


def test_a_pass_says_nothing_of_itself_but_what_it_must() -> None:
    plain = FunctionPass(lambda program: program)
    assert traits_of(plain) == Traits(latest_input_stage=plain.input_stage)
    assert [stage for stage in Stage if stage.refines] == [Stage.SCHEDULED]


def test_a_pass_takes_later_stages_if_it_says_so() -> None:
    class Lenient(FunctionPass):
        latest_input_stage = Stage.OUTLINED

    def finish(program: Program) -> Program:
        return program.evolve(stage=Stage.REPLICATED, graph=program.shard_graphs[0], shard_graphs=())

    stages = ("custom", Stage.CAPTURED, Stage.REPLICATED)
    pipeline = [PlanBuckets(), OutlineRegions()]
    assert run_passes(handmade(), [*pipeline, Lenient(finish, *stages)]).stage is Stage.REPLICATED
    with pytest.raises(PassError, match=r"'custom' .* is given one at OUTLINED\n  fix:  move it to an earlier place"):
        run_passes(handmade(), [*pipeline, FunctionPass(finish, *stages)])


@pytest.mark.parametrize("remarks", ["hello", ["a"], ("a", 1), None])
def test_remarks_are_a_tuple_of_texts(remarks: object) -> None:
    remarking = FunctionPass(lambda program: program.evolve(remarks=remarks))
    with pytest.raises(
        PassError, match=r"'custom' gave a program whose remarks are .*\n  why:  they must be a tuple of texts"
    ):
        run_passes(handmade(), [remarking])


def test_instruments_are_told_of_a_program_that_a_pass_cannot_take() -> None:
    told: list[object] = []

    class Listens(Instrument):
        def failed(self, compiler_pass: Pass, before: Program, error: Exception) -> None:
            told.append((compiler_pass.name, before.stage, type(error)))

    with pytest.raises(PassError):
        run_passes(handmade(), [Replicate()], [Listens()])
    assert told == [("replicate", Stage.CAPTURED, PassError)]


def test_instruments_are_told_of_a_program_that_one_of_them_refuses() -> None:
    told: list[object] = []

    class Refuses(Instrument):
        def start(self, program: Program) -> None:
            raise VerifyError("no")

        def refused(self, program: Program, error: Exception) -> None:
            told.append((program.stage, str(error)))

    with pytest.raises(VerifyError, match=r"^no$"):
        run_passes(handmade(), [PlanBuckets()], [Refuses()])
    assert told == [(Stage.CAPTURED, "no")]


def test_an_instrument_that_fails_when_told_of_an_error_does_not_hide_it(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Instrument):
        def failed(self, compiler_pass: Pass, before: Program, error: Exception) -> None:
            raise OSError("disk full")

    with pytest.raises(PassError, match="'replicate' takes"):
        run_passes(handmade(), [Replicate()], [Fails()])
    assert "OSError: disk full" in caplog.text


def test_a_pass_that_gives_another_stage_than_it_promises_is_refused() -> None:
    lies = FunctionPass(name="lies", output_stage=Stage.OUTLINED)
    with pytest.raises(PassError, match=r"'lies' gave a CAPTURED program but promises OUTLINED\n  fix:  set the stage"):
        run_passes(handmade(), [lies])


def test_a_pass_that_fails_is_named() -> None:
    def fail(program: Program) -> Program:
        raise KeyError("gone")

    with pytest.raises(PassError, match=r"pass 'custom' failed on a CAPTURED program: KeyError: 'gone'") as caught:
        run_passes(handmade(), [FunctionPass(fail)])
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_setting_that_does_not_suit_the_devices_is_no_fault_of_the_pass() -> None:
    program = run_up_to("schedule-overlap", captured_two_layers(2))
    with pytest.raises(ValueError, match=r"(?s)^MC1104: link='nccl' cannot join cpu:0, cpu:1.*link='shared-memory'"):
        run_passes(program, [LowerCollectives(link="nccl")])


def test_a_pass_may_raise_an_error_of_mirrorc_itself() -> None:
    def fail(program: Program) -> Program:
        raise VerifyError("mine")

    with pytest.raises(VerifyError, match=r"^mine$"):
        run_passes(handmade(), [FunctionPass(fail)])


def test_passes_are_disabled_by_name() -> None:
    selected = select_passes(core_pipeline(), ["schedule-overlap"])
    assert [p.name for p in selected] == [name for name in PASS_NAMES if name != "schedule-overlap"]
    assert run_passes(handmade(), selected).stage is Stage.LOWERED


def test_disabling_an_unknown_pass_names_the_closest_or_the_list() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)disable names 'plan-bucket', .* pipeline\s+fix: +did you mean 'plan-buckets'\?$"
    ):
        select_passes(default_pipeline(), ["plan-bucket"])
    with pytest.raises(
        ValueError, match=r"(?s)disable names 'no-such-pass', .*`mirrorc passes` lists all that there are$"
    ):
        select_passes(default_pipeline(), ["no-such-pass"])


@pytest.mark.parametrize("thing", [print, Replicate, "replicate", None])
def test_what_is_no_pass_is_refused(thing: object) -> None:
    with pytest.raises(TypeError, match=r"is no pass\n  why:  a pass has name, input_stage, output_stage and run"):
        select_passes([thing], [])  # type: ignore[list-item]


@pytest.mark.slow
def test_a_pass_of_ones_own_runs_between_others() -> None:
    seen = []

    def look(program: Program) -> Program:
        seen.append(program.stage)
        return program

    own = FunctionPass(look, input_stage=Stage.UPDATED, output_stage=Stage.UPDATED)
    pipeline, after = core_pipeline(), PASS_NAMES.index("insert-update") + 1
    run_passes(handmade(), select_passes([*pipeline[:after], own, *pipeline[after:]], []))
    assert seen == [Stage.UPDATED]
