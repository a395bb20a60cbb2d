"""Bytes of activations and of the output layer, a token at a time.

The numbers are those of transformers' decoder layers with torch's attention: what autograd saves,
counted operation by operation. Tests compare them with traces.
"""

from lightrft.tools.plan.model_size import ModelSize
from lightrft.tools.plan.setup import Model, Setup

# As `lightrft.kernels.logprob`: columns of a chunk on a GPU and on a CPU, and the budget of logits
# of a loss inside the output layer on a GPU.
GPU_CHUNK_COLUMNS = 16_384
CPU_CHUNK_COLUMNS = 4_096
FLOAT = 4


def layer_token_bytes(size: ModelSize, compute_bytes: int) -> float:
    """What the backward pass of one layer keeps of a token."""
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
    """What a forward pass up to the last hidden states keeps for its backward pass."""
    size = model.size
    kept = layer_token_bytes(size, compute_bytes)
    if model.checkpoints:
        kept = compute_bytes * size.hidden
    norm = FLOAT + 2 * compute_bytes if compute_bytes == 2 else 2 * FLOAT
    ends = norm * size.hidden + (2 + FLOAT // 2) * size.head_dim
    return num_tokens * (size.num_layers * kept + ends)


def block_bytes(model: Model, num_tokens: int, compute_bytes: int) -> float:
    """What the backward pass of one layer adds: gradients of its activations, recomputed ones."""
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
