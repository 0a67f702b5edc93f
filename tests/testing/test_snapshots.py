import importlib.util
import os
import sys
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion
from tiny_programs import SMALL_BUCKETS, Weight, every_stage, handmade

from mirrorc import Program
from mirrorc.testing import ProgramSnapshot

pytest_plugins = ["pytester"]

SUPPORT = Path(__file__).parents[1] / "support"
TEST_FILE = """
import os
from tiny_programs import SMALL_BUCKETS, Weight, every_stage, handmade

def program(rows=int(os.environ.get("ROWS", 4)), link=os.environ.get("LINK")):
    weights = [Weight("fc1.weight", (rows, 20)), Weight("fc2.weight", (90,))]
    return every_stage(handmade(2, weights), link=link, **SMALL_BUCKETS)["lower-devices"]

def test_a(mirror_snapshot):
    assert program() == mirror_snapshot
"""
SNAPSHOT = Path("__snapshots__", "test_schedule", "test_a.mirror")


def made(rows: int = 4) -> Program:
    weights = [Weight("fc1.weight", (rows, 20)), Weight("fc2.weight", (90,))]
    return every_stage(handmade(2, weights), **SMALL_BUCKETS)["lower-devices"]


class Folder:
    """A folder with a test file, and a way to run pytest in it."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.write(TEST_FILE)

    def write(self, source: str) -> None:
        (self.pytester.path / "test_schedule.py").write_text(source, encoding="utf-8")

    def run(self, *options: str) -> tuple[int, str]:
        result = self.pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:randomly", *options)
        return int(result.ret), result.stdout.str() + result.stderr.str()

    def start(self, *options: str, seed: str = "0") -> tuple[int, str]:
        os.environ["PYTHONHASHSEED"] = seed
        result = self.pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)
        return int(result.ret), result.stdout.str() + result.stderr.str()

    def files(self) -> list[str]:
        """The snapshots that there are, without the folder of this test file."""
        folder = self.pytester.path / "__snapshots__"
        return sorted(path.relative_to(folder / "test_schedule").as_posix() for path in folder.rglob("*.mirror"))

    def text(self) -> str:
        return (self.pytester.path / SNAPSHOT).read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def all_is_imported() -> None:
    """Makes a program: pytester makes Python forget what was first imported under it, and torch cannot be imported twice."""
    made().to_text(regions=True)


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:  # syrupy's workers report nothing
        monkeypatch.delenv(name)
    return Folder(pytester)


@pytest.mark.slow
def test_a_snapshot_that_is_missing_fails_and_says_how_to_make_it(folder: Folder) -> None:
    status, output = folder.run()
    assert status == 1 and folder.files() == []
    assert f"the snapshot {SNAPSHOT} does not exist: write it with pytest --snapshot-update" in output
    assert "b0_pending: pending f32[96]      = reduce_scatter(" in output and "1 snapshot failed" in output


@pytest.mark.slow
def test_updating_writes_the_canonical_text_and_an_equal_program_passes(folder: Folder) -> None:
    status, output = folder.run("--snapshot-update")
    assert status == 0 and "1 snapshot generated" in output
    assert folder.files() == ["test_a.mirror"]
    assert folder.text() == made().to_text(slots=True, sources=False)
    status, output = folder.run()
    assert status == 0 and "1 snapshot passed" in output


@pytest.mark.slow
def test_a_changed_program_fails_by_its_lines_and_can_be_renewed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.run("--snapshot-update")
    monkeypatch.setenv("ROWS", "8")
    monkeypatch.setenv("LINK", "copy")
    monkeypatch.delenv("CI", raising=False)  # where pytest shows long messages in full
    status, output = folder.run()
    assert status == 1
    lines = [line.removeprefix("E").strip() for line in output.splitlines() if line.startswith("E ")]
    assert lines[:3] == [
        f"AssertionError: the program is not as in the snapshot {SNAPSHOT}; if it should be, renew that with pytest "
        "--snapshot-update.",
        "",
        "--- old",
    ]
    assert any(line.endswith(" @@ bucket 1") for line in lines) and any("link=copy" in line for line in lines)
    assert "-#     fc1.weight[4, 20]" in lines and "+#     fc1.weight[8, 20]" in lines
    assert "use '-vv' to show" not in output and "snapshots.py" not in output and "torch.__trace" not in output
    assert folder.text() == made().to_text(slots=True, sources=False)
    status, output = folder.run("--snapshot-update")
    assert status == 0 and "1 snapshot updated" in output
    assert "fc1.weight[8, 20]" in folder.text() and folder.run()[0] == 0


@pytest.mark.slow
def test_processes_with_other_hashes_and_other_ways_of_importing_agree(folder: Folder) -> None:
    assert folder.run("--snapshot-update")[0] == 0
    written = folder.text()
    for seed, mode in (("2", "importlib"), ("3", "append")):
        status, output = folder.start(f"--import-mode={mode}", seed=seed)
        assert status == 0 and "1 snapshot passed" in output, output
    assert folder.text() == written


@pytest.mark.slow
def test_workers_of_xdist_agree_and_write(folder: Folder) -> None:
    pytest.importorskip("xdist")
    folder.write(TEST_FILE + "\ndef test_b(mirror_snapshot):\n    assert program(8) == mirror_snapshot\n")
    status, output = folder.start("-n", "2", "--snapshot-update")
    assert status == 0 and "2 snapshots generated" in output, output
    assert folder.files() == ["test_a.mirror", "test_b.mirror"]
    status, output = folder.start("-n", "2", "--import-mode=importlib")
    assert status == 0 and "2 snapshots passed" in output, output


@pytest.mark.slow
def test_snapshots_that_no_test_uses_are_reported_and_removed(folder: Folder) -> None:
    folder.write(TEST_FILE + "\ndef test_b(mirror_snapshot):\n    assert program() == mirror_snapshot(name='twin')\n")
    folder.run("--snapshot-update")
    assert folder.files() == ["test_a.mirror", "test_b[twin].mirror"]
    folder.write(TEST_FILE)
    status, output = folder.run("--snapshot-details")
    assert status == 1 and "1 snapshot unused" in output and "test_b[twin]" in output, output
    status, output = folder.run("--snapshot-update")
    assert status == 0 and "1 unused snapshot deleted" in output and folder.files() == ["test_a.mirror"]


SEVERAL = """
def test_several(mirror_snapshot):
    assert program() == mirror_snapshot
    assert program(8) == mirror_snapshot
    assert program() == mirror_snapshot(regions=True)
    assert program(8) == mirror_snapshot(name="eight rows")
    assert mirror_snapshot == program(12)
    assert mirror_snapshot(name="both", regions=True) == program(12)
