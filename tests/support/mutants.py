"""Changes valid programs in every way of `mutations`, and counts what the verifier makes of it.

    python tests/support/mutants.py                         # all models and handmade programs: half an hour
    python tests/support/mutants.py --only handmade pairs   # sources whose names contain one of these words
    python tests/support/mutants.py --every-program         # so often in the program after every pass, not in some: hours
    python tests/support/mutants.py --every-program --places 0   # and at every place, not a sample of them
    python tests/support/mutants.py --jobs 1                # in one process; otherwise one for each core

A kind that breaks programs must be refused, by a `VerifyError` and not by an accident, wherever it applies; a harmless one
must be accepted. Exits with 1 where that is not so.
"""

import argparse
import math
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import islice

from mutations import KINDS, Kind
from mutations.meaning import meaning
from mutations.places import copied_program
from mutations.programs import Source, Subject, handmade_sources, model_sources
from tiny_models import MODELS

from mirrorc.errors import VerifyError
from mirrorc.ir.program import Program
from mirrorc.verifier.verifier import Verify

HANDMADE = "handmade"  # the part of all programs that no model is captured for
_SHARES = 4  # of the handmade ones, each examined by a process
_PLACES = 3  # of a kind in the programs of a source, or in each of them, unless told


@dataclass
class Tally:
    """What became of the mutants of a kind.

    Attributes:
        wrong: those that were accepted and break programs, or were refused and do not: subject, place, what was said.
        crashed: those at which a rule failed: no `VerifyError` names it, the node and the remedy.
    """

    mutants: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)


@dataclass
class Report:
    tallies: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in KINDS})
    valid: int = 0

    @property
    def wrong(self) -> list[str]:
        return [line for tally in self.tallies.values() for line in (*tally.wrong, *tally.crashed)]

    def add(self, other: "Report") -> None:
        self.valid += other.valid
        for name, tally in self.tallies.items():
            more = other.tallies[name]
            tally.mutants += more.mutants
            tally.rules.update(more.rules)
            tally.wrong += more.wrong
            tally.crashed += more.crashed


