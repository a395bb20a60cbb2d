"""The models, options and machine of a plan, and what follows from them."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lightrft.config import TrainConfig
from lightrft.config.parts.machine import sends_adapters
from lightrft.engines.factory import engine_facts
from lightrft.tools.plan.sizes import TOWERS, ModelSize, read_model_size

# Bytes of a float32.
FLOAT = 4
# Stages whose memory is known, and the number of answers that they compare with each other.
PLANNED = {"policy": 1, "sft": 1, "prefer": 2, "reward": 2, "divergence": 1}
# Preference losses that read no reference.
WITHOUT_REFERENCE = {"simpo", "cpo", "orpo", "sft"}


@dataclass(frozen=True)
class Model:
    """One model of a run.

    Args:
        size: Sizes of the model.
        trained: Count of numbers that get gradients: 0 of a model that is only evaluated.
        scores_tokens: Whether it has an output projection over the vocabulary; a critic or a reward
            model has one value instead.
        checkpoints: Whether activations are computed again in the backward pass.
    """

    size: ModelSize
    trained: int
    scores_tokens: bool = True
    checkpoints: bool = False

    @property
    def stored(self) -> int:
        """Numbers in its files: without adapters; of a critic without the output projection."""
        unused = 0 if self.scores_tokens or self.size.is_tied else self.size.embedding_parameters
        return self.size.parameters - unused

    @property
    def adapters(self) -> int:
        """Numbers of trained adapters, which are in no file."""
        is_adapted = 0 < self.trained < self.stored - self.size.tower_parameters
        return self.trained if is_adapted else 0

    @property
    def trains_all(self) -> bool:
        """Return whether the text model itself gets gradients, not adapters."""
        return self.trained > 0 and self.adapters == 0

    @property
    def total(self) -> int:
        """All numbers, adapters included."""
        return self.stored + self.adapters

    @property
    def root(self) -> int:
        """Numbers outside of the layers, of text and of images, which have the adapters."""
        towers = self.size.tower_parameters
        return self.stored - self.size.num_layers * self.layer - towers

    @property
    def has_own_head(self) -> bool:
        """Return whether the output projection is a unit of FSDP2; see `fsdp2.find_ends`."""
        return self.scores_tokens and not self.size.is_tied and self.size.vision is None

    @property
    def end(self) -> int:
        """Numbers of FSDP2's largest unit outside of the layers: an embedding, or the root unit."""
        is_alone = self.has_own_head or (not self.scores_tokens and self.size.vision is None)
        return self.size.embedding_parameters if is_alone else self.root

    @property
    def layer(self) -> int:
        """Numbers of one layer, without adapters."""
        return self.size.layer_parameters


