"""The memory of a run, phase by phase, against what its machine has.

A phase adds to what FSDP2 or a stage of ZeRO holds of the models at rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightrft.engines.types import MOST_KEPT_IDS
from lightrft.tools.plan.setup import FLOAT, Model, Setup
from lightrft.tools.plan.sizes import GB, ModelSize, constant

if TYPE_CHECKING:
    from lightrft.tools.plan.engine_room import EngineRoom

# Predictions err by less than this factor; the second one is a guess for untraced devices.
TOLERANCE, UNTRACED_TOLERANCE = 1.1, 1.3
LARGEST_BUDGET = 2**15
MEGABYTE = 1_000_000
# Buckets in flight at a time.
NUM_BUCKETS = 2
# As in `strategy.deepspeed.engine_config`, and DeepSpeed's limits.
ZERO_BUCKET = 50_000_000
ZERO1_BUCKET = 500_000_000
ZERO3_LIVE = 1_000_000_000
# As `lightrft.kernels.logprob`: columns of a chunk on a GPU and on a CPU, and the budget of logits
# of a loss inside the output layer on a GPU.
GPU_CHUNK_COLUMNS = 16_384
CPU_CHUNK_COLUMNS = 4_096
# As `kernels.logprob.policy_loss.WORKSPACES` on a GPU: bytes of stored products, and the least,
# most and divisor of a chunk's tokens.
LOSS_BUDGET = 2**31
LOSS_TOKENS = (1024, 8192)
LOSS_MULTIPLE = 128
# As in `models.support`: elements of gathered weights. Kept ids of a token where only a
# probability bounds them, and bytes of the values that exist for each of them.
GATHERED, KEPT_BY_PROBABILITY, BYTES_PER_KEPT = 2**24, 64, 48
# As in `models.divergence`.
DIVERGENCE_LOGITS = 2**24
REWARD_SHARDS = 8
CONTEXT = "CUDA context and NCCL"
# Bytes of a weight in 4 bits with its part of the scales; see `engines.nf4`.
PACKED = 0.5 + 1 / 64 + FLOAT / (64 * 256)


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """One item of a sum.

    Args:
        name: Name of the item.
        num_bytes: Bytes on one rank.
        is_on_host: Whether it lies in the host's memory beside a GPU.
    """

    name: str
    num_bytes: float
    is_on_host: bool = False


def resting(setup: Setup, model: Model) -> Iterator[MemoryTerm]:
    """Yield a trained model between updates, once Adam's states exist; gradients are in `peaks`."""
    config, world, c = setup.config, setup.world_size, setup.compute_bytes
    trained, total = model.trained, model.total
    if config.fsdp:
        stored = c if config.use_mp_opt and c == 2 else FLOAT
        master = FLOAT if stored == 2 else 0
        on_host = config.fsdp_cpu_offload and setup.has_gpu
        rest = total - trained - model.size.num_layers * model.layer
        weights = stored * trained + c * rest + model.size.num_layers * layer_bytes(setup, model)
        yield MemoryTerm("weights, sharded", weights / world, on_host)
        moves = setup.has_gpu and config.adam_offload
        moments = moment_bytes(config.adam_8bit)
        yield MemoryTerm("Adam's states", (moments + master) * trained / world, on_host or moves)
    else:
        yield from _resting_zero(setup, model)


def num_packed(setup: Setup, model: Model) -> int:
    """Return how many weights of a layer have 4 bits: all, but tensors of experts."""
    if setup.config.quantize is None or not model.adapters:
        return 0
    size = model.size
    attention = 2 * size.hidden * (size.q_width + size.kv_width)
    return attention if size.num_experts > 1 else model.layer


def layer_bytes(setup: Setup, model: Model) -> float:
    """Return the bytes of a layer's weights as they are gathered."""
    packed = num_packed(setup, model)
    return PACKED * packed + setup.compute_bytes * (model.layer - packed)


def dense_bytes(setup: Setup, model: Model) -> float:
    """Return the bytes of the weight that is dequantised at a time, with a scale for each block."""
    size = model.size
    largest = size.hidden * max(size.q_width, size.intermediate)
    is_packed = num_packed(setup, model) > 0
    return (setup.compute_bytes + FLOAT / 64) * largest * is_packed


def moment_bytes(is_8bit: bool) -> float:
    """Return bytes of Adam's two moments a number; 8-bit ones have a float32 scale for each 256."""
    return 2 * (1 + FLOAT / 256) if is_8bit else 2 * FLOAT


def _resting_zero(setup: Setup, model: Model) -> Iterator[MemoryTerm]:
    """Yield `resting` under a stage of ZeRO."""
    config, world, c = setup.config, setup.world_size, setup.compute_bytes
    trained, total = model.trained, model.total
    stage = config.zero_stage
    on_host = config.adam_offload and setup.has_gpu
    whole = world if stage == 3 else 1
    yield MemoryTerm("weights" + (", sharded" if stage == 3 else ""), c * total / whole)
    parts = world if stage > 0 else 1
    masters = FLOAT * trained / parts if stage > 0 else 0
    yield MemoryTerm("Adam's states", 8 * trained / parts, on_host)
    yield MemoryTerm("float32 weights", masters, on_host)
    if stage == 1 and c == 2:
        yield MemoryTerm("gradients", FLOAT * trained)
    if stage == 3:
        yield MemoryTerm("gradients, sharded", FLOAT * trained / world, on_host)
        yield MemoryTerm("bucket of gradients", FLOAT * min(trained, ZERO_BUCKET))
        yield MemoryTerm("small weights, whole", c * model.size.small_parameters)


