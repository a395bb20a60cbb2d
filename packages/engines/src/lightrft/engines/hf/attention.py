"""Attention for single-token steps that reads the cache without repeating its heads."""

import sys
from collections.abc import Callable
from typing import cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "lightrft_grouped"
# Implementations that take an additive 4-D mask.
MASKED = (GROUPED, "sdpa", "eager")
# Options that models pass to attention and torch's fused kernels would ignore.
UNFUSED_OPTIONS = ("softcap", "s_aux")
_unfused: WeakSet[nn.Module] = WeakSet()


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute attention by `sdpa`, or by the model's eager function with caps or sinks.

    Args:
        module, query, key, value, options: Arguments from transformers.
        attention_mask: [rows, 1, new, seq] additive or bool, or None, as `sdpa` takes it.

    Returns:
        [rows, new, heads, head_dim], and None for the weights.
    """
    if all(options.get(name) is None for name in UNFUSED_OPTIONS):
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return output
    _unfused.add(module)
    mask = attention_mask
    if mask is None:
        new, seq = query.shape[2], key.shape[2]
        mask = torch.ones(new, seq, dtype=torch.bool, device=query.device).tril(seq - new)
    if mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, hidden)
    names = vars(sys.modules[type(module).__module__])
    eager = cast("Callable[..., tuple[Tensor, Tensor]]", names["eager_attention_forward"])
    return eager(module, query, key, value, mask, **options)[0], None


def unfused_layers(model: nn.Module) -> bool:
    """Return whether a layer of a model used its eager attention instead of a fused one."""
    return any(module in _unfused for module in model.modules())


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the queries that share a key head as rows of one product.

    With one new token per row, the query heads of a key head take the place of the sequence
    dimension. Other calls, and those with a position bias, go to `fused_attention`.

    Args:
        query: [rows, heads, new, head_dim].
        key, value: [rows, kv_heads, seq, head_dim].
        attention_mask: [rows, 1, new, seq] additive or bool, or None.
        module, kwargs: Further arguments from transformers.

    Returns:
        [rows, new, heads, head_dim], and None for the weights.
    """
    rows, heads, num_new, _ = query.shape
    kv_heads = key.shape[1]
    is_other = any(kwargs.get(name) is not None for name in UNFUSED_OPTIONS)
    # Heads with masks of their own cannot be rows of one product.
    is_other |= attention_mask is not None and attention_mask.shape[1] != 1
    if num_new != 1 or position_bias is not None or is_other:
        kwargs |= {"scaling": scaling, "position_bias": position_bias}
        return fused_attention(module, query, key, value, attention_mask, **kwargs)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, kv_heads, heads // kv_heads, query.shape[-1]),
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
    )
    return attended.reshape(rows, 1, heads, value.shape[-1]), None


def use_attention(model: PreTrainedModel, name: str | None) -> None:
    """Set a model's attention implementation; None takes grouped attention if supported.

    Raises:
        ValueError: The model does not support the named implementation.
    """
    if name is None:
        if not (model._supports_attention_backend and model._supports_sdpa):
            return
        name = GROUPED
    set_text_attention(model, name)


def set_text_attention(model: PreTrainedModel, name: str | None) -> None:
    """Set the attention of the language model, not of a vision tower."""
    text, whole = model.config.get_text_config(), model.config
    if text is whole:
        model.set_attn_implementation(name)
        return
    text_key = next(key for key in whole.sub_configs if getattr(whole, key) is text)
    model.set_attn_implementation({text_key: name})


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
