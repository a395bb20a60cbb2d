"""The line that a terminal shows while a command is silent."""

import io
import json
import sys
import threading
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest
from tests.programs import run_python

from lightrft.reporting import start_bar as module
from lightrft.reporting.start_bar import end_start_bar, start_bar, start_text

ERASE = "\r\x1b[2K"
RECORDER = Path(__file__).parents[2] / "docs" / "record.py"


class Terminal(io.StringIO):
    """Notes when something was written that has a given text."""

    def __init__(self):
        super().__init__()
        self.waits = {}

    def isatty(self):
        return True

    def write(self, text):
        for wanted, event in list(self.waits.items()):
            if wanted in text:
                event.set()
        return super().write(text)

    def await_text(self, text):
        event = self.waits.setdefault(text, threading.Event())
        assert event.wait(30), f"{text!r} was not written: {self.getvalue()!r}"


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 0.01)
    return Terminal()


@contextmanager
def bar_on(terminal):
    """The bar on this terminal; pytest sets the standard streams anew before each test."""
    with redirect_stdout(terminal):
        with start_bar("lightrft try"):
            yield
        assert sys.stdout is terminal


def test_silence_has_a_line_that_goes_when_something_is_written(terminal):
    with bar_on(terminal):
        terminal.await_text("lightrft try  ")
        start_text("reading")
        terminal.await_text("reading  ")
        print("a result")
        assert terminal.getvalue().rsplit(ERASE, 1)[1] == "a result\n"
        terminal.waits.clear()
        terminal.await_text("reading  ")  # below what was written
    assert terminal.getvalue().endswith(ERASE)


def require_silent(terminal):
    before = terminal.getvalue()
    threading.Event().wait(0.1)
    assert terminal.getvalue() == before


def test_a_line_that_is_not_ended_is_not_written_over(terminal):
    with bar_on(terminal):
        terminal.await_text("lightrft try")
        print("half a line", end="")
        require_silent(terminal)
        print()
        terminal.waits.clear()
        terminal.await_text("lightrft try")


def test_another_bar_or_the_end_removes_it_for_good(terminal):
    with bar_on(terminal):
        terminal.await_text("lightrft try")
        end_start_bar()
        assert terminal.getvalue().endswith(ERASE)
        require_silent(terminal)


@pytest.mark.parametrize("how", ["a file", "a rank", "CI"])
def test_only_the_terminal_of_a_person_shows_it(terminal, monkeypatch, how):
    if how == "a file":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    elif how == "a rank":
        monkeypatch.setenv("RANK", "1")
    else:
        monkeypatch.setenv("CI", "true")
    with bar_on(terminal):
        assert sys.stdout is terminal
        threading.Event().wait(0.1)
    assert terminal.getvalue() == ""


@pytest.mark.full
def test_a_recorded_command_shows_it_before_its_first_word(tmp_path, monkeypatch):
    for name in ("CI", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    command = [str(Path(sys.executable).with_name("lightrft")), "init-model", str(tmp_path / "m")]
    done = run_python(str(RECORDER), str(tmp_path / "out.cast"), *command, timeout_seconds=300)
    assert done.returncode == 0, done.stderr
    assert "longest silence" in done.stdout
    header, *events = map(json.loads, (tmp_path / "out.cast").read_text().splitlines())
    assert header["version"] == 2
    shown = [text for _, _, text in events]
    assert shown[0].startswith(f"{ERASE}lightrft init-model")
    assert any("wrote tiny-qwen3" in text for text in shown[1:])
