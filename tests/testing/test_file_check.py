import random

import pytest
import torch
from tiny_programs import SMALL_BUCKETS, TwoLayers, handmade, run_up_to, sgd_step
from torch.testing import FileCheck

from mirrorc import Program
from mirrorc.testing import check

TEXT = """\
# mirrorc · stage LOWERED
alpha   beta
    gamma   delta
update(0)
update(1)
    end ☃ größe
return loss
"""


@pytest.fixture(scope="module")
def program() -> Program:
    return run_up_to("lower-devices", handmade(2), **SMALL_BUCKETS)


PASSES = {
    "in order": "CHECK: alpha\nCHECK: gamma\nCHECK: return",
    "indented, with and without a sign": "\n    # CHECK: alpha\n  CHECK: gamma\n\t#CHECK: return\n",
    "comments": "# the first line\nCHECK: alpha\n# CHECKED by hand\n\n# and so on",
    "blanks count as one": "CHECK:   alpha beta\nCHECK:gamma      delta  ",
    "same": "CHECK: alpha\nCHECK-SAME: beta",
    "next": "CHECK: alpha\nCHECK-NEXT: delta\nCHECK-NEXT: update",
    "not": "CHECK: alpha\nCHECK-NOT: end\nCHECK: update(1)\nCHECK-NOT: gamma",
    "count": "CHECK-COUNT-2: update(\nCHECK: end",
    "at least": "CHECK-COUNT-1: update(\nCHECK: update(1)",
    "exactly": "CHECK-COUNT-EXACTLY-2: update(",
    "in any order": "CHECK-DAG: return\nCHECK-DAG: alpha\nCHECK-DAG: gamma",
    "beyond ASCII": "CHECK: mirrorc · stage\nCHECK: ☃\nCHECK-SAME: größe",
}


@pytest.mark.parametrize("name", PASSES)
def test_what_is_as_checked_passes(name: str) -> None:
    check(TEXT, PASSES[name])


FAILURES = {
    "CHECK: zeta": (0, "CHECK: zeta", "'zeta' is not there", "sought from the beginning", 1),
    "CHECK: gamma\nCHECK: alpha": (1, "CHECK: alpha", "'alpha' is not there", "line 3, up to which 'CHECK: gamma'", 3),
    "CHECK: alpha\nCHECK-SAME: delta": (1, "CHECK-SAME: delta", "not there in the rest of the line", "from line 2", 2),
    "CHECK: alpha\nCHECK-NEXT: update(1)": (1, "CHECK-NEXT: update(1)", "not there in the next line", "from line 2", 2),
    "CHECK: alpha\nCHECK-NOT: x\nCHECK-NOT: update(1)\nCHECK: return": (
        2,
        "CHECK-NOT: update(1)",
        "is there",
        "from line 2",
        2,
    ),
    "CHECK: alpha\nCHECK-NOT: return": (1, "CHECK-NOT: return", "'return' is there", "from line 2", 2),
    "CHECK-COUNT-3: update(": (0, "CHECK-COUNT-3: update(", "is not there 3 times", "from the beginning", 1),
    "CHECK-COUNT-EXACTLY-1: update(": (0, "CHECK-COUNT-EXACTLY-1: update(", "is there once more", "from line 4", 4),
    "CHECK: alpha\nCHECK-DAG: return\nCHECK-DAG: zeta": (2, "CHECK-DAG: zeta", "'zeta' is not there", "from line 2", 2),
    "CHECK: ☃\nCHECK: ☃": (1, "CHECK: ☃", "'☃' is not there", "from line 6", 6),
}


@pytest.mark.parametrize("directives", FAILURES)
def test_a_failure_shows_the_directive_and_the_text_from_where_it_was_sought(directives: str) -> None:
    place, line, reason, where, first = FAILURES[directives]
    with pytest.raises(AssertionError) as caught:
        check(TEXT, directives)
    head, sought, _, *shown = str(caught.value).splitlines()
    assert head == f"the program is not as line {place + 1} of the check says, {line!r}: {head.split(': ', 2)[-1]}"
    assert reason in head and where in sought
    assert [text.split(" | ", 1)[1] for text in shown] == TEXT.splitlines()[first - 1 :]
    assert shown[0].split(" | ")[0].strip(" >") == str(first)


