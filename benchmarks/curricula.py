"""Samples that a mixed task takes to a fixed accuracy: pools against drawing all prompts alike.

    python benchmarks/curricula.py --seeds 5

Of 120 prompts 48 are solved whatever the model answers, 48 are out of reach, and 24 can be learned:
each asks for a digit of its own. The model is tiny and has learned to answer with some digit. After
every step it answers the 24 questions greedily; a run ends when 80 % of the answers are right. Each
seed is another model and another order. The last line is the median over seeds of the ratio of both
numbers of samples.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from lightrft.run.callbacks import Callback
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer import sft, train

GOAL, MAX_STEPS = 0.8, 400
NUM_DIGITS = 8
SIZES = {"rollout_batch_size": 16, "n_samples_per_prompt": 8, "train_batch_size": 128}
# What all runs share.
COMMON = {
    "fsdp": True,
    "num_threads": 1,
    "lr_warmup_ratio": 0.0,
    "lr_scheduler": "constant",
    "input_key": "prompt",
    "save_steps": -1,
}
WAYS: dict[str, dict[str, object]] = {"uniform": {}, "pools": {"prompt_sampler": "pools"}}


def rows(**sizes: int) -> list[dict[str, object]]:
    """Return prompts by level, each with a number of its own and the digit that is right."""
    levels = [level for level, size in sizes.items() for _ in range(size)]
    return [
        {"prompt": f"{number}: ", "level": level, "digit": str(number * 5 % NUM_DIGITS)}
        for number, level in enumerate(levels)
    ]


def first_digit(
    responses: Sequence[str], level: Sequence[str], digit: Sequence[str]
) -> list[float]:
    """Score 1 for the right digit; prompts that are easy or out of reach have one score."""
    fixed = {"easy": 1.0, "far": 0.0}
    return [
        fixed.get(each, float(text[:1] == right))
        for text, each, right in zip(responses, level, digit, strict=True)
    ]


class Goal(Callback):
    """End of a run at the goal, with the number of the step."""

    reached: int | None = None

    def end_step(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Note the first step that reaches the goal."""
        if self.reached is None and metrics.get("eval/reward", 0.0) >= GOAL:
            self.reached = step
        return {}

    def wants_stop(self) -> bool:
        """Return whether the goal is reached."""
        return self.reached is not None


def warm_start(folder: Path, seed: int, prompts: Sequence[Mapping[str, object]]) -> Path:
    """Return a model that answers each prompt with any digit."""
    write_tiny_model(folder / "model", "tiny-qwen3", seed=seed)
    answers = [
        {"prompt": each["prompt"], "completion": str(digit)}
        for each in prompts
        for digit in range(NUM_DIGITS)
    ]
    sft(
        folder / "model",
        answers,
        output_dir=str(folder / "warm"),
        seed=seed,
        train_batch_size=64,
        micro_train_batch_size=64,
        actor_learning_rate=3e-3,
        max_epochs=4,
        **{name: value for name, value in COMMON.items() if name != "input_key"},
    )
    return folder / "warm" / "model"


def samples_to_goal(folder: Path, model: Path, seed: int, way: str) -> int | None:
    """Return the samples that a run takes to the goal; None if it does not get there."""
    goal = Goal()
    train(
        model,
        rows(learnable=24, easy=48, far=48),
        first_digit,
        eval_data=rows(learnable=24),
        callbacks=[goal],
        output_dir=str(folder / way),
        seed=seed,
        engine_type="hf",
        micro_train_batch_size=128,
        micro_rollout_batch_size=128,
        generate_max_len=2,
        prompt_max_len=16,
        init_kl_coef=0.0,
        actor_learning_rate=1e-3,
        max_steps=MAX_STEPS,
        num_episodes=MAX_STEPS,
        eval_steps=1,
        parity_check_steps=-1,
        **COMMON,
        **SIZES,
        **WAYS[way],
    )
    if goal.reached is None:
        return None
    return goal.reached * SIZES["rollout_batch_size"] * SIZES["n_samples_per_prompt"]


def main() -> None:
    """Compare the ways and print a line for each seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="Number of seeds. Default: 5.")
    parser.add_argument("--first", type=int, default=1, help="First seed. Default: 1.")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    ratios = []
    for seed in range(options.first, options.first + options.seeds):
        needed: dict[str, int] = {}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = warm_start(folder, seed, rows(learnable=24, easy=48, far=48))
            for way in WAYS:
                num_samples = samples_to_goal(folder, model, seed, way)
                # A run that does not get there counts with all of its samples.
                most = MAX_STEPS * SIZES["rollout_batch_size"] * SIZES["n_samples_per_prompt"]
                needed[way] = most if num_samples is None else num_samples
        ratios.append(needed["pools"] / needed["uniform"])
        print(json.dumps({"seed": seed, **needed, "ratio": round(ratios[-1], 3)}), flush=True)
    print(f"pools take {median(ratios):.2f} of the samples of uniform drawing (median)")


if __name__ == "__main__":
    main()
