"""The best evaluation's model is kept, across resumes, and never replaced by a worse one."""

import json
import math

import pytest
from transformers import AutoModelForCausalLM

from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer

# Of the first evaluation nothing is known.
SCORES = [math.nan, 0.5, 0.4, 0.5, 0.7]


class Graded(SPMDPPOTrainer):
    """Evaluations whose results are given."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        scores = {"eval/reward": SCORES, "eval/truncated_share": [1 - score for score in SCORES]}
        self.stage.evaluate = lambda: {n: s[self.state.num_steps] for n, s in scores.items()}


@pytest.mark.full
@pytest.mark.parametrize(
    "metric, first_best, last_best",
    [("eval/reward", 0.5, 0.7), ("eval/truncated_share", 0.5, 1 - 0.7)],
)
def test_the_best_model_stays(build_world, tmp_path, metric, first_best, last_best):
    def fit(max_steps):
        """The best value and its step of a run that goes on; whether its model is the present."""
        world = build_world(
            trainer_class=Graded, ckpt_path=str(tmp_path), best_metric=metric, num_prompts=16
        )
        world.trainer.load_checkpoint()
        world.trainer.fit({"max_steps": max_steps, "eval_steps": 1, "num_episodes": 9})
        kept = AutoModelForCausalLM.from_pretrained(tmp_path / "best").state_dict()
        now = {n.removeprefix("model."): v for n, v in world.weights().items()}
        best = world.trainer.state.best
        return best.value, best.step, all(kept[n].equal(v) for n, v in now.items() if n in kept)

    assert fit(3) == (first_best, 1, False)
    assert fit(4) == (last_best, 4, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["_actor", "best"]
    assert json.loads((tmp_path / "best/config.json").read_text())["model_type"] == "qwen3"


def test_an_unknown_metric_is_told_at_the_first_evaluation(build_world, tmp_path):
    world = build_world(trainer_class=Graded, ckpt_path=str(tmp_path), best_metric="eval/rewrad")
    with pytest.raises(ValueError, match=r"no 'eval/rewrad', it has eval/reward"):
        world.trainer.fit({"max_steps": 1})