"""


@pytest.mark.slow
def test_a_test_may_have_several_snapshots_by_name_or_number_and_with_bodies_of_regions(folder: Folder) -> None:
    folder.write(TEST_FILE + SEVERAL)
    assert folder.run("--snapshot-update")[0] == 0
    names = ["", ".1", ".2", ".4", "[both]", "[eight rows]"]
    assert folder.files() == sorted(["test_a.mirror", *(f"test_several{name}.mirror" for name in names)])
    directory = folder.pytester.path / SNAPSHOT.parent
    texts = {name: (directory / f"test_several{name}.mirror").read_text(encoding="utf-8") for name in names}
    assert texts[""] == made().to_text(slots=True, sources=False) and "fc1.weight[8, 20]" in texts[".1"]
    assert texts[".2"] == made().to_text(slots=True, sources=False, regions=True)
    assert texts["[eight rows]"] == texts[".1"]
    assert texts["[both]"].startswith(texts[".4"].split("\n\n")[0]) and "\nregion fwd_0(" in texts["[both]"]
    status, output = folder.run()
    assert status == 0 and "7 snapshots passed" in output


OTHERS = """
import pytest
from tiny_programs import TwoLayers
import torch
import mirrorc

def test_step(mirror_snapshot):
    model = TwoLayers()
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss_fn": torch.nn.functional.cross_entropy}
    step = mirrorc.compile(model, 2, compiler=mirrorc.Compiler(backend="eager"), **options)
    with pytest.raises(TypeError, match="is compared with a Step: compare step.program"):
        step == mirror_snapshot

@pytest.mark.parametrize("wrong", [None, 3, "text", b"text", [1]])
def test_others(mirror_snapshot, wrong):
    with pytest.raises(TypeError, match=f"is compared with a {type(wrong).__name__}: compare a Program, such as step.program"):
        assert wrong == mirror_snapshot
    with pytest.raises(TypeError):
        assert wrong != mirror_snapshot
    with pytest.raises(TypeError, match="name is 3: give the snapshot's name, a string"):
        mirror_snapshot(name=3)

def test_unequal(mirror_snapshot):
    assert program(8) != mirror_snapshot(name="four")
    assert not program(4) != mirror_snapshot(name="four")

