"""Seconds of each phase of a step from operations, bytes and links, for any number of GPUs.

Of three published runs (8B, 32B, a mixture of 30B) 0.68 to 1.04 times their seconds are predicted,
which a test holds; sleeping, waking and saving are left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightrft.run.gpus import GB, Gpu
from lightrft.tools.plan.memory import plan_memory
from lightrft.tools.plan.setup import Setup

TERA = 1e12


@dataclass(frozen=True, slots=True)
class Constant:
    """A number of the model of time.

    Args:
        value: In its unit.
        meaning: With the unit.
        is_measured: From a run of this project; else an assumption.
        compare: What others report of it.
    """

    value: float
    meaning: str
    is_measured: bool = False
    compare: str = ""

    @property
    def source(self) -> str:
        """The origin of the number."""
        kind = "measured" if self.is_measured else "assumed"
        return f"{kind}; {self.compare}" if self.compare else kind


# Replace an assumption by what `doctor --gpu` or a run reports (`mfu`, seconds of phases).
CONSTANTS = {
    "train_efficiency": Constant(
        0.40,
        "share of the peak in forward and backward passes",
        compare="0.38 to 0.43 for Llama 3 405B on H100 (arXiv:2407.21783, table 4)",
    ),
    "score_efficiency": Constant(0.50, "share of the peak in forward passes"),
    "decode_bandwidth_share": Constant(0.60, "share of the memory's bandwidth while decoding"),
    "decode_step_seconds": Constant(0.004, "s a decoding step takes beside reading memory"),
    "mean_length_share": Constant(0.5, "mean response over generate_max_len"),
    "link_share": Constant(
        0.70,
        "share of a link's bandwidth in collectives",
        compare="about 200 of 300 GB/s on 8 A100 with NVLink (NVIDIA/nccl-tests issue 149)",
    ),
    "node_gb_per_second": Constant(
        50.0,
        "GB/s of a GPU to other nodes",
        compare="400 Gb/s is a ConnectX-7 for each GPU, as in DGX H100; DGX A100 has half",
    ),
    "collective_seconds": Constant(30e-6, "s a collective waits for each doubling of ranks"),
    "overlap": Constant(0.8, "share of FSDP2's transfers hidden behind computation"),
}


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


def constant(name: str) -> float:
    """The value of a constant."""
    return CONSTANTS[name].value


def exchange_bytes_per_rank(setup: Setup) -> float:
    """Bytes that one rank receives when the rollouts of a step are exchanged."""
    config = setup.config
    response = mean_row_tokens(setup) - config.prompt_max_len
    samples = StepSamples(
        config.rollout_batch_size * config.n_samples_per_prompt, config.prompt_max_len, response
    )
    return predict_exchange(
        samples, world_size=setup.world_size, sp_size=config.sp_size, ledger_gate=config.ledger_gate
    ).total


def mean_row_tokens(setup: Setup) -> float:
    """Prompt and response of an average sample."""
    mean = constant("mean_length_share") * setup.config.max_response_tokens
    return min(setup.row_tokens, setup.config.prompt_max_len + mean)


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
    """The same options on several numbers of GPUs."""
    node = setup.ranks_per_node
    return [
        step_seconds(replace(setup, world_size=n, ranks_per_node=min(n, node)), gpu)
        for n in counts
        if n % setup.config.engine_tp_size == 0
    ]


def efficiency(rows: Sequence[StepSeconds]) -> list[float]:
    """GPU-seconds of the first row over those of each row: 1 where more GPUs lose nothing."""
    first = rows[0]
    return [first.total * first.num_gpus / (row.total * row.num_gpus) for row in rows]


def where_it_stops_paying(setup: Setup, rows: Sequence[StepSeconds]) -> str:
    """From which number of GPUs on less than half of their time is the step's work; and why."""
    shares = efficiency(rows)
    beyond = [row for row, share in zip(rows, shares, strict=True) if share < 0.5]
    if not beyond:
        return f"each of {rows[-1].num_gpus} GPUs still does {shares[-1]:.0%} of the work of one"
    first = beyond[0]
    slowest = max(first.phases, key=lambda name: first.phases[name])
    samples = setup.config.rollout_batch_size * setup.config.n_samples_per_prompt
    per_rank = samples / first.num_gpus
    wanted = 2 ** math.ceil(math.log2(setup.config.rollout_batch_size / shares[rows.index(first)]))
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


