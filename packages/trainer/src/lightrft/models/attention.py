"""Attention for transformers' models: within sequences of one stream, and of short rows."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypedDict, Unpack, cast
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import (
    LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING,
    create_recurrent_attention_mask,
    sdpa_mask,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lightrft.engines.hf.attention import UNFUSED_OPTIONS, fused_attention, set_text_attention
from lightrft.engines.media.families import family_of, language_model
from lightrft.models.shared_prefix import SharedRuns
from lightrft.models.types import LayoutRefusedError
from lightrft.models.varlen import (
    HALF_DTYPES,
    KernelShape,
    KernelTrial,
    attend_varlen,
    try_kernel,
)

PACKED, SHORT = "lightrft_packed", "lightrft_short"
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Up to this length products and a softmax were faster on one core.
MAX_SHORT_TOKENS = 128
# Queries of one mask; causality spares more keys of smaller blocks.
MAX_MASKED_QUERIES = 256
# Queries, keys and values of one stream: [1, heads, tokens, head_dim] each.
QKV = tuple[Tensor, Tensor, Tensor]
_packed: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True, slots=True)
class SequenceBounds:
    """Borders of the sequences of a stream.

    Args:
        offsets: First token of each sequence, then the number of tokens of the whole stream.
        offsets_tensor: [sequences + 1] int32, the offsets on the stream's device.
        group: Ranks that each hold a slice of the stream; None if this rank holds it all.
        blocks: [tokens] int64 of the whole stream: tokens of one block (>= 0) see each other in
            both directions, as tokens of an image do in some models; None has no blocks.
        shared: Rows, if a sequence is only the tail of its row; None if sequences are whole rows.
        masks: Masks that all layers share; see `_shared_mask`.
    """

    offsets: tuple[int, ...]
    offsets_tensor: Tensor
    group: ProcessGroup | None = None
    blocks: Tensor | None = None
    shared: SharedRuns | None = None
    masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def inputs(self) -> dict[str, object]:
        """Return them as inputs of a model; kernels of recurrences know other names for them."""
        if self.group is not None or self.shared is not None:
            return {"sequence_bounds": self}
        places = torch.arange(self.offsets[-1], device=self.offsets_tensor.device)
        sequences = torch.bucketize(places, self.offsets_tensor[1:], out_int32=True, right=True)
        cu_seq_lens = {"cu_seq_lens_q": self.offsets_tensor, "cu_seq_lens_k": self.offsets_tensor}
        return {"sequence_bounds": self, **cu_seq_lens, "seq_idx": sequences[None]}

    @property
    def key_offsets(self) -> tuple[int, ...]:
        """First key of each sequence, then the number of keys."""
        return (self.shared or self).offsets

    def spans(self) -> Iterator[tuple[slice, slice]]:
        """Yield the queries and the keys of each sequence; the last keys belong to the queries."""
        queries, keys = pairwise(self.offsets), pairwise(self.key_offsets)
        yield from ((slice(*q), slice(*k)) for q, k in zip(queries, keys, strict=True))


class MissingBoundsError(ValueError):
    """Packed attention was called without the borders of the sequences."""


class AttentionOptions(TypedDict, total=False):
    """Options that transformers passes to attention.

    Args:
        dropout, scaling: Share of weights to drop, and the factor of the products.
        sliding_window: Number of last tokens that a token sees, itself included; None is all.
        softcap, s_aux: Cap of the products and sinks, which only the model's own function knows.
    """

    dropout: float
    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    s_aux: Tensor | None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_bounds: SequenceBounds | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, None]:
    """Attend causally inside each sequence; registered with transformers as `PACKED`.

    No mask over the whole stream is formed: the work is only that of the sequences.

    Args:
        module: Attention layer.
        query: [1, heads, tokens, head_dim], of this rank's slice of the stream.
        key, value: [1, kv_heads, tokens, head_dim].
        attention_mask: Must be None: padding is not part of a stream.
        sequence_bounds: Borders of the sequences in the whole stream.
        options: Further options of transformers; only those of `AttentionOptions` matter.

    Returns:
        [1, tokens, heads, head_dim], and None for the weights.

    Raises:
        MissingBoundsError: The model was called directly, or does not pass them on.
        LayoutRefusedError: The model's attention is of another kind.
    """
    if sequence_bounds is None or attention_mask is not None:
        raise MissingBoundsError(
            "this model reads packed sequences: call it through its actor or critic, or give it "
            "back its attention by pack_samples(False)"
        )
    _packed.add(module)
    group = sequence_bounds.group
    is_other = any(options.get(name) is not None for name in UNFUSED_OPTIONS)
    if not vars(module).get("is_causal", True) or (is_other and group is not None):
        raise LayoutRefusedError(
            f"{type(module).__name__} computes attention without causality, or with a softcap or "
            "sinks over several ranks: train without packing_samples and sp_size"
        )
    if group is not None:
        from lightrft.models.ulysses import gather_sequence, scatter_sequence

        query, key, value = gather_sequence(query, key, value, group)
    shared = sequence_bounds.shared
    if shared is not None:
        key, value = map(shared.read, (key, value))
    if is_other:
        qkv = query, key, value
        return _attend_unfused(module, qkv, sequence_bounds, options), None
    is_varlen = sequence_bounds.blocks is None and has_varlen_kernel(
        query, key, value, has_prefixes=shared is not None
    )
    attend = attend_stream if is_varlen else attend_each
    attended = attend((query, key, value), sequence_bounds, options)
    if group is not None:
        attended = scatter_sequence(attended, group)
    return attended.transpose(1, 2).contiguous(), None


def has_varlen_kernel(
    query: Tensor, key: Tensor, value: Tensor, *, has_prefixes: bool = False
) -> bool:
    """Return whether one kernel takes all sequences; else torch's attention runs for each."""
    if len({x.dtype for x in (query, key, value)}) > 1:
        return False
    return try_kernel(
        KernelShape(query.device.type, query.dtype, query.shape[-1], value.shape[-1], has_prefixes)
    ).works


