"""Recipes reach what their page says."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from tests.programs import run_python

pytestmark = pytest.mark.shard("recipes")

PAGE = (Path(__file__).resolve().parents[2] / "docs/recipes.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| [^|]+ \| `(?P<command>lightrft [^`]+)` \| (?P<held_out>[\d:., ]+) "
    r"\| (?P<rewards>[\d., ]+) \| (?P<minutes>[\d.]+) \|$",
    flags=re.MULTILINE,
)
ROWS = {row["command"]: row for row in ROW.finditer(PAGE)}
COMMANDS = re.findall(r"`(lightrft [^`]+)`", PAGE.replace("seed N", "seed 0"))
# Another processor rounds otherwise; at the end all that matters has been learnt.
SLACK = 0.05


def curve(text):
    """Scores by step of "0: 0.320, 10: 1.000"."""
    pairs = (part.split(": ") for part in text.split(", "))
    return {int(step): float(score) for step, score in pairs}


def test_every_recipe_has_a_command_a_curve_and_a_cost():
    assert len(ROWS) == PAGE.count("| `lightrft ") == 8
    assert len({command.split("--output_dir ")[1] for command in ROWS}) == len(ROWS)
    for command, row in ROWS.items():
        scores = curve(row["held_out"])
        assert scores[0] < 0.4 < 0.9 < scores[max(scores)], command
        assert len(row["rewards"].split(", ")) == len(scores)
    assert re.search(r"^Measured on \d{4}-\d\d-\d\d ", PAGE, flags=re.MULTILINE)
    assert "(real_model.md)" in PAGE


@pytest.mark.slow
@pytest.mark.timeout(3500)
def test_every_command_runs_and_reaches_the_scores_of_the_page(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for command in COMMANDS:
        run_python(
            "-m",
            "lightrft.cli.main",
            *shlex.split(command)[1:],
            timeout_seconds=1500,
            cwd=tmp_path,
            env=environment,
            code=0,
        )
        if command not in ROWS:
            continue
        folder = tmp_path / command.split("--output_dir ")[1]
        entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        found = {entry["step"]: entry["eval/reward"] for entry in entries if "eval/reward" in entry}
        stated = curve(ROWS[command]["held_out"])
        assert found.keys() == stated.keys(), command
        assert abs(found[0] - stated[0]) < SLACK, (command, found)
        assert found[max(found)] >= stated[max(stated)] - SLACK, (command, found)
