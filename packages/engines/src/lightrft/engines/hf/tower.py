"""Vision towers on a CPU, with few calls for patches and for attention within parts of images."""

import inspect
from collections import defaultdict
from copy import copy
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

# Models that see "flash" in the name leave splitting into parts to the attention function.
IN_PARTS = "lightrft_flash_of_parts"


class PatchConv3d(nn.Conv3d):
    """Convolution of patches of its kernel's size, computed as one product."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [patches, channels, frames, height, width] to [patches, features, 1, 1, 1]."""
        is_patch = input.dim() == 5 and input.shape[2:] == self.kernel_size
        if not is_patch or input.device.type != "cpu" or self.groups > 1 or any(self.padding):
            return super().forward(input)
        return linear(input.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def attention_of_parts(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute attention within each part of a stream, with one call for parts of equal length.

    Args:
        module, attention_mask, kwargs: Further arguments from transformers; parts have no mask.
        query: [1, heads, tokens, head_dim].
        key, value: [1, kv_heads, tokens, head_dim].
        cu_seq_lens_q: Starts of the parts and the end of the last, [parts + 1].
        scaling, dropout: Scale of the products, and dropout of the weights.

    Returns:
        [1, tokens, heads, head_dim], and None for the weights.
    """
    num_sharing = query.shape[1] // key.shape[1]
    if num_sharing > 1:
        key, value = (each.repeat_interleave(num_sharing, dim=1) for each in (key, value))
    bounds = cu_seq_lens_q.tolist()
    starts: dict[int, list[int]] = defaultdict(list)
    for start, stop in pairwise(bounds):
        starts[stop - start].append(start)
    stream = torch.stack([query[0], key[0], value[0]]).transpose(1, 2)  # [3, tokens, heads, dim]
    outputs, places = [], []
    for length, begins in starts.items():
        place = (torch.tensor(begins)[:, None] + torch.arange(length)).flatten()
        group = stream if len(starts) == 1 else stream[:, place.to(stream.device)]
        # [parts, heads, length, dim] each.
        q, k, v = group.view(3, -1, length, *group.shape[2:]).transpose(2, 3)
        attended = scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
        places.append(place)
    if len(outputs) == 1:
        return outputs[0][None], None
    order = torch.cat(places).argsort().to(stream.device)
    return torch.cat(outputs)[order][None], None


def use_fast_tower(model: PreTrainedModel) -> None:
    """Make a model's vision tower on a CPU compute its patches and parts in few calls.

    Changes the model in place; parameters and results stay the same.
    """
    if torch.accelerator.is_available():
        return
    for module in model.modules():
        # A subclass may have another forward.
        if type(module) is nn.Conv3d and module.stride == module.kernel_size:
            module.__class__ = PatchConv3d
        config = vars(module).get("config")
        takes_parts = "cu_seqlens" in inspect.signature(type(module).forward).parameters
        if config is None or not takes_parts or isinstance(module, PreTrainedModel):
            continue
        # The model's configuration stays unchanged: other models are built from it.
        module.config = copy(config)
        module.config._attn_implementation = IN_PARTS


AttentionInterface.register(IN_PARTS, attention_of_parts)
