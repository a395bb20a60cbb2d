"""The best model is that of the better value: small losses and errors, large rewards."""

import pytest

from lightrft.config import ConfigError, TrainConfig
from lightrft.reporting.metric_table import larger_is_better
from lightrft.run.resume import plan_run


@pytest.mark.parametrize("metric", ["eval/response_length", "eval/num_rows", "eval/seconds"])
def test_what_is_neither_better_nor_worse_is_refused_before_the_run(tmp_path, metric):
    with pytest.raises(ConfigError, match=f"best_metric: neither.* of {metric} are better; give"):
        plan_run(TrainConfig(output_dir=str(tmp_path), best_metric=metric))


def test_rewards_their_parts_and_metrics_of_users_are_the_better_the_larger():
    assert all(map(larger_is_better, ("eval/reward", "eval/format", "eval/accuracy", "own/score")))
    small = ("eval/loss", "eval/perplexity", "eval/truncated_share", "eval/masked_share")
    assert not any(map(larger_is_better, small))