@dataclass(frozen=True)
class Setup:
    """A run on a machine.

    Args:
        config: Options of the run.
        actor_size: Size of the trained policy.
        world_size: Number of ranks.
        most_per_node: Number of ranks that one node takes.
        has_gpu: Whether ranks have a GPU each.
        capacity_bytes: Memory of a rank's device; of its share of the host without a GPU.
        node_bytes: Memory of a node's host; None if it is not known.
        engine: "vllm", "sglang" or "hf"; "" where only other ranks generate.
        stage: Name in `config.registry.STAGES`.
        rows_per_item: Largest number of answers compared with each other; 1 if none are.
        longest_row: Tokens of the longest row of the data; None takes what the options allow.
        mean_length_share: Mean response over the longest that the options allow.
    """

    config: TrainConfig
    actor_size: ModelSize
    world_size: int
    most_per_node: int
    has_gpu: bool
    capacity_bytes: float
    engine: str
    node_bytes: float | None = None
    stage: str = "policy"
    rows_per_item: int = 1
    longest_row: int | None = None
    mean_length_share: float = 0.5

    @property
    def ranks_per_node(self) -> int:
        """Ranks on one node."""
        return min(self.world_size, self.most_per_node)

    @property
    def host_bytes(self) -> float | None:
        """This rank's share of the host's memory; None if it is not known."""
        return self.node_bytes and self.node_bytes / self.ranks_per_node

    @property
    def rolls_out(self) -> bool:
        """Return whether an engine samples what is trained on."""
        return self.stage == "policy"

    @cached_property
    def compute_bytes(self) -> int:
        """Bytes of a number in forward and backward passes."""
        return 2 if self.config.computes_in_bf16(has_gpu=self.has_gpu) else 4

    @property
    def freezes_tower(self) -> bool:
        """Return whether `freeze_prefix` keeps the vision tower as it is."""
        names = [start + tower for tower in TOWERS for start in ("", "model.")]
        return any(re.match(p, f"{n}.") for p in self.config.freeze_prefix for n in names)

    @property
    def num_apart(self) -> int:
        """Numbers of the adapters that an engine holds beside its weights."""
        config, are_packed = self.config, self.config.quantize is not None
        is_apart = sends_adapters(config.lora_sync, self.engine, are_packed=are_packed)
        return self.actor.adapters if is_apart else 0

    @property
    def shares_base(self) -> bool:
        """Return whether the trainer reads its frozen base in the storage of a server engine."""
        config = self.config
        is_whole = self.world_size == 1 if config.fsdp else config.zero_stage < 3
        is_here = self.has_gpu and self.has_server_engine and not config.fsdp_cpu_offload
        return self.num_apart > 0 and is_whole and is_here and not config.rollout_ranks

    @property
    def num_sent(self) -> int:
        """Numbers that a weight sync moves."""
        return self.num_apart or self.actor_size.parameters

    @cached_property
    def actor(self) -> Model:
        """The trained policy, or reward model."""
        rank, size, scores = self.config.lora_rank, self.actor_size, self.stage != "reward"
        whole = Model(size, 0, scores).total - (size.tower_parameters if self.freezes_tower else 0)
        adapters = size.adapter_parameters(rank, on_tower=not self.freezes_tower)
        trained = adapters if rank else whole
        return Model(size, trained, scores, self.config.gradient_checkpointing)

    @cached_property
    def critic(self) -> Model | None:
        """The trained critic, which `gae` needs."""
        path = self.config.critic_pretrain
        if not self.rolls_out:
            return None
        if self.config.advantage_estimator != "gae" and not isinstance(path, str):
            return None
        size = read_model_size(path) if isinstance(path, str) else self.actor_size
        whole = Model(size, 0, scores_tokens=False).total
        trained = whole - (size.tower_parameters if self.freezes_tower else 0)
        checkpoints = self.config.gradient_checkpointing
        return Model(size, trained, scores_tokens=False, checkpoints=checkpoints)

    @cached_property
    def evaluated(self) -> dict[str, Model]:
        """Models without gradients, by name."""
        models: dict[str, Model] = {}
        names = set(self.config.preference_loss)
        stored = self.config.ref_logprobs
        has_stored = stored is not None and Path(stored).exists()
        compares = self.stage == "prefer" and self.config.lora_rank == 0 and not has_stored
        if self.config.init_kl_coef > 0 or (compares and not names <= WITHOUT_REFERENCE):
            models["reference"] = Model(self.actor_size, 0)
        for name, place in self.config.teacher_folders.items():
            models[f"teacher {name}".strip()] = Model(read_model_size(place), 0)
        if self.config.enable_ema:
            models["moving average"] = Model(self.actor_size, 0)
        for index, path in enumerate(self.config.reward_pretrain):
            models[f"reward model {index + 1}"] = Model(read_model_size(path), 0, False)
        return models

    @property
    def has_server_engine(self) -> bool:
        """Return whether the engine has separate weights and a separate cache on the device."""
        return bool(self.engine) and self.rolls_out and engine_facts(self.engine).has_own_memory

    @property
    def cache_bytes(self) -> int:
        """Keys and values that an engine keeps of a token, on all of its ranks."""
        size, tp = self.actor_size, self.config.engine_tp_size
        numbers = 2 * size.num_layers * size.kv_width
        if size.measured is not None:
            numbers = size.measured.cached_per_token
        # Ranks beyond the heads of keys hold copies.
        heads = max(size.num_kv_heads, tp) if self.has_server_engine else size.num_kv_heads
        return self.compute_bytes * numbers * heads // size.num_kv_heads

    @property
    def state_bytes(self) -> int:
        """States of recurrences and convolutions that an engine keeps of a row."""
        size = self.actor_size.measured
        if size is None:
            return 0
        return self.compute_bytes * size.cached_per_row + FLOAT * size.float_per_row

    @property
    def is_fused(self) -> bool:
        """Return whether the logits never exist as a whole."""
        if not self.rolls_out:
            return self.config.fused_linear_logprob is not False
        return self.config.fuses_logprob(has_gpu=self.has_gpu)

    @property
    def builds_on_meta(self) -> bool:
        """Return whether each rank reads only its rows of the files instead of the whole model."""
        # A reward model has a head that is in no file.
        is_read = self.config.fsdp and self.stage != "reward"
        return is_read and self.config.builds_on_meta(
            has_gpu=self.has_gpu,
            weight_bytes=2 * self.actor_size.parameters,
            is_in_files=not self.config.allow_new_weights,
        )

    @property
    def mean_tokens(self) -> float:
        """Tokens of an average response."""
        return self.mean_length_share * self.config.max_response_tokens

    def num_patches(self, num_rows: int) -> int:
        """Count the patches of `num_rows` rows whose prompts are images from end to end."""
        vision = self.actor_size.vision
        if vision is None:
            return 0
        rows = max(num_rows, self.micro_tokens(num_rows) // max(1, self.row_tokens))
        prompt = self.config.prompt_max_len if self.rolls_out else self.row_tokens
        return rows * prompt * vision.merged

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        if self.rolls_out:
            return self.config.max_episode_tokens
        return self.config.max_row_tokens if self.longest_row is None else self.longest_row

    def micro_tokens(self, num_rows: int) -> int:
        """Return the most tokens of a micro batch of rows, or items of the data, on one rank."""
        if not self.rolls_out:
            return -(-self._given_tokens(num_rows) // self.config.sp_size)
        tokens = self.config.max_micro_tokens(num_rows) or num_rows * self.row_tokens
        # A bound below one row still admits that row.
        return -(-max(tokens, self.row_tokens) // self.config.sp_size)

    @property
    def item_tokens(self) -> int:
        """Tokens of the longest row, or of the answers that are compared with each other."""
        return self.rows_per_item * self.row_tokens

    @property
    def batch_tokens(self) -> int:
        """Tokens of an optimizer batch on one rank, at most."""
        share = -(-self.config.train_batch_size * self.config.sp_size // self.world_size)
        return share * self.item_tokens

    def _given_tokens(self, num_items: int) -> int:
        """Return the most tokens that a micro batch of items of the data has."""
        config, item = self.config, self.item_tokens
        bound = config.micro_batch_tokens
        if bound is None and config.packing_samples:
            bound = config.micro_train_batch_size * self.rows_per_item * config.max_row_tokens
        if bound is None:
            return num_items * item
        return max(item, min(bound, self.batch_tokens))

    def scored_tokens(self, num_rows: int) -> int:
        """Return the tokens of a micro batch that the output projection sees."""
        if not self.rolls_out:
            return self.micro_tokens(num_rows)
        config, row = self.config, max(1, self.row_tokens)
        response = min(config.max_response_tokens, row)
        # A budget of tokens counts only a part of the prompts of further samples.
        free = config.uncounted_tokens(row - response) if config.packing_samples else 0
        return round(self.micro_tokens(num_rows) * response / (row - free))

    @property
    def samples_per_rank(self) -> int:
        """Samples of a step on one rank."""
        total = self.config.rollout_batch_size * self.config.n_samples_per_prompt
        return -(-total // self.world_size)

    @property
    def samples_in_flight(self) -> int:
        """Samples that the engine of one rank may have at a time."""
        config = self.config
        if config.stream_chunk is None:
            return self.samples_per_rank
        total = config.num_prompts_in_flight * config.n_samples_per_prompt
        return -(-total // self.world_size)