def attend_each(qkv: QKV, bounds: SequenceBounds, options: AttentionOptions) -> Tensor:
    """Call torch's attention once for each sequence: [1, heads, tokens, head_dim]."""
    pieces = [
        F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=options.get("dropout", 0.0),
            is_causal=mask is None,
            scale=options.get("scaling"),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        for (q, k, v), mask in _parts(qkv, bounds, list(_bounded(bounds)), options)
    ]
    return torch.cat(pieces, dim=2)


def _attend_unfused(
    module: nn.Module, qkv: QKV, bounds: SequenceBounds, options: AttentionOptions
) -> Tensor:
    """Call the model's eager attention for each sequence: [1, tokens, heads, head_dim]."""
    pieces = [
        fused_attention(module, *part, None if mask is None else mask[None, None], **options)[0]
        for part, mask in _parts(qkv, bounds, list(bounds.spans()), options)
    ]
    return torch.cat(pieces, dim=1)


def _parts(
    qkv: QKV,
    bounds: SequenceBounds,
    spans: Sequence[tuple[slice, slice]],
    options: AttentionOptions,
) -> Iterator[tuple[QKV, Tensor | None]]:
    """Yield queries, keys and values of each span, and the mask that they need."""
    query, key, value = qkv
    window, key_blocks = options.get("sliding_window"), bounds.blocks
    if key_blocks is not None and bounds.shared is not None:
        key_blocks = bounds.shared.read(key_blocks, dim=0)
    most = max((part.stop - part.start for part, _ in spans), default=0)
    longest = max((part.stop - part.start for _, part in spans), default=0)
    for queries, keys in spans:
        part = query[:, :, queries], key[:, :, keys], value[:, :, keys]
        num_queries, num_keys = (x.shape[2] for x in part[:2])
        if key_blocks is not None and bool((key_blocks[keys] >= 0).any()):
            mask = _visible(num_queries, num_keys, window, query.device, key_blocks[keys])
        elif num_queries == num_keys and (window is None or window >= num_keys):
            mask = None
        else:
            # All end where the largest does. Kernels of GPUs read from aligned addresses.
            is_cut = query.device.type == "cpu"
            size = (most, longest) if is_cut else (num_queries, num_keys)
            mask = _shared_mask(query, bounds, size, window)[-num_queries:, -num_keys:]
        yield part, mask


