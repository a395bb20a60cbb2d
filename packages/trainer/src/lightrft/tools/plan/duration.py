"""Seconds of each phase of a step from operations, bytes and links, for any number of GPUs.

Compared with three published runs (`published.PUBLISHED`); sleeping and saving are left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
        num_gpus: Ranks.
        memory_bytes: Of a rank in the phase that needs most; None where it does not fit.
        phases: By name, in their order.
    """

    num_gpus: int
    memory_bytes: float | None
    phases: Mapping[str, float]

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(self.phases.values())


def exchange_bytes_per_rank(setup: Setup) -> float:
    """Bytes that one rank receives when the rollouts of a step are exchanged."""
    config = setup.config
    response = setup.mean_row_tokens - config.prompt_max_len
    samples = StepSamples(
        config.rollout_batch_size * config.n_samples_per_prompt,
        config.prompt_max_len,
        response,
        num_turns=math.ceil(response / config.stream_chunk) if config.stream_chunk else 1.0,
    )
    return predict_exchange(
        samples,
        world_size=setup.world_size,
        sp_size=config.sp_size,
        ledger_gate=config.ledger_gate,
        num_open_groups=config.num_prompts_in_flight if config.stream_chunk else 0.0,
    ).total


def step_seconds(setup: Setup, gpu: Gpu) -> StepSeconds:
    """The prediction for one number of GPUs."""
    memory = plan_memory(setup)
    return StepSeconds(
        setup.world_size,
        memory.worst.device_bytes if memory.fits else None,
        {
            "rollout": _rollout(setup, gpu),
            "exchange": _collective(setup, exchange_bytes_per_rank(setup), gpu),
            "score": _score(setup, gpu),
            "train": _train(setup, gpu),
            "sync": _sync(setup, gpu),
        },
    )


def scale(setup: Setup, gpu: Gpu, counts: Sequence[int]) -> list[StepSeconds]:
    """The same options on several numbers of GPUs, each with the token budget of its start."""
    node = setup.ranks_per_node
    return [
        step_seconds(with_budget(replace(setup, world_size=n, ranks_per_node=min(n, node))), gpu)
        for n in counts
        if n % setup.config.engine_tp_size == 0
    ]


def efficiency(rows: Sequence[StepSeconds]) -> list[float | None]:
    """Least GPU-seconds of all rows over those of each; None where the run does not fit.

    The least need not be those of the fewest GPUs: with weights on the host each GPU has a link of
    its own, so more of them bring a whole model sooner.
    """
    costs = [None if row.memory_bytes is None else row.total * row.num_gpus for row in rows]
    least = min((cost for cost in costs if cost is not None), default=0.0)
    return [None if cost is None else least / cost for cost in costs]


def where_it_stops_paying(setup: Setup, rows: Sequence[StepSeconds]) -> str:
    """From which number of GPUs on less than half of their time is the step's work; and why."""
    fitting = [(row, x) for row, x in zip(rows, efficiency(rows), strict=True) if x is not None]
    if not fitting:
        return "the run fits on none of these numbers of GPUs"
    best = max(fitting, key=lambda each: each[1])[0].num_gpus
    beyond = [(row, share) for row, share in fitting if share < 0.5 and row.num_gpus > best]
    if not beyond:
        last, share = fitting[-1]
        if last.num_gpus == best:
            return f"up to {best} GPUs none loses work to the others"
        return f"each of {last.num_gpus} GPUs still does {share:.0%} of the work of one of {best}"
    first, share = beyond[0]
    slowest = max(first.phases, key=lambda name: first.phases[name])
    samples = setup.config.rollout_batch_size * setup.config.n_samples_per_prompt
    per_rank = samples / first.num_gpus
    wanted = 2 ** math.ceil(math.log2(setup.config.rollout_batch_size / share))
    remedies = {
        "rollout": (
            f"decoding reads all weights for {per_rank:g} samples of a rank: "
            f"--rollout_batch_size {wanted}, or fewer GPUs"
        ),
        "train": (
            f"each rank trains {per_rank:g} samples: --rollout_batch_size {wanted} with a larger "
            "--train_batch_size, or FSDP2 shards of one node (hybrid)"
        ),
        "sync": "all weights go to every engine in each step: --rollout_batch_size "
        f"{wanted}, so that there are fewer steps",
    }
    hint = remedies.get(slowest, f"--rollout_batch_size {wanted}")
    return f"from {first.num_gpus} GPUs on less than half of their time is work: {hint}"


