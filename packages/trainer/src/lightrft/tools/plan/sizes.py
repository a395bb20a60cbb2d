"""Sizes of models, by formulas or by the model's own code, and measured constants."""

import functools
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lightrft.config import ConfigError
from lightrft.config.files import read_object, typed
from lightrft.config.options import LARGEST_INT, did_you_mean
from lightrft.config.toml import read_toml
from lightrft.kernels.names import first_line


@dataclass(frozen=True, slots=True)
class Constant:
    """A number of the plan.

    Args:
        value: Number in its unit.
        meaning: Meaning with the unit.
        measured_on: Machine, GPU and versions of the run that it is from; "" is an assumption.
        compare: Numbers that others report of it.
    """

    value: float
    meaning: str
    measured_on: str = ""
    compare: str = ""

    @property
    def source(self) -> str:
        """Origin of the number."""
        kind = f"measured on {self.measured_on}" if self.measured_on else "assumed"
        return f"{kind}; {self.compare}" if self.compare else kind


_FILE = Path(__file__).with_name("constants.toml")
CONSTANTS = typed(dict[str, Constant], read_toml(_FILE), _FILE)


def constant(name: str) -> float:
    """Return the value of a constant."""
    return CONSTANTS[name].value


_logger = logging.getLogger(__name__)

# Numbers of tokens of two passes, from which numbers per token and per row follow.
NUM_TOKENS = (8, 9)
# Children under these names hold a tower, as `strategy.fsdp2.sharding` knows them.
TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder")

GB = 1e9
WIDE = 4


@dataclass(frozen=True, slots=True)
class MeasuredSize:
    """Counts of a model that the model's own code gives.

    Args:
        parameters: Numbers of the whole model.
        layers: Numbers of its layers, without towers.
        cached_per_token: Numbers that a cache keeps of each token, in the model's dtype.
        cached_per_row: Numbers that it keeps of each row whatever its length, in that dtype:
            windows of convolutions.
        float_per_row: Numbers in float32 that it keeps of each row: states of recurrences.
    """

    parameters: int
    layers: int
    cached_per_token: int
    cached_per_row: int
    float_per_row: int


