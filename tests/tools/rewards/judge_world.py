"""Judges of a folder whose model knows one line, and runs that they pay."""

import json

from tests.runs import rollout_options, say_rows, write
from tests.tools.rewards.chain_model import write_chain_model

from lightrft.config import TrainConfig
from lightrft.reporting.rollouts import read_rollout
from lightrft.rewards import build_reward
from lightrft.tools.model_presets import write_tiny_model

DRAWN = {"temperature": 1, "max_tokens": 16}
TEXTS = [f"answer {number}" for number in range(12)]


def write_judges(folder):
    """Write the judge `scorer`, a `policy`, a question, and rows; return it."""
    write_chain_model(folder / "scorer", "Score: ", "37")
    write_tiny_model(folder / "policy", "tiny-qwen3", seed=1)
    (folder / "question.txt").write_text("{prompt} <{mark}>{response}<{mark}>")
    write(folder / "train.jsonl", say_rows(8))
    return folder


def judged_options(folder, model="scorer", **changes):
    """Options of a judge, which is the policy itself if its name is that."""
    options = {
        "pretrain": str(folder / "scorer"),
        "reward_fn": ("judge",),
        "judge_model": model if model == "policy" else str(folder / model),
        "judge_args": DRAWN,
        "output_dir": str(folder / "none" / "run"),
        **changes,
    }
    if "judge_compare" not in options:
        options["judge_template"] = str(folder / "question.txt")
    return options


def config_of(folder, model="scorer", **changes):
    return TrainConfig(**judged_options(folder, model, **changes))


def judge_of(folder, model="scorer", **changes):
    """The reward of a judge, to be closed."""
    return build_reward(["judge"], config=config_of(folder, model, **changes))


def run_options(folder, output, model="scorer", **changes):
    """Options of a run of two steps that a judge pays."""
    options = judged_options(folder, model, output_dir=str(output), prompt_max_len=64)
    options |= {"pretrain": str(folder / "policy"), "save_rollouts": True, **changes}
    return rollout_options(folder, **options)


def rewards_of(output):
    """The reward of each sample of a run."""
    lines = (output / "rollouts.jsonl").read_bytes().splitlines()
    samples = [read_rollout(line, "a line") for line in lines]
    return {(each.step, each.sample_id): each.reward for each in samples}


def first_rows(output, count):
    """The first samples of a run as they are written."""
    lines = (output / "rollouts.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines[:count]]
