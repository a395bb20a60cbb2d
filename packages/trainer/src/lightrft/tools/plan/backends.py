"""Memory of FSDP2 and the stages of ZeRO on one rank, at rest and at the peak of an update."""

from collections.abc import Iterator
from dataclasses import dataclass

from lightrft.tools.plan.model_size import ModelSize
from lightrft.tools.plan.setup import Model, Setup

# As in `strategy.deepspeed.engine_config`; and DeepSpeed's own limits.
ZERO_BUCKET = 50_000_000
ZERO1_BUCKET = 500_000_000
ZERO3_LIVE = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Term:
    """One item of a sum.

    Args:
        name: Of what it is.
        num_bytes: Of one rank.
        is_on_host: It lies in the host's memory beside a GPU.
    """

    name: str
    num_bytes: float
    is_on_host: bool = False


def resting(setup: Setup, model: Model) -> Iterator[Term]:
    """A trained model between updates, once Adam's states exist; gradients are in `peaks`."""
    config, world, c = setup.config, setup.world_size, setup.compute_bytes
    trained, total = model.trained, model.total
    if config.fsdp:
        stored = c if config.use_mp_opt and c == 2 else FLOAT
        master = FLOAT if stored == 2 else 0
        on_host = config.fsdp_cpu_offload and setup.has_gpu
        yield Term("weights, sharded", stored * total / world, on_host)
        moves = setup.has_gpu and config.adam_offload
        yield Term("Adam's states", (8 + master) * trained / world, on_host or moves)
    else:
        yield from _resting_zero(setup, model)


def _resting_zero(setup: Setup, model: Model) -> Iterator[Term]:
    """`resting` under a stage of ZeRO."""
    config, world, c = setup.config, setup.world_size, setup.compute_bytes
    trained, total = model.trained, model.total
    stage = config.zero_stage
    on_host = config.adam_offload and setup.has_gpu
    whole = world if stage == 3 else 1
    yield Term("weights" + (", sharded" if stage == 3 else ""), c * total / whole)
    parts = world if stage > 0 else 1
    masters = FLOAT * trained / parts if stage > 0 else 0
    yield Term("Adam's states", 8 * trained / parts, on_host)
    yield Term("float32 weights", masters, on_host)
    if stage == 1 and c == 2:
        yield Term("gradients", FLOAT * trained)
    if stage == 3:
        yield Term("gradients, sharded", FLOAT * trained / world, on_host)
        yield Term("bucket of gradients", FLOAT * min(trained, ZERO_BUCKET))
        yield Term("small weights, whole", c * model.size.small_parameters)


def evaluated(setup: Setup, model: Model) -> float:
    """Bytes of a model without gradients."""
    is_sharded = setup.config.fsdp or setup.config.zero_stage == 3
    return setup.compute_bytes * model.total / (setup.world_size if is_sharded else 1)


def gathered(setup: Setup, model: Model) -> float:
    """Whole weights that a forward pass holds beside the shards."""
    c = setup.compute_bytes
    if setup.config.fsdp:
        # The root's weights while they are copied out of what the ranks sent, and two layers.
        return c * 2 * (model.root + model.layer)
    return c * min(model.total, ZERO3_LIVE) if setup.config.zero_stage == 3 else 0


def forward_peak(setup: Setup, model: Model, num_rows: int) -> Iterator[Term]:
    """A forward pass without gradients."""
    tokens = setup.micro_tokens(num_rows)
    one = Model(model.size, 0, model.scores_tokens, checkpoints=True)
    yield Term("gathered weights", gathered(setup, model))
    passing = block_bytes(one, tokens, setup.compute_bytes)
    head = head_bytes(setup, model, setup.scored_tokens(num_rows), is_training=False)
    yield Term("activations of a layer, or logits", max(passing, head))


def train_peak(setup: Setup, model: Model) -> list[Term]:
    """The addition of an update to `resting`, at its largest moment."""
    return max(moments(setup, model), key=lambda terms: sum(t.num_bytes for t in terms))


