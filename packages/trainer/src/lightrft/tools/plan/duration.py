"""Seconds of each phase of a step by a roofline: operations, bytes and links over their rates.

rollout  decoding steps * max(bytes read / bandwidth, operations / peak), and every prompt once
score    operations of the forward passes / peak
train    operations / peak, transfers beyond those that computation hides, states, offloads
sync     weights that are read, copied and gathered

Rates are those of data sheets times the shares of `constants`. The exchange of rows, sleeping and
saving are left out: they are seconds where the rest is minutes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightrft.config import ConfigError
from lightrft.config.policy_options import launch_problems
from lightrft.run.gpus import GB, Gpu
from lightrft.tools.plan.constants import constant
from lightrft.tools.plan.engine_room import engine_room
from lightrft.tools.plan.memory import plan_memory, with_budget
from lightrft.tools.plan.setup import Setup

TERA = 1e12


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Predicted seconds of one step.

    Args:
        num_gpus: Number of ranks.
        memory_bytes: Bytes of a rank in the phase that needs most; None where it does not fit.
        phases: Seconds by phase, in order.
    """

    num_gpus: int
    memory_bytes: float | None
    phases: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.phases.values())


def step_seconds(setup: Setup, gpu: Gpu) -> StepSeconds:
    """Return the prediction for one number of GPUs."""
    memory = plan_memory(setup)
    phases = {"rollout": _rollout, "score": _score, "train": _train, "sync": _sync}
    return StepSeconds(
        setup.world_size,
        memory.worst.device_bytes if memory.fits else None,
        {name: seconds(setup, gpu) for name, seconds in phases.items()},
    )


def scale(setup: Setup, gpu: Gpu, counts: Sequence[int]) -> list[StepSeconds]:
    """Predict the same options on several numbers of GPUs, each with the budget of its start."""
    return [
        step_seconds(with_budget(_on(setup, n)), gpu)
        for n in counts
        if n % setup.config.engine_tp_size == 0
    ]


def efficiency(rows: Sequence[StepSeconds]) -> list[float | None]:
    """Return the least GPU-seconds of all rows over those of each; None where it does not fit.

    The least need not be those of the fewest GPUs. With weights on the host, each GPU has a
    separate link, so more GPUs bring a whole model sooner.
    """
    costs = [None if row.memory_bytes is None else row.total * row.num_gpus for row in rows]
    least = min((cost for cost in costs if cost is not None), default=0.0)
    return [None if cost is None else least / cost for cost in costs]


def where_it_stops_paying(setup: Setup, rows: Sequence[StepSeconds]) -> str:
    """Describe from how many GPUs on less than half of their time is work, and why."""
    fitting = [(row, x) for row, x in zip(rows, efficiency(rows), strict=True) if x is not None]
    if not fitting:
        return "the run fits on none of these numbers of GPUs"
    best = max(fitting, key=lambda each: each[1])[0].num_gpus
    beyond = [(row, share) for row, share in fitting if share < 0.5 and row.num_gpus > best]
    if not beyond:
        last, share = fitting[-1]
        return f"each of {last.num_gpus} GPUs still does {share:.0%} of the work of one of {best}"
    first, share = beyond[0]
    slowest = max(first.phases, key=lambda name: first.phases[name])
    wanted = 2 ** math.ceil(math.log2(setup.config.rollout_batch_size / share))
    return (
        f"from {first.num_gpus} GPUs on less than half of their time is work, most of it {slowest} "
        f"with few samples of a rank: --rollout_batch_size {wanted}, or fewer GPUs"
    )


@dataclass(frozen=True, slots=True)
class Form:
    """Form of a step: its seconds, and the options to get it from one that waits for all."""

    seconds: float
    flags: str