@pytest.mark.xfail(strict=True, raises=AssertionError)
def test_expected_to_differ(mirror_snapshot):
    assert program(8) == mirror_snapshot(name="four")
"""


@pytest.mark.slow
def test_what_is_no_program_is_a_type_error_and_unequal_programs_are_unequal(folder: Folder) -> None:
    folder.write(TEST_FILE + OTHERS)
    directory = folder.pytester.path / SNAPSHOT.parent
    directory.mkdir(parents=True)
    text = made(4).to_text(slots=True, sources=False)
    for name in ("test_a", "test_unequal[four]", "test_expected_to_differ[four]"):
        (directory / f"{name}.mirror").write_text(text, encoding="utf-8")
    status, output = folder.run("-rA")
    assert status == 0 and "8 passed, 1 xfailed" in output, output


@pytest.mark.slow
def test_a_snapshot_that_somebody_has_edited_is_compared_line_by_line(folder: Folder) -> None:
    folder.run("--snapshot-update")
    path = folder.pytester.path / SNAPSHOT
    path.write_text("<<<<<<< HEAD\n" + folder.text(), encoding="utf-8")
    status, output = folder.run()
    assert status == 1 and "E       -<<<<<<< HEAD" in output
    assert "the old text cannot be compared: line 1 is '<<<<<<< HEAD'" in output


def test_without_syrupy_the_fixture_says_what_to_install(folder: Folder) -> None:
    folder.write(TEST_FILE + "\ndef test_without():\n    pass\n")
    status, output = folder.run("-p", "no:syrupy")
    assert status == 1 and "1 passed, 1 error" in output
    assert "pip install 'mirrorc[testing]'" in output and "Traceback" not in output


HIDDEN = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "syrupy":
            raise ModuleNotFoundError("No module named 'syrupy'", name="syrupy")

sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.slow
def test_check_does_without_syrupy(folder: Folder) -> None:
    source = HIDDEN + "from mirrorc.testing import check\ncheck('alpha', 'CHECK: alpha')\n"
    source += "try:\n    from mirrorc.testing import ProgramSnapshot\nexcept ImportError as error:\n    print(error)\n"
    result = folder.pytester.run(sys.executable, "-c", source)
    assert result.ret == 0, result.stderr.str()
    assert "ProgramSnapshot needs syrupy, which is not installed: pip install 'mirrorc[testing]'" in result.stdout.str()


@pytest.mark.slow
def test_pytest_brings_neither_torch_nor_mirrorc_along(folder: Folder) -> None:
    folder.write(
        "import sys\n\ndef test_nothing(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.hasplugin('mirrorc')\n"
        "    assert not {'torch', 'mirrorc', 'mirrorc.testing'} & set(sys.modules)\n"
    )
    assert folder.start()[0] == 0
    source = HIDDEN + "import mirrorc_pytest\nassert not {'torch', 'mirrorc', 'syrupy'} & set(sys.modules)\n"
    assert folder.pytester.run(sys.executable, "-c", source).ret == 0
    assert importlib.util.find_spec("mirrorc_pytest") is not None


def test_a_snapshot_fixture_of_another_plugin_is_refused(folder: Folder) -> None:
    folder.pytester.makeconftest("import pytest\n\n@pytest.fixture\ndef snapshot():\n    return 3\n")
    status, output = folder.run()
    assert status == 1 and "the fixture 'snapshot' gives a int, not syrupy's" in output


@pytest.mark.slow
def test_a_snapshot_fixture_with_another_extension_will_do(folder: Folder) -> None:
    folder.pytester.makeconftest(
        "import pytest\nfrom syrupy.extensions.json import JSONSnapshotExtension\n\n@pytest.fixture\ndef snapshot(snapshot):\n"
        "    return snapshot.use_extension(JSONSnapshotExtension)\n"
    )
    assert folder.run("--snapshot-update")[0] == 0 and folder.files() == ["test_a.mirror"] and folder.run()[0] == 0


def test_what_the_fixture_gives(mirror_snapshot: ProgramSnapshot, snapshot: SnapshotAssertion) -> None:
    assert isinstance(mirror_snapshot, ProgramSnapshot) and repr(mirror_snapshot) == "mirror_snapshot"
    assert repr(mirror_snapshot(name="twin")) == "mirror_snapshot(name='twin')"
    assert isinstance(snapshot, SnapshotAssertion)
    with pytest.raises(TypeError, match="unhashable"):
        hash(mirror_snapshot)