def moments(setup: Setup, model: Model) -> Iterator[list[Term]]:
    """The addition of an update to `resting` at each moment that may be its largest."""
    rows, c = setup.config.micro_train_batch_size, setup.compute_bytes
    tokens, scored = setup.micro_tokens(rows), setup.scored_tokens(rows)
    trunk = trunk_bytes(model, tokens, c)
    kept = Term("activations", trunk)
    head = Term("output layer", head_bytes(setup, model, scored, is_training=True))
    passing = Term("backward pass of a layer", block_bytes(model, tokens, c))
    one_layer = trunk / max(1, model.size.num_layers)
    of_backend = _fsdp_moments if setup.config.fsdp else _zero_moments
    yield from of_backend(setup, model, kept, head, passing, one_layer)


def _fsdp_moments(
    setup: Setup, model: Model, kept: Term, head: Term, passing: Term, one_layer: float
) -> Iterator[list[Term]]:
    world, c = setup.world_size, setup.compute_bytes
    on_host = setup.config.fsdp_cpu_offload and setup.has_gpu
    is_whole = model.trained == model.total
    total = Term("gradients, sharded", FLOAT * model.trained / world, on_host)
    # A sharded gradient exists from the first micro batch on.
    output = model.size.embedding_parameters if model.scores_tokens and is_whole else 0
    root = Term("weights of the root unit", c * model.root)
    moved = []
    if setup.config.adam_offload and setup.has_gpu and not on_host:
        moved = [Term("Adam's states, back from the host", 8 * model.trained / world)]
    yield [total, *moved, kept, head, root, Term("gradient of the output layer", c * output)]
    unit = model.layer
    reduced = (c + FLOAT) * unit if is_whole else 0
    less = Term(kept.name, max(0.0, kept.num_bytes - one_layer))
    yield [
        total,
        *moved,
        less,
        passing,
        root,
        Term("gradient of the output layer", c * output),
        Term("two layers, gathered", 2 * c * unit),
        Term("a layer's gradients", reduced),
    ]
    if is_whole:
        before = c * model.root
        after = c * min(model.size.embedding_parameters, model.root) + FLOAT * model.root / world
        # Gloo copies what it reduces.
        copies = 1 if setup.has_gpu else 2
        root_gradients = copies * FLOAT * model.root + max(before, after)
        yield [total, *moved, Term("gradients of the root unit", root_gradients)]
    else:
        yield [Term("root unit, gathered twice", 2 * c * model.root), total, *moved]


def _zero_moments(
    setup: Setup, model: Model, kept: Term, head: Term, passing: Term, one_layer: float
) -> Iterator[list[Term]]:
    del one_layer
    config, c, trained = setup.config, setup.compute_bytes, model.trained
    stage, world = config.zero_stage, setup.world_size
    bucket = min(trained, ZERO_BUCKET)
    # Part of the backward pass that is still to come when the last full bucket is reduced.
    left = 1 - bucket / max(1, trained)
    on_host = config.adam_offload and setup.has_gpu
    output = Term(
        "gradient of the output layer",
        c * model.size.embedding_parameters
        if model.scores_tokens and trained == model.total
        else 0,
    )
    if stage == 0:
        held = [Term("gradients", FLOAT * trained)]
        yield [*held, kept, head, output]
        yield [*held, kept, passing]
        return
    if stage == 1:
        yield from _zero1_moments(setup, model, kept, head, passing, output)
        return
    live = Term("gathered weights", gathered(setup, model))
    twice = 2 if config.overlap_comm else 1
    if stage == 2:
        sums = Term("gradients, sharded", FLOAT * trained / world, on_host)
        wide = FLOAT if c == 2 else 0
        buckets = Term("buckets of gradients", (twice * c + c + wide) * bucket)
        step = [sums, Term("gradients of the step", FLOAT * trained / world, on_host)]
    else:
        sums = Term("small gradients", 0.0)
        buckets = Term("copies of the bucket", (1 + twice) * FLOAT * bucket)
        step = []
    yield [sums, kept, head, live, output]
    share = [Term(t.name, left * t.num_bytes) for t in (kept, live)]
    largest = 0.0 if stage == 2 else c * model.size.embedding_parameters
    yield [sums, *share, passing, buckets, Term("gradient of one tensor", largest)]
    yield step


