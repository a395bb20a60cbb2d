"""A step of one batch, whose only forward pass is compared before any strategy's optimizer acts."""

import pytest
from tests.ranks import run_multiprocess
from tests.runs import rollout_options, train, write_inputs

import lightrft.engines.hf.engine as adapter
import lightrft.stages.policy.maker as maker
from lightrft.stages.parity_limits import ParityError
from lightrft.strategy.distributed.process_groups import start_process_group
from lightrft.strategy.model_training import ModelTraining

pytestmark = pytest.mark.shard("training")

RUNS = {
    "fsdp2": {},
    "zero2": {"fsdp": False, "zero_stage": 2},
    "zero3": {"fsdp": False, "zero_stage": 3},
    "control": {"parity_check_steps": -1},
}


def train_with_a_shifted_engine(rank, world_size, runs):
    """What ends each run, of which rank 1 has a fault, and how often an optimizer has acted."""
    make, step, steps = adapter.RawCompletion, ModelTraining.optimizer_step, []

    def shifted(token_ids, logprobs, *others):
        return make(token_ids, tuple(value - rank for value in logprobs), *others)

    def counted(training, *arguments, **keywords):
        result = step(training, *arguments, **keywords)
        if result is not None:
            steps.append(result)
        return result

    adapter.RawCompletion, ModelTraining.optimizer_step = shifted, counted
    maker.score_actor = None  # no other forward pass is made
    start_process_group(None)
    ends = []
    for options in runs:
        steps.clear()
        try:
            train(options)
            text = "nothing"
        except ParityError as error:
            text = str(error)
        ends.append((text, len(steps)))
    return ends


@pytest.mark.full
def test_the_only_forward_of_a_step_is_compared_before_any_optimizer_acts(tmp_path, tiny_model):
    write_inputs(tmp_path)
    common = {
        "pretrain": tiny_model,
        "train_batch_size": 16,
        "max_steps": 1,
        "off_policy_correction": "tis",
        # Either would find it first.
        "ledger_gate": False,
        "verify_weight_sync": False,
    }
    runs = [rollout_options(tmp_path, name, **common | more) for name, more in RUNS.items()]
    first, second = run_multiprocess(
        train_with_a_shifted_engine, 2, timeout_seconds=400, args=(runs,)
    )
    assert first == second
    for text, num_steps in first[:-1]:
        assert "in the mean" in text
        assert "layers: all agree when the row is computed again" in text
        assert num_steps == 0
    assert first[-1] == ("nothing", 1)
