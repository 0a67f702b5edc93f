"""The verifier refuses what breaks a program and accepts what does not; `mutants.py` tries far more of it."""

from collections.abc import Iterator

import pytest
from mutants import Examiner, Report, Tally, examine_some, sampled, table
from mutations import KINDS
from mutations.programs import handmade_sources, model_sources
from selections import exhaustive, slow

from mirrorc.verifier import verifier

MODEL_QUOTA = 1  # mutants of a kind of each model
SMALL_MODEL, LARGE_MODELS = "mlp", ("conv", "resnet", "gpt2", "bert", "vit")


def examine_model(name: str, number: int, report: Report) -> None:
    sources = list(model_sources(name))
    chosen = [sources[number % 2], sources[3 - number % 2]]
    examine_some([s for source in chosen for s in source.subjects()], KINDS.values(), MODEL_QUOTA, report)


def assert_told_apart(report: Report) -> None:
    assert not report.wrong, "\n" + table(report)
    assert f"{report.valid} valid programs accepted" in table(report)


@pytest.mark.slow
@pytest.mark.parametrize(("num_devices", "quota"), [((2,), 1), *slow(((2, 3), 2))], ids=str)
def test_what_breaks_a_program_is_refused_and_what_keeps_its_meaning_is_accepted(
    num_devices: tuple[int, ...], quota: int
) -> None:
    report = Report()
    subjects = [subject for source in handmade_sources(num_devices) for subject in source.subjects()]
    examine_some(subjects, KINDS.values(), quota, report)
    examine_model(SMALL_MODEL, 0, report)
    assert_told_apart(report)
    assert all(tally.mutants for tally in report.tallies.values())
    assert report.valid >= 75 * quota
    assert sum(kind.is_harmless for kind in KINDS.values()) >= 12
    assert sum(not kind.is_harmless for kind in KINDS.values()) >= 12


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*slow(("conv",), ("bert",)), *exhaustive(("resnet",), ("gpt2",), ("vit",))])
def test_mutants_of_large_models_are_told_apart_too(name: str) -> None:
    report = Report()
    examine_model(name, LARGE_MODELS.index(name), report)
    assert_told_apart(report)
    if name == "bert":  # which has regions that write into several slots
        assert report.tallies["write into each others slots"].mutants


def _texts(subject: object) -> Iterator[str]:
    program = subject.program  # type: ignore[attr-defined]
    for graph in (*program.graphs(), *(region.graph_module.graph for region in program.regions.values())):
        yield "\n".join(
            f"{node.name} {node.target} {node.args} {node.kwargs} {node.meta.get('val')}" for node in graph.nodes
        )
    yield str(program.buckets)


@pytest.mark.slow
def test_mutants_are_copies() -> None:
    subjects = list(next(handmade_sources()).subjects())
    before = [list(_texts(subject)) for subject in subjects]
    examine_some(subjects, KINDS.values(), 3, Report())
    assert [list(_texts(subject)) for subject in subjects] == before


def test_a_verifier_that_accepts_all_misses_all(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = list(next(handmade_sources()).subjects())[-1]
    examiner = Examiner(subject)
    monkeypatch.setattr(verifier, "verify", lambda *args, **kwargs: None)
    tally = Tally()
    examiner.examine(KINDS["drop a wait"], 0, tally)
    assert (tally.mutants, len(tally.wrong), tally.crashed) == (1, 1, [])
    assert tally.wrong[0].endswith("after lower-devices, place 0: accepted")


def test_a_rule_that_fails_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise IndexError("list index out of range")

    subject = list(next(handmade_sources()).subjects())[-1]
    examiner = Examiner(subject)
    monkeypatch.setattr(verifier, "verify", fail)
    tally = Tally()
    examiner.examine(KINDS["drop a wait"], 0, tally)
    assert (tally.mutants, tally.wrong, len(tally.crashed)) == (1, [], 1)


@pytest.mark.slow
def test_places_are_sampled_evenly_and_others_each_turn() -> None:
    assert list(sampled(3, 5, turn=1)) == [0, 1, 2] and list(sampled(4, 0, turn=1)) == [0, 1, 2, 3]
    chosen = [list(sampled(100, 4, turn)) for turn in range(5)]
    assert all(len(places) == 4 and 0 <= min(places) <= max(places) < 100 for places in chosen)
    assert len({tuple(places) for places in chosen}) == 5
