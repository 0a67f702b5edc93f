import pytest
from typer.testing import CliRunner

from mirrorc.cli import app
from mirrorc.passes import PASSES
from mirrorc.verifier.rules.rule import rules

run = CliRunner().invoke


def test_passes_are_listed_in_order_with_stages_and_options() -> None:
    lines = run(app, ["passes"]).stdout.splitlines()
    headings = [line for line in lines if not line.startswith(" ")]
    assert [line.partition(":")[0] for line in headings] == [*PASSES]
    assert headings[list(PASSES).index("insert-update")] == "insert-update: REDUCED to UPDATED"
    place = lines.index("plan-buckets: CAPTURED, left out of evaluations")
    assert lines[place + 1 : place + 3] == [
        "    Groups gradients into buckets, in the order of backward.",
        "    options: buckets=ByBytes(cap_mb=25.0, first_mb=1.0), order='ready'",
    ]


def test_a_pass_by_name_shows_its_whole_docstring() -> None:
    done = run(app, ["passes", "plan-buckets"])
    assert done.exit_code == 0 and "The graph does not change::" in done.stdout and "replicate" not in done.stdout


def test_rules_are_listed_with_the_stage_from_which_they_apply() -> None:
    done = run(app, ["rules"])
    assert all(f"{rule.name}: applies {rule.applies}\n    {rule.statement}\n" in done.stdout for rule in rules())
    assert "every_bucket_is_updated_once: applies from UPDATED on\n" in done.stdout
    whole = run(app, ["rules", "every_bucket_is_updated_once"]).stdout
    assert whole.startswith("every_bucket_is_updated_once: ") and "replicas_have" not in whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["passes", "plan-bucket"], "there is no pass 'plan-bucket': did you mean 'plan-buckets'?"),
        (["passes", "nix"], "there is no pass 'nix': mirrorc passes lists them"),
        (
            ["rules", "values_have_types"],
            "there is no rule 'values_have_types': did you mean 'values_have_their_types'?",
        ),
    ],
)
def test_an_unknown_name_gets_the_closest(arguments: list[str], message: str) -> None:
    done = run(app, arguments)
    assert done.exit_code == 2 and done.stderr == f"mirrorc: {message}\n" and done.stdout == ""
