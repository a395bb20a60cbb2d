"""Samples that a mixed task takes to a fixed accuracy: pools against drawing all prompts alike.

    python benchmarks/curricula.py --seeds 5

Of 120 prompts 48 are solved whatever the model answers, 48 are out of reach, and 24 can be learned:
"say odd" and "say even" ask for characters of one parity, and the reward is the share of them. The
model is tiny and has random weights. After every step it answers 24 held-out questions that can be
learned; a run ends when their mean reward is 0.8. Each seed is another model and another order. The
last line is the median over seeds of the ratio of both numbers of samples.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from lightrft.run.callbacks import Callback
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer import train

GOAL, MAX_STEPS = 0.8, 150
SIZES = {"rollout_batch_size": 16, "n_samples_per_prompt": 8, "train_batch_size": 128}
WAYS: dict[str, dict[str, object]] = {"uniform": {}, "pools": {"prompt_sampler": "pools"}}


def rows(first: int, *, num_easy: int, num_far: int, num_learnable: int) -> list[dict[str, object]]:
    """Return prompts of three levels, each of both kinds, with numbers that tell them apart."""
    levels = ["easy"] * num_easy + ["far"] * num_far + ["learnable"] * num_learnable
    kinds = itertools.cycle(("odd", "even"))
    return [
        {"prompt": f"say {kind} {first + number}", "level": level, "kind": kind}
        for number, (level, kind) in enumerate(zip(levels, kinds, strict=False))
    ]


def parity(responses: Sequence[str], level: Sequence[str], kind: Sequence[str]) -> list[float]:
    """Score the share of right characters; prompts that are easy or out of reach have one score."""
    fixed = {"easy": 1.0, "far": 0.0}
    return [
        fixed.get(each, _share(text, asked))
        for text, each, asked in zip(responses, level, kind, strict=True)
    ]


def _share(text: str, kind: str) -> float:
    num_odd = sum(ord(character) % 2 for character in text)
    share = num_odd / max(len(text), 1)
    return share if kind == "odd" else 1 - share


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


def samples_to_goal(folder: Path, seed: int, way: str) -> int | None:
    """Return the samples that a run takes to the goal; None if it does not get there."""
    write_tiny_model(folder / "model", "tiny-qwen3", seed=seed)
    goal = Goal()
    train(
        folder / "model",
        rows(0, num_easy=48, num_far=48, num_learnable=24),
        parity,
        eval_data=rows(500, num_easy=0, num_far=0, num_learnable=24),
        callbacks=[goal],
        output_dir=str(folder / "run"),
        input_key="prompt",
        seed=seed,
        fsdp=True,
        engine_type="hf",
        micro_train_batch_size=32,
        generate_max_len=8,
        prompt_max_len=32,
        init_kl_coef=0.0,
        actor_learning_rate=1e-3,
        lr_warmup_ratio=0.0,
        lr_scheduler="constant",
        max_steps=MAX_STEPS,
        num_episodes=MAX_STEPS,
        eval_steps=1,
        parity_check_steps=-1,
        num_threads=1,
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
        found: dict[str, int] = {}
        for way in WAYS:
            with tempfile.TemporaryDirectory() as name:
                num_samples = samples_to_goal(Path(name), seed, way)
            # A run that does not get there counts with all of its samples.
            most = MAX_STEPS * SIZES["rollout_batch_size"] * SIZES["n_samples_per_prompt"]
            found[way] = most if num_samples is None else num_samples
        ratios.append(found["pools"] / found["uniform"])
        print(json.dumps({"seed": seed, **found, "ratio": round(ratios[-1], 3)}), flush=True)
    print(f"pools take {median(ratios):.2f} of the samples of uniform drawing (median)")


if __name__ == "__main__":
    main()