def test_what_must_not_be_there_is_marked() -> None:
    with pytest.raises(AssertionError) as caught:
        check(TEXT, "CHECK: alpha\nCHECK-NOT: gamma delta")
    assert [line for line in str(caught.value).splitlines() if line.startswith(">")] == [">     3 |     gamma   delta"]


def test_a_long_text_is_shown_in_part() -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    with pytest.raises(AssertionError) as caught:
        check(text, "CHECK: line 500\nCHECK: no such")
    lines = str(caught.value).splitlines()
    assert lines[3] == "    501 | line 500" and lines[-1] == "... and 460 more lines" and len(lines) == 44


@pytest.mark.parametrize(
    ("directives", "message"),
    [
        ("", "has no directive, so nothing could fail"),
        ("\n# a comment\n", "has no directive"),
        (
            "CHECK: a\nbwd_0(",
            r"line 2 of the check, 'bwd_0\(', is no directive\n  fix:  begin it with one of CHECK:, CHECK-SAME:",
        ),
        ("CHEKC: a", "is no directive"),
        ("CHECK-NXT: a", "'CHECK-NXT: a', is no directive that is known: there are CHECK:"),
        ("CHECK a", "is no directive that is known"),
        ("CHECK-COUNT: a", "is no directive that is known"),
        ("CHECK-COUNT-0: a", "is no directive that is known"),
        ("CHECK-NOT-2: a", "is no directive that is known"),
        ("# CHECK-NEXT:", "'CHECK-NEXT:', seeks nothing: write what is sought after the colon"),
    ],
)
def test_a_check_that_says_nothing_is_refused(directives: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(TEXT, directives)


@pytest.mark.slow
def test_a_program_a_step_and_a_text_can_be_checked(program: Program) -> None:
    directives = """
        CHECK: #     fc2.weight[3]
        CHECK: b0: f32[16] = pack(bucket=0
        CHECK-NEXT: b0_pending: pending f32[16] = all_reduce(
        CHECK-SAME: link=shared-memory
        CHECK: return loss
    """
    check(program, directives)
    check(program.to_text(slots=True), directives)
    with pytest.raises(AssertionError, match=r"CHECK: b0: f32"):
        check(program.to_text().replace("b0: f32", "b0: f16"), directives)
    model = TwoLayers()
    loss_fn = torch.nn.functional.cross_entropy
    with sgd_step(model, 2, loss_fn=loss_fn) as step:
        step.prepare(torch.zeros(4, 4), target=torch.zeros(4, dtype=torch.int64))
        check(step, "CHECK: SGD group 0\nCHECK: reduce_scatter(\nCHECK: return loss")
    for wrong in (model, None, 3):
        with pytest.raises(
            TypeError, match=f"a {type(wrong).__name__} cannot be checked: give a Program, a Step, or a text"
        ):
            check(wrong, "CHECK: a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="directives is a list"):
        check(TEXT, ["CHECK: alpha"])  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_holds_and_what_does_not_is_what_file_check_says() -> None:
    kinds = ("", "-SAME", "-NEXT", "-NOT", "-DAG", "-COUNT-2", "-COUNT-EXACTLY-2")
    draw = random.Random(0)
    outcomes = {True: 0, False: 0}
    for _ in range(3000):
        text = "".join(" ".join(draw.choices("abc", k=draw.randint(1, 3))) + "\n" for _ in range(draw.randint(1, 6)))
        directives = "\n".join(f"# CHECK{draw.choice(kinds)}: {draw.choice('abc')}" for _ in range(draw.randint(1, 5)))
        outcome = holds(text, directives)
        outcomes[outcome] += 1
        if outcome:
            check(text, directives)
        else:
            with pytest.raises(AssertionError, match="the program is not as line"):
                check(text, directives)
    assert min(outcomes.values()) > 300


def holds(text: str, directives: str) -> bool:
    try:
        FileCheck().run(directives, text)
    except RuntimeError:
        return False
    return True