def waiting_share(setup: Setup, gpu: Gpu) -> float:
    """Share of a step in which the mean response has ended and the longest has not."""
    config = setup.config
    mean = setup.mean_tokens
    waves = max(1.0, _rows_at_once(setup, gpu)[1])
    tail = (config.max_response_tokens - mean) / ((waves - 1) * mean + config.max_response_tokens)
    seconds = step_seconds(setup, gpu)
    return seconds.phases["rollout"] * tail / seconds.total


def stream_advice(setup: Setup, gpu: Gpu) -> str:
    """What the longest responses cost, and the option against it."""
    share, config = waiting_share(setup, gpu), setup.config
    text = f"waiting for the longest responses: {share:.0%} of the step"
    if share <= 1 / 3 or config.stream_chunk is not None or config.has_episodes:
        return text
    # With less, the longest responses reach their bound of age and are waited for.
    chunk = math.ceil(max(setup.mean_tokens, config.max_response_tokens / config.max_staleness))
    return f"{text}; --stream_chunk {chunk} does not wait (--length_sigma compares the forms)"


def _rows_at_once(setup: Setup, gpu: Gpu) -> tuple[float, float]:
    """Responses that an engine samples at once, and how many times so many there are."""
    rows = setup.samples_per_rank * setup.config.engine_tp_size
    room = engine_room(replace(setup, capacity_bytes=gpu.memory_bytes))
    at_once = max(1.0, min(rows, rows if room is None else room.rows))
    return at_once, rows / at_once


@dataclass(frozen=True, slots=True)
class Decoding:
    """Seconds of an engine's work.

    Args:
        weight_seconds: Of reading the weights once.
        token_seconds: Of reading keys and values of one token.
        row_seconds: Of computing one row's next token.
        prefill_seconds: Of computing one token of a prompt.
    """

    weight_seconds: float
    token_seconds: float
    row_seconds: float
    prefill_seconds: float

    def step(self, rows: float, tokens: float) -> float:
        """Of a decoding step of rows that have so many tokens together."""
        read = self.weight_seconds + tokens * self.token_seconds
        return max(read, rows * self.row_seconds) + constant("decode_step_seconds")


def decoding(setup: Setup, gpu: Gpu) -> Decoding:
    """Seconds of the engine of `engine_tp_size` devices."""
    tp, active = setup.config.engine_tp_size, _active_parameters(setup)
    bandwidth = gpu.memory_gb_per_second * GB * constant("decode_bandwidth_share") * tp
    compute = 2 * active / (gpu.tflops * TERA * constant("score_efficiency") * tp)
    weights = _read_weights(setup, setup.samples_per_rank * tp)
    return Decoding(weights / bandwidth, setup.cache_bytes / bandwidth, compute, compute)


def _rollout(setup: Setup, gpu: Gpu) -> float:
    """Decoding until the longest response of the rank is done; weights are read at each step."""
    config, cost = setup.config, decoding(setup, gpu)
    at_once, waves = _rows_at_once(setup, gpu)
    # The last wave lasts as long as its longest response.
    steps = max(0.0, waves - 1) * setup.mean_tokens + config.max_response_tokens
    # Prompts of a group share their prefix.
    rows = setup.samples_per_rank * config.engine_tp_size / config.n_samples_per_prompt
    prefill = cost.prefill_seconds * rows * config.prompt_max_len
    return steps * cost.step(at_once, at_once * setup.mean_row_tokens) + prefill


def _active_parameters(setup: Setup) -> float:
    size = setup.actor_size
    return size.num_layers * size.active_layer_parameters + size.embedding_parameters


def _read_weights(setup: Setup, rows: float) -> float:
    """Bytes of weights that a decoding step of so many responses reads."""
    size = setup.actor_size
    read = size.parameters if rows >= size.num_experts else _active_parameters(setup)
    return setup.compute_bytes * read


def _flops_per_pass(setup: Setup) -> float:
    """Operations of a forward pass over this rank's samples."""
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
        num_messages = micro * 3 * size.num_layers
    else:
        moved = (micro * 4 + c * config.steps_per_rollout) * size.parameters
        num_messages = micro * size.parameters / 5e7
    moved *= config.max_epochs
    transfer = _collective(setup, moved, gpu, num_messages * config.max_epochs)
    hidden = min(transfer * constant("overlap"), compute)
    states = 16 * size.parameters / setup.world_size * config.steps_per_rollout
    step = states / (gpu.memory_gb_per_second * GB)
    return compute + transfer - hidden + step + _offload(setup, micro * config.max_epochs)