def evaluated(setup: Setup, model: Model) -> float:
    """Return the bytes of a model without gradients."""
    if setup.config.fsdp and not model.scores_tokens:
        # `prepare_reward_models` asks for at most so many shards.
        return setup.compute_bytes * model.total / min(REWARD_SHARDS, setup.world_size)
    is_sharded = setup.config.fsdp or setup.config.zero_stage == 3
    total = setup.compute_bytes * float(model.total)
    if model.size is setup.actor_size:  # the reference has the actor's base
        wide = setup.compute_bytes * model.layer
        total -= model.size.num_layers * (wide - layer_bytes(setup, setup.actor))
    return total / (setup.world_size if is_sharded else 1)


def num_copies(setup: Setup) -> int:
    """Return how often FSDP2 holds what it gathers: as it was sent, which one process skips."""
    return 1 if setup.world_size == 1 else 2


def gathered(setup: Setup, model: Model) -> float:
    """Return the bytes of whole weights that a forward pass holds beside the shards."""
    c = setup.compute_bytes
    if setup.config.fsdp:
        # Weights of an end while they are copied out of what the ranks sent, and two layers.
        whole = c * model.end + layer_bytes(setup, model)
        return num_copies(setup) * whole + dense_bytes(setup, model)
    if setup.config.zero_stage < 3:
        return 0
    # Adapters leave the embedding alone, so nothing keeps it until the backward pass.
    is_released = model.adapters and not model.size.is_tied
    released = model.size.embedding_parameters if is_released else 0
    return c * min(_divided(model) - released, ZERO3_LIVE)


def _divided(model: Model) -> int:
    """Return how many numbers stage 3 gathers: a trained model's small weights stay whole."""
    return model.total - (model.size.small_parameters if model.trained else 0)


def copied(setup: Setup, model: Model) -> float:
    """Return the bytes of weights that stage 3 fetched together: as received, and as tensors."""
    if setup.config.fsdp or setup.config.zero_stage < 3:
        return 0
    return setup.compute_bytes * 2 * min(_divided(model), ZERO_BUCKET)


def forward_peak(setup: Setup, model: Model, num_rows: int) -> Iterator[MemoryTerm]:
    """Yield the memory of a forward pass without gradients."""
    tokens = setup.micro_tokens(num_rows)
    one = Model(model.size, 0, model.scores_tokens, checkpoints=True)
    live = gathered(setup, model)
    yield MemoryTerm("gathered weights", live)
    passing = block_bytes(one, tokens, setup.compute_bytes)
    head = head_bytes(setup, model, setup.scored_tokens(num_rows), is_training=False)
    largest = max(passing, head, copied(setup, model) - live)
    yield MemoryTerm("activations of a layer, or logits", largest)
    yield MemoryTerm("tower: activations of a layer", tower_bytes(setup, one, num_rows))


def train_peak(setup: Setup, model: Model) -> list[MemoryTerm]:
    """Return the addition of an update to `resting`, at its largest moment."""
    return max(moments(setup, model), key=lambda terms: sum(t.num_bytes for t in terms))


def moments(setup: Setup, model: Model) -> Iterator[list[MemoryTerm]]:
    """Yield the addition of an update to `resting` at each moment that may be its largest."""
    rows, c = setup.config.micro_train_batch_size, setup.compute_bytes
    tokens, scored = setup.micro_tokens(rows), setup.scored_tokens(rows)
    kept = MemoryTerm(
        "activations", trunk_bytes(model, tokens, c) + tower_bytes(setup, model, rows)
    )
    head = MemoryTerm("output layer", head_bytes(setup, model, scored, is_training=True))
    passing = MemoryTerm("backward pass of a layer", block_bytes(model, tokens, c))
    # A sharded gradient exists from the first micro batch on.
    is_wide = model.scores_tokens and model.trains_all
    output = MemoryTerm(
        "gradient of the output layer", c * model.size.embedding_parameters if is_wide else 0
    )
    of_backend = _fsdp_moments if setup.config.fsdp else _zero_moments
    yield from of_backend(setup, model, kept, head, passing, output)


