"""What a continued run has got back, as a table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from collections.abc import Sequence
from lightrft.config import TrainConfig
from lightrft.trainer.runs.plan import Change
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer



def resume_rows(
    config: TrainConfig, trainer: SPMDPPOTrainer, changes: Sequence[Change]
) -> list[tuple[str, str]]:
    """Name and state of everything that a checkpoint brought back."""
    state, strategy = trainer.state, trainer.strategy
    folder = config.checkpoint_dir / "_actor" / f"global_step{state.num_steps}"
    num_files = sum(path.is_file() for path in folder.rglob("*"))
    num_generators = len(list((folder / "rng").glob("*.json")))
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(folder.stat().st_mtime))
    models = "actor" if trainer.critic is None else "actor and critic"
    moments = state.reward_moments
    sync = strategy.last_weight_sync
    rows = [
        ("checkpoint", f"{folder}: complete, {num_files} files, written {written}"),
        ("weights", f"{models}, hashes of all files as written"),
        ("optimizer", f"{models}, with learning rate schedule"),
        ("generators", f"{min(num_generators, strategy.world_size)} of {strategy.world_size} "
         "processes"),
        ("data", f"pass {state.episode + 1}, {state.num_episode_prompts} of its prompts used"),
        ("kl_coef", f"{state.kl.coef:g}"),
        ("reward moments", "not used" if moments is None else f"of {moments.count} rewards"),
        ("engine", "holds the restored weights" + (
            f", version {sync.weights_version}" if sync is not None else "")),
    ]  # fmt: skip
    for change in changes:
        kind = "changed" if change.is_free else "changed, exactness lost"
        rows.append((kind, str(change)))
    return rows


def resume_table(config: TrainConfig, num_steps: int, rows: Sequence[tuple[str, str]]) -> str:
    """The rows below a headline."""
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:{width}}  {text}" for name, text in rows]
    return "\n".join([f"continuing {config.output_dir} after step {num_steps}", *lines])
