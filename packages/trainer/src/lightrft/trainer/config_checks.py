"""Rules that the values of a training configuration must keep; each returns lines, not errors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.trainer.config import TrainConfig

GROUP_ESTIMATORS = ("group_norm", "rloo", "reinforce_baseline")


def range_problems(config: TrainConfig) -> list[str]:
    """Values that no run accepts, whatever the number of processes; one line each."""
    problems = [
        f"{name} must be {expected}: got {getattr(config, name)}"
        for names, expected, is_legal in _RANGES
        for name in names
        if getattr(config, name) is not None and not is_legal(getattr(config, name))
    ]
    if config.advantage_estimator in GROUP_ESTIMATORS and config.n_samples_per_prompt < 2:
        problems.append(
            f"advantage_estimator {config.advantage_estimator} compares the samples of one prompt "
            f"and needs n_samples_per_prompt >= 2: got {config.n_samples_per_prompt}"
        )
    if config.input_template is not None and "{}" not in config.input_template:
        problems.append(
            "input_template must contain {}, where the prompt goes: got "
            f"{config.input_template!r}"
        )
    if config.apply_chat_template and config.input_template is not None:
        problems.append("apply_chat_template and input_template exclude each other: give one")
    if config.system_prompt is not None and not config.apply_chat_template:
        problems.append("system_prompt needs --apply_chat_template")
    return problems


_RANGES = (
    (
        (
            "prompt_max_len",
            "max_samples",
            "max_eval_samples",
            "rollout_batch_size",
            "generate_max_len",
            "max_epochs",
            "num_episodes",
            "max_steps",
            "logging_steps",
            "max_ckpt_num",
            "n_samples_per_prompt",
            "train_batch_size",
            "micro_train_batch_size",
            "micro_rollout_batch_size",
        ),
        "at least 1",
        lambda value: value >= 1,
    ),
    (
        ("save_steps", "eval_steps"),
        "-1 (off) or at least 1",
        lambda value: value == -1 or value >= 1,
    ),
    (("top_k",), "-1 (off) or at least 1", lambda value: value == -1 or value >= 1),
    (("temperature", "max_ckpt_mem", "kl_target"), "above 0", lambda value: value > 0),
    (("top_p",), "in (0, 1]", lambda value: 0 < value <= 1),
    (("gamma", "lambd"), "in [0, 1]", lambda value: 0 <= value <= 1),
    (
        ("eps_clip", "eps_clip_low", "eps_clip_high", "value_clip", "init_kl_coef", "entropy_coef"),
        "at least 0",
        lambda value: value >= 0,
    ),
)


def batch_problems(config: TrainConfig, world_size: int) -> list[str]:
    """How the batch sizes fail to fit together on `world_size` processes; one line per rule.

    A step samples rollout_batch_size * n_samples_per_prompt responses and updates once per
    train_batch_size of them; each of the `world_size / sp_size` data-parallel ranks goes through
    its share in micro-batches of micro_train_batch_size.
    """
    ranks = world_size // config.sp_size
    problems = []
    prompts, group_size = config.rollout_batch_size, config.n_samples_per_prompt
    samples, train, micro = (
        prompts * group_size,
        config.train_batch_size,
        config.micro_train_batch_size,
    )
    if min(prompts, group_size, train, micro, ranks) < 1:
        return []  # reported by range_problems
    if prompts % ranks:
        problems.append(
            f"rollout_batch_size must be a multiple of the {ranks} data-parallel processes: got "
            f"{prompts}; nearest legal: {_nearest(_multiples(prompts, ranks))}"
        )
    if train % (micro * ranks):
        problems.append(
            "train_batch_size must be a multiple of micro_train_batch_size * processes: got "
            f"{train} and {micro} * {ranks} = {micro * ranks}; nearest legal train_batch_size: "
            f"{_nearest(_multiples(train, micro * ranks))}"
        )
    if samples % train:
        legal_train = [
            size for size in range(micro * ranks, samples + 1, micro * ranks) if samples % size == 0
        ]
        problems.append(
            "rollout_batch_size * n_samples_per_prompt must be a multiple of train_batch_size: got "
            f"{prompts} * {group_size} = {samples} samples and train_batch_size {train}; nearest "
            f"legal train_batch_size: {_nearest(_closest(legal_train, train))}; nearest legal "
            f"rollout_batch_size: {_nearest(_legal_prompts(prompts, group_size, train, ranks))}"
        )
    return problems


def _multiples(value: int, unit: int) -> list[int]:
    below = value // unit * unit
    return [size for size in (below, below + unit) if size > 0]


def _closest(sizes: list[int], value: int) -> list[int]:
    below = [size for size in sizes if size <= value][-1:]
    above = [size for size in sizes if size > value][:1]
    return below + above


def _legal_prompts(prompts: int, group_size: int, train: int, ranks: int) -> list[int]:
    """Numbers of prompts around `prompts` that fill whole batches on all ranks."""
    unit = math.lcm(train // math.gcd(train, group_size), ranks)
    return _multiples(prompts, unit)


def _nearest(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes)) if sizes else "none with these sizes"
