"""What is shown of a run: a line a step, a bar on a terminal, signs of life, a log per rank."""

import io
import logging
import re
import sys
import time
import warnings

import pytest
from tests.reporting.terminal import Screen, open_terminal, wait_for

from lightrft.reporting.console import (
    PlainScreen,
    RunConsole,
    bar_text,
    duration,
    fitted,
    is_terminal,
    step_line,
)
from lightrft.reporting.files import rank_log
from lightrft.reporting.loggers import ConsoleLogger
from lightrft.strategy.distributed.context import (
    console_sink,
    current_progress,
    print_on_first_rank,
    report_memory,
    report_progress,
    with_progress,
)
from lightrft.strategy.distributed.deadlines import phase

METRICS = {
    "reward": 0.5,
    "kl": 0.001,
    "step_seconds": 2.0,
    "rare": 1.0,
    "eval/reward": 0.25,
    "response_length": 31.25,
    "tokens_per_second": 12345.6,
}


@pytest.fixture
def terminal(monkeypatch):
    """A person's terminal; `.seen()` gives what was written to it."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with open_terminal() as stream:
        yield stream


def test_a_step_is_one_line_of_pairs():
    lines = []
    ConsoleLogger(lines.append).log(3, {"reward": 0.5, "rare": 1.0, "eval/reward": 0.25})
    assert lines == ["step=3 reward=0.5 eval/reward=0.25"]


def test_the_line_of_a_step():
    line = step_line(7, 40, METRICS, seconds_left=3723)
    assert line == ("step  7/40  reward 0.500  held-out 0.250  len  31.2  12346 tok/s   1h02m left")
    plain = {name: value for name, value in METRICS.items() if name != "eval/reward"}
    other = step_line(8, 40, plain, seconds_left=59)
    assert "held-out" not in other
    assert other.index("len") == line.index("len")
    assert other.endswith("0:59 left")
    assert len(other) == len(line)
    assert step_line(0, 40, {"eval/reward": 0.3}) == "step  0/40                held-out 0.300"
    narrow = step_line(7, 40, METRICS, seconds_left=3723, width=70)
    assert narrow == line.replace("  12346 tok/s", "")


@pytest.mark.parametrize(
    "value, decimals, shown",
    [
        (0.5, 3, "0.500"),
        (-0.0384, 3, "-.038"),
        (-1.25, 3, "-1.25"),
        (12.3456, 3, "12.35"),
        (-123456.789, 3, "-123k"),
        (31.25, 1, " 31.2"),
        (1234.5, 1, " 1234"),
        (414.4, 0, "  414"),
        (123456.0, 0, " 123k"),
        (2e6, 0, "2.00M"),
        (9e15, 0, " 9e15"),
        (float("nan"), 3, "  nan"),
    ],
)
def test_a_number_takes_five_columns(value, decimals, shown):
    assert fitted(value, decimals) == shown


@pytest.mark.parametrize(
    "seconds, shown",
    [(59.6, "1:00"), (3599, "59:59"), (3600, "1h00m"), (86399, "23h59m"), (9e5, "10d10h")],
)
def test_durations(seconds, shown):
    assert duration(seconds) == shown


def test_what_is_under_way():
    assert bar_text("step 1/4", None, None) == ""
    assert bar_text("step 1/4", None, ("short", 0.25)) == ""
    assert bar_text("step 1/4", None, ("load the models", 62.0)).split()[-1] == "1:02"
    bar = bar_text("step 1/4", ("generate", 32, 128), ("generate", 3.0))
    assert (bar.count("#"), bar.count("-")) == (5, 15)
    assert bar.endswith("32/128")


def test_errors_that_go_to_a_file_stay_there(terminal, monkeypatch):
    errors = io.StringIO()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", errors)
    handler = logging.StreamHandler()
    logging.getLogger("a_library").addHandler(handler)
    console = RunConsole(heartbeat_seconds=60)
    logging.getLogger("a_library").warning("of a library")
    print("of a print", file=sys.stderr)
    console.close()
    logging.getLogger("a_library").removeHandler(handler)
    assert errors.getvalue() == "of a library\nof a print\n"
    assert "of a" not in terminal.seen()


def test_the_screen_of_these_tests_notices_a_line_that_does_not_fit():
    screen = Screen(10)
    screen.feed("12345678901\r\n")
    assert screen.wrapped == ["1234567890"]


def test_a_file_gets_plain_lines_and_no_bar(terminal, monkeypatch, capsys):
    assert is_terminal(terminal)
    assert not is_terminal(io.StringIO())
    monkeypatch.setenv("CI", "true")
    assert not is_terminal(terminal)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    console = RunConsole(heartbeat_seconds=60, every=2)
    console.plan(4)
    console.tell("a line\nand another", False)
    console.tell("Finished hf wakeup", True)
    report_progress("generate", 3, 12)
    for step in (1, 2):
        console.log(step, {"reward": 0.5})
    console.log(3, METRICS)
    console.close()
    report_progress("generate", 0, 0)
    lines = sys.stdout.getvalue().splitlines()
    assert [line[:9] for line in lines] == ["a line", "and anoth", "step 2/4 ", "step 3/4 "]
    assert "\x1b" not in sys.stdout.getvalue()
    assert "\r" not in sys.stdout.getvalue()


def test_verbose_shows_the_engine_room_and_more_metrics(capsys):
    console = RunConsole(heartbeat_seconds=60, is_verbose=True)
    with console_sink(console.tell):
        print_on_first_rank(None, "slept", is_detail=True)
        report_memory(None, "now")
    console.plan(4)
    console.log(1, METRICS)
    console.close()
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "slept"
    assert shown[1].startswith("MEMORY STATUS: now")
    assert shown[2].startswith("step 1/4  reward")
    assert "kl=0.001" in shown[3]


def test_the_engine_room_is_kept_in_the_log(tmp_path, capsys):
    console = RunConsole(heartbeat_seconds=60)
    with console_sink(console.tell), rank_log(tmp_path, 0):
        print_on_first_rank(None, "slept", is_detail=True)
        print_on_first_rank(None, "8 prompts")
    console.close()
    assert capsys.readouterr().out == "8 prompts\n"
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert "slept" in log
    assert "8 prompts" in log


def test_without_a_console_details_are_only_logged(capsys, caplog):
    with caplog.at_level(logging.INFO):
        print_on_first_rank(None, "slept", is_detail=True)
        print_on_first_rank(None, "8 prompts")
    assert re.fullmatch(r"\[StrategyINFO .*\]  8 prompts\n", capsys.readouterr().out)
    assert "slept" in caplog.text


def test_counted_items_are_told_while_they_go_by():
    seen = [current_progress() for _ in with_progress("abc", "train actor")]
    assert seen == [("train actor", done, 3) for done in range(3)]
    assert current_progress() is None


def test_a_run_that_failed_leaves_no_progress_to_the_next():
    with pytest.raises(MemoryError), console_sink(lambda *_: None):
        report_progress("train actor", 5, 6)
        raise MemoryError
    assert current_progress() is None


def test_silence_is_broken_by_the_name_of_the_phase():
    stream = io.StringIO()
    screen = PlainScreen(stream, lambda: "step 2/4", seconds=0.05)
    screen.line("step")
    with phase("save a checkpoint", 60):
        wait_for(lambda: "still" in stream.getvalue())
    screen.close()
    first, found = stream.getvalue().splitlines()[:2]
    assert first == "step"
    assert re.fullmatch(r"still at step 2/4: save a checkpoint, \d+ s", found)
    shown = stream.getvalue()
    time.sleep(0.2)
    assert stream.getvalue() == shown


def test_each_rank_has_a_log_with_warnings_phases_and_its_end(tmp_path, capsys):
    logger = logging.getLogger("lightrft.somewhere")
    with pytest.raises(ZeroDivisionError), rank_log(tmp_path, 1):
        logger.warning("of rank %d", 1)
        warnings.warn("from a library", stacklevel=1)
        with phase("generate", 60):
            1 / 0  # noqa: B018
    assert capsys.readouterr().err == ""  # only the first rank speaks
    text = (tmp_path / "logs" / "rank_1.log").read_text()
    for part in ("of rank 1", "from a library", "phase 'generate' took", "ZeroDivisionError"):
        assert part in text
    with rank_log(tmp_path, 0):
        logger.warning("shown")
        logger.info("not shown")
    assert capsys.readouterr().err == "shown\n"
    assert "not shown" in (tmp_path / "logs" / "rank_0.log").read_text()
    assert logging.getLogger("lightrft").handlers == []


LABELS = ("reward", "held-out", "len", "tok/s", "left")
LONG = "a_folder_with_a_name_that_does_not_fit_" * 3
# What steps say: usual, negative, huge, not a number; without an evaluation; and of a slow run.
STEPS = (
    {"reward": 0.5, "eval/reward": 0.25, "response_length": 31.25, "tokens_per_second": 414.0},
    {"reward": -0.0384, "response_length": 1024.5, "tokens_per_second": 12345.6},
    {"reward": -123456.789, "eval/reward": -1e9, "response_length": 32768.0},
    {"reward": float("nan"), "eval/reward": 1.0, "response_length": 8.0, "tokens_per_second": 2e6},
)


def tell_of_a_run(stream, num_steps, step_seconds):
    """Writes what a run says; returns all that was written while either bar was shown."""
    # As libraries do, a logger takes the stream that there is when it is made.
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("a_library").addHandler(handler)
    report_progress("", 0, 0)  # what a part that failed in another test has left
    console = RunConsole(heartbeat_seconds=60)
    pictures = []
    console.plan(num_steps)
    console.tell("memory: largest phase train: 0.015 GB of 18.1 GB " * 3, False)
    console.log(0, {"eval/reward": 0.125})
    with phase(f"load {LONG}", 600):
        wait_for(lambda: f"load {LONG}"[:20] in stream.seen())
        pictures.append(stream.seen())
    for step, metrics in enumerate(STEPS, num_steps - len(STEPS) - 2):
        console.log(step, {**metrics, "step_seconds": step_seconds})
    report_progress(f"train {LONG}", 99_999, 100_000)
    wait_for(lambda: "99999/100000" in stream.seen())
    logging.getLogger("a_library").warning("of a library")
    print("of a print", file=sys.stderr)
    console.tell("the bar is below all of it", False)
    wait_for(lambda: "99999/100000" in stream.seen().partition("below all of it")[2])
    pictures.append(stream.seen())
    report_progress("", 0, 0)
    console.close()
    assert handler.stream is stream
    logging.getLogger("a_library").removeHandler(handler)
    return pictures


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("num_steps, step_seconds", [(40, 1.5), (100_000, 90_000.0)])
def test_nothing_breaks_and_columns_stand_below_each_other(
    terminal, monkeypatch, width, num_steps, step_seconds
):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    for written in tell_of_a_run(terminal, num_steps, step_seconds):
        screen = Screen(width)
        screen.feed(written)
        assert screen.wrapped == []
        rows = screen.shown()
        assert rows[-1].startswith("step ")  # the bar
    lines = [row for row in rows[:-1] if row.startswith("step") and "reward" in row]
    assert [line.split()[1] for line in lines][-1] == f"{num_steps - 3}/{num_steps}"
    assert len(lines) == len(STEPS)
    for label in LABELS:
        assert len({line.index(label) for line in lines if label in line}) <= 1, label
    said = ["of a library", "of a print", "the bar is below all of it"]
    assert rows[-4:-1] == said
    # What follows shows that the bar is gone.
    terminal.write("the end\n")
    terminal.flush()
    wait_for(lambda: "the end" in terminal.seen())
    screen = Screen(width)
    screen.feed(terminal.seen())
    assert screen.shown() == [*rows[:-1], "the end"]
    assert "####" in rows[-1]
    assert any(re.search(r" \d+d\d\dh left$", line) for line in lines) == (step_seconds > 86400)
