"""What is shown of a run: lines, signs of life, a live block, a log per rank."""

from __future__ import annotations

import io
import logging
import os
import pty
import time
import warnings

import pytest

from lightrft.strategy.distributed.deadlines import current_phase, phase
from lightrft.trainer.reporting.loggers import ConsoleLogger
from lightrft.trainer.reporting.progress import (
    Heartbeat,
    LiveBlock,
    build_console,
    is_terminal,
    phase_text,
    rank_log,
)

METRICS = {"reward": 0.5, "kl": 0.001, "step_seconds": 2.0, "rare": 1.0, "eval/reward": 0.25}


def wait_for(condition):
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < 60
        time.sleep(0.01)


def test_a_step_is_one_line_of_pairs():
    lines = []
    ConsoleLogger(lines.append).log(3, METRICS)
    (line,) = lines
    pairs = dict(part.split("=") for part in line.split(" "))
    assert pairs == {
        "step": "3", "reward": "0.5", "kl": "0.001", "step_seconds": "2", "eval/reward": "0.25",
    }  # fmt: skip


def test_silence_is_broken_by_the_name_of_the_phase():
    lines = []
    console = Heartbeat(ConsoleLogger(lines.append), lines.append, seconds=0.05)
    console.log(1, METRICS)
    with phase("save a checkpoint", 60):
        wait_for(lambda: any("heartbeat" in line for line in lines))
    console.close()
    assert lines[0].startswith("step=1 ")
    found = next(line for line in lines if "heartbeat" in line)
    assert found.startswith("heartbeat after_step=1 phase=save_a_checkpoint phase_seconds=")
    num_lines = len(lines)
    time.sleep(0.2)
    assert len(lines) == num_lines


def test_who_speaks_needs_no_heartbeat():
    lines = []
    console = Heartbeat(ConsoleLogger(lines.append), lines.append, seconds=30)
    for step in range(5):
        console.log(step, METRICS)
    console.close()
    assert len(lines) == 5


def test_the_innermost_phase_is_the_current_one():
    assert current_phase() is None
    assert phase_text(4) == "after_step=4 phase=none"
    with phase("outer", 60), phase("inner", 60):
        name, seconds = current_phase()
        assert name == "inner"
        assert 0 <= seconds < 60


def test_a_terminal_gets_a_block_and_a_file_gets_lines(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal, os.fdopen(leader, "rb") as screen:
        assert is_terminal(terminal)
        assert not is_terminal(io.StringIO())
        monkeypatch.setattr("sys.stdout", terminal)
        console = build_console(print, num_steps=4, every=1, heartbeat_seconds=9)
        assert isinstance(console, LiveBlock)
        console.log(2, METRICS)
        console.log(3, METRICS)
        assert console._render().row_count == 6  # step, phase, three metrics, one evaluation
        console.close()
        terminal.flush()
        shown = ""
        while "eval/reward" not in shown:
            shown += os.read(screen.fileno(), 1 << 16).decode()
        for text in ("step", "3 of 4", "reward", "0.5", "eval/reward", "left"):
            assert text in shown
        assert "rare" not in shown
        monkeypatch.setenv("CI", "true")
        assert not is_terminal(terminal)
        lines = build_console(print, num_steps=4, every=1, heartbeat_seconds=9)
    assert isinstance(lines, Heartbeat)
    lines.close()


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
