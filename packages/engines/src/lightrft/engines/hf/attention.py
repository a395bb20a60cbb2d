"""Attention for single-token steps that reads the cache without repeating its heads."""

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "lightrft_grouped"
# Implementations that take an additive 4-D mask.
MASKED = (GROUPED, "sdpa", "eager")


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
    """Attention with the queries that share a key head as the rows of one product.

    With one new token a row, the query heads of a key head can take the place of the sequence
    dimension. Other calls, and those with a position bias, go to transformers' own sdpa.

    Args:
        query: [rows, heads, new, head_dim].
        key, value: [rows, kv_heads, seq, head_dim].
        attention_mask: [rows, 1, new, seq] additive or bool, or None.
        module, kwargs: What else transformers passes on.

    Returns:
        [rows, new, heads, head_dim], and None for the weights.
    """
    rows, heads, num_new, _ = query.shape
    kv_heads = key.shape[1]
    if num_new != 1 or position_bias is not None:
        kwargs |= {"scaling": scaling, "position_bias": position_bias}
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return output
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, kv_heads, heads // kv_heads, query.shape[-1]),
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
    )
    return attended.reshape(rows, 1, heads, value.shape[-1]), None


def use_attention(model: PreTrainedModel, name: str | None) -> None:
    """Sets a model's attention implementation; None takes grouped attention where it can be used.

    Raises:
        ValueError: The model does not support the named implementation.
    """
    if name is None:
        if not (model._supports_attention_backend and model._supports_sdpa):
            return
        name = GROUPED
    set_text_attention(model, name)


def set_text_attention(model: PreTrainedModel, name: str | None) -> None:
    """Sets the attention of the language model, and leaves that of a vision tower as it is."""
    text, whole = model.config.get_text_config(), model.config
    if text is whole:
        model.set_attn_implementation(name)
        return
    found = next(key for key in whole.sub_configs if getattr(whole, key) is text)
    model.set_attn_implementation({found: name})


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
