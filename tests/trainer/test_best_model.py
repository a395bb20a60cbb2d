"""The best evaluation's model is kept, across resumes, and never replaced by a worse one."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer

# Of the first evaluation nothing is known.
SCORES = [math.nan, 0.5, 0.4, 0.5, 0.7]


class Graded(SPMDPPOTrainer):
    """Evaluations whose results are given."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        scores = {"eval/reward": SCORES, "eval/truncated_share": [1 - score for score in SCORES]}
        self.stage.evaluate = lambda: {n: s[self.state.num_steps] for n, s in scores.items()}


@pytest.mark.parametrize(
    ("metric", "first_best", "last_best"),
    [("eval/reward", 0.5, 0.7), ("eval/truncated_share", 0.5, 1 - 0.7)],
)
def test_the_best_model_stays(build_world, tmp_path, metric, first_best, last_best):
    from transformers import AutoModelForCausalLM

    def world():
        return build_world(
            trainer_class=Graded,
            ckpt_path=str(tmp_path),
            best_metric=metric,
            num_prompts=16,
        )

    first = world()
    first.trainer.fit({"max_steps": 3, "eval_steps": 1, "num_episodes": 9})
    assert (first.trainer.state.best.value, first.trainer.state.best.step) == (first_best, 1)
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "best").state_dict()
    now = {n.removeprefix("model."): v for n, v in first.weights().items()}
    assert any(not torch.equal(value, now[name]) for name, value in kept.items() if name in now)
    resumed = world()
    assert resumed.trainer.load_checkpoint()
    resumed.trainer.fit({"max_steps": 4, "eval_steps": 1, "num_episodes": 9})
    assert (resumed.trainer.state.best.value, resumed.trainer.state.best.step) == (last_best, 4)
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "best").state_dict()
    now = {n.removeprefix("model."): v for n, v in resumed.weights().items()}
    assert all(torch.equal(value, now[name]) for name, value in kept.items() if name in now)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["_actor", "best"]
    assert json.loads((tmp_path / "best" / "config.json").read_text())["model_type"] == "qwen3"


def test_an_unknown_metric_is_told_at_the_first_evaluation(build_world, tmp_path):
    world = build_world(trainer_class=Graded, ckpt_path=str(tmp_path), best_metric="eval/rewrad")
    with pytest.raises(ValueError, match=r"no 'eval/rewrad', it has eval/reward"):
        world.trainer.fit({"max_steps": 1})
