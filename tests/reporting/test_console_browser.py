"""The console of a run as it looks, drawn by a real browser from what a terminal got."""

from __future__ import annotations

import html
import json
import logging
import re
import subprocess
import sys

import pytest
from tests.machine import seconds
from tests.reporting.terminal import Screen, open_terminal, wait_for
from tests.tools.report.browser import faults, needs_browser, open_browser, take_picture

from lightrft.reporting.console import RunConsole
from lightrft.strategy.distributed.console_sink import report_progress
from lightrft.strategy.distributed.deadlines import phase
from lightrft.tools.model_presets import write_tiny_model

pytestmark = [pytest.mark.shard("training"), needs_browser]
WIDTHS = (80, 200)
LABELS = ("reward", "held-out", "len", "tok/s", "left")
LONG = "a_folder_with_a_name_that_does_not_fit_" * 3
# What steps say: usual, negative, huge, not a number; without an evaluation; and of a slow run.
STEPS = (
    {"reward": 0.5, "eval/reward": 0.25, "response_length": 31.25, "tokens_per_second": 414.0},
    {"reward": -0.0384, "response_length": 1024.5, "tokens_per_second": 12345.6},
    {"reward": -123456.789, "eval/reward": -1e9, "response_length": 32768.0},
    {"reward": float("nan"), "eval/reward": 1.0, "response_length": 8.0, "tokens_per_second": 2e6},
)
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #16191d; color: #e7eaee; }}
main {{ width: {width}ch; font: 14px/1.4 monospace; }}
main {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
</style><main>{rows}</main>"""
# Rows that take more than one line, and the columns in which a word stands.
LOOK = """(labels) => {
  const rows = [...document.querySelectorAll("main > div")];
  const boxes = (node, from, to) => {
    const range = document.createRange();
    range.setStart(node, from); range.setEnd(node, to);
    return range.getBoundingClientRect();
  };
  const high = Math.min(...rows.map((row) => row.getBoundingClientRect().height));
  const column = boxes(rows[0].firstChild, 0, 1).width;
  const places = {};
  for (const row of rows.filter((row) => /^step +\\d/.test(row.textContent))) {
    for (const label of labels) {
      const at = row.textContent.indexOf(label);
      if (at < 0 || row.textContent.includes("####")) continue;
      (places[label] ??= []).push(Math.round(boxes(row.firstChild, at, at + 1).left / column));
    }
  }
  return { places, broken: rows.filter((row) => row.getBoundingClientRect().height > high + 1)
    .map((row) => row.textContent) };
}"""


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


def show_rows(browser, rows, width):
    """A page with the rows of a terminal, as wide as that."""
    page = browser.new_context(viewport={"width": 1800, "height": 600}).new_page()
    divisions = "".join(f"<div>{html.escape(row)}</div>" for row in rows)
    page.set_content(PAGE.format(width=width, rows=divisions))
    return page


def blemishes(page):
    """Rows that broke, texts that overlap or are cut, and labels that are not below each other."""
    look = page.evaluate(LOOK, list(LABELS))
    ragged = [f"ragged: {name}" for name, at in look["places"].items() if len(set(at)) > 1]
    return faults(page)[0] + [f"broken: {row}" for row in look["broken"]] + ragged


@pytest.fixture
def person(monkeypatch):
    """The environment of a person at a terminal."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return monkeypatch


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


@pytest.mark.full
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("num_steps", "step_seconds"), [(40, 1.5), (100_000, 90_000.0)])
def test_nothing_breaks_and_columns_stand_below_each_other(
    browser, person, tmp_path, width, num_steps, step_seconds
):
    person.setenv("COLUMNS", str(width))
    with open_terminal() as stream:
        person.setattr("sys.stdout", stream)
        person.setattr("sys.stderr", stream)
        pictures = tell_of_a_run(stream, num_steps, step_seconds)
    for number, written in enumerate(pictures):
        screen = Screen(width)
        screen.feed(written)
        assert screen.wrapped == []
        rows = screen.shown()
        assert rows[-1].startswith("step ")  # the bar
        page = show_rows(browser, rows, width)
        assert blemishes(page) == []
        size, num_colours = take_picture(page, tmp_path / f"console_{width}_{number}.png")
        assert size[0] == 1800
        assert num_colours > 10
        page.context.close()
    lines = [row for row in rows[:-1] if row.startswith("step") and "reward" in row]
    assert [line.split()[1] for line in lines][-1] == f"{num_steps - 3}/{num_steps}"
    assert len(lines) == len(STEPS)
    said = ["of a library", "of a print", "the bar is below all of it"]
    assert rows[-4:-1] == said
    assert "####" in rows[-1]
    assert any(re.search(r" \d+d\d\dh left$", line) for line in lines) == (step_seconds > 86400)


def test_a_row_that_breaks_and_a_column_that_moves_are_found(browser):
    rows = ["step 1/4  reward 0.500  held-out 0.250", "step 2/4  reward 0.500  held-out 0.250"]
    spoilt = {
        "ragged: held-out": [rows[0], "step 2/4  reward -0.500  held-out 0.250"],
        "broken: " + "x" * 81: [*rows, "x" * 81],
    }
    page = show_rows(browser, rows, 80)
    assert blemishes(page) == []
    page.context.close()
    for said, changed in spoilt.items():
        page = show_rows(browser, changed, 80)
        assert said in blemishes(page)
        page.context.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_real_run_on_a_terminal(browser, person, tmp_path, width):
    """What `lightrft train` writes to a terminal; only paths may be longer than that is wide."""
    write_tiny_model(tmp_path / "tiny", "tiny-qwen3", seed=0)
    rows = [json.dumps({"input": f"Count to {n}."}) for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "reward.py").write_text(
        "def fewer_digits(prompts, responses, labels, **columns):\n"
        "    return [-sum(c.isdigit() for c in r) / 16 for r in responses]\n"
    )
    folder = tmp_path / LONG / LONG
    words = (
        "train --fsdp --pretrain tiny --prompt_data rows.jsonl --reward_fn reward.py:fewer_digits"
    )
    words += " --eval_data rows.jsonl --eval_steps 2 --engine_type hf --rollout_batch_size 2"
    words += " --advantage_estimator group_norm --n_samples_per_prompt 4 --train_batch_size 8"
    words += " --micro_train_batch_size 4 --prompt_max_len 64 --generate_max_len 16 --save_steps 2"
    program = [sys.executable, "-m", "lightrft.cli.main", *words.split(), "--output_dir", folder]
    person.setenv("COLUMNS", str(width))
    person.setenv("OMP_NUM_THREADS", "1")
    with open_terminal() as stream:
        done = subprocess.run(
            program,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            timeout=seconds(500),
            check=False,
        )
        stream.write("the end\n")
        stream.flush()
        wait_for(lambda: "the end" in stream.seen())
        written = stream.seen()
    assert done.returncode == 0, written[-3000:]
    screen = Screen(width)
    screen.feed(written)
    shown = screen.shown()
    (closing,) = [number for number, row in enumerate(shown) if row.startswith("model ")]
    assert set(screen.wrapped).isdisjoint(shown[:closing])
    lines = [row for row in shown if row.startswith("step ")]
    assert [line.split()[1] for line in lines] == [f"{step}/4" for step in range(5)]
    assert sum("held-out" in line for line in lines) == 3
    assert all(line.endswith("left") and "tok/s" in line for line in lines[1:])
    assert not any("----" in row or "####" in row for row in shown)  # nothing of the bar is left
    page = show_rows(browser, shown, width)
    assert blemishes(page) == []
    take_picture(page, tmp_path / f"run_{width}.png")
    page.context.close()