def _rollout(setup: Setup, gpu: Gpu) -> float:
    """Decoding until the longest response of the rank is done; weights are read at each step."""
    config, size, c = setup.config, setup.actor_size, setup.compute_bytes
    tp = config.engine_tp_size
    rows = setup.samples_per_rank * tp
    active = size.num_layers * size.active_layer_parameters + size.embedding_parameters
    row, row_tokens = setup.cache_bytes, mean_row_tokens(setup)
    weights = c * (size.parameters if rows >= size.num_experts else active)
    cache = max(1.0, config.engine_mem_util * gpu.memory_bytes * tp - weights)
    at_once = max(1.0, min(rows, cache / (row * row_tokens)))
    waves = rows / at_once
    mean = constant("mean_length_share") * config.max_response_tokens
    bandwidth = gpu.memory_gb_per_second * GB * constant("decode_bandwidth_share") * tp
    read = (weights + at_once * row * row_tokens) / bandwidth
    compute = 2 * active * at_once / (gpu.tflops * TERA * constant("score_efficiency") * tp)
    step = max(read, compute) + constant("decode_step_seconds")
    # The last wave lasts as long as its longest response.
    steps = max(0.0, waves - 1) * mean + config.max_response_tokens
    prefill = 2 * active * setup.samples_per_rank * config.prompt_max_len
    once = config.n_samples_per_prompt  # prompts of a group share their prefix
    return steps * step + prefill / once / (gpu.tflops * TERA * constant("score_efficiency"))


def _flops_per_pass(setup: Setup) -> float:
    """Operations of a forward pass over this rank's samples."""
    size, tokens = setup.actor_size, mean_row_tokens(setup)
    per_token = 2.0 * size.num_layers * size.active_layer_parameters
    scored = 2.0 * size.embedding_parameters * (tokens - setup.config.prompt_max_len)
    attention = 2.0 * size.num_layers * size.q_width * tokens**2
    return setup.samples_per_rank * (per_token * tokens + scored + attention)


def _score(setup: Setup, gpu: Gpu) -> float:
    passes = 1 + len(setup.evaluated) + (setup.critic is not None)
    if setup.config.use_rollout_logprobs:
        passes -= 1
    flops = passes * _flops_per_pass(setup)
    return flops / (gpu.tflops * TERA * constant("score_efficiency"))


def _train(setup: Setup, gpu: Gpu) -> float:
    config, size, c = setup.config, setup.actor_size, setup.compute_bytes
    passes = (4 if config.gradient_checkpointing else 3) * (1 + (setup.critic is not None))
    flops = config.max_epochs * passes * _flops_per_pass(setup)
    compute = flops / (gpu.tflops * TERA * constant("train_efficiency"))
    tokens = setup.samples_per_rank * mean_row_tokens(setup)
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
    return compute + transfer - hidden + states / (gpu.memory_gb_per_second * GB)


def _sync(setup: Setup, gpu: Gpu) -> float:
    total = setup.compute_bytes * setup.actor_size.parameters
    messages = total / (setup.config.weight_bucket_mb * 1e6)
    # Hashes and copies read everything about four times.
    local = 4 * total / (gpu.memory_gb_per_second * GB)
    return local + _collective(setup, total, gpu, messages)


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
ROW_BYTES = 44
COMPONENT_BYTES = 8
# Framing of one rank's rows, of one sample's evidence and of each call in it, as measured.
MESSAGE_BYTES = 40
EVIDENCE_ROW_BYTES = 90
EVIDENCE_CALL_BYTES = 70


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
    samples: StepSamples, *, world_size: int, sp_size: int = 1, ledger_gate: bool = True
) -> ExchangeBytes:
    """The mean over ranks of what `exchange`, `deliver_rows` and `deliver_evidence` move.

    A sample is trained on a rank that has nothing to do with where it was sampled, so 1 of
    `world_size` need not move. Rewards have one component. Partial rollouts also tell every rank
    all tokens of each chunk, which is not in here.

    Args:
        samples: Of the step.
        world_size: Ranks.
        sp_size: Ranks that train the same samples.
        ledger_gate: Whether evidence moves.
    """
    moved = (world_size - 1) / world_size
    trained = samples.count * sp_size / world_size
    tokens = samples.token_bytes
    if samples.observed_tokens:
        tokens += samples.response_tokens / 8
    evidence = samples.token_bytes - 4 * samples.observed_tokens
    evidence += EVIDENCE_ROW_BYTES + EVIDENCE_CALL_BYTES * samples.num_turns
    return ExchangeBytes(
        rows=moved * (samples.count * (ROW_BYTES + COMPONENT_BYTES) + world_size * MESSAGE_BYTES),
        tokens=moved * trained * tokens,
        evidence=moved * trained * evidence if ledger_gate else 0.0,
    )
