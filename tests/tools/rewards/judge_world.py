"""A policy that judges and knows one line, and runs that it pays."""

from tests.runs import rollout_options, say_rows, write
from tests.tools.rewards.chain_model import write_chain_model

from lightrft.config import TrainConfig
from lightrft.reporting.rollouts import read_rollout
from lightrft.rewards import build_reward

DRAWN = {"temperature": 1, "max_tokens": 16}
TEXTS = [f"answer {number}" for number in range(12)]


def write_judges(folder):
    """Write the policy `scorer`, a question, and rows; return the folder."""
    write_chain_model(folder / "scorer", "Score: ", "37")
    (folder / "question.txt").write_text("{prompt} <{mark}>{response}<{mark}>")
    write(folder / "train.jsonl", say_rows(8))
    return folder


def judged_options(folder, **changes):
    """Options of the policy as judge."""
    options = {
        "pretrain": str(folder / "scorer"),
        "reward_fn": ("judge",),
        "judge_model": "policy",
        "judge_args": DRAWN,
        "output_dir": str(folder / "none" / "run"),
        **changes,
    }
    if "judge_compare" not in options:
        options["judge_template"] = str(folder / "question.txt")
    return options


def config_of(folder, **changes):
    return TrainConfig(**judged_options(folder, **changes))


def judge_of(folder, **changes):
    """The reward of a judge, to be closed."""
    return build_reward(["judge"], config=config_of(folder, **changes))


def run_options(folder, output, **changes):
    """Options of a run of two steps that a judge pays."""
    options = judged_options(folder, output_dir=str(output), prompt_max_len=64)
    options |= {"save_rollouts": True, **changes}
    return rollout_options(folder, **options)


def rewards_of(output):
    """The reward of each sample of a run."""
    lines = (output / "rollouts.jsonl").read_bytes().splitlines()
    samples = [read_rollout(line, "a line") for line in lines]
    return {(each.step, each.sample_id): each.reward for each in samples}
