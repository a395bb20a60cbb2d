"""Rows with unequal numbers of images in a model that attends from text to images."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightrft.engines.media.families import language_model
from lightrft.engines.media.media import EncodedPrompt

Arguments = tuple[tuple[object, ...], dict[str, object]]


@contextmanager
def only_own_images(trunk: nn.Module, prompts: Sequence[EncodedPrompt | None]) -> Iterator[None]:
    """Hide from each row the padding up to the most images of any row.

    Tokens before a row's first image, and rows without images, attend evenly to all places,
    padding included. Their results would depend on the rest of the batch. Rows without images
    see values of zero, which add nothing because the projections have no bias.

    Args:
        trunk: Model, called with padded rows.
        prompts: Encoded prompt of each row; None without images.
    """
    num_images = [0 if prompt is None else prompt.num_images for prompt in prompts]

    def narrow(module: nn.Module, args: tuple[object, ...], given: dict[str, object]) -> Arguments:
        states, mask = given["cross_attention_states"], given["cross_attention_mask"]
        assert isinstance(states, Tensor)
        assert isinstance(mask, Tensor)
        counts = torch.tensor(num_images, device=states.device)
        most = max(1, int(counts.max()))
        is_image = torch.arange(most, device=states.device)[None] < counts[:, None]
        seen = states.view(len(counts), most, -1, *states.shape[1:])
        seen = torch.where(is_image[:, :, None, None, None], seen, torch.zeros_like(seen))
        is_hidden = (~is_image & (counts[:, None] > 0)).repeat_interleave(
            mask.shape[-1] // most, dim=1
        )
        lowest = torch.finfo(mask.dtype).min
        given = {
            **given,
            "cross_attention_states": seen.view(states.shape),
            "cross_attention_mask": mask.masked_fill(is_hidden[:, None, None], lowest),
        }
        return args, given

    handle = language_model(trunk).register_forward_pre_hook(narrow, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