@dataclass(frozen=True, slots=True)
class VisionSize:
    """Sizes of a transformer over patches, and of its projector into the text model.

    Args:
        num_layers, hidden, intermediate: Sizes as of a text model.
        num_products: Matrices of a feed-forward block: 3 where it is gated.
        num_kept: Results of its width that its backward pass needs.
        patch_numbers: Numbers of a patch's pixels.
        merged: Patches that become one token of the text model.
        text_hidden: Width of those tokens.
        other_parameters: Numbers of position tables and of further projectors.
    """

    num_layers: int
    hidden: int
    intermediate: int
    num_products: int
    patch_numbers: int
    merged: int
    text_hidden: int
    other_parameters: int = 0
    num_kept: int = 4

    @classmethod
    def of_config(cls, values: Mapping[str, object]) -> "VisionSize | None":
        """Return the size from the contents of a config.json; None for a model of text."""
        tower = values.get("vision_config")
        text = values.get("text_config")
        if not isinstance(tower, Mapping):
            return None

        def number(*names: str, default: int = 1, fields: Mapping[str, object] = tower) -> int:
            numbers = (fields.get(name) for name in names)
            return next((n for n in numbers if isinstance(n, int) and n > 0), default)

        inner = text if isinstance(text, Mapping) else values
        text_hidden = number("hidden_size", fields=inner)
        # Qwen2-VL calls the tower's width embed_dim, and hidden_size what it is projected to.
        hidden = number("embed_dim", "hidden_size", default=1024)
        is_gated = str(tower.get("model_type", "")).startswith("qwen2_5_vl")
        side = number("patch_size", default=14)
        merge = number("spatial_merge_size")
        patch = side**2 * number("in_channels", "num_channels", "in_chans", default=3)
        patch *= number("temporal_patch_size")
        positions = number("num_position_embeddings", default=0)
        if merge == 1 and not positions:
            image = number("image_size", default=384)
            positions = (image // side) ** 2
            # Pooled or shuffled: the tokens of an image say how many patches become one.
            tokens = number("mm_tokens_per_image", "image_seq_length", fields=values, default=0)
            merge = round(max(1.0, positions / tokens) ** 0.5) if tokens else 1
        size = cls(
            num_layers=number("depth", "num_hidden_layers", default=24)
            + number("num_global_layers", default=0),
            hidden=hidden,
            intermediate=number(
                "intermediate_size", default=hidden * number("mlp_ratio", default=4)
            ),
            num_products=3 if is_gated else 2,
            patch_numbers=patch,
            merged=merge**2,
            text_hidden=number("out_hidden_size", default=text_hidden),
            other_parameters=positions * hidden,
            num_kept=4 if is_gated else 3 if tower.get("hidden_act") == "quick_gelu" else 2,
        )
        stacked = tower.get("deepstack_visual_indexes")
        if isinstance(stacked, list | tuple):
            more = size.other_parameters + len(stacked) * size.projector_parameters
            size = replace(size, other_parameters=more)
        return size

    @property
    def layer_parameters(self) -> int:
        """Numbers of one layer, biases and norms included."""
        feed_forward = self.num_products * (self.hidden + 1) * self.intermediate
        return 4 * self.hidden * (self.hidden + 1) + feed_forward + 5 * self.hidden

    @property
    def projector_parameters(self) -> int:
        """Numbers of two layers from merged patches to the text model's width."""
        width = self.hidden * self.merged
        return width * width + width * self.text_hidden + 2 * width + self.text_hidden

    @property
    def parameters(self) -> int:
        """Numbers of tower and projector."""
        ends = self.patch_numbers * self.hidden + self.projector_parameters + self.other_parameters
        return self.num_layers * self.layer_parameters + ends

    def adapter_parameters(self, rank: int) -> int:
        """Count the numbers of adapters on linear layers, with queries, keys and values in one."""
        attention = 4 * self.hidden + 2 * self.hidden
        feed_forward = self.num_products * (self.hidden + self.intermediate)
        merged = self.hidden * self.merged
        projector = 3 * merged + self.text_hidden
        return rank * (self.num_layers * (attention + feed_forward) + projector)

    def layer_patch_bytes(self, compute_bytes: int) -> float:
        """Return bytes that the backward pass of one layer keeps of a patch."""
        # Inputs and results of both norms and of attention; queries, keys and values, rotated.
        kept = 11.25 * compute_bytes * self.hidden
        if self.num_products == 3:
            kept += 2 * WIDE * self.hidden  # these norms widen what they keep
        return kept + compute_bytes * self.num_kept * self.intermediate


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a decoder with gated feed-forward blocks (Llama, Mistral, Qwen and their kin).

    Args:
        num_layers, hidden, intermediate, vocab: Usual sizes; `intermediate` is that of one expert.
        num_heads, num_kv_heads, head_dim: Sizes of attention.
        is_tied: Whether output projection and embedding are one matrix.
        has_qkv_bias: Whether the projections to queries, keys and values have biases.
        has_qk_norm: Whether queries and keys are normalised.
        num_experts, num_active_experts: Feed-forward blocks of a layer, and of a token.
        vision: Size of its tower; None reads text alone.
        measured: Counts of the model's own code, which win; None leaves the formulas alone.
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
    vision: VisionSize | None = None
    measured: MeasuredSize | None = None

    @classmethod
    def of_config(cls, values: Mapping[str, object]) -> "ModelSize":
        """Return the size from a model's configuration.

        Args:
            values: Fields under the names that most models have for them.

        Raises:
            ConfigError: The configuration lacks a size.
        """
        fields = dict(values)
        # DBRX keeps sizes in further parts.
        for part in ("text_config", "attn_config", "ffn_config"):
            inner = values.get(part)
            fields |= inner if isinstance(inner, Mapping) else {}
        kind = str(fields.get("model_type", ""))

        def number(*names: str, default: int | None = None) -> int:
            for name in names:
                value = fields.get(name)
                if isinstance(value, int) and 0 < value <= LARGEST_INT:
                    return value
            if default is None:
                raise ConfigError(
                    f"the configuration of the model has no {names[0]}: only decoders with "
                    "hidden_size, num_hidden_layers, num_attention_heads and vocab_size are "
                    "planned; summary.json of a run with --max_steps 1 says what each phase took"
                )
            return default

        heads, hidden = number("num_attention_heads"), number("hidden_size")
        experts = number("num_experts", "num_local_experts", "moe_num_experts", default=1)
        # Blocks that are not gated have two matrices instead of three.
        ungated = number("n_inner", "ffn_dim", "dff", default=4 * hidden) * 2 // 3
        dense = number("intermediate_size", "ffn_hidden_size", default=ungated)
        return cls(
            num_layers=number("num_hidden_layers"),
            hidden=hidden,
            intermediate=number("moe_intermediate_size", default=dense) if experts > 1 else dense,
            vocab=number("vocab_size"),
            num_heads=heads,
            num_kv_heads=number("kv_n_heads", "num_key_value_heads", default=heads),
            head_dim=number("head_dim", default=hidden // heads),
            is_tied=bool({**fields, **values}.get("tie_word_embeddings", False)),
            has_qkv_bias=bool(fields.get("attention_bias")) or kind.startswith("qwen2"),
            has_qk_norm=kind.startswith("qwen3"),
            num_experts=experts,
            num_active_experts=number("num_experts_per_tok", "moe_top_k", default=1),
            vision=VisionSize.of_config(values),
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
        """Numbers of the embedding, and of an untied output projection."""
        return self.vocab * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Numbers of one layer; of an average one if they were counted."""
        if self.measured is not None:
            return self.measured.layers // self.num_layers
        expert = 3 * self.hidden * self.intermediate + (self.hidden if self.num_experts > 1 else 0)
        return self._attention_parameters + self.num_experts * expert

    @property
    def _attention_parameters(self) -> int:
        matrices = self.hidden * (2 * self.q_width + 2 * self.kv_width)
        biases = self.q_width + 2 * self.kv_width if self.has_qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.has_qk_norm else 0)
        return matrices + biases + norms

    @property
    def tower_parameters(self) -> int:
        """Numbers of the vision tower and its projector."""
        return 0 if self.vision is None else self.vision.parameters

    @property
    def parameters(self) -> int:
        """Numbers of the whole model."""
        if self.measured is not None:
            return self.measured.parameters
        ends = self.embedding_parameters * (1 if self.is_tied else 2) + self.hidden
        return ends + self.num_layers * self.layer_parameters + self.tower_parameters

    def adapter_parameters(self, rank: int, *, on_tower: bool = True) -> int:
        """Count the numbers of adapters on all linear layers, with the tower unless it is frozen.

        Experts are one tensor with an extra axis, which no adapter takes.
        """
        ends = 2 * (self.hidden + self.q_width) + 2 * (self.hidden + self.kv_width)
        if self.num_experts == 1:
            ends += 3 * (self.hidden + self.intermediate)
        tower = 0 if self.vision is None or not on_tower else self.vision.adapter_parameters(rank)
        return self.num_layers * rank * ends + tower

    @property
    def small_parameters(self) -> int:
        """Numbers in tensors of at most 100,000 numbers, which stage 3 of ZeRO keeps whole."""
        matrices = [self.hidden * self.q_width] * 2 + [self.hidden * self.kv_width] * 2
        matrices += [self.hidden * self.intermediate] * 3 * self.num_experts
        matrix_numbers = sum(size for size in matrices if size <= 100_000)
        biases = self.q_width + 2 * self.kv_width if self.has_qkv_bias else 0
        return self.num_layers * (matrix_numbers + biases + 2 * self.hidden) + self.hidden


_SHAPES_FILE = Path(__file__).with_name("shapes.toml")
# Published shapes, so that a plan needs no download.
SHAPES = typed(dict[str, ModelSize], read_toml(_SHAPES_FILE), _SHAPES_FILE)


def read_model_size(path: str) -> ModelSize:
    """Return the size of a checkpoint's directory, or of a name in `SHAPES`.

    Raises:
        ConfigError: The path is neither, or its config.json lacks a size.
    """
    if path in SHAPES:
        return SHAPES[path]
    file = Path(path) / "config.json"
    if not file.is_file():
        near = did_you_mean(path, SHAPES).partition("; known")[0]
        raise ConfigError(
            f"no config.json in {path!r}{near}: give a model directory or one of "
            f"{', '.join(SHAPES)}"
        )
    # Imported here: they import torch, which a plan for published shapes does not need.
    from transformers import CONFIG_MAPPING

    from lightrft.models.loading import ModelLoadError, common_fields, load_config

    values = read_object(file)
    try:
        if str(values.get("model_type")) not in CONFIG_MAPPING:
            return ModelSize.of_config(values)
        size = ModelSize.of_config(common_fields(load_config(path)))
        return replace(size, measured=measure(path))
    except ModelLoadError as error:
        raise ConfigError(str(error)) from error


def measure(path: str) -> MeasuredSize | None:
    """Count a model of a checkpoint's configuration; None if it runs on no text without memory."""
    from lightrft.models.loading import load_config

    return _measure(json.dumps(load_config(path).to_dict(), sort_keys=True, default=str), path)


@functools.lru_cache(maxsize=16)
def _measure(_: str, path: str) -> MeasuredSize | None:
    """Count a model; the first argument tells changed configurations apart."""
    import torch
    from transformers.cache_utils import Cache

    from lightrft.engines.media.families import language_model, language_model_class
    from lightrft.models.attention import trunk_of
    from lightrft.models.loading import load_config, without_warnings

    config, counts = load_config(path), list[tuple[int, int]]()
    try:
        with torch.device("meta"), torch.no_grad(), without_warnings():
            model = language_model_class(config).from_config(config, dtype=torch.bfloat16).eval()
            for number in NUM_TOKENS:
                ids = torch.zeros(1, number, dtype=torch.int64)
                output = model(input_ids=ids, use_cache=True)
                cache = next(value for value in output.values() if isinstance(value, Cache))
                counts.append(_numbers(cache))
    except Exception as error:  # noqa: BLE001  the model's own code, on a device that it may not know
        _logger.warning(
            "%s: planned by the formulas of usual decoders, which may be far off for others, "
            "because its code cannot be run without memory: %s: %s",
            path,
            type(error).__name__,
            first_line(error),
        )
        return None
    (first, states), (second, _states) = counts
    per_token = (second - first) // (NUM_TOKENS[1] - NUM_TOKENS[0])
    return MeasuredSize(
        parameters=sum(value.numel() for value in model.parameters()),
        layers=sum(
            value.numel()
            for name, value in language_model(trunk_of(model)).named_parameters()
            if re.search(r"\.\d+\.", name)
        ),
        cached_per_token=per_token,
        cached_per_row=first - NUM_TOKENS[0] * per_token,
        float_per_row=states,
    )


def _numbers(cache: object) -> tuple[int, int]:
    """Return the numbers in a cache: in the model's dtype, and in float32."""
    import torch

    parts = [value for layer in vars(cache)["layers"] for value in vars(layer).values()]
    parts += [each for part in parts if isinstance(part, dict) for each in part.values()]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    kept, wide = (
        sum(each.numel() for each in tensors if each.dtype == dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    return kept, wide
