"""Folders of runs for the tests of the report."""

import json

from lightrft.reporting.loggers import JsonLinesFile, JsonLinesLogger
from lightrft.reporting.metric_table import STAGES

HASH = -6861381335572764021
OPTIONS = {"pretrain": "some/model", "n_samples_per_prompt": 4, "verify_weight_sync": True}


def metrics_of(step, rewards, best):
    is_solved = min(rewards) == max(rewards)
    return {
        **{f"{stage}_seconds": 0.1 + 0.01 * step for stage in STAGES},
        "step_seconds": 0.7,
        "reward": sum(rewards) / 4,
        "reward_std": 0.5 - 0.5 * is_solved,
        "reward_min": min(rewards),
        "reward_max": best,
        "constant_group_share": float(is_solved),
        "response_length": 20.0 + step,
        "truncated_share": 0.0,
        "kl": 0.01 * step,
        "approx_kl": 0.01,
        "entropy": 1.0,
        "grad_norm": 0.5,
        "clip_fraction_low": 0.01,
        "clip_fraction_high": 0.02,
        "logprob_diff_max": 1e-5,
        "actor_lr": 1e-5,
        "tokens_per_second": 1000.0,
        "weights_version": step,
        "engine_hash": HASH,
    }


def append(folder, name, *rows):
    """Append rows to a file of JSON lines."""
    lines = JsonLinesFile(folder / f"{name}.jsonl")
    for row in rows:
        lines.append(row)
    lines.close()


def write_run(
    folder,
    num_steps=12,
    *,
    best=1.0,
    solved_from=None,
    label="843",
    said=None,
    metrics=(),
    has_tokens=True,
    has_ended=True,
    **options,
):
    """Write a run whose rewards are 0 and `best`; from `solved_from` on all samples have that.

    Args:
        said: Every response; None for one that says the reward.
        metrics: Changes those of each step.
        has_tokens: Whether it recorded tokens.
        has_ended: Whether there is a summary.
        options: Of the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logger = JsonLinesLogger(folder / "metrics.jsonl")
    samples, trajectories = [], []
    for step in range(1, num_steps + 1):
        is_solved = solved_from is not None and step >= solved_from
        rewards = [best] * 4 if is_solved else [0.0, 0.0, best, best]
        logger.log(step, {**metrics_of(step, rewards, best), **dict(metrics)})
        for number, reward in enumerate(rewards):
            shared = {"step": step, "prompt": f"{step} + {number // 2} =", "reward": reward}
            shared |= {"response": said or f"the sum is {int(10 * reward)}", "label": label}
            shared |= {"components": {"exact": reward}, "response_length": 4}
            samples.append(shared)
            advantage = 0.0 if is_solved else reward - 0.5
            numbers = {"logprobs": [-0.1, -2.0], "rollout_logprobs": [-0.1, -1.9]}
            numbers |= {"advantages": [advantage] * 2, "entropy": [0.5, 0.1]}
            trajectories.append({**shared, "tokens": ["the sum", " is"], **numbers})
    logger.close()
    append(folder, "samples", *samples)
    if has_tokens:
        append(folder, "trajectories", *trajectories)
    options = {**OPTIONS, **options}
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
    (folder / "config.toml").write_text(text)
    versions = {"python": "3.11.7", "torch": "2.13.0"}
    (folder / "run.json").write_text(json.dumps({"world_size": 2, "versions": versions}))
    if has_ended:
        (folder / "summary.json").write_text(json.dumps({"num_steps": num_steps}))
    return folder


def change_lines(folder, name, change):
    """Replace each row of a file of JSON lines by change(row)."""
    path = folder / f"{name}.jsonl"
    rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