def attends_packed(part: nn.Module) -> bool:
    """Return whether packed attention has run inside a part of a model."""
    return any(module in _packed for module in part.modules())


def _bounded(bounds: SequenceBounds) -> Iterator[tuple[slice, slice]]:
    """Yield the spans of bounds; queries after a shared prefix, which need a mask, in blocks."""
    for queries, keys in bounds.spans():
        size = queries.stop - queries.start
        num_before = keys.stop - keys.start - size
        # Tokens of an image see later ones.
        step = MAX_MASKED_QUERIES if num_before and bounds.blocks is None else size
        for first in range(0, size, step):
            last = min(first + step, size)
            seen = slice(keys.start, keys.start + num_before + last)
            yield slice(queries.start + first, queries.start + last), seen


def _shared_mask(
    query: Tensor, bounds: SequenceBounds, size: tuple[int, int], window: int | None
) -> Tensor:
    """Return the additive mask of a span, [queries, keys].

    The backward pass keeps masks: one for each layer and row could take more memory than keys.
    """
    place = size, window, query.dtype
    if place not in bounds.masks:
        is_seen = _visible(*size, window, query.device)
        hidden = torch.zeros_like(is_seen, dtype=query.dtype)
        bounds.masks[place] = hidden.masked_fill_(~is_seen, torch.finfo(query.dtype).min)
    return bounds.masks[place]


def _visible(
    num_queries: int,
    num_keys: int,
    window: int | None,
    device: torch.device,
    blocks: Tensor | None = None,
) -> Tensor:
    """Return [queries, keys] bool: the keys that each query sees.

    The last keys belong to the queries, and each key has its block.
    """
    index = torch.arange(num_keys, device=device)
    distance = index[num_keys - num_queries :, None] - index[None, :]
    mask = distance >= 0
    if blocks is not None:
        of_queries = blocks[num_keys - num_queries :, None]
        mask = mask | ((of_queries == blocks[None, :]) & (of_queries >= 0))
    if window is not None:  # limits blocks, too, but only backwards, as in transformers
        mask = mask & (distance < window)
    return mask


def attend_stream(qkv: QKV, bounds: SequenceBounds, options: AttentionOptions) -> Tensor:
    """Call one kernel for all sequences: [1, heads, tokens, head_dim]."""
    if options.get("dropout"):
        raise ValueError("packed attention has no dropout on a GPU: set attention_dropout to 0")
    query, key, value = (x[0].transpose(0, 1) for x in qkv)
    borders, keys = (
        (each.offsets_tensor, max(b - a for a, b in pairwise(each.offsets)))
        for each in (bounds, bounds.shared or bounds)
    )
    attended = attend_varlen(
        (query, key, value),
        borders,
        keys,
        scale=options.get("scaling"),
        window=options.get("sliding_window"),
    )
    return attended.transpose(0, 1).unsqueeze(0)


def trunk_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a language model that gives hidden states.

    That is its largest part with the input embedding and without the output projection. Models
    without one of these give their base model.
    """
    embedding, projection = model.get_input_embeddings(), model.get_output_embeddings()
    if None not in (embedding, projection):
        for part in model.modules():  # larger parts come before those inside them
            inside = set(part.modules()) if isinstance(part, PreTrainedModel) else set()
            if embedding in inside and projection not in inside:
                return cast("PreTrainedModel", part)
    return cast("PreTrainedModel", model.base_model)


def packing_hindrance(
    model_class: type[PreTrainedModel], text_config: PretrainedConfig
) -> str | None:
    """Return unknown ways, besides attention, by which tokens see each other; None if none.

    Args:
        model_class: Class of the model.
        text_config: Configuration of its text part.
    """
    kinds = {kind for kind in _other_layers(text_config) if not _is_recurrent(kind)}
    if kinds:
        return f"layers of type {', '.join(sorted(kinds))}"
    return None if model_class._supports_flash_attn else "attention of its own"


def has_other_layers(text: PreTrainedModel) -> bool:
    """Return whether a text model may have layers that mix sequences, besides attention."""
    return bool(_other_layers(text.config.get_text_config())) or not (
        text._supports_attention_backend
    )


def _other_layers(text_config: PretrainedConfig) -> set[str]:
    return set(text_config.to_dict().get("layer_types") or ()) - LAYER_TYPES


def _is_recurrent(kind: str) -> bool:
    """Return whether layers of a kind need no other mask than a recurrence's."""
    masks = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get(kind)
    functions = masks.values() if isinstance(masks, dict) else [masks]
    return create_recurrent_attention_mask in functions


