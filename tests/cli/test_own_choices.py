"""A loss, an estimator, a reward and a logger of the user's own, through the command line."""

import pytest
from tests.runs import FEW, rollout_options, steps, tiny_models, words, write_inputs

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_inputs(tiny_models(tmp_path_factory.mktemp("own"), "model"), files={"own.py": OWN})


def run(folder, name, *flags):
    """The exit code of a run of one step with everything own."""
    own = folder / "own.py"
    choices = {
        "policy_loss": f"{own}:scaled",
        "advantage_estimator": f"{own}:shifted",
        "reward_fn": f"{own}:short",
        "loggers": f"{own}:Lines",
    }
    options = rollout_options(folder, name, max_steps=1, **FEW, **choices)
    return main(["train", *words(options), *flags])


def train(folder, name, *flags):
    """The metrics of the one step of such a run."""
    assert run(folder, name, *flags) == 0
    return steps(folder / name)[-1]


@pytest.mark.full
@pytest.mark.timeout(280)
def test_own_choices_train_and_their_hyper_parameters_change_the_numbers(folder):
    plain = train(folder, "plain", "--advantage_args", "shift=1")
    assert plain["policy_loss"] == pytest.approx(-1.0, abs=1e-4)  # minus the mean advantage
    assert (folder / "plain/lines.txt").read_text() == f"1 {plain['reward']}\n"
    other = train(
        folder,
        "other",
        "--policy_loss_args",
        "factor=3",
        "--advantage_args",
        "shift=2",
        "--reward_args",
        "bonus=5",
    )
    assert other["policy_loss"] == pytest.approx(-6.0, abs=1e-3)
    assert other["reward"] == pytest.approx(plain["reward"] + 5)


@pytest.mark.full
def test_a_changed_file_of_an_own_loss_is_not_continued_silently(capsys, folder):
    train(folder, "again", "--save_steps", "1")
    (folder / "own.py").write_text(OWN.replace("-factor", "-2 * factor"))
    code = run(folder, "again", "--max_steps", "2", "--load_checkpoint")
    (folder / "own.py").write_text(OWN)
    assert code == 2
    assert "own.py" in capsys.readouterr().err
