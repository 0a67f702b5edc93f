"""Reports show each device, call and bucket once, tie bars to lines of the program, and can be read back."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_programs import captured_two_layers, sgd_step
from torch import nn
from typer.testing import CliRunner

import mirrorc
from mirrorc.cli import app
from mirrorc.report.page import changes, load_report, predicted_report, read_report, render
from mirrorc.report.picture import picture_of
from mirrorc.report.step_report import StepReport, step_report
from mirrorc.runtime.profiling.accounting import parts_of

VOID = {"meta", "input", "link", "br", "hr", "img"}
LETTERS = "a<b>&'\""


class Page(HTMLParser):
    """The elements of a page; fails where a tag is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def of(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [
            a
            for name, a in self.elements
            if name == tag and all(v in (a.get(k) or "").split() for k, v in wanted.items())
        ]


def step_on(num_devices: int, **options: Any) -> mirrorc.Step:
    torch.manual_seed(0)
    model = type(LETTERS, (nn.Sequential,), {})(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    return sgd_step(model, num_devices, loss_fn=F.mse_loss, **options)


def train(step: mirrorc.Step, times: int = 4, num_examples: int = 9) -> None:
    for _ in range(times):
        step(torch.randn(num_examples, 4), target=torch.randn(num_examples, 1))


@pytest.fixture(scope="module", params=[1, 2, 3])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("reports")
    ring = {"communication": mirrorc.Communication(algorithm="ring", buckets=1e-4)} if request.param == 3 else {}
    with step_on(request.param, **ring) as step:
        train(step)
        path = step.report(folder / "new" / "report.html")
        step.program.save(folder / "program.mirror")
        recorder = step._runs.main.recorder  # type: ignore[union-attr]
        return SimpleNamespace(
            path=path,
            text=path.read_text(encoding="utf-8"),
            report=read_report(path),
            program=step.program,
            steps=recorder.steps(),  # type: ignore[union-attr]
            explanation=step.explain(),
            memory=step.memory(),
            saved=folder / "program.mirror",
        )


def test_every_device_call_and_bucket_is_there(made: SimpleNamespace) -> None:
    page, report = Page(made.text), made.report
    assert [lane.device for lane in report.lanes] == [device.name for device in made.program.devices]
    for replica, lane in enumerate(report.lanes):
        assert f"<b>{lane.device}</b>" in made.text
        assert lane.calls and all(page.of("a", id=f"c{replica}-{i}") for i in range(len(lane.calls)))
    for bucket in made.program.buckets:
        assert len(page.of("tr", id=f"bucket{bucket.index}")) == 1
    assert {flight.bucket for flight in report.flights} == (
        {bucket.index for bucket in made.program.buckets} if len(report.lanes) > 1 else set()
    )
    assert report.commit is not None and report.commit.device in [lane.device for lane in report.lanes]
    assert (f"all wait for {report.commit.device}" in made.text) == (len(report.lanes) > 1)


def test_links_lead_from_bars_to_lines_and_back(made: SimpleNamespace) -> None:
    page = Page(made.text)
    elements = [attributes for _, attributes in page.elements]
    names = [attributes["id"] for attributes in elements if "id" in attributes]
    assert len(names) == len(set(names))
    links = [str(a["href"]) for a in elements if "href" in a]
    assert links and {link[1:] for link in links} <= set(names)
    bars = {a["id"]: a for a in page.of("a") if "bar" in str(a.get("class")).split() and "id" in a}
    calls = [name for name in bars if str(name).startswith("c")]
    assert len(calls) == sum(len(lane.calls) for lane in made.report.lanes)
    assert all(bars[name].get("data-line") for name in calls), "each call has a line"
    lines = made.report.program.text.split("\n")
    back = picture_of(made.report).first_bar
    assert {int(str(bars[name]["data-line"])) for name in calls} == set(back)
    for number, name in back.items():
        assert bars[name]["href"] == f"#L{number}"
    for lane in made.report.lanes:
        for call in lane.calls:
            if call.name.split()[0] in ("commit", "wait", "pack", "update", "send", "fwd_0"):
                line = lines[call.line - 1]
                assert f"{call.name.split()[0]}(" in line, line


def test_a_page_needs_nothing_from_elsewhere_and_escapes_all_text(made: SimpleNamespace) -> None:
    page = Page(made.text)
    assert not re.search(r"https?:|@import|url\((?!#)", made.text)
    assert not [tag for tag, attributes in page.elements if "src" in attributes or tag == "link"]
    assert "<b>&" not in made.text and "a&lt;b&gt;&amp;" in made.text
    assert made.report.facts["model"] == LETTERS


def test_data_are_read_back(made: SimpleNamespace) -> None:
    assert render(made.report) == made.text
    assert made.report.explanation == made.explanation and made.report.program.text == made.program.to_text(fold=False)
    assert made.report.memory == made.memory
    assert made.report.step_ms == pytest.approx(
        sorted((s.ended_ns - s.begun_ns) / 1e6 for s in made.steps if not s.warms_up)[1]
    )


def test_a_bar_is_split_as_explain_splits_the_wait(made: SimpleNamespace) -> None:
    for step in made.steps:
        report = step_report(made.program, step, made.explanation, None, {}, {})
        for replica, lane in enumerate(report.lanes):
            parts = parts_of(made.program, step, replica)
            waits = [call for call in lane.calls if call.part == "transfer"]
            assert sum(call.late_ms for call in waits) == pytest.approx(parts["skew"] / 1e6, abs=1e-6)
            assert all(0 <= call.late_ms <= call.end_ms - call.start_ms + 1e-9 for call in lane.calls)
            bars = [bar for bar in picture_of(report).bars if bar.line]
            assert all(bar.style in ("late", "moving") for bar in bars if bar.text.startswith("wait"))
    assert any(call.num_bytes for lane in made.report.lanes for call in lane.calls)
    most = [device.peak.num_bytes for device in made.memory.devices]
    assert [max(device.within_calls.values()) for device in made.memory.devices] == most


def test_each_message_has_an_arrow_and_a_row_below_the_sums_of_buckets(made: SimpleNamespace) -> None:
    report, page = made.report, Page(made.text)
    messages = [bucket for bucket in made.explanation.buckets if bucket.kind == "send"]
    assert bool(messages) == (len(report.lanes) == 3)
    arrows = picture_of(report).arrows
    assert [arrow for arrow in arrows if report.flights[arrow.flight].kind == "send"] == (arrows if messages else [])
    assert len(page.of("line", **{"class": "arrow"})) == len(arrows) >= len(messages)
    for message, flight in zip(messages, report.flights, strict=bool(messages)):
        (arrival,) = flight.arrivals
        assert (arrival.source, arrival.replica) == (message.source, message.destination)
        assert f"<td>{message.label}</td>" in made.text and flight.label == message.label
    assert all(f"<td>{total.label}</td>" in made.text for total in made.explanation.totals)
    assert ("each message, ms" in made.text) == bool(messages) and "<td>slowest step</td>" in made.text


def test_a_saved_program_has_a_predicted_step(made: SimpleNamespace) -> None:
    report = load_report(made.saved)
    assert report.prediction and len(report.lanes) == made.program.num_replicas and report.step_ms > 0
    assert all(call.line for lane in report.lanes for call in lane.calls)
    page = render(report)
    Page(page)
    assert "This is a prediction" in page and report.explanation is not None
    assert report.explanation.step_ms == pytest.approx(report.step_ms)


def test_a_program_that_is_not_lowered_is_printed_without_times() -> None:
    report = predicted_report(captured_two_layers(), {})
    page = render(report)
    Page(page)
    assert not report.lanes and "a step that has not run" in page and "one_device" in page


def test_two_reports_stand_side_by_side(tmp_path: Path) -> None:
    with step_on(2) as step:
        train(step)
        old = step.report(tmp_path / "old.html")
        same = step.report(tmp_path / "same.html", compare=old).read_text(encoding="utf-8")
    assert "The programs are the same." in same
    with step_on(2, communication=mirrorc.Communication(buckets=1e-4)) as step:
        train(step)
        step.program.save(tmp_path / "program.mirror.gz")
        new = step.report(tmp_path / "new.html", compare=old).read_text(encoding="utf-8")
    Page(new)
    assert "Differences of the program" in new and "buckets" in new and "time/step_ms" in new
    done = CliRunner().invoke(
        app, ["report", str(tmp_path / "program.mirror.gz"), str(tmp_path / "x.html"), "--compare", str(old)]
    )
    assert done.exit_code == 0 and "This is a prediction" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_figures_and_their_differences() -> None:
    rows = list(
        changes({"time/a_ms": 2.0, "x_bytes": 1024.0, "gone": 1.0}, {"time/a_ms": 3.0, "x_bytes": 1024.0, "n": 2.0})
    )
    assert [(row.name, row.before, row.now, row.difference) for row in rows] == [
        ("time/a_ms", "2.000", "3.000", "+1.000 (+50.0%)"),
        ("x_bytes", "1.0 KiB", "1.0 KiB", ""),
        ("n", "-", "2", ""),
        ("gone", "1", "-", ""),
    ]


@pytest.mark.parametrize(
    "text", ["<!doctype html>", '<!doctype html><script type="application/json" id="data">{"format":']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    other = tmp_path / "other.html"
    other.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{other} is not a report")):
        load_report(other)
    done = CliRunner().invoke(app, ["report", str(other), str(tmp_path / "out.html")])
    assert done.exit_code == 2 and "is not a report" in done.stderr and not (tmp_path / "out.html").exists()
    with step_on(1) as step:
        train(step, 1)
        with pytest.raises(ValueError, match="is not a report"):
            step.report(tmp_path / "out.html", compare=other)
    assert not (tmp_path / "out.html").exists()


def test_data_of_an_unknown_field_are_refused(tmp_path: Path) -> None:
    data = {"format": "mirrorc report 1", "report": {"surprise": 1}}
    page = f'<!doctype html><script type="application/json" id="data">{json.dumps(data)}</script>'
    (tmp_path / "a.html").write_text(page)
    with pytest.raises(ValueError, match="is not a report"):
        read_report(tmp_path / "a.html")


def test_figures_for_a_logger() -> None:
    with step_on(2, check_finite="skip") as step:
        before = step.metrics()
        assert before == {"programs/compiled": 0, "programs/recompiled": 0, "steps/run": 0, "steps/skipped": 0}
        train(step, 3)
        figures = step.metrics()
        explanation = step.explain()
        parts = sum(figures[f"time/{part}_ms"] for part in explanation.parts_ms)
        assert parts == pytest.approx(figures["time/step_ms"])
        assert figures["memory/peak_bytes"] == step.memory().total
        assert figures["communication/sent_bytes"] == sum(bucket.num_bytes for bucket in explanation.buckets)
        assert (figures["programs/compiled"], figures["programs/recompiled"], figures["steps/run"]) == (1, 0, 3)
        step(torch.full((9, 4), torch.nan), target=torch.ones(9, 1))
        train(step, 1, num_examples=12)
        figures = step.metrics()
        assert figures["programs/compiled"] == 1 + figures["programs/recompiled"] and figures["steps/skipped"] == 1
        assert figures["steps/run"] == 5
        documented = re.sub(r"``time/PART_ms``", "", mirrorc.Step.metrics.__doc__ or "")
        named = set(re.findall(r"``(\w+/\w+)``", documented)) | {f"time/{part}_ms" for part in explanation.parts_ms}
        assert named == set(figures) and all(type(value) is float for value in figures.values())


def test_notebooks_show_escaped_text(made: SimpleNamespace) -> None:
    for shown in (made.program, made.explanation, made.memory):
        text = shown._repr_html_()
        assert Page(text).elements[0][0] == "details"
        assert "<pre>" in text and text.count("<") == 6


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CLICKS = """<script>
const lit = () => [...document.querySelectorAll(".on")].map((element) => element.id).filter(Boolean);
document.querySelector("#c0-0").dispatchEvent(new MouseEvent("click", {bubbles: true, cancelable: true}));
const byBar = lit();
document.querySelector("#COMMIT > a").click();
document.body.dataset.result = JSON.stringify([byBar, lit(), document.documentElement.scrollWidth, innerWidth]);
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_clicks_in_a_browser_light_bars_and_lines(made: SimpleNamespace, tmp_path: Path) -> None:
    report: StepReport = made.report
    commit = next(call.line for call in report.lanes[0].calls if call.name == "commit")
    page = tmp_path / "page.html"
    page.write_text(made.text.replace("</body>", CLICKS.replace("COMMIT", f"L{commit}")), encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=390,900"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (body,) = Page(done.stdout).of("body")
    by_bar, by_line, width, window = json.loads(str(body["data-result"]))
    assert {"c0-0", f"L{report.lanes[0].calls[0].line}"} <= set(by_bar)
    of_commit = {
        f"c{r}-{i}" for r, lane in enumerate(report.lanes) for i, c in enumerate(lane.calls) if c.line == commit
    }
    assert of_commit and set(by_line) == of_commit | {f"L{commit}"}
    assert width <= window
