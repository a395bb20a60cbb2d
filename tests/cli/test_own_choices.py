"""A loss, an estimator, a reward and a logger of the user's own, through the command line."""

import pytest
from tests.runs import rollout_options, steps, tiny_models, words, write_inputs

from lightrft.cli.main import main

OWN = """
import json
import torch
from lightrft.algorithms import advantage_estimator, policy_loss


@policy_loss(aggregation="token-mean")
def scaled(logprobs, old_logprobs, advantages, response_mask, *, factor: float = 1.0):
    return -factor * (logprobs - old_logprobs).exp() * advantages


@advantage_estimator(needs_groups=True)
def shifted(inputs, *, shift: float = 0.0):
    return inputs.rewards - inputs.rewards.mean() + shift


def short(responses, *, bonus=0.0):
    return [bonus - len(text) / 10 for text in responses]


class Lines:
    def __init__(self, config):
        self.path = config.output_dir + "/lines.txt"

    def log(self, step, metrics):
        with open(self.path, "a") as file:
            file.write(f"{step} {metrics['reward']}\\n")

    def close(self):
        pass
"""


def train(folder, name, *flags):
    """Return the metrics of a run of one step with everything own."""
    own = folder / "own.py"
    sizes = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "train_batch_size": 4}
    choices = {
        "policy_loss": f"{own}:scaled",
        "advantage_estimator": f"{own}:shifted",
        "reward_fn": f"{own}:short",
        "loggers": f"{own}:Lines",
    }
    options = rollout_options(folder, name, max_steps=1, **sizes, **choices)
    assert main(["train", *words(options), *flags]) == 0
    return steps(folder / name)[-1]


@pytest.mark.full
@pytest.mark.timeout(280)
def test_own_choices_train_and_their_hyper_parameters_change_the_numbers(tmp_path):
    folder = write_inputs(tiny_models(tmp_path, "model"), files={"own.py": OWN})
    plain = train(folder, "plain", "--advantage_args", "shift=1")
    assert plain["policy_loss"] == pytest.approx(-1.0, abs=1e-4)  # minus the mean advantage
    assert (folder / "plain/lines.txt").read_text() == f"1 {plain['reward']}\n"
    flags = "--policy_loss_args factor=3 --advantage_args shift=2 --reward_args bonus=5"
    other = train(folder, "other", *flags.split())
    assert other["policy_loss"] == pytest.approx(-6.0, abs=1e-3)
    assert other["reward"] == pytest.approx(plain["reward"] + 5)