def forms(setup: Setup, gpu: Gpu) -> list[Form]:
    """Return the run as it is and, if it waits for all responses, its faster forms that fit.

    Streaming saves the seconds in which the mean response has ended and the longest has not. Ranks
    that only generate take as long as the slower side, and both sides take part in the sync.
    """
    config, phases = setup.config, step_seconds(setup, gpu).phases
    total = sum(phases.values())
    current = [Form(total, "")]
    if config.rollout_lag or config.stream_chunk or config.has_episodes:
        return current
    # With less, the longest responses reach their bound of age and are waited for.
    chunk = math.ceil(max(setup.mean_tokens, config.max_response_tokens / config.max_staleness))
    streams = Form(total - phases["rollout"] * _tail_share(setup, gpu), f"--stream_chunk {chunk}")
    others = [streams, *_splits(setup, gpu)]
    return current + sorted((f for f in others if f.seconds < total), key=lambda f: f.seconds)[:2]


def _splits(setup: Setup, gpu: Gpu) -> Iterator[Form]:
    """Yield the run with each number of ranks that only generate, where both sides fit."""
    for number in range(1, setup.world_size if setup.config.fsdp else 1):
        changes = {"rollout_ranks": number, "rollout_lag": 1}
        try:
            config = setup.config.replaced(changes)
        except ConfigError:
            return  # the run may not have such ranks
        trains = replace(_on(setup, setup.world_size - number), engine="")
        samples = _on(setup, number)
        room = engine_room(samples)
        if (
            setup.config.rollout_batch_size % number
            or launch_problems(config, setup.world_size)
            or not plan_memory(trains).fits
            or (room is not None and room.problem())
        ):
            continue
        update = _score(trains, gpu) + _train(trains, gpu)
        seconds = max(_rollout(samples, gpu), update) + _sync(setup, gpu)
        yield Form(seconds, f"--rollout_ranks {number} --rollout_lag 1")


def _on(setup: Setup, world_size: int) -> Setup:
    """Return the run on another number of ranks."""
    node = min(world_size, setup.ranks_per_node)
    return replace(setup, world_size=world_size, ranks_per_node=node)


def _tail_share(setup: Setup, gpu: Gpu) -> float:
    """Return the share of decoding after the mean response of the last wave has ended."""
    longest, mean = setup.config.max_response_tokens, setup.mean_tokens
    waves = _rows_at_once(setup, gpu)[1]
    return (longest - mean) / ((waves - 1) * mean + longest)


def _rows_at_once(setup: Setup, gpu: Gpu) -> tuple[float, float]:
    """Return the number of responses that an engine samples at once, and of waves."""
    rows = setup.samples_per_rank * setup.config.engine_tp_size
    room = engine_room(replace(setup, capacity_bytes=gpu.memory_bytes))
    at_once = max(1.0, min(rows, rows if room is None else room.rows))
    return at_once, rows / at_once


def _rollout(setup: Setup, gpu: Gpu) -> float:
    """Return the seconds until the longest response is done; each step reads all weights."""
    config, size, tp = setup.config, setup.actor_size, setup.config.engine_tp_size
    rows = setup.samples_per_rank * tp
    bandwidth = gpu.memory_gb_per_second * GB * constant("decode_bandwidth_share") * tp
    active = size.num_layers * size.active_layer_parameters + size.embedding_parameters
    token = 2 * active / (gpu.tflops * TERA * constant("score_efficiency") * tp)
    read = size.parameters if rows >= size.num_experts else active
    at_once, waves = _rows_at_once(setup, gpu)
    cache = at_once * setup.mean_row_tokens * setup.cache_bytes
    moved = (setup.compute_bytes * read + cache) / bandwidth
    step = max(moved, at_once * token) + constant("decode_step_seconds")
    # The last wave lasts as long as its longest response; prompts of a group share their prefix.
    steps = (waves - 1) * setup.mean_tokens + config.max_response_tokens
    return steps * step + token * config.prompt_max_len * rows / config.n_samples_per_prompt


