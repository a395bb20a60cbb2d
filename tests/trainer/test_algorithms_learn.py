"""Every algorithm solves the quick start's task on held-out sums; shuffled rewards teach nothing.

All start from one warm-started model; a minute or two of one core each: run with `-m slow`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from tests.ranks import run_multiprocess

pytestmark = [
    pytest.mark.shard("learning"),
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(7200),
]

ALGORITHMS = {
    "grpo": {},
    "rloo": {"advantage_estimator": "rloo"},
    "reinforce_baseline": {"advantage_estimator": "reinforce_baseline"},
    "dr_grpo": {"advantage_estimator": "dr_grpo", "policy_loss": "dr_grpo"},
    "opo": {"advantage_estimator": "opo"},
    "dapo": {"policy_loss": "dapo", "dynamic_sampling": True, "max_num_gen_batches": 3},
    "gspo": {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "gspo-token": {"policy_loss": "gspo-token", "loss_agg_mode": "seq-mean-token-mean"},
    "gmpo": {"policy_loss": "gmpo", "loss_agg_mode": "seq-mean-token-mean"},
    "cpgd": {"policy_loss": "cpgd", "advantage_estimator": "cpgd"},
    "cispo": {"policy_loss": "cispo"},
    "sapo": {"policy_loss": "sapo", "loss_agg_mode": "seq-mean-token-mean"},
    "reinforce": {"policy_loss": "reinforce"},
    "remax": {"advantage_estimator": "remax"},
    "ppo": {"algorithm": "ppo"},
    "reinforce++": {"algorithm": "reinforce++"},
}
SHUFFLED = """
import importlib.util
from pathlib import Path

file = Path(__file__).with_name("honest.py")
spec = importlib.util.spec_from_file_location("honest", file)
honest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(honest)


def score(prompts, responses, labels):
    found = honest.score(prompts, responses, labels)
    return [*found[11:], *found[:11]]
"""


def warm_start(rank, world_size, directory):
    """The model that all of them start from."""
    from pathlib import Path

    from lightrft.tools.quickstart.quickstart_command import Recipe, prepare

    prepare(Recipe(num_threads=1), Path(directory))


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm")
    run_multiprocess(warm_start, 1, timeout_seconds=3600, args=(str(folder),))
    return str(folder / "warm_start")


def train(rank, world_size, directory, model, options):
    from pathlib import Path

    from lightrft.run.assembly import run_training
    from lightrft.tools.quickstart import boxed_sum
    from lightrft.tools.quickstart.arithmetic import ADDITION
    from lightrft.tools.quickstart.quickstart_command import Recipe, training_config
    from lightrft.tools.quickstart.task import HELD_OUT_SEED, write_exercises

    torch.set_num_threads(1)
    folder, options = Path(directory), dict(options)
    recipe = Recipe(algorithm=options.pop("algorithm", "grpo"), num_threads=1, num_eval_prompts=256)
    (folder / "data").mkdir()
    for name, count, seed, held_out in (
        ("train.jsonl", recipe.num_prompts, 0, False),
        ("eval.jsonl", 256, HELD_OUT_SEED, True),
    ):
        write_exercises(folder / "data" / name, ADDITION, count, seed=seed, held_out=held_out)
    is_shuffled = options.pop("shuffled", False)
    shutil.copyfile(boxed_sum.__file__, folder / ("honest.py" if is_shuffled else "reward.py"))
    if is_shuffled:
        (folder / "reward.py").write_text(SHUFFLED)
    config = dataclasses.replace(
        training_config(recipe, folder),
        **{"pretrain": model, "eval_steps": -1, "save_trajectories": False, **options},
    )
    summary = run_training(config)
    return summary.first_eval["eval/reward"], summary.last_eval["eval/reward"]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_held_out_accuracy_reaches_nine_tenths(tmp_path, warm_model, name):
    ((before, after),) = run_multiprocess(
        train, 1, timeout_seconds=3600, args=(str(tmp_path), warm_model, ALGORITHMS[name])
    )
    assert before < 0.8
    assert after >= 0.9


def test_rewards_of_other_responses_teach_nothing(tmp_path, warm_model):
    """The mean over the responses of a step is the accuracy, whoever got whose reward.

    Of sampled responses, not of greedy ones: the warm-started model remembers the carry about
    every other time, so a drift of nothing turns the greedy answers of most sums around.
    """
    args = (str(tmp_path), warm_model, {"shuffled": True})
    run_multiprocess(train, 1, timeout_seconds=3600, args=args)
    early, late = mean_rewards(tmp_path)
    assert late < early + 0.15
    assert late < 0.8


def test_own_rewards_teach(tmp_path, warm_model):
    """Positive control: the same measure rises where the rewards are those of the responses."""
    run_multiprocess(train, 1, timeout_seconds=3600, args=(str(tmp_path), warm_model, {}))
    early, late = mean_rewards(tmp_path)
    assert late > early + 0.15
    assert late > 0.9


def mean_rewards(folder, num_steps=10):
    """Mean reward of the first and of the last steps."""
    (file,) = folder.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert len(rewards) >= 2 * num_steps
    return sum(rewards[:num_steps]) / num_steps, sum(rewards[-num_steps:]) / num_steps
