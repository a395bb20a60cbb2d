"""Every algorithm solves the quick start's task on held-out sums.

All start from one warm-started model; a minute or two of one core each: run with `-m slow`. GRPO,
PPO and REINFORCE++ do it as algorithms of the command, in `tests/tools/quickstart`.
"""

import dataclasses
import shutil

import pytest
import torch
from tests.ranks import run_multiprocess

pytestmark = [pytest.mark.shard("learning"), pytest.mark.slow, pytest.mark.timeout(7200)]

ALGORITHMS = {
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
    # Rows of older weights teach as much.
    "lag 1": {"rollout_lag": 1},
    "lag 2": {"rollout_lag": 2},
    "stream": {"stream_chunk": 24},
}


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
    from lightrft.tools.quickstart.quickstart_command import Recipe, training_config
    from lightrft.tools.quickstart.task import ADDITION, HELD_OUT_SEED, write_exercises

    torch.set_num_threads(1)
    folder = Path(directory)
    recipe = Recipe(num_threads=1, num_eval_prompts=256)
    (folder / "data").mkdir()
    for name, count, seed, held_out in (
        ("train.jsonl", recipe.num_prompts, 0, False),
        ("eval.jsonl", 256, HELD_OUT_SEED, True),
    ):
        write_exercises(folder / "data" / name, ADDITION, count, seed=seed, held_out=held_out)
    shutil.copyfile(boxed_sum.__file__, folder / "reward.py")
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
