"""Folders of runs for the tests of the report."""

from __future__ import annotations

import json

from lightrft.reporting.metric_table import STAGES


def write_run(folder, num_steps=12, *, best=1.0, solved_from=None, label="843", **options):
    """A run whose rewards rise from 0 to `best`; from `solved_from` on all samples have it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = {"metrics": [], "samples": [], "trajectories": []}
    for step in range(1, num_steps + 1):
        is_solved = solved_from is not None and step >= solved_from
        rewards = [best] * 4 if is_solved else [0.0, 0.0, best, best]
        row = {f"{stage}_seconds": 0.1 + 0.01 * step for stage in STAGES}
        row |= {"step": step, "reward": sum(rewards) / 4, "reward_std": 0.5 - 0.5 * is_solved}
        row |= {"reward_min": min(rewards), "reward_max": best, "kl": 0.01 * step, "entropy": 1.0}
        row |= {"constant_group_share": float(is_solved), "response_length": 20.0 + step}
        row |= {"grad_norm": 0.5, "tokens_per_second": 1000.0, "logprob_diff_max": 1e-5}
        row |= {"step_seconds": 0.7, "truncated_share": 0.0, "approx_kl": 0.01}
        row |= {"clip_fraction_low": 0.01, "clip_fraction_high": 0.02, "actor_lr": 1e-5}
        lines["metrics"].append(row)
        for number, reward in enumerate(rewards):
            shared = {"step": step, "prompt": f"{step} + {number // 2} =", "reward": reward}
            shared |= {"response": f"the sum is {int(10 * reward)}", "label": label}
            shared |= {"components": {"exact": reward}, "response_length": 4}
            lines["samples"].append(shared)
            advantage = 0.0 if is_solved else reward - 0.5
            numbers = {"logprobs": [-0.1, -2.0], "rollout_logprobs": [-0.1, -1.9]}
            numbers |= {"advantages": [advantage] * 2, "entropy": [0.5, 0.1]}
            lines["trajectories"].append({**shared, "tokens": ["the sum", " is"], **numbers})
    for name, rows in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"pretrain": "some/model", "n_samples_per_prompt": 4, **options}
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
    (folder / "config.toml").write_text(text)
    versions = {"python": "3.11.7", "torch": "2.13.0"}
    (folder / "run.json").write_text(json.dumps({"world_size": 2, "versions": versions}))
    (folder / "summary.json").write_text(json.dumps({"num_steps": num_steps}))
    return folder
