"""The real vLLM on a rank that only generates, beside a rank that trains: the sequential run."""

import json

import pytest
from tests.models.tiny import WIDE, tiny_model
from tests.ranks import run_multiprocess
from tests.trainer.test_random_kills import require_same_end, result, settings, write_inputs

pytestmark = [pytest.mark.full, pytest.mark.vllm, pytest.mark.timeout(900)]
NUM_STEPS = 3


def options_of(folder, name, **changes):
    options = settings(folder, "fsdp", name) | {
        "advantage_estimator": "group_norm",
        "rollout_lag": 1,
        "rollout_batch_size": 4,
        "train_batch_size": 8,
        "max_steps": NUM_STEPS,
        "num_episodes": 20,
        "actor_learning_rate": 1e-2,
        "engine_type": "vllm",
        "engine_mem_util": 0.05,
        "engine_args": {"block_size": 32},
        "timeout_minutes": 6.0,
        **changes,
    }
    del options["critic_pretrain"]
    return options


def train(rank, world_size, options):
    """One rank of a run; vLLM leaves process groups, so each has a process of its own."""
    from lightrft.config import TrainConfig
    from lightrft.run.assembly import run_training

    return run_training(TrainConfig(**options)).verdict


@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 4, "lora_sync": "adapter"}])
def test_vllm_beside_a_rank_that_trains_is_the_sequential_run(adapters, tmp_path):
    """Weights, optimizer, metrics and samples, bit for bit: both decode the same rows together."""
    write_inputs(tmp_path, 16)
    config = json.loads((tmp_path / "model/config.json").read_text())
    tiny_model(vocab_size=config["vocab_size"], **WIDE).save_pretrained(tmp_path / "model")
    ends = []
    for name, changes in (("sequential", {}), ("split", {"rollout_ranks": 1})):
        options = options_of(tmp_path, name, **changes, **adapters)
        verdicts = run_multiprocess(train, 1 + len(changes), timeout_seconds=400, args=(options,))
        assert all(verdict.startswith("trained") for verdict in verdicts), verdicts
        ends.append(result(options, ("_actor",), num_steps=NUM_STEPS))
    require_same_end(ends[1], ends[0], "split")
