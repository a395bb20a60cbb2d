"""A step of one batch, whose only forward pass is compared before any strategy's optimizer acts."""

import pytest
from tests.ranks import run_multiprocess

pytestmark = [pytest.mark.shard("training"), pytest.mark.multiprocess]

STRATEGIES = {
    "fsdp2": {"fsdp": True},
    "zero2": {"fsdp": False, "zero_stage": 2},
    "zero3": {"fsdp": False, "zero_stage": 3},
}
REWARD = """
def score(responses):
    return [float(sum(map(ord, text)) % 2) for text in responses]
"""


def train_with_a_shifted_engine(rank, world_size, runs):
    """What ends each run, and how often an optimizer has acted in it."""
    import torch.distributed as dist

    import lightrft.engines.hf.engine as adapter
    import lightrft.stages.policy.maker as maker
    from lightrft.config import TrainConfig
    from lightrft.run.assembly import run_training
    from lightrft.stages.policy.parity import ParityError
    from lightrft.strategy.strategy_base import StrategyBase

    make, prepare, steps = adapter.RawCompletion, StrategyBase.optimizer_step, []

    def shifted(token_ids, logprobs, finish_reason, *facts):
        return make(token_ids, tuple(value - 0.5 for value in logprobs), finish_reason, *facts)

    def counted(strategy, *arguments, **keywords):
        result = prepare(strategy, *arguments, **keywords)
        if result is not None:
            steps.append(result)
        return result

    adapter.RawCompletion, StrategyBase.optimizer_step = shifted, counted
    maker.score_actor = None  # no other forward pass is made
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    found = []
    for values in runs:
        steps.clear()
        try:
            run_training(TrainConfig(**values))
            text = "nothing"
        except ParityError as error:
            text = str(error)
        found.append((text, len(steps)))
    return found


def settings(folder, model, name, **changes):
    return {
        "pretrain": model,
        "prompt_data": str(folder / "train.jsonl"),
        "input_key": "prompt",
        "reward_fn": (f"{folder / 'reward.py'}:score",),
        "bf16": False,
        "engine_type": "hf",
        "output_dir": str(folder / name),
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "train_batch_size": 16,
        "micro_train_batch_size": 4,
        "generate_max_len": 8,
        "max_steps": 1,
        "off_policy_correction": "tis",
        # Either would find it first.
        "ledger_gate": False,
        "verify_weight_sync": False,
        **changes,
    }


@pytest.mark.full
def test_the_only_forward_of_a_step_is_compared_before_any_optimizer_acts(tmp_path, tiny_model):
    rows = "".join(f'{{"prompt": "{n}+{n}="}}\n' for n in range(8))
    (tmp_path / "train.jsonl").write_text(rows)
    (tmp_path / "reward.py").write_text(REWARD)
    runs = [settings(tmp_path, tiny_model, name, **more) for name, more in STRATEGIES.items()]
    control = settings(tmp_path, tiny_model, "control", fsdp=True, parity_check_steps=-1)
    found = run_multiprocess(
        train_with_a_shifted_engine, 2, timeout_seconds=400, args=([*runs, control],)
    )
    assert found[0] == found[1]
    for text, num_steps in found[0][:-1]:
        assert "in the mean" in text
        assert num_steps == 0
    assert found[0][-1] == ("nothing", 1)
