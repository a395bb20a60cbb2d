"""How the sizes of a step fit together and onto a number of processes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.trainer.config import TrainConfig
    from lightrft.trainer.ppo_config import PPOConfig


def batch_problems(config: TrainConfig | PPOConfig, world_size: int) -> list[str]:
    """How sizes fail to fit together on `world_size` processes, one line per rule.

    A step samples rollout_batch_size * n_samples_per_prompt responses and updates once per
    train_batch_size of them; each process goes through its share in micro-batches of
    micro_train_batch_size.
    """
    prompts, group_size = config.rollout_batch_size, config.n_samples_per_prompt
    samples, train = prompts * group_size, config.train_batch_size
    if world_size % config.sp_size:
        legal = [size for size in range(1, world_size + 1) if world_size % size == 0]
        return [
            f"sp_size must divide the number of processes: got {config.sp_size} and {world_size}; "
            f"legal sp_size: {_either(legal)}"
        ]
    # Ranks that share their sequences share their samples.
    num_data_ranks = world_size // config.sp_size
    unit = config.micro_train_batch_size * num_data_ranks
    legal_train = [size for size in range(unit, samples + 1, unit) if samples % size == 0]
    found = []
    if world_size % config.engine_tp_size:
        found.append(
            "engine_tp_size must divide the number of processes: got "
            f"{config.engine_tp_size} and {world_size}"
        )
    if prompts % world_size:
        found.append(
            f"rollout_batch_size must be a multiple of the {world_size} processes: got {prompts}; "
            f"nearest legal: {_either(_multiples(prompts, world_size))}"
        )
    if train % unit:
        nearest = _closest(legal_train, train) or _multiples(train, unit)
        found.append(
            "train_batch_size must be a multiple of micro_train_batch_size * processes: got "
            f"{train} and {config.micro_train_batch_size} * {num_data_ranks} = {unit}; nearest "
            f"legal train_batch_size: {_either(nearest)}"
        )
    elif samples % train:
        legal_prompts = _multiples(
            prompts, math.lcm(train // math.gcd(train, group_size), world_size)
        )
        found.append(
            "rollout_batch_size * n_samples_per_prompt must be a multiple of train_batch_size: got "
            f"{prompts} * {group_size} = {samples} samples and train_batch_size {train}; nearest "
            f"legal train_batch_size: {_either(_closest(legal_train, train))}; nearest legal "
            f"rollout_batch_size: {_either(legal_prompts)}"
        )
    return found


def _multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit` on both sides of `value`, without 0."""
    below = value // unit * unit
    return [size for size in (below, below + unit) if size > 0]


def _closest(sizes: list[int], value: int) -> list[int]:
    """The neighbours of `value` in ascending `sizes`."""
    return [size for size in sizes if size <= value][-1:] + [s for s in sizes if s > value][:1]


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes)) if sizes else "none with the other sizes"
