"""Numbers of parameters of a decoder and of its parts, from its configuration."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightrft.config import ConfigError
from lightrft.config.options import did_you_mean


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a decoder with gated feed-forward blocks (Llama, Mistral, Qwen and their kin).

    Args:
        num_layers, hidden, intermediate, vocab: As usual; intermediate is that of one expert.
        num_heads, num_kv_heads, head_dim: Of attention.
        is_tied: Output projection and embedding are one matrix.
        has_qkv_bias: Of the projections to queries, keys and values.
        has_qk_norm: Queries and keys are normalised.
        num_experts, num_active_experts: Feed-forward blocks of a layer, and those a token sees.
    """

    num_layers: int
    hidden: int
    intermediate: int
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_tied: bool
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    num_experts: int = 1
    num_active_experts: int = 1

    @classmethod
    def of_config(cls, values: Mapping[str, object]) -> "ModelSize":
        """From the contents of a config.json.

        Raises:
            ConfigError: It lacks a size.
        """
        text = values.get("text_config")
        fields = {**values, **text} if isinstance(text, Mapping) else dict(values)
        kind = str(fields.get("model_type", ""))

        def number(*names: str, default: int | None = None) -> int:
            for name in names:
                found = fields.get(name)
                if isinstance(found, int) and found > 0:
                    return found
            if default is None:
                raise ConfigError(
                    f"the configuration of the model has no {names[0]}: expected a decoder with "
                    "hidden_size, num_hidden_layers, intermediate_size and vocab_size"
                )
            return default

        heads, hidden = number("num_attention_heads"), number("hidden_size")
        experts = number("num_experts", "num_local_experts", default=1)
        dense = number("intermediate_size")
        return cls(
            num_layers=number("num_hidden_layers"),
            hidden=hidden,
            intermediate=number("moe_intermediate_size", default=dense) if experts > 1 else dense,
            vocab=number("vocab_size"),
            num_heads=heads,
            num_kv_heads=number("num_key_value_heads", default=heads),
            head_dim=number("head_dim", default=hidden // heads),
            is_tied=bool(fields.get("tie_word_embeddings", False)),
            has_qkv_bias=bool(fields.get("attention_bias")) or kind.startswith("qwen2"),
            has_qk_norm=kind.startswith("qwen3"),
            num_experts=experts,
            num_active_experts=number("num_experts_per_tok", default=1),
        )

    @property
    def q_width(self) -> int:
        """Numbers of a token's queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers of a token's keys."""
        return self.num_kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding, and of an untied output projection."""
        return self.vocab * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""
        return self._attention_parameters + self.num_experts * self._expert_parameters

    @property
    def active_layer_parameters(self) -> int:
        """The parameters of a layer that one token passes through."""
        return self._attention_parameters + self.num_active_experts * self._expert_parameters

    @property
    def _expert_parameters(self) -> int:
        return 3 * self.hidden * self.intermediate + (self.hidden if self.num_experts > 1 else 0)

    @property
    def _attention_parameters(self) -> int:
        matrices = self.hidden * (2 * self.q_width + 2 * self.kv_width)
        biases = self.q_width + 2 * self.kv_width if self.has_qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.has_qk_norm else 0)
        return matrices + biases + norms

    @property
    def root_parameters(self) -> int:
        """All that stands outside of the layers."""
        return self.embedding_parameters * (1 if self.is_tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.root_parameters + self.num_layers * self.layer_parameters

    def adapter_parameters(self, rank: int) -> int:
        """Of adapters of this rank on all linear layers of the decoder."""
        ends = 2 * (self.hidden + self.q_width) + 2 * (self.hidden + self.kv_width)
        return self.num_layers * rank * (ends + 3 * (self.hidden + self.intermediate))

    @property
    def small_parameters(self) -> int:
        """Of tensors with at most 100,000 numbers, which stage 3 of ZeRO keeps whole."""
        matrices = [self.hidden * self.q_width] * 2 + [self.hidden * self.kv_width] * 2
        matrices += [self.hidden * self.intermediate] * 3 * self.num_experts
        found = sum(size for size in matrices if size <= 100_000)
        biases = self.q_width + 2 * self.kv_width if self.has_qkv_bias else 0
        return self.num_layers * (found + biases + 2 * self.hidden) + self.hidden


def _qwen(
    layers: int, hidden: int, intermediate: int, heads: int, kv: int, **more: int
) -> ModelSize:
    is_third = "qk" in more
    return ModelSize(
        layers,
        hidden,
        intermediate,
        more.get("vocab", 151_936),
        heads,
        kv,
        more.get("dim", hidden // heads),
        bool(more.get("tied", 0)),
        has_qkv_bias=not is_third,
        has_qk_norm=is_third,
    )


# Published shapes, so that a plan needs no download.
SHAPES = {
    "qwen2.5-0.5b": _qwen(24, 896, 4864, 14, 2, tied=1),
    "qwen2.5-1.5b": _qwen(28, 1536, 8960, 12, 2, tied=1),
    "qwen2.5-7b": _qwen(28, 3584, 18944, 28, 4, vocab=152_064),
    "qwen2.5-32b": _qwen(64, 5120, 27648, 40, 8, vocab=152_064),
    "qwen2.5-72b": _qwen(80, 8192, 29568, 64, 8, vocab=152_064),
    "qwen3-0.6b": _qwen(28, 1024, 3072, 16, 8, dim=128, tied=1, qk=1),
    "qwen3-8b": _qwen(36, 4096, 12288, 32, 8, dim=128, qk=1),
}


def read_model_size(path: str) -> ModelSize:
    """The size of a checkpoint's directory, or of a name in `SHAPES`.

    Raises:
        ConfigError: It is neither, or its config.json lacks a size.
    """
    if path in SHAPES:
        return SHAPES[path]
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"no config.json in {path!r}{did_you_mean(path, SHAPES)}: give a model directory or "
            f"one of {', '.join(SHAPES)}"
        )
    return ModelSize.of_config(json.loads(file.read_text("utf-8")))
