"""Whole runs of learning from preferences: what they learn, and losses of the user's own."""

import pytest
from tests.stages.row_stages import run, write_rows

from lightrft.config import ConfigError


@pytest.mark.full
def test_pairs_are_told_apart_and_so_are_held_out_ones(tmp_path, models, capsys):
    rows, held_out = write_rows(tmp_path), write_rows(tmp_path, "held_out", start=8)
    changes = {"eval_data": held_out, "best_metric": "eval/accuracy"}
    summary = run("prefer", models, rows, tmp_path / "run", **changes)
    assert summary.verdict.startswith("trained: 6 of 6")
    start, end = summary.first_eval, summary.last_eval
    # The margin is 0 before the first step, and no pair is decided.
    assert start["eval/margin"] == pytest.approx(0.0, abs=1e-5)
    assert start["eval/loss"] == pytest.approx(0.6931471806, abs=1e-5)
    assert end["eval/accuracy"] == 1.0
    assert end["eval/margin"] > 1
    assert summary.last_metrics["accuracy"] == 1.0
    assert (tmp_path / "run/checkpoints/best").is_dir()
    said = capsys.readouterr().out
    assert "swapped" not in said
    assert "held-out pairs are trained on" not in said


def test_an_own_loss_is_taken_and_a_wrong_one_is_named(tmp_path, models):
    rows = write_rows(tmp_path)
    (tmp_path / "own.py").write_text(
        "def mine(sums, *, scale: float = 1.0):\n    return -scale * sums.gaps\n"
        "def wrong(sums):\n    return sums.gaps.sum()\n"
    )
    own = {"preference_loss": (f"{tmp_path}/own.py:mine",), "preference_args": {"scale": 0.5}}
    metrics = run("prefer", models, rows, tmp_path / "run", max_steps=2, **own).last_metrics
    assert metrics["loss"] == pytest.approx(-0.5 * metrics["margin"])
    own = {"preference_loss": (f"{tmp_path}/own.py:wrong",)}
    with pytest.raises(ConfigError, match="expected 3 finite numbers with a gradient"):
        run("prefer", models, rows, tmp_path / "new", **own)
