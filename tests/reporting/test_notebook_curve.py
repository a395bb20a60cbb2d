"""The live curve of a notebook."""

import json
import re
import sys

import pytest

from lightrft.reporting.loggers import HEIGHT, WIDTH, NotebookCurve, notebook_loggers


def places(html):
    found = re.findall(r'points="([^"]+)"', html)
    return [[tuple(map(float, pair.split(","))) for pair in text.split()] for text in found]


def test_the_curve_grows_by_a_point_a_step_and_stays_in_its_frame():
    shown = []
    curve = NotebookCurve(shown.append)
    for step, value in enumerate([0.5, -3.0, 2.5, float("nan")], start=1):
        curve.log(step, {"reward": value, "grad_norm": 7.0})
    assert [len(places(html)[0]) for html in shown] == [1, 2, 3, 3]
    last = places(shown[-1])[0]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in last)
    # Larger values are higher up; y grows downwards.
    assert last[1][1] > last[0][1] > last[2][1]
    assert "reward: 0.5 in step 1, 2.5 in step 3" in shown[-1]


def test_there_is_no_curve_outside_of_a_notebook():
    assert notebook_loggers() == []
    pytest.importorskip("ipykernel", reason="notebooks need ipykernel")
    assert "ipykernel" in sys.modules
    assert notebook_loggers() == []


CELLS = (
    "from lightrft.tools.model_presets import write_tiny_model\n"
    "from lightrft.trainer import train\n"
    "from pathlib import Path\n"
    "write_tiny_model(Path('tiny'), 'tiny-qwen3', seed=1)",
    "def length(completions, **columns):\n    return [len(text) / 10 for text in completions]",
    "summary = train('tiny', [{'input': f'Say {n}.'} for n in range(8)], length, fsdp=True,\n"
    "    engine_type='hf', max_steps=2, rollout_batch_size=4, n_samples_per_prompt=2,\n"
    "    train_batch_size=8, prompt_max_len=64, generate_max_len=4)\nsummary.num_steps",
)


@pytest.mark.full
def test_a_notebook_runs(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="notebooks need nbclient and ipykernel")
    client = pytest.importorskip("nbclient", reason="notebooks need nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="notebooks need nbclient and ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    client.NotebookClient(
        book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    last = book.cells[-1].outputs
    assert any(out.get("data", {}).get("text/plain") == "2" for out in last)
    assert "<polyline" in json.dumps(last)