def _fsdp_moments(
    setup: Setup,
    model: Model,
    kept: MemoryTerm,
    head: MemoryTerm,
    passing: MemoryTerm,
    output: MemoryTerm,
) -> Iterator[list[MemoryTerm]]:
    world, c, unit = setup.world_size, setup.compute_bytes, model.layer
    twice = num_copies(setup)
    one, dense = layer_bytes(setup, model), dense_bytes(setup, model)
    on_host = setup.config.fsdp_cpu_offload and setup.has_gpu
    is_whole = model.trains_all
    held = [MemoryTerm("gradients, sharded", FLOAT * model.trained / world, on_host)]
    if setup.config.adam_offload and setup.has_gpu and not on_host:
        held.append(
            MemoryTerm(
                "Adam's states, back from the host",
                moment_bytes(setup.config.adam_8bit) * model.trained / world,
            )
        )
    end = MemoryTerm("weights of an end", c * model.end)
    early = one if twice == 2 else 0  # gathered before its turn
    next_layer = MemoryTerm("gathered layers", early)
    yield [*held, kept, head, end, output, next_layer]
    one_layer = kept.num_bytes / max(1, model.size.num_layers)
    rest = MemoryTerm(kept.name, max(0.0, kept.num_bytes - one_layer))
    # The root unit holds what is shared or has no unit, and stays until its turn.
    waiting = () if model.has_own_head else (end, output)
    # What arrives is copied: for the layer before, unless its gradients take that room.
    # A weight of 4 bits is dequantised once the copy is gone.
    before = 0 if is_whole else max(dense, early)
    layers = MemoryTerm("gathered layers", twice * one + before)
    gradients = MemoryTerm("a layer's gradients", (c + FLOAT) * unit if is_whole else 0)
    yield [*held, rest, passing, *waiting, layers, gradients]
    if not is_whole:
        left = MemoryTerm(head.name, kept_head_bytes(setup, model))
        gathering = MemoryTerm("end, as it is gathered", twice * c * model.end)
        yield [*held, kept, left, gathering, next_layer]
        return
    # Gloo copies what it reduces.
    copies = 1 if setup.has_gpu else twice
    widest = min(model.size.embedding_parameters, model.end)
    after = max(c * model.end, c * widest + FLOAT * model.end / world)
    reduced = MemoryTerm("gradients of an end", copies * FLOAT * model.end + after)
    yield [*held, reduced, MemoryTerm("a layer's gradients", FLOAT * unit * (1 + 1 / world))]
    if model.has_own_head:
        yield [*held, kept, reduced, MemoryTerm("gathered layers", 1.5 * c * unit)]
    if model.has_own_head and setup.has_gpu:
        # Reduced beside the backward pass of the last layer.
        beside = MemoryTerm("gradients of an end", FLOAT * model.end)
        yield [*held, kept, passing, beside, layers, MemoryTerm("a layer's gradients", c * unit)]
    if gradients_of_one_tensor(model) > 1:
        summed = MemoryTerm("gradients of an end", 4 * c * model.end)
        yield [*held, summed, MemoryTerm("a layer's gradients", FLOAT * unit)]


def gradients_of_one_tensor(model: Model) -> int:
    """Count the embedding's gradients at one moment: one per use if tied, and their sum."""
    if not model.trains_all:
        return 0
    return 3 if model.size.is_tied and model.scores_tokens else 1


def _zero_moments(
    setup: Setup,
    model: Model,
    kept: MemoryTerm,
    head: MemoryTerm,
    passing: MemoryTerm,
    output: MemoryTerm,
) -> Iterator[list[MemoryTerm]]:
    config, c, trained = setup.config, setup.compute_bytes, model.trained
    stage, world = config.zero_stage, setup.world_size
    bucket = min(trained, ZERO_BUCKET)
    # Part of the backward pass that is still to come when the last full bucket is reduced.
    left = 1 - bucket / max(1, trained)
    on_host = config.adam_offload and setup.has_gpu
    if stage == 0:
        held = [MemoryTerm("gradients", FLOAT * trained)]
        yield [*held, kept, head, output]
        yield [*held, kept, passing]
        return
    if stage == 1:
        yield from _zero1_moments(setup, model, kept, head, passing, output)
        return
    live = MemoryTerm("gathered weights", gathered(setup, model))
    twice = 2 if config.overlap_comm else 1
    if stage == 2:
        sums = MemoryTerm("gradients, sharded", FLOAT * trained / world, on_host)
        wide = FLOAT if c == 2 else 0
        buckets = MemoryTerm("buckets of gradients", (twice * c + c + wide) * bucket)
        # Two masks say of each number whether it is finite.
        step = [sums, MemoryTerm("gradients of the step", (FLOAT + 2) * trained / world, on_host)]
    else:
        sums = MemoryTerm("small gradients", 0.0)
        buckets = MemoryTerm("copies of the bucket", (1 + twice) * FLOAT * bucket)
        step = []
    yield [sums, kept, head, live, output]
    share = [MemoryTerm(t.name, left * t.num_bytes) for t in (kept, live)]
    embedding, num_gradients = c * model.size.embedding_parameters, gradients_of_one_tensor(model)
    largest = embedding if stage == 3 and num_gradients else 0
    yield [sums, *share, passing, buckets, MemoryTerm("gradient of one tensor", largest)]
    if stage == 2 and num_gradients > 1:
        # The sum lies in the bucket, and is copied on its way out.
        filled = MemoryTerm(buckets.name, c * bucket + embedding)
        yield [filled, MemoryTerm("gradient of one tensor", num_gradients * embedding)]
    if stage == 3:
        yield [sums, MemoryTerm("gathered weights", copied(setup, model))]
    yield step


