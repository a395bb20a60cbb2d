"""Held-out numbers of a reward model in its metrics and its report, and scores of steps."""

import json

import numpy as np
import pytest
import torch
from tests.runs import write
from tests.stages.reward.reward_world import (
    PAIRS,
    build_stage,
    pair,
    run,
    slow_scores,
    tiny_classifier,
)
from tests.stages.stage_world import STILL
from transformers import AutoModelForTokenClassification, AutoTokenizer

from lightrft.models import RewardModel
from lightrft.reporting.metric_table import metric_row
from lightrft.strategy import get_fake_strategy
from lightrft.tools.report.charts import format_number
from lightrft.tools.report.page import write_report


def test_bins_of_confidence_are_those_of_all_held_out_pairs():
    held_out = tuple(pair(7 + n, 20 - n, seed=n) for n in range(12))
    stage = build_stage(get_fake_strategy(STILL), PAIRS, held_out=held_out)
    metrics = stage.evaluate()
    with torch.no_grad():
        scores = slow_scores(tiny_classifier().double(), held_out).numpy()
        lengths = np.array([len(row.token_ids) for each in held_out for row in each.rows])
    differences = scores[::2] - scores[1::2]
    confidence = 1 / (1 + np.exp(-np.abs(differences)))
    places = np.minimum(((confidence - 0.5) * 20).astype(int), 9)
    error = 0.0
    for place in range(10):
        own = places == place
        names = [
            f"eval/bin_{what}/{50 + 5 * place}" for what in ("share", "confidence", "accuracy")
        ]
        assert metrics[names[0]] == pytest.approx(own.mean(), abs=1e-6)
        if not own.any():
            assert names[1] not in metrics
            continue
        right = (differences[own] > 0).mean()
        assert metrics[names[1]] == pytest.approx(confidence[own].mean(), abs=1e-5)
        assert metrics[names[2]] == pytest.approx(right, abs=1e-6)
        error += own.mean() * abs(confidence[own].mean() - right)
    assert metrics["eval/calibration_error"] == pytest.approx(error, abs=1e-5)
    correlation = np.corrcoef(scores, lengths)[0, 1]
    assert metrics["eval/length_correlation"] == pytest.approx(correlation, abs=1e-4)
    assert metrics["eval/score_margin"] == pytest.approx(differences.mean(), abs=1e-5)
    assert len(set(places)) > 1


def test_the_page_shows_the_held_out_numbers_of_a_reward_model(tmp_path, model, rows):
    run(model, rows, tmp_path / "run", max_epochs=2, eval_data=rows)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)}
    assert not any(name.startswith("bin_") for name in names)
    shown = [name for name in names if name.startswith("eval/")]
    assert len(shown) > 15
    assert all(map(metric_row, shown))
    page = write_report(tmp_path / "run").read_text()
    last = json.loads(lines[-1])
    place = next(name[-2:] for name in last if name.startswith("eval/bin_accuracy/"))
    cells = [
        format_number(last[f"eval/bin_{x}/{place}"]) for x in ("share", "confidence", "accuracy")
    ]
    for text in (
        "Calibration on held-out rows",
        f"<td>{place} to ",
        '</td><td class="number">'.join([" %", *cells]),
        "<h3>Accuracy</h3>",
        "<h3>Score margin</h3>",
        "<h3>Calibration error</h3>",
        "Correlation of score and length",
        "lightrft reward --config",
    ):
        assert text in page


def test_scores_of_steps_are_those_of_a_token_classifier(tmp_path, model):
    steps = [
        {
            "prompt": f"{number}+1: ",
            "completions": [f"{number} first", "then at once" if number % 2 else "then please"],
            "labels": [True, number % 2 == 0],
        }
        for number in range(12)
    ]
    path = write(tmp_path / "steps.jsonl", steps)
    summary = run(model, path, tmp_path / "run", train_batch_size=4, max_epochs=2)
    theirs, report = AutoModelForTokenClassification.from_pretrained(
        summary.model_dir, output_loading_info=True
    )
    # No part of it is new: a head with a random bias would give other scores.
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    theirs.eval()
    ours = RewardModel.from_pretrained(summary.model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(summary.model_dir)
    for row in steps[:4]:
        text = row["prompt"] + "\n".join(row["completions"]) + tokenizer.eos_token
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        everywhere = torch.ones_like(ids, dtype=torch.bool)
        with torch.no_grad():
            found = ours(ids, everywhere, is_read=everywhere)
            torch.testing.assert_close(theirs(ids).logits[..., 0], found, rtol=0, atol=2e-5)
