"""The models, options and machine that a plan is made for, and what follows from them."""

from dataclasses import dataclass
from functools import cached_property

from lightrft.config import TrainConfig
from lightrft.tools.plan.model_size import ModelSize, read_model_size


@dataclass(frozen=True)
class Model:
    """One model of a run.

    Args:
        size: Its numbers.
        trained: Numbers that get gradients: 0 of a model that is only evaluated.
        scores_tokens: It has an output projection over the vocabulary; a critic or a reward model
            has one value instead.
        checkpoints: Activations are computed again in the backward pass.
    """

    size: ModelSize
    trained: int
    scores_tokens: bool = True
    checkpoints: bool = False

    @property
    def total(self) -> int:
        """All numbers, adapters included; of a critic without the output projection."""
        size = self.size
        unused = 0 if self.scores_tokens or size.is_tied else size.embedding_parameters
        adapters = self.trained if 0 < self.trained < size.parameters - unused else 0
        return size.parameters - unused + adapters

    @property
    def root(self) -> int:
        """Numbers outside of the layers."""
        return self.total - self.size.num_layers * self.layer

    @property
    def layer(self) -> int:
        """Numbers of one layer, without adapters."""
        return self.size.layer_parameters


@dataclass(frozen=True)
class Setup:
    """A run on a machine.

    Args:
        config: Its options.
        actor_size: Of the trained policy.
        world_size: Ranks.
        ranks_per_node: Of them on one node.
        has_gpu: Whether ranks have a GPU each.
        capacity_bytes: Memory of a rank's device; of its share of the host without a GPU.
        host_bytes: Memory of the host that is this rank's share; None is not known.
        engine: "vllm", "sglang", "hf" or "fake".
    """

    config: TrainConfig
    actor_size: ModelSize
    world_size: int
    ranks_per_node: int
    has_gpu: bool
    capacity_bytes: float
    engine: str
    host_bytes: float | None = None

    @cached_property
    def compute_bytes(self) -> int:
        """Of a number in forward and backward passes."""
        return 2 if self.config.computes_in_bf16(has_gpu=self.has_gpu) else 4

    @cached_property
    def actor(self) -> Model:
        """The trained policy."""
        rank = self.config.lora_rank
        size = self.actor_size
        trained = size.adapter_parameters(rank) if rank else size.parameters
        return Model(size, trained, checkpoints=self.config.gradient_checkpointing)

    @cached_property
    def critic(self) -> Model | None:
        """The trained critic, which `gae` needs."""
        path = self.config.critic_pretrain
        if self.config.advantage_estimator != "gae" and not isinstance(path, str):
            return None
        size = read_model_size(path) if isinstance(path, str) else self.actor_size
        unused = 0 if size.is_tied else size.embedding_parameters
        checkpoints = self.config.gradient_checkpointing
        return Model(size, size.parameters - unused, scores_tokens=False, checkpoints=checkpoints)

    @cached_property
    def evaluated(self) -> dict[str, Model]:
        """Models without gradients, by name."""
        found: dict[str, Model] = {}
        if self.config.init_kl_coef > 0:
            found["reference"] = Model(self.actor_size, 0)
        if self.config.enable_ema:
            found["moving average"] = Model(self.actor_size, 0)
        for index, path in enumerate(self.config.reward_pretrain):
            found[f"reward model {index + 1}"] = Model(read_model_size(path), 0, False)
        return found

    @property
    def is_fused(self) -> bool:
        """Whether the logits never exist as a whole."""
        return self.config.fuses_logprob(has_gpu=self.has_gpu)

    @property
    def builds_on_meta(self) -> bool:
        """Whether ranks read their own rows of the files instead of the whole model."""
        weights = 2 * self.actor_size.parameters
        wanted = self.config.builds_on_meta(has_gpu=self.has_gpu, weight_bytes=weights)
        return self.config.fsdp and wanted

    @property
    def row_tokens(self) -> int:
        """Of the longest row."""
        return self.config.max_episode_tokens

    def micro_tokens(self, num_rows: int) -> int:
        """Tokens of a micro batch on one rank, at most."""
        tokens = self.config.max_micro_tokens(num_rows) or num_rows * self.row_tokens
        # A bound below one row still admits that row.
        return -(-max(tokens, self.row_tokens) // self.config.sp_size)

    def scored_tokens(self, num_rows: int) -> int:
        """Of them those the output projection sees."""
        share = self.config.max_response_tokens / max(1, self.row_tokens)
        return round(self.micro_tokens(num_rows) * min(1.0, share))

    @property
    def samples_per_rank(self) -> int:
        """Samples of a step on one rank."""
        total = self.config.rollout_batch_size * self.config.n_samples_per_prompt
        return -(-total // self.world_size)