def _zero1_moments(
    setup: Setup,
    model: Model,
    kept: MemoryTerm,
    head: MemoryTerm,
    passing: MemoryTerm,
    output: MemoryTerm,
) -> Iterator[list[MemoryTerm]]:
    c, trained = setup.compute_bytes, model.trained
    if c == 2:
        # The float32 sums are in `resting`; they are reduced through a copy.
        narrow = MemoryTerm("gradients in bfloat16", c * trained)
        yield [kept, head, output]
        yield [
            narrow,
            passing,
            MemoryTerm("bucket of gradients", FLOAT * min(trained, ZERO1_BUCKET)),
        ]
        return
    bucket = MemoryTerm("bucket of gradients", FLOAT * min(trained, ZERO_BUCKET))
    whole = MemoryTerm("gradients", FLOAT * trained)
    yield [whole, bucket, kept, head, output]
    embedding = c * model.size.embedding_parameters
    largest = MemoryTerm("gradient of one tensor", gradients_of_one_tensor(model) * embedding)
    yield [whole, bucket, passing, largest]


def layer_token_bytes(size: ModelSize, compute_bytes: int) -> float:
    """Return the bytes that the backward pass of one layer keeps of a token."""
    c = compute_bytes
    # Norms widen their input, keep it and the narrow result before the gain. The projections keep
    # the product with the gain. In float32 nothing is narrow.
    norm = (FLOAT + 2 * c) if c == 2 else 3 * FLOAT
    kept = 2.0 * (norm * size.hidden + FLOAT)
    kept += c * (size.q_width + 2 * size.kv_width)  # queries, keys, values
    kept += c * size.q_width + FLOAT * size.num_heads  # attention's result and its log sums
    if size.has_qk_norm:
        kept += (FLOAT + c) * (size.q_width + size.kv_width) if c == 2 else 0
        kept += 2 * FLOAT * (size.q_width + size.kv_width) if c == FLOAT else 0
        kept += FLOAT * (size.num_heads + size.num_kv_heads)
    return kept + 4 * c * size.intermediate * size.num_active_experts


