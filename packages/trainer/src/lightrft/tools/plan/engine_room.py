"""Room of an engine within its share of a device: what is fixed, and what is left for rows."""

import math
from dataclasses import dataclass

from lightrft.tools.plan.setup import Setup
from lightrft.tools.plan.sizes import GB, constant

# vLLM's defaults (`EngineArgs.get_batch_defaults`, version 0.32) for a device of at least so
# many bytes: tokens of a profiled batch, and responses at a time.
LARGE_DEVICE = 70 * 2**30
LARGE_BATCH, SMALL_BATCH = (16_384, 1024), (8192, 256)
LARGEST_SHARE = 0.92
WIDE = 4


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """An engine's share of one device, and its use.

    Args:
        share_bytes: Bytes of the device; infinite where the engine takes what it needs.
        weight_bytes: Bytes of this rank's part of the weights.
        graph_bytes: Bytes of CUDA graphs, which stay while the engine sleeps.
        activation_bytes: Bytes of the largest batch, which vLLM profiles at its start.
        token_bytes: Keys and values of one token on this rank.
        state_bytes: States of recurrences and convolutions of one row on this rank.
        longest_tokens, mean_tokens: Tokens of the longest and of an average row.
        num_rows: Rows that this engine samples in a step.
    """

    share_bytes: float
    weight_bytes: float
    graph_bytes: float
    activation_bytes: float
    token_bytes: float
    state_bytes: float
    longest_tokens: float
    mean_tokens: float
    num_rows: int

    @property
    def fixed_bytes(self) -> float:
        """Bytes that do not depend on the number of rows."""
        return self.weight_bytes + self.graph_bytes + self.activation_bytes

    @property
    def rows(self) -> float:
        """Average rows that the cache holds; at most those of a step."""
        rows = (self.share_bytes - self.fixed_bytes) / self.row_bytes(self.mean_tokens)
        return max(0.0, min(rows, self.num_rows))

    def row_bytes(self, num_tokens: float) -> float:
        """Return what the cache keeps of a row of so many tokens."""
        return self.token_bytes * num_tokens + self.state_bytes

    @property
    def useful_rows(self) -> int:
        """Rows that decoding should have at a time, or all of them if they are fewer."""
        return min(int(constant("useful_rows")), self.num_rows)

    @property
    def least_bytes(self) -> float:
        """Smallest share with which it starts: vLLM refuses without room for one longest row."""
        return self.fixed_bytes + self.row_bytes(self.longest_tokens)

    @property
    def useful_bytes(self) -> float:
        """Share with room for a useful number of average rows."""
        rows = self.useful_rows * self.row_bytes(self.mean_tokens)
        return max(self.least_bytes, self.fixed_bytes + rows)

    def problem(self) -> str:
        """Return the reason that the share is too small, or ""."""
        numbers = (self.share_bytes, self.weight_bytes, self.graph_bytes + self.activation_bytes)
        share, weights, others = (f"{number / GB:.1f}" for number in numbers)
        held = (
            f"its share is {share} GB, weights take {weights} and graphs and activations {others}"
        )
        if self.share_bytes < self.least_bytes:
            return f"the engine cannot start: {held}, no room for one row of full length"
        if self.share_bytes < self.useful_bytes:
            return (
                f"the engine is cramped: {held}, room for {self.rows:.0f} rows at a time and "
                f"{self.useful_rows} are useful"
            )
        return ""


def engine_room(setup: Setup) -> EngineRoom | None:
    """Return the room of a server engine; None of an embedded one, which shares trainer memory."""
    if not setup.has_server_engine:
        return None
    config, size, c = setup.config, setup.actor_size, setup.compute_bytes
    tp = config.engine_tp_size
    share = config.engine_mem_util * setup.capacity_bytes if setup.has_gpu else float("inf")
    tokens, num_seqs = LARGE_BATCH if setup.capacity_bytes >= LARGE_DEVICE else SMALL_BATCH
    texts = {name: str(value) for name, value in (config.engine_args or {}).items()}
    tokens, num_seqs = (
        int(texts[name]) if texts.get(name, "").isdecimal() else default
        for name, default in (("max_num_batched_tokens", tokens), ("max_num_seqs", num_seqs))
    )
    expert = size.intermediate * size.num_active_experts
    width = 2 * size.hidden + max(size.q_width + 2 * size.kv_width, 3 * expert) / tp
    # Logits, widened, and their log-softmax of every response.
    logits = num_seqs * size.vocab * (c + 2 * WIDE)
    return EngineRoom(
        share_bytes=share,
        weight_bytes=c * (size.parameters + setup.num_apart) / tp,
        graph_bytes=constant("graph_gb_per_layer") * GB * size.num_layers if setup.has_gpu else 0.0,
        activation_bytes=max(c * tokens * width, logits) if setup.has_gpu else 0.0,
        token_bytes=setup.cache_bytes / tp,
        state_bytes=setup.state_bytes / tp,
        longest_tokens=setup.row_tokens,
        mean_tokens=min(setup.row_tokens, config.prompt_max_len + setup.mean_tokens),
        num_rows=setup.samples_per_rank * tp,
    )


def working_share(setup: Setup, trainer_bytes: float, usable_bytes: float) -> float | None:
    """Return the share nearest to the wanted one that works for engine and trainer, in hundredths.

    Args:
        setup: Setup of the run.
        trainer_bytes: Bytes of the trainer on the device while the engine is awake.
        usable_bytes: Usable bytes of the device.

    Returns:
        The share, or None if none is enough for both.
    """
    room = engine_room(setup)
    if room is None or not setup.has_gpu:
        return None
    largest = math.floor(100 * (usable_bytes - trainer_bytes) / setup.capacity_bytes) / 100
    least = math.ceil(100 * room.useful_bytes / setup.capacity_bytes) / 100
    largest = min(largest, LARGEST_SHARE)
    return min(max(setup.config.engine_mem_util, least), largest) if least <= largest else None