def try_packing(config: PretrainedConfig, device_type: str, *, bf16: bool) -> KernelTrial:
    """Try whether one kernel packs all rows of a model, in bfloat16 or float32 on a device."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return KernelTrial(False, f"{type(config).__name__} is not of a text model")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    hindrance = packing_hindrance(model_class, config.get_text_config())
    if hindrance is not None:
        return KernelTrial(False, f"{model_class.__name__} has {hindrance}")
    if _other_layers(config.get_text_config()) or not model_class._supports_attention_backend:
        reason = f"{model_class.__name__} may have layers that are called once per packed sequence"
        return KernelTrial(False, reason)
    return try_kernel(KernelShape.of_model(config, device_type, bf16=bf16))


def use_packed_attention(model: PreTrainedModel, *, sp_size: int = 1) -> None:
    """Let a model read packed sequences.

    Args:
        model: Model with or without output projection; it is changed in place.
        sp_size: Number of ranks that will share a sequence.

    Raises:
        LayoutRefusedError: Its attention cannot be packed, or the heads cannot be distributed over
            the ranks.
    """
    check_packable(model)
    if sp_size > 1:
        from lightrft.models.ulysses import check_head_counts

        check_head_counts(model.config.get_text_config().num_attention_heads, sp_size)
    set_text_attention(model, PACKED)


def check_packable(model: PreTrainedModel) -> None:
    """Raise LayoutRefusedError if the attention of a model cannot be packed."""
    config = model.config.get_text_config()
    # The vision tower may attend differently.
    text = language_model(trunk_of(model))
    hindrance = packing_hindrance(cast("type[PreTrainedModel]", type(text)), config)
    if hindrance is not None:
        raise LayoutRefusedError(
            f"{type(model).__name__} has {hindrance}, which would mix packed sequences: train "
            "without packing_samples and sp_size"
        )
    family = family_of(model.config)
    if family is not None and family.attends_to_images:
        raise LayoutRefusedError(
            f"{type(model).__name__} attends from text to images, which packed sequences do not "
            "support: train without packing_samples and sp_size"
        )


def short_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Run `fused_attention`; on a CPU, short rows in half precision use plain products.

    In half precision the backward pass of torch's fused CPU kernel takes a fixed time for each row
    and head: 64 rows of 15 tokens take five times as long as with products. Only dtype and shape
    decide, so that passes with and without gradients compute the same.

    Args:
        module, attention_mask, kwargs: Arguments from transformers.
        query: [rows, heads, tokens, head_dim].
        key, value: [rows, kv_heads, tokens, head_dim].

    Returns:
        [rows, tokens, heads, head_dim], and None for the weights.
    """
    is_half = query.dtype in HALF_DTYPES
    is_slow = query.device.type == "cpu" and is_half and key.shape[2] <= MAX_SHORT_TOKENS
    with sdpa_kernel(SDPBackend.MATH) if is_slow else nullcontext():
        return fused_attention(module, query, key, value, attention_mask, **kwargs)


def use_short_attention(model: PreTrainedModel) -> None:
    """Let a model that would use torch's fused attention attend by `short_attention`."""
    if model._supports_attention_backend and model._supports_sdpa:
        set_text_attention(model, SHORT)


# Not compiled: each number of rows would be compiled anew, up to torch's limit.
uncompiled = torch.compiler.disable(packed_attention)
AttentionInterface.register(PACKED, uncompiled)
AttentionInterface.register(SHORT, short_attention)
AttentionMaskInterface.register(SHORT, sdpa_mask)