class Examiner:
    """Shows mutants of a valid program to the verifier, as the pass manager would after the pass that made it."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._meaning = meaning(subject.program)
        self._begin()
        self._verify(subject.program)
        self._begin()

    def _begin(self) -> None:
        self._verifier = Verify()
        self._verifier.start(self.subject.before)

    def _verify(self, program: Program) -> None:
        self._verifier.after_pass(self.subject.made_by, self.subject.before, program, 0.0)

    def refusals(self, kind: Kind) -> Iterator[tuple[str, str]]:
        """The rule and the reason of the mutant of each place, in order."""
        for place in range(sum(1 for _ in kind.places(self.subject.program))):
            yield self._refusal(self._mutant(kind, place))

    def _mutant(self, kind: Kind, place: int) -> Program:
        mutant = copied_program(self.subject.program, kind.in_regions)
        changed = next(islice(kind.places(mutant), place, None))()
        return changed if isinstance(changed, Program) else mutant

    def examine(self, kind: Kind, place: int, tally: Tally) -> None:
        mutant = self._mutant(kind, place)
        means_the_same = self._means_the_same(mutant) if kind.is_judged or kind.is_harmless else False
        if kind.is_judged and means_the_same:
            return
        assert means_the_same == kind.is_harmless, (
            f"{kind.name} at place {place} of {self.subject}: what it says is wrong"
        )
        tally.mutants += 1
        rule, said = self._refusal(mutant)
        where = f"{self.subject}, place {place}"
        if said and not rule:
            tally.crashed.append(f"{where}: {said}")
            return
        tally.rules.update([rule] if rule else [])
        if bool(rule) == kind.is_harmless:
            tally.wrong.append(f"{where}: refused by {rule}: {said}" if rule else f"{where}: accepted")

    def _means_the_same(self, mutant: Program) -> bool:
        try:
            return meaning(mutant) == self._meaning
        except (KeyError, IndexError, ValueError):  # it calls or names what is not there
            return False

    def _refusal(self, mutant: Program) -> tuple[str, str]:
        """The rule that a mutant is said to break, and what is said of it; of a rule that fails, its error; else nothing."""
        try:
            self._verify(mutant)
        except VerifyError as error:
            found = re.search(r"breaks the rule (\w+) [\w ]+\n.*?  why:  (.*?)\. The rule: ", str(error), re.DOTALL)
            assert found is not None, error
            return found[1], found[2]
        except Exception as error:  # noqa: BLE001 - counted, and said
            return "", f"{type(error).__name__}: {error}"
        self._begin()  # it has noted the mutant's regions
        return "", ""


def sampled(count: int, limit: int, turn: int) -> Sequence[int]:
    """So many places of ``count``, spread evenly; others in each turn. All of them if there is no limit."""
    if not limit or count <= limit:
        return range(count)
    return sorted({(i * count // limit + turn * 7) % count for i in range(limit)})


def examine(subjects: Iterable[Subject], kinds: Iterable[Kind], limit: int, report: Report) -> None:
    for turn, subject in enumerate(subjects):
        examiner = Examiner(subject)
        report.valid += 1
        for kind in kinds:
            for place in sampled(sum(1 for _ in kind.places(subject.program)), limit, turn):
                examiner.examine(kind, place, report.tallies[kind.name])


def examine_some(subjects: Sequence[Subject], kinds: Iterable[Kind], quota: int, report: Report, turn: int = 0) -> None:
    """Tries each kind in so many of these programs, at a place each; kinds begin at different programs, others in each turn."""
    examiners: dict[int, Examiner] = {}
    for i, kind in enumerate(kinds, turn * 3):
        tally, wanted = report.tallies[kind.name], report.tallies[kind.name].mutants + quota
        for number in _scattered(len(subjects), i):
            count = sum(1 for _ in kind.places(subjects[number].program)) if tally.mutants < wanted else 0
            if count:
                if number not in examiners:
                    examiners[number] = Examiner(subjects[number])
                examiners[number].examine(kind, (i + number) * 11 % count, tally)
    report.valid += len(examiners)


def _scattered(count: int, begin: int) -> list[int]:
    """All numbers below ``count``, in an order that jumps about."""
    step = next(step for step in range(max(2, count * 3 // 8), count + 2) if math.gcd(step, count) == 1)
    return [(begin * 7 + i * step) % count for i in range(count)]


def _rows(report: Report, is_harmless: bool) -> Iterator[str]:
    right, wrong = ("accepted", "refused") if is_harmless else ("caught", "missed")
    width = max(len(kind.name) for kind in KINDS.values())
    yield f"{'kind':<{width}}  {'mutants':>8} {right:>8} {wrong:>8} {'crashed':>8}  what it is"
    for kind in KINDS.values():
        tally = report.tallies[kind.name]
        if kind.is_harmless is is_harmless and tally.mutants:
            numbers = [tally.mutants, _right(tally), len(tally.wrong), len(tally.crashed)]
            yield f"{kind.name:<{width}}  {' '.join(f'{number:>8}' for number in numbers)}  {kind.description}"
            rules = ", ".join(f"{rule} {count}" for rule, count in tally.rules.most_common())
            if rules and not is_harmless:
                yield f"{'':<{width}}  {'':>35}  caught by {rules}"


def _right(tally: Tally) -> int:
    return tally.mutants - len(tally.wrong) - len(tally.crashed)


def table(report: Report, examples: int = 3) -> str:
    lines = ["Mutations that break a program", *_rows(report, False), "", "Mutations that keep its meaning"]
    lines += _rows(report, True)
    for name, tally in report.tallies.items():
        for what, found in (("wrong", tally.wrong), ("crashed", tally.crashed)):
            if found:
                lines += ["", f"{name}: {len(found)} {what}, such as", *(f"    {line}" for line in found[:examples])]
    lines += ["", f"{report.valid} valid programs accepted"]
    for is_harmless in (False, True):
        tallies = [t for name, t in report.tallies.items() if KINDS[name].is_harmless is is_harmless and t.mutants]
        right, wrong = ("accepted", "falsely refused") if is_harmless else ("caught", "missed")
        lines.append(
            f"{sum(t.mutants for t in tallies)} mutants of {len(tallies)} kinds that "
            f"{'keep the meaning' if is_harmless else 'break'}: {sum(_right(t) for t in tallies)} {right}, "
            f"{sum(len(t.wrong) for t in tallies)} {wrong}, {sum(len(t.crashed) for t in tallies)} crashed a rule"
        )
    return "\n".join(lines)


def _sources(part: str, share: int, words: Sequence[str]) -> Iterator[Source]:
    """A share of the handmade programs, or all of a model, whose names contain one of these words."""
    is_handmade = part == HANDMADE
    for source in islice(handmade_sources(), share, None, _SHARES) if is_handmade else model_sources(part):
        name = f"{HANDMADE} {source.name}" if is_handmade else f"model {source.name}"
        if not words or any(word in name for word in words):
            yield source


def _examined(
    part: str, share: int, words: Sequence[str], kinds: Sequence[str], limit: int, in_every_program: bool
) -> Report:
    """The report on a share of a part of all programs; runs in a process of its own."""
    warnings.simplefilter("ignore")
    report, found = Report(), [KINDS[name] for name in kinds]
    for turn, source in enumerate(_sources(part, share, words)):
        if in_every_program:
            examine(source.subjects(), found, limit, report)
        else:
            examine_some(list(source.subjects()), found, limit, report, turn)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--places", type=int, default=_PLACES, help="places of a kind in the programs of a source")
    parser.add_argument(
        "--every-program", action="store_true", help="so many places in the program after every pass; 0 places for all"
    )
    parser.add_argument("--only", nargs="+", default=(), help="words, one of which the name of a program contains")
    parser.add_argument("--kinds", nargs="+", default=(), help="words, one of which the name of a kind contains")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    if not options.places and not options.every_program:
        parser.error("--places 0 goes with --every-program")
    kinds = [name for name in KINDS if not options.kinds or any(word in name for word in options.kinds)]
    report, started = Report(), time.perf_counter()
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        shares = [*((HANDMADE, share) for share in range(_SHARES)), *((model, 0) for model in MODELS)]
        given = options.only, kinds, options.places, options.every_program
        parts = {pool.submit(_examined, *share, *given): share[0] for share in shares}
        for future in as_completed(parts):
            report.add(future.result())
            done = sum(tally.mutants for tally in report.tallies.values())
            sys.stderr.write(f"{time.perf_counter() - started:6.0f} s  {parts[future]}: {done} mutants so far\n")
            sys.stderr.writelines(f"    {line}\n" for line in future.result().wrong)
    sys.stdout.write(table(report) + "\n")
    return int(bool(report.wrong))


if __name__ == "__main__":
    sys.exit(main())