def _zero1_moments(
    setup: Setup, model: Model, kept: Term, head: Term, passing: Term, output: Term
) -> Iterator[list[Term]]:
    c, trained = setup.compute_bytes, model.trained
    if c == 2:
        # The float32 sums are in `resting`; they are reduced by way of a copy.
        narrow = Term("gradients in bfloat16", c * trained)
        yield [kept, head, output]
        yield [narrow, passing, Term("bucket of gradients", FLOAT * min(trained, ZERO1_BUCKET))]
        return
    bucket = Term("bucket of gradients", FLOAT * min(trained, ZERO_BUCKET))
    whole = Term("gradients", FLOAT * trained)
    yield [whole, bucket, kept, head, output]
    largest = Term("gradient of one tensor", c * model.size.embedding_parameters)
    yield [whole, bucket, passing, largest]


# As `lightrft.kernels.logprob`: columns of a chunk on a GPU and on a CPU, and the budget of logits
# of a loss inside the output layer on a GPU.
GPU_CHUNK_COLUMNS = 16_384
CPU_CHUNK_COLUMNS = 4_096
FLOAT = 4


def layer_token_bytes(size: ModelSize, compute_bytes: int) -> float:
    """Bytes that the backward pass of one layer keeps of a token."""
    c = compute_bytes
    # Norms widen their input, keep it and the narrow result before the gain; and the product with
    # the gain is what the projections keep. In float32 nothing is narrow.
    norm = (FLOAT + 2 * c) if c == 2 else 3 * FLOAT
    found = 2.0 * (norm * size.hidden + FLOAT)
    found += c * (size.q_width + 2 * size.kv_width)  # queries, keys, values
    found += c * size.q_width + FLOAT * size.num_heads  # attention's result and its log sums
    if size.has_qk_norm:
        found += (FLOAT + c) * (size.q_width + size.kv_width) if c == 2 else 0
        found += 2 * FLOAT * (size.q_width + size.kv_width) if c == FLOAT else 0
        found += FLOAT * (size.num_heads + size.num_kv_heads)
    return found + 4 * c * size.intermediate * size.num_active_experts


def trunk_bytes(model: Model, num_tokens: int, compute_bytes: int) -> float:
    """Bytes that a forward pass up to the last hidden states keeps for its backward pass."""
    size = model.size
    kept = layer_token_bytes(size, compute_bytes)
    if model.checkpoints:
        kept = compute_bytes * size.hidden
    norm = FLOAT + 2 * compute_bytes if compute_bytes == 2 else 2 * FLOAT
    ends = norm * size.hidden + (2 + FLOAT // 2) * size.head_dim
    return num_tokens * (size.num_layers * kept + ends)


def block_bytes(model: Model, num_tokens: int, compute_bytes: int) -> float:
    """Bytes that one layer's backward pass adds: gradients of activations, recomputed ones."""
    size = model.size
    passing = 3 * compute_bytes * size.intermediate * size.num_active_experts
    again = layer_token_bytes(size, compute_bytes) if model.checkpoints else 0
    return num_tokens * (passing + again)


def head_bytes(setup: Setup, model: Model, num_scored: int, *, is_training: bool) -> float:
    """Work space of the output layer, the gradient of its weight left out."""
    size, c = model.size, setup.compute_bytes
    hidden = num_scored * size.hidden
    if not model.scores_tokens:
        return FLOAT * hidden
    if not setup.is_fused:
        # Logits, their log-softmax and its gradient in float32; the weight is widened, too.
        copies = 3 if is_training else 2
        widened = 0 if c == FLOAT else FLOAT * (hidden + size.embedding_parameters)
        return copies * FLOAT * num_scored * size.vocab + c * hidden + widened
    columns = setup.config.chunk_size
    if columns is None:
        columns = GPU_CHUNK_COLUMNS if setup.has_gpu else CPU_CHUNK_COLUMNS
    columns = min(columns, size.vocab)
    found = c * hidden + 32 * 2**20
    if is_training:
        # A chunk's logits and their gradient, and the gradient of the hidden states.
        found += num_scored * columns * (FLOAT + c) + (FLOAT + c) * hidden
    return found
