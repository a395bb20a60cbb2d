"""Options of reinforcement, and batch sizes that fit together. Standard library only."""

import math

from lightrft.config.options import option, part
from lightrft.config.parts.learning import LearningOptions
from lightrft.config.parts.machine import ENGINE_TYPES, BuildOptions
from lightrft.config.parts.rollout import RolloutOptions
from lightrft.config.parts.rows import PromptDataOptions
from lightrft.config.parts.run_control import OutputOptions
from lightrft.config.strategy_config import StrategyConfig


# A whole run chooses its engine; the published default of a strategy is vllm.
@part("engine")
class PolicyOptions(
    OutputOptions,
    LearningOptions,
    RolloutOptions,
    PromptDataOptions,
    BuildOptions,
    StrategyConfig,
):
    """Options of reinforcement."""

    engine_type: str = option(
        "auto",
        "Rollout engine; auto takes vllm or sglang on a GPU, else hf.",
        choices=ENGINE_TYPES,
        common=True,
    )


def launch_problems(config: PolicyOptions, num_processes: int) -> list[str]:
    """Return the problems that every process of a launch has in common."""
    num_training = num_processes - config.rollout_ranks
    if num_training < 1:
        return [
            f"rollout_ranks {config.rollout_ranks} leaves no process to train: got "
            f"{num_processes} in all, expected {config.rollout_ranks + 1} or more"
        ]
    return batch_problems(config, num_training)


def batch_problems(config: PolicyOptions, world_size: int) -> list[str]:
    """Return sizes that do not fit together on `world_size` processes, one line per rule.

    A step samples rollout_batch_size * n_samples_per_prompt responses and updates once per
    train_batch_size of them; each process runs its share in micro-batches of
    micro_train_batch_size.
    """
    prompts, group_size = config.rollout_batch_size, config.n_samples_per_prompt
    samples, train = prompts * group_size, config.train_batch_size
    if world_size % config.sp_size:
        legal = _divisors(world_size)
        return [
            f"sp_size must divide the number of processes: got {config.sp_size} and {world_size}; "
            f"legal sp_size: {_either(legal)}"
        ]
    # Ranks that share their sequences share their samples.
    num_data_ranks = world_size // config.sp_size
    unit = config.micro_train_batch_size * num_data_ranks
    legal_train = [size for size in _divisors(samples) if size % unit == 0]
    problems = []
    size = min(config.fsdp_shard_size, world_size)
    if config.fsdp and size > 0 and world_size % size:
        problems.append(
            f"fsdp_shard_size must divide the number of processes: got {size} and {world_size}; "
            f"legal fsdp_shard_size: {_either(_divisors(world_size))}"
        )
    if config.adam_8bit and world_size > 1:
        problems.append(
            f"adam_8bit is for one process, blocks of shards have other scales: got {world_size}; "
            "leave it out, each process holds a part of Adam's moments"
        )
    problems += _engine_problems(config, config.rollout_ranks or world_size)
    if prompts % world_size:
        problems.append(
            f"rollout_batch_size must be a multiple of the {world_size} processes: got {prompts}; "
            f"nearest legal: {_either(_multiples(prompts, world_size))}"
        )
    if train % unit:
        remedies = _micro_remedies(config, samples, num_data_ranks)
        problems.append(
            "train_batch_size must be a multiple of micro_train_batch_size * processes: got "
            f"{train} and {config.micro_train_batch_size} * {num_data_ranks} = {unit}"
            f"{'; '.join(['', *remedies])}"
        )
    elif samples % train:
        legal_prompts = _multiples(
            prompts, math.lcm(train // math.gcd(train, group_size), world_size)
        )
        problems.append(
            "rollout_batch_size * n_samples_per_prompt must be a multiple of train_batch_size: got "
            f"{prompts} * {group_size} = {samples} samples and train_batch_size {train}; nearest "
            f"legal train_batch_size: {_either(_closest(legal_train, train))}; nearest legal "
            f"rollout_batch_size: {_either(legal_prompts)}"
        )
    return problems


def _micro_remedies(config: PolicyOptions, samples: int, ranks: int) -> list[str]:
    """Return the nearest sizes of updates and micro-batches that pass all rules."""
    train, micro = config.train_batch_size, config.micro_train_batch_size
    trains = [size for size in _divisors(samples) if size % ranks == 0]
    legal = {
        "micro_train_batch_size": _closest(_divisors(train // ranks), micro)
        if train in trains
        else [],
        "train_batch_size": _closest([e for e in trains if e % (micro * ranks) == 0], train),
    }
    remedies = [f"nearest legal {name}: {_either(sizes)}" for name, sizes in legal.items() if sizes]
    if remedies:
        return remedies
    nearest = _closest(trains, train)
    pairs = [f"{size} with {_closest(_divisors(size // ranks), micro)[0]}" for size in nearest]
    return [f"nearest legal pair of them: {' or '.join(pairs)}"] if pairs else []


def _engine_problems(config: PolicyOptions, generating: int) -> list[str]:
    """Return problems of the ranks with engines: the rollout ranks, if there are any."""
    problems, prompts = [], config.rollout_batch_size
    if generating % config.engine_tp_size:
        problems.append(
            "engine_tp_size must divide the number of processes: got "
            f"{config.engine_tp_size} and {generating}"
        )
    if config.rollout_ranks and prompts % generating:
        problems.append(
            f"rollout_batch_size must be a multiple of rollout_ranks: got {prompts} and "
            f"{generating}; nearest legal: {_either(_multiples(prompts, generating))}"
        )
    return problems


def _divisors(number: int) -> list[int]:
    """Return all divisors, ascending; of a number above 10**12, only those near its ends."""
    low = [size for size in range(1, min(math.isqrt(number), 10**6) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


def _multiples(value: int, unit: int) -> list[int]:
    """Return the multiples of `unit` on both sides of `value`, without 0."""
    below = value // unit * unit
    return [size for size in (below, below + unit) if size > 0]


def _closest(sizes: list[int], value: int) -> list[int]:
    """Return the neighbours of `value` in ascending `sizes`."""
    return [size for size in sizes if size <= value][-1:] + [s for s in sizes if s > value][:1]


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes)) if sizes else "none with the other sizes"
