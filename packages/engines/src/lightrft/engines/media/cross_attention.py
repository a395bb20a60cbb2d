"""Rows with unequal numbers of images in a model that attends from text to images."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Arguments = tuple[tuple[object, ...], dict[str, object]]


@contextmanager
def only_own_images(language_model: nn.Module, num_images: Sequence[int]) -> Iterator[None]:
    """Hides from each row the places that other rows' images have filled up with padding.

    Tokens before a row's first image attend to all places evenly, padding included, and rows
    without images too: their results would follow from the batch they are in. Rows without images
    see values of zero, which add nothing, since the projections have no bias.

    Args:
        language_model: The part that attends, called with padded rows.
        num_images: Of each row.
    """

    def narrow(module: nn.Module, args: tuple[object, ...], given: dict[str, object]) -> Arguments:
        states, mask = given["cross_attention_states"], given["cross_attention_mask"]
        assert isinstance(states, Tensor)
        assert isinstance(mask, Tensor)
        counts = torch.tensor(num_images, device=states.device)
        most = max(1, int(counts.max()))
        is_own = torch.arange(most, device=states.device)[None] < counts[:, None]
        seen = states.view(len(counts), most, -1, *states.shape[1:])
        seen = torch.where(is_own[:, :, None, None, None], seen, torch.zeros_like(seen))
        is_hidden = (~is_own & (counts[:, None] > 0)).repeat_interleave(
            mask.shape[-1] // most, dim=1
        )
        lowest = torch.finfo(mask.dtype).min
        given = {
            **given,
            "cross_attention_states": seen.view(states.shape),
            "cross_attention_mask": mask.masked_fill(is_hidden[:, None, None], lowest),
        }
        return args, given

    handle = language_model.register_forward_pre_hook(narrow, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