def trunk_bytes(model: Model, num_tokens: int, compute_bytes: int) -> float:
    """Return bytes that a forward pass up to the last hidden states keeps for its backward pass."""
    size = model.size
    kept = layer_token_bytes(size, compute_bytes)
    if model.checkpoints:
        kept = compute_bytes * size.hidden
    norm = FLOAT + 2 * compute_bytes if compute_bytes == 2 else 2 * FLOAT
    ends = norm * size.hidden + (2 + FLOAT // 2) * size.head_dim
    return num_tokens * (size.num_layers * kept + ends)


def tower_bytes(setup: Setup, model: Model, num_rows: int) -> float:
    """Return bytes that a vision tower keeps of prompts that are images from end to end."""
    vision, c = model.size.vision, setup.compute_bytes
    if vision is None:
        return 0.0
    layer, is_kept = vision.layer_patch_bytes(c), model.trained > 0 and not setup.freezes_tower
    kept = vision.num_layers * (c * vision.hidden if model.checkpoints else layer)
    # What is kept before the first layer and after the last one.
    kept += c * (vision.patch_numbers + 3 * vision.hidden)
    transient = layer if model.checkpoints or not is_kept else 0.0
    return setup.num_patches(num_rows) * ((kept if is_kept else 0.0) + transient)


def block_bytes(model: Model, num_tokens: int, compute_bytes: int) -> float:
    """Return bytes that a layer's backward pass adds: activations' gradients, recomputations."""
    size = model.size
    passing = 3 * compute_bytes * size.intermediate * size.num_active_experts
    again = layer_token_bytes(size, compute_bytes) if model.checkpoints else 0
    return num_tokens * (passing + again)


def head_bytes(setup: Setup, model: Model, num_scored: int, *, is_training: bool) -> float:
    """Return the work space of the output layer, without the gradient of its weight."""
    config = setup.config
    if setup.stage == "policy" and config.truncates and model.scores_tokens:
        kept = kept_ids_bytes(setup, model, num_scored, is_training=is_training)
        if is_training and config.truncated_logprobs == "kept":
            return kept  # nothing else of the layer is computed
    else:
        kept = 0
    return kept + _whole_head_bytes(setup, model, num_scored, is_training=is_training)


def kept_ids_bytes(setup: Setup, model: Model, num_scored: int, *, is_training: bool) -> float:
    """Return the work space of logprobs over the recorded ids of truncated sampling."""
    size, pairs = model.size, num_scored * _kept_per_token(setup)
    # Two factors and their product; the gradients of hidden states and of the weight are summed in
    # float32.
    total = BYTES_PER_KEPT * pairs + 3 * FLOAT * min(GATHERED, pairs * size.hidden)
    if is_training:
        total += FLOAT * num_scored * size.hidden
        total += FLOAT * size.embedding_parameters if model.trains_all else 0
    return total


def _kept_per_token(setup: Setup) -> int:
    top_k = setup.config.top_k
    ids = KEPT_BY_PROBABILITY if top_k < 1 else min(top_k, MOST_KEPT_IDS)
    return min(ids, setup.actor_size.vocab)


def recorded_bytes(setup: Setup) -> float:
    """Return the bytes of kept ids and experts of the rows that a rank trains on in a step."""
    config, size, total = setup.config, setup.actor_size, 0.0
    rows = setup.samples_per_rank * config.sp_size
    if config.truncates:
        # Each token's ids and their number, and their places [batch, seq] as two int64.
        total += FLOAT * (1 + _kept_per_token(setup)) * rows * setup.mean_tokens
        total += 16 * rows * setup.row_tokens
    asked = "enable_return_routed_experts" in (config.engine_args or {})
    is_recorded = config.routing_replay == "auto" and (asked or not setup.has_server_engine)
    if is_recorded and size.num_experts > 1:
        choices = size.num_layers * size.num_active_experts
        total += (1 if size.num_experts <= 256 else 2) * choices * rows * setup.row_tokens
        # Of a micro batch as int64, in the order of the rows and of the pass.
        total += 16 * choices * setup.micro_tokens(config.micro_train_batch_size)
    return total


def _whole_head_bytes(setup: Setup, model: Model, num_scored: int, *, is_training: bool) -> float:
    """Return the work space of the output layer over the whole vocabulary."""
    size, c = model.size, setup.compute_bytes
    hidden = num_scored * size.hidden
    if setup.stage == "divergence" and is_training:
        return _divergence_bytes(setup, num_scored)
    if not model.scores_tokens:
        return FLOAT * hidden
    if not setup.is_fused:
        # Logits, their log-softmax and its gradient in float32; the weight is widened, too.
        logits = FLOAT * num_scored * size.vocab
        widened = 0 if c == FLOAT else FLOAT * (hidden + size.embedding_parameters)
        third = logits if is_training else 0
        if is_training and widened and model.trains_all:
            third = max(logits, FLOAT * size.embedding_parameters)  # the gradient of the widened
        return 2 * logits + third + c * hidden + widened
    if is_training and setup.has_gpu:
        return loss_bytes(model, num_scored, c)
    columns = setup.config.chunk_size
    if columns is None:
        columns = GPU_CHUNK_COLUMNS if setup.has_gpu else CPU_CHUNK_COLUMNS
    columns = min(columns, size.vocab)
    total = c * hidden + 32 * 2**20
    if is_training:
        # A chunk's logits and their gradient, and the gradient of the hidden states.
        total += num_scored * columns * (FLOAT + c) + (FLOAT + c) * hidden
    return total


def kept_head_bytes(setup: Setup, model: Model) -> float:
    """Return what the output layer keeps for the backward pass once its loss is computed."""
    size, c = model.size, setup.compute_bytes
    num_scored = setup.scored_tokens(setup.config.micro_train_batch_size)
    if setup.is_fused or not model.scores_tokens:
        return FLOAT * num_scored * size.hidden
    widened = 0 if c == FLOAT else FLOAT * size.embedding_parameters
    return FLOAT * num_scored * size.vocab + widened


def loss_bytes(model: Model, num_scored: int, compute_bytes: int) -> float:
    """Return the work space of a loss in the output layer on a GPU, its weight's gradient apart."""
    c, vocab, width = compute_bytes, model.size.vocab, model.size.hidden
    least, most = LOSS_TOKENS
    most = min(max(LOSS_BUDGET // (FLOAT * vocab), least), most) // LOSS_MULTIPLE * LOSS_MULTIPLE
    num_chunks = max(1, -(-num_scored // most))
    rows = min(num_scored, -(-num_scored // num_chunks // LOSS_MULTIPLE) * LOSS_MULTIPLE)
    columns = min(GPU_CHUNK_COLUMNS, vocab)
    stored = FLOAT * rows * vocab
    if stored > LOSS_BUDGET:
        stored = LOSS_BUDGET + FLOAT * rows * columns
    # Hidden states of the chunk, gathered and padded, and both gradients of hidden states.
    states = width * (2 * c * rows + FLOAT * rows + FLOAT * num_scored)
    total = stored + states + c * rows * columns
    if not model.trains_all or c == FLOAT:
        return total
    if num_chunks == 1:
        return total  # The weight's gradient is written in its dtype.
    # Summed in float32, then narrowed.
    weight = FLOAT * vocab * width
    narrowed = weight + (FLOAT + c) * width * num_scored
    return max(total + (FLOAT - c) * vocab * width, narrowed)


def _divergence_bytes(setup: Setup, num_scored: int) -> float:
    """Return bytes of student and teacher logits for some tokens, within the teacher's pass."""
    size, c = setup.actor_size, setup.compute_bytes
    teachers = [model for name, model in setup.evaluated.items() if name.split()[0] == "teacher"]
    whole = sum(gathered(setup, each) for each in teachers)
    if setup.config.fsdp:
        whole = sum(c * (each.end + 2 * each.layer) for each in teachers)
    tokens = min(num_scored, max(1, DIVERGENCE_LOGITS // size.vocab))
    # Logits and log-probabilities of both, the divergence's terms, and gradients.
    return 7 * FLOAT * tokens * size.vocab + whole + 3 * c * num_scored * size.hidden


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory of one phase of a run on a rank at its peak.

    Args:
        name: Name of the phase.
        terms: Items that add up.
    """

    name: str
    terms: tuple[MemoryTerm, ...]

    @property
    def device_bytes(self) -> float:
        """Bytes on the device (on the host without a GPU)."""
        return rank_bytes(self.terms)

    @property
    def allocated_bytes(self) -> float:
        """Bytes on the device that torch allocates, as `max_memory_allocated` measures."""
        return rank_bytes([term for term in self.terms if term.name != CONTEXT])

    @property
    def host_bytes(self) -> float:
        """Bytes on the host beside a GPU."""
        return sum(term.num_bytes for term in self.terms if term.is_on_host)


@dataclass(frozen=True)
class MemoryPlan:
    """All phases of a run.

    Args:
        setup: Run that the plan was made for.
        phases: Phases in the order of a step.
    """

    setup: Setup
    phases: tuple[Phase, ...]

    @property
    def usable_bytes(self) -> float:
        """Bytes of a rank's memory, without the reserve."""
        return self.setup.capacity_bytes * (1 - constant("reserve_share"))

    @property
    def worst(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.device_bytes)

    @property
    def passes_fit(self) -> bool:
        """Return whether the phases that depend on micro-batches fit, though predictions err."""
        needs = (each.device_bytes for each in self.phases if each.name in ("score", "train"))
        return self.tolerance * max(needs) <= self.usable_bytes

    @property
    def is_traced(self) -> bool:
        """Return whether such updates were traced on a device; ZeRO in bfloat16 was not."""
        setup = self.setup
        return setup.config.fsdp or setup.compute_bytes == FLOAT or not setup.has_gpu

    @property
    def tolerance(self) -> float:
        """Factor by which the sum may err."""
        return TOLERANCE if self.is_traced else UNTRACED_TOLERANCE

    @property
    def host_bytes(self) -> float:
        """Largest bytes of one rank on the host."""
        return max(phase.host_bytes for phase in self.phases)

    @property
    def room(self) -> EngineRoom | None:
        """Room of the engine in its share; None without a server engine."""
        return _room(self.setup)

    @property
    def problems(self) -> list[str]:
        """Phases that do not fit the device or the host, and an engine above its share."""
        worst, problems = self.worst, []
        if worst.device_bytes > self.usable_bytes:
            problems.append(
                f"{worst.name} needs {gigabytes(worst.device_bytes)} of "
                f"{gigabytes(self.usable_bytes)}"
            )
        host = self.setup.host_bytes
        if host is not None and self.host_bytes > host:
            ranks = self.setup.ranks_per_node
            problems.append(
                f"the host needs {gigabytes(ranks * self.host_bytes)} of {gigabytes(ranks * host)} "
                f"for the {ranks} ranks of a node"
            )
        problem = "" if self.room is None else self.room.problem()
        return [*problems, problem] if problem else problems

    @property
    def fits(self) -> bool:
        """Return whether nothing is too large: the answer of plan, advice and a run's start."""
        return not self.problems


def plan_memory(setup: Setup) -> MemoryPlan:
    """Predict every phase, from the second step on, when all states exist."""
    if not setup.rolls_out:
        return MemoryPlan(setup, tuple(_given_phases(setup)))
    always = [*_context(setup), *model_terms(setup)]
    asleep = [MemoryTerm("engine: graphs", _graph_bytes(setup))]
    if setup.num_apart and setup.has_gpu:  # the base is not sent again
        is_on_host = not setup.shares_base
        weights = [
            MemoryTerm(f"{t.name}, asleep", t.num_bytes, is_on_host) for t in _engine_weights(setup)
        ]
        asleep += weights
    if not _sleeps(setup):  # the embedded engine has a cache while it samples
        asleep = list(_engine(setup) if setup.has_server_engine else _engine_weights(setup))
    recorded = MemoryTerm("kept ids and experts of the samples", recorded_bytes(setup))
    scoring = _scoring(setup, setup.config.micro_rollout_batch_size)
    phases = (
        Phase("load", (*_context(setup), *_loading(setup))),
        Phase("rollout", (*always, *_engine(setup))),
        Phase("score", (*always, *asleep, recorded, *scoring)),
        Phase("train", (*always, *asleep, recorded, *_training(setup))),
        Phase("sync", (*always, *_waking(setup), *_buckets(setup))),
        Phase("save", (*always, *asleep, *_saving(setup))),
    )
    return MemoryPlan(setup, phases)


def fitting_budget(setup: Setup) -> int:
    """Return the most micro-batch tokens that fit: a power of two up to `LARGEST_BUDGET`.

    It leaves room for a prediction's error, and is not more than the batch has. It is not less than
    the longest row, which is trained whatever the budget is.
    """
    least, most = setup.item_tokens, min(LARGEST_BUDGET, setup.batch_tokens)
    for power in range(LARGEST_BUDGET.bit_length() - 1, -1, -1):
        tokens = min(1 << power, most)
        if tokens <= least:
            break
        if plan_memory(with_tokens(setup, tokens)).passes_fit:
            return tokens
    return min(least, LARGEST_BUDGET)


def with_tokens(setup: Setup, tokens: int) -> Setup:
    """Return the setup with another token budget of micro-batches."""
    return replace(setup, config=setup.config.replaced({"micro_batch_tokens": tokens}))


def with_budget(setup: Setup) -> Setup:
    """Return the setup with the token budget of a start on GPUs, if its options leave it open."""
    config = setup.config
    if not setup.has_gpu or config.micro_batch_tokens is not None or config.sizes_in_rows:
        return setup
    return with_tokens(setup, fitting_budget(setup))


def _given_phases(setup: Setup) -> Iterator[Phase]:
    """Yield the phases of a stage that reads its rows."""
    always = [*_context(setup), *model_terms(setup)]
    yield Phase("load", (*_context(setup), *_loading(setup)))
    if setup.stage == "prefer":
        yield Phase("score", (*always, *_scoring(setup, setup.config.micro_train_batch_size)))
    yield Phase("train", (*always, *_training(setup)))
    yield Phase("save", (*always, *_saving(setup)))


def rank_bytes(terms: Sequence[MemoryTerm]) -> float:
    """Return the sum of what lies on the device."""
    return sum(term.num_bytes for term in terms if not term.is_on_host)


def fitting_share(plan: MemoryPlan) -> float | None:
    """Return the engine's share with which all of a run works; None if there is none."""
    setup = plan.setup
    trainer = rank_bytes([*_context(setup), *model_terms(setup)]) - _shared_bytes(setup)
    if not _sleeps(setup):
        others = max(p.device_bytes for p in plan.phases if p.name != "rollout")
        trainer = max(trainer, others - rank_bytes(list(_engine(setup))))
    from lightrft.tools.plan.engine_room import working_share

    return working_share(setup, trainer, plan.usable_bytes)


def _context(setup: Setup) -> Iterator[MemoryTerm]:
    if setup.has_gpu:
        yield MemoryTerm(CONTEXT, constant("context_gb") * GB)


def model_terms(setup: Setup) -> Iterator[MemoryTerm]:
    """Yield what the models of a run hold in memory."""
    yield from resting(setup, setup.actor)
    if setup.critic is not None:
        for term in resting(setup, setup.critic):
            yield MemoryTerm(f"critic: {term.name}", term.num_bytes, term.is_on_host)
    for name, model in setup.evaluated.items():
        yield MemoryTerm(name, evaluated(setup, model))


def _sleeps(setup: Setup) -> bool:
    return setup.config.enable_engine_sleep and setup.has_server_engine


def _shared_bytes(setup: Setup) -> float:
    """Return the bytes of a server engine's weights that are the trainer's, too."""
    return setup.compute_bytes * setup.actor.stored if setup.shares_base else 0.0


def engine_bytes(setup: Setup) -> float:
    """Return what the engine's weights take beside those of the trainer."""
    config, actor, c = setup.config, setup.actor, setup.compute_bytes
    is_whole = setup.world_size == 1 or (not config.fsdp and config.zero_stage < 3)
    if setup.has_server_engine or not is_whole:
        number = setup.actor_size.parameters + setup.num_apart
        unpacked = c * actor.layer - layer_bytes(setup, actor) if setup.num_apart else 0
        return c * number - setup.actor_size.num_layers * unpacked - _shared_bytes(setup)
    if config.lora_rank:
        return c * (setup.num_apart or setup.actor_size.num_layers * actor.layer)
    is_alike = not config.fsdp or c == FLOAT
    return c * (0 if is_alike else actor.trained)


def _engine_weights(setup: Setup) -> Iterator[MemoryTerm]:
    parts = setup.config.engine_tp_size if setup.has_server_engine else 1
    num_bytes = engine_bytes(setup) / parts
    if setup.engine and num_bytes:  # else other ranks generate
        yield MemoryTerm("engine: weights", num_bytes)


def _room(setup: Setup) -> EngineRoom | None:
    """Return the room of a server engine; None of an embedded one, which shares trainer memory."""
    if not setup.has_server_engine:
        return None
    from lightrft.tools.plan.engine_room import engine_room

    return engine_room(setup)


def _graph_bytes(setup: Setup) -> float:
    """Return what a sleeping engine keeps on the device."""
    room = _room(setup)
    return 0.0 if room is None else room.graph_bytes


def _engine(setup: Setup) -> Iterator[MemoryTerm]:
    if not setup.engine:  # other ranks generate
        return
    room = _room(setup)
    if room is not None and setup.has_gpu:
        yield MemoryTerm("engine: weights", room.weight_bytes - _shared_bytes(setup))
        yield MemoryTerm("engine: graphs", room.graph_bytes)
        yield MemoryTerm("engine: activations", room.activation_bytes)
        rest = max(0.0, room.share_bytes - room.fixed_bytes)
        yield MemoryTerm(f"engine: keys and values of {room.rows:.0f} rows", rest)
        return
    yield from _engine_weights(setup)
    if setup.num_apart:
        yield MemoryTerm("engine: a weight, dequantised", dense_bytes(setup, setup.actor))
    row = setup.row_tokens * setup.cache_bytes + setup.state_bytes
    yield MemoryTerm("engine: keys and values", setup.samples_in_flight * row)


def _waking(setup: Setup) -> Iterator[MemoryTerm]:
    """Yield the memory of an engine that takes weights before it has a cache again."""
    yield from _engine_weights(setup)
    yield MemoryTerm("engine: graphs", _graph_bytes(setup))


def _buckets(setup: Setup) -> Iterator[MemoryTerm]:
    size = NUM_BUCKETS * setup.config.weight_bucket_mb * MEGABYTE
    total = setup.compute_bytes * setup.num_sent
    if setup.has_server_engine or engine_bytes(setup):
        yield MemoryTerm("buckets of weights", min(size, NUM_BUCKETS * total))


def _loading(setup: Setup) -> Iterator[MemoryTerm]:
    """Yield whole weights on their way from the host, or adapters if ranks read only their rows.

    Actor and critic are read together. Each other model is read once those before it are placed;
    reward models are read together. All of them are in float32.
    """
    yield from (term for term in model_terms(setup) if "Adam" not in term.name)
    models = setup.evaluated
    rewards = sum(m.stored for name, m in models.items() if name.startswith("reward model"))
    others = [m.stored for name, m in models.items() if not name.startswith("reward model")]
    trained = setup.actor.total + (0 if setup.critic is None else setup.critic.total)
    read = max(trained, rewards, *others, 0)
    if setup.builds_on_meta:
        read = max(rewards, setup.actor.adapters)
    name = "whole float32 weights, on the way"
    yield MemoryTerm(name, FLOAT * read, is_on_host=setup.has_gpu)
    if not setup.config.fsdp and setup.config.zero_stage == 3:
        # DeepSpeed places a model on the device as a whole.
        whole = setup.compute_bytes * max(m.total for m in (setup.actor, *models.values()))
        yield MemoryTerm("a whole model, before it is divided", whole)


def _scoring(setup: Setup, rows: int) -> list[MemoryTerm]:
    models = [setup.actor, *setup.evaluated.values()]
    models += [] if setup.critic is None else [setup.critic]
    return max((list(forward_peak(setup, model, rows)) for model in models), key=rank_bytes)


def _training(setup: Setup) -> list[MemoryTerm]:
    """Return the larger of actor and critic: they take turns, and gradients are gone after each."""
    models = [setup.actor] if setup.critic is None else [setup.actor, setup.critic]
    return max((train_peak(setup, model) for model in models), key=rank_bytes)


def _saving(setup: Setup) -> Iterator[MemoryTerm]:
    largest = max(setup.actor_size.embedding_parameters, setup.actor_size.layer_parameters)
    if gathered(setup, setup.actor):
        yield MemoryTerm("one whole tensor", 4 * largest)
    # The very first rank collects the export; with adapters it is float32 and merged anew.
    actor, c = setup.actor, setup.compute_bytes
    kept = c * actor.stored
    if setup.config.lora_rank:
        changed = actor.stored if c < FLOAT else setup.actor_size.num_layers * actor.layer
        kept = FLOAT * actor.total + c * changed
    share = kept / setup.ranks_per_node
    yield MemoryTerm("the exported model, on the first rank", share, is_on_host=setup.has_gpu)


def gigabytes(num_bytes: float) -> str:
    """Format with one decimal, or three below 1 GB."""
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= GB else f"{num_bytes / GB:.3f} GB"


def memory_table(plan: MemoryPlan) -> str:
    """Return one block of lines for each phase, its largest terms first."""
    lines = []
    for phase in plan.phases:
        verdict = "" if phase.device_bytes <= plan.usable_bytes else "  TOO LARGE"
        lines.append(f"{phase.name:8} {gigabytes(phase.device_bytes):>10}{verdict}")
        lines += _terms(phase)
    return "\n".join(lines)


def summary(plan: MemoryPlan) -> str:
    """Return the verdict in one line."""
    worst, setup = plan.worst, plan.setup
    where = "GPU" if setup.has_gpu else "share of the host"
    text = (
        f"largest phase {worst.name}: {gigabytes(worst.device_bytes)} of "
        f"{gigabytes(plan.usable_bytes)} ({gigabytes(setup.capacity_bytes)} of each rank's {where} "
        f"less {constant('reserve_share'):.0%})"
    )
    if plan.host_bytes:
        node = gigabytes(setup.ranks_per_node * plan.host_bytes)
        text += f", and {gigabytes(plan.host_bytes)} of the host ({node} a node)"
    return text


def _terms(phase: Phase) -> list[str]:
    terms = sorted(phase.terms, key=lambda term: -term.num_bytes)
    return [
        f"  {gigabytes(term.num_bytes):>12}  {term.name}{' (host)' if term.is_on_host else ''}"
        for term in terms
        if term.num_bytes >= 1e-3 * max(1.0, phase.device_bytes + phase.host_bytes)
    ]