def _offload(setup: Setup, num_micro: float) -> float:
    """Of optimizer states, or of all that is sharded, on the host."""
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
    messages = sent / (setup.config.weight_bucket_mb * 1e6)
    # Hashes read all weights on both sides, copies twice what is sent.
    read = 2 * (setup.compute_bytes * setup.actor_size.parameters + sent)
    local = read / (gpu.memory_gb_per_second * GB)
    if setup.config.rollout_ranks:  # ranks that train gather nothing, see `forms`
        return local
    return local + _collective(setup, sent, gpu, messages)


def _collective(setup: Setup, num_bytes: float, gpu: Gpu, num_messages: float = 1.0) -> float:
    """Of an all-gather that ends with `num_bytes` on each rank."""
    world = setup.world_size
    if world == 1:
        return 0.0
    local = min(setup.ranks_per_node, world)
    share = constant("link_share") * GB
    inside = num_bytes * (local - 1) / local / (gpu.link_gb_per_second * share)
    # What comes from other nodes arrives over all network cards of the node and is passed on.
    num_nodes = -(-world // local)
    across = num_bytes * (num_nodes - 1) / num_nodes / local
    outside = across / (constant("node_gb_per_second") * share)
    latency = num_messages * constant("collective_seconds") * math.log2(world)
    return max(inside, outside) + latency


# Of `records.table.row_on_wire`, which a test compares.
ROW_BYTES = 45
COMPONENT_BYTES = 8
# Framing of one rank's rows, of one sample's evidence and of each call in it, as measured.
MESSAGE_BYTES = 40
EVIDENCE_ROW_BYTES = 90
EVIDENCE_CALL_BYTES = 70
# What all ranks know of a group in flight.
GROUP_BYTES = 16


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of one step over all ranks.

    Args:
        count: Of them.
        prompt_tokens, response_tokens: Of one sample on average; the response with observations.
        observed_tokens: Tokens of observations among those of the response.
        num_turns: Calls of the engine for one response.
    """

    count: int
    prompt_tokens: float
    response_tokens: float
    observed_tokens: float = 0.0
    num_turns: float = 1.0

    @property
    def token_bytes(self) -> float:
        """Of one sample's ids and logprobs."""
        return 4 * (self.prompt_tokens + 2 * self.response_tokens)


@dataclass(frozen=True, slots=True)
class ExchangeBytes:
    """Bytes that one rank gets from the others in one step.

    Args:
        rows: Ids, rewards, lengths and masks of the samples of all ranks.
        tokens: Of the samples that it trains.
        evidence: Ledger and journal of these samples; 0 without the ledger gate.
    """

    rows: float
    tokens: float
    evidence: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.rows + self.tokens + self.evidence


def predict_exchange(
    samples: StepSamples,
    *,
    world_size: int,
    sp_size: int = 1,
    ledger_gate: bool = True,
    num_open_groups: float = 0.0,
) -> ExchangeBytes:
    """The mean over ranks of what `exchange`, `deliver_rows` and `deliver_evidence` move.

    A sample is trained on a rank that has nothing to do with where it was sampled, so 1 of
    `world_size` need not move. Rewards have one component.

    Args:
        samples: Of the step.
        world_size: Ranks.
        sp_size: Ranks that train the same samples.
        ledger_gate: Whether evidence moves.
        num_open_groups: Of streaming rollouts, which tell all ranks of them three times.
    """
    moved = (world_size - 1) / world_size
    trained = samples.count * sp_size / world_size
    tokens = samples.token_bytes
    if samples.observed_tokens:
        tokens += samples.response_tokens / 8
    evidence = samples.token_bytes - 4 * samples.observed_tokens
    evidence += EVIDENCE_ROW_BYTES + EVIDENCE_CALL_BYTES * samples.num_turns
    rows = samples.count * (ROW_BYTES + COMPONENT_BYTES) + world_size * MESSAGE_BYTES
    return ExchangeBytes(
        rows=moved * (rows + 3 * GROUP_BYTES * num_open_groups),
        tokens=moved * trained * tokens,
        evidence=moved * trained * evidence if ledger_gate else 0.0,
    )
