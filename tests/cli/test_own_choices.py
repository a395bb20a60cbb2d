"""A loss, an estimator, a reward and a logger of the user's own, through the command line."""

from __future__ import annotations

import json

import pytest

from lightrft.cli.main import main
from lightrft.tools.model_presets import write_tiny_model

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
    path = tmp_path_factory.mktemp("own")
    write_tiny_model(path / "model", "tiny-qwen3", seed=0)
    (path / "own.py").write_text(OWN)
    rows = [json.dumps({"input": f"Say {n}.", "label": str(n)}) + "\n" for n in range(8)]
    (path / "prompts.jsonl").write_text("".join(rows))
    return path


def run(folder, name, *flags):
    """The exit code of a run of one step with everything own."""
    own = folder / "own.py"
    sizes = """--rollout_batch_size 2 --n_samples_per_prompt 2 --train_batch_size 4
        --prompt_max_len 32 --generate_max_len 4 --max_steps 1 --init_kl_coef 0 --no_bf16"""
    choices = f"""train --fsdp --engine_type hf --pretrain {folder / "model"}
        --prompt_data {folder / "prompts.jsonl"} --output_dir {folder / name}
        --policy_loss {own}:scaled --advantage_estimator {own}:shifted
        --reward_fn {own}:short --loggers {own}:Lines"""
    return main([*choices.split(), *sizes.split(), *flags])


def train(folder, name, *flags):
    """The metrics of the one step of such a run."""
    assert run(folder, name, *flags) == 0
    (line,) = [
        entry
        for entry in map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
        if entry["step"] == 1
    ]
    return line


@pytest.mark.full
@pytest.mark.timeout(280)
def test_own_choices_train_and_their_hyper_parameters_change_the_numbers(folder):
    plain = train(folder, "plain", "--advantage_args", "shift=1")
    assert plain["policy_loss"] == pytest.approx(-1.0, abs=1e-4)  # minus the mean advantage
    assert (folder / "plain" / "lines.txt").read_text() == f"1 {plain['reward']}\n"
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


def refusal(capsys, folder, *flags):
    argv = ["train", "--fsdp", "--pretrain", str(folder / "model"), "--reward_fn", "gsm8k"]
    argv += ["--prompt_data", str(folder / "prompts.jsonl"), "--output_dir", str(folder / "none")]
    argv += ["--generate_max_len", "8"]
    assert main([*argv, *flags]) == 2
    return capsys.readouterr().err


BROKEN = """
def no_gradient(logprobs, old_logprobs, advantages, response_mask):
    return advantages

def wrong_shape(logprobs, old_logprobs, advantages, response_mask):
    return logprobs.sum()

def wrong_arguments(logprobs):
    return logprobs

def one_number(inputs):
    return 3.0

def demanding(inputs, *, strength: float):
    return inputs.rewards * strength
"""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--policy_loss", "{b}:no_gradient"), "no gradient flows"),
        (("--policy_loss", "{b}:wrong_shape"), "fails on an example batch|has the shape"),
        (("--policy_loss", "{b}:wrong_arguments"), "fails on an example batch"),
        (("--policy_loss", "{b}:nothing"), "has no 'nothing'"),
        (("--policy_loss", "no_such_file.py:f"), "cannot be imported"),
        (("--policy_loss", "daop"), "did you mean 'dapo'"),
        (
            ("--policy_loss", "sapo", "--policy_loss_args", "temprature_positive=2"),
            "did you mean temperature_positive",
        ),
        (("--policy_loss", "sapo", "--policy_loss_args", "temperature_positive=hot"), "got 'hot'"),
        (("--policy_loss", "sapo", "--policy_loss_args", "temperature_positive=nan"), "got nan"),
        (("--advantage_estimator", "{b}:one_number"), "it gives float"),
        (("--advantage_estimator", "{b}:demanding"), "needs the option 'strength'"),
        (("--off_policy_correction", "tsi"), "did you mean 'tis'"),
    ],
)
def test_what_cannot_be_called_is_named_before_anything_is_built(capsys, folder, flags, message):
    (folder / "broken.py").write_text(BROKEN)
    text = refusal(capsys, folder, *[flag.format(b=folder / "broken.py") for flag in flags])
    assert any(part in text for part in message.split("|")), text
    assert not (folder / "none").exists()


@pytest.mark.full
def test_a_changed_file_of_an_own_loss_is_not_continued_silently(capsys, folder):
    train(folder, "again", "--save_steps", "1")
    (folder / "own.py").write_text(OWN.replace("-factor", "-2 * factor"))
    code = run(folder, "again", "--max_steps", "2", "--load_checkpoint")
    (folder / "own.py").write_text(OWN)
    assert code == 2
    assert "own.py" in capsys.readouterr().err
