import io
import subprocess
import sys

from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.token import Keyword, Name, String
from tiny_programs import SMALL_BUCKETS, captured_two_layers, run_up_to

from mirrorc.printing.colors import MirrorLexer, colored, print_colored


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colors_leave_the_text_alone() -> None:
    program = run_up_to("lower-devices", captured_two_layers(), **SMALL_BUCKETS)
    for text in (program.to_text(regions=True), str(program)):
        assert colored(text).plain == text
    assert program.__rich__().plain == str(program)


def test_what_is_colored() -> None:
    text = colored("    b0_pending: pending f32[8] = all_reduce(bucket=0, b0)  # all_reduce(\n")
    spans = {(text.plain[span.start : span.end], str(span.style)) for span in text.spans}
    assert {"all_reduce", "pending f32[8]", "# all_reduce("} <= {part for part, _ in spans}
    assert len({style for _, style in spans}) >= 3


def test_pygments_finds_the_lexer_without_torch() -> None:
    code = "import sys, mirrorc.printing.colors; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert isinstance(get_lexer_for_filename("program.mirror"), MirrorLexer)
    text = run_up_to("lower-devices", captured_two_layers(), **SMALL_BUCKETS).to_text(complete=True)
    tokens = list(get_lexer_by_name("mirror", stripnl=False, ensurenl=False).get_tokens(text))
    assert "".join(part for _, part in tokens) == text and {Keyword, Name.Exception, String} <= {
        kind for kind, _ in tokens
    }


def test_a_terminal_gets_colors_and_a_file_does_not(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        print_colored("def cpu_0(x: f32[2]):  # replica 0\n", stream)
    assert "\x1b[" in terminal.getvalue() and file.getvalue() == "def cpu_0(x: f32[2]):  # replica 0\n"