def _flops_per_pass(setup: Setup) -> float:
    """Return the operations of a forward pass over this rank's samples."""
    size, tokens = setup.actor_size, setup.mean_row_tokens
    per_token = 2.0 * size.num_layers * size.active_layer_parameters
    scored = 2.0 * size.embedding_parameters * (tokens - setup.config.prompt_max_len)
    attention = 2.0 * size.num_layers * size.q_width * tokens**2
    return setup.samples_per_rank * (per_token * tokens + scored + attention)


def _score(setup: Setup, gpu: Gpu) -> float:
    config, scored = setup.config, [n for n in setup.evaluated if n != "moving average"]
    # The one update of a step computes the policy's logprobs itself.
    has_kl_reward = "reference" in scored and not config.use_kl_loss
    is_first = config.num_minibatches > 1 or config.asks_policy_first or has_kl_reward
    scores_policy = is_first and not config.use_rollout_logprobs
    passes = scores_policy + len(scored) + (setup.critic is not None)
    flops = passes * _flops_per_pass(setup)
    return flops / (gpu.tflops * TERA * constant("score_efficiency"))


def _train(setup: Setup, gpu: Gpu) -> float:
    config, size, c = setup.config, setup.actor_size, setup.compute_bytes
    passes = (4 if config.gradient_checkpointing else 3) * (1 + (setup.critic is not None))
    flops = config.max_epochs * passes * _flops_per_pass(setup)
    compute = flops / (gpu.tflops * TERA * constant("train_efficiency"))
    tokens = setup.samples_per_rank * setup.mean_row_tokens
    micro = max(1.0, tokens / setup.micro_tokens(config.micro_train_batch_size))
    if config.fsdp or config.zero_stage == 3:
        # Weights twice and gradients once, for every micro batch.
        moved = micro * (2 * c + 4) * size.parameters
    else:
        moved = (micro * 4 + c * config.steps_per_rollout) * size.parameters
    transfer = config.max_epochs * _gather(setup, moved, gpu)
    hidden = min(transfer * constant("overlap"), compute)
    states = 16 * size.parameters / setup.world_size * config.steps_per_rollout
    step = states / (gpu.memory_gb_per_second * GB)
    return compute + transfer - hidden + step + _offload(setup, micro * config.max_epochs)


def _offload(setup: Setup, num_micro: float) -> float:
    """Return the seconds of optimizer states, or of all that is sharded, on the host."""
    config, world = setup.config, setup.world_size
    trained, total = setup.actor.trained / world, setup.actor.total / world
    link, host = (constant(n) * GB for n in ("host_gb_per_second", "host_adam_gb_per_second"))
    steps = config.steps_per_rollout * config.max_epochs
    # Gradients there and weights back; Adam reads and writes weights and both moments.
    on_host = steps * ((4 + setup.compute_bytes) * trained / link + 28 * trained / host)
    if config.fsdp and config.fsdp_cpu_offload:
        # Shards for both passes of each micro batch, and its gradients.
        return on_host + num_micro * 4 * (2 * total + trained) / link
    if config.adam_offload and config.fsdp:
        return 2 * 8 * trained / link  # both ways, around an update phase
    return on_host if config.adam_offload else 0.0


def _sync(setup: Setup, gpu: Gpu) -> float:
    sent = setup.compute_bytes * setup.num_sent
    # Hashes read all weights on both sides; copies read and write what is sent.
    read = 2 * (setup.compute_bytes * setup.actor_size.parameters + sent)
    return read / (gpu.memory_gb_per_second * GB) + _gather(setup, sent, gpu)


def _gather(setup: Setup, num_bytes: float, gpu: Gpu) -> float:
    """Return the seconds of an all-gather that ends with `num_bytes` on each rank."""
    local = min(setup.ranks_per_node, setup.world_size)
    share = constant("link_share") * GB
    inside = num_bytes * (local - 1) / local / (gpu.link_gb_per_second * share)
    # Data of other nodes arrives over all network cards of the node and is passed on.
    num_nodes = -(-setup.world_size // local)
    across = num_bytes * (num_nodes - 1) / num_nodes / local
    return max(inside, across / (constant("node_gb_per_second") * share))
