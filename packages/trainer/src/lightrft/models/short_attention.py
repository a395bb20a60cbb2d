"""Attention of short rows in half precision on a CPU."""

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lightrft.engines.hf.attention import set_text_attention

SHORT = "lightrft_short"
# Up to here products and a softmax were faster on one core.
MAX_SHORT_TOKENS = 128


def short_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention of transformers' `sdpa`, for short rows in half precision from plain products.

    The backward pass of torch's fused kernel for CPUs takes a fixed time for each row and head in
    half precision: with it, 64 rows of 15 tokens take five times as long as products.
    Decided by dtype and shape alone, so that passes with and without gradients compute the same.

    Args:
        module, attention_mask, kwargs: What transformers passes.
        query: [rows, heads, tokens, head_dim].
        key, value: [rows, kv_heads, tokens, head_dim].

    Returns:
        [rows, tokens, heads, head_dim], and None for the weights.
    """
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    is_slow = query.device.type == "cpu" and is_half and key.shape[2] <= MAX_SHORT_TOKENS
    output: tuple[Tensor, None]
    if is_slow:
        with sdpa_kernel(SDPBackend.MATH):
            output = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    else:
        output = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output


def use_short_attention(model: PreTrainedModel) -> None:
    """Lets a model of a machine without accelerator attend by `short_attention`."""
    if torch.accelerator.is_available():
        return
    if model._supports_attention_backend and model._supports_sdpa:
        set_text_attention(model, SHORT)


AttentionInterface.register(SHORT, short_attention)
AttentionMaskInterface.register(SHORT, sdpa_mask)
