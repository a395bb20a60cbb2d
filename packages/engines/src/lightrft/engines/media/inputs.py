"""Inputs of a vision-language model beside the tokens of a batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from lightrft.engines.media.families import VisionFamily, placeholder_ids
from lightrft.engines.media.media import EncodedPrompt

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Prompts = Sequence[EncodedPrompt | None]
# From values of each row's tokens, [..., tokens of the row], to values as the inputs lie.
Place = Callable[[Sequence[Tensor]], Tensor]


def media_inputs(
    family: VisionFamily, rows: Sequence[Tensor], prompts: Prompts, *, width: int
) -> dict[str, Tensor]:
    """The tensors of the media of all rows.

    Args:
        family: Of the model.
        rows: Tokens of each row.
        prompts: Of each row.
        width: Tokens of a padded row.
    """
    given: list[Mapping[str, Tensor]] = [
        {} if prompt is None else prompt.tensors for prompt in prompts
    ]
    found: dict[str, Tensor] = {}
    for name in {name: None for tensors in given for name in tensors}:
        is_token_axis = name in family.token_axis
        tensors = [
            _extended(own[name], len(row), is_token_axis=is_token_axis) if name in own else None
            for row, own in zip(rows, given, strict=True)
        ]
        joined = family.join(name, tensors)
        if is_token_axis:
            missing = joined.new_zeros(len(rows), width - joined.shape[1], *joined.shape[2:])
            joined = torch.cat([joined, missing], dim=1)
        found[name] = joined
    return found


def _extended(tensor: Tensor, length: int, *, is_token_axis: bool) -> Tensor:
    """With an entry for each token: those of the response see what the prompt's last one sees."""
    if not is_token_axis:
        return tensor
    last = tensor[:, -1:].expand(-1, length - tensor.shape[1], *tensor.shape[2:])
    return torch.cat([tensor, last], dim=1)


def token_types(rows: Sequence[Tensor], prompts: Prompts) -> list[Tensor]:
    """Of each row, the kinds of its tokens: [tokens] int64 each, 0 for text and responses."""
    found: list[Tensor] = []
    for row, prompt in zip(rows, prompts, strict=True):
        types = torch.zeros(len(row), dtype=torch.int64)
        if prompt is not None and prompt.token_types is not None:
            types[: len(prompt.token_types)] = torch.tensor(prompt.token_types)
        found.append(types)
    return found


def axes_of_rows(
    trunk: "PreTrainedModel", rows: Sequence[Tensor], prompts: Prompts
) -> list[Tensor]:
    """Of each row, the places of its tokens in time, height and width: [3, tokens] int64 each.

    Tokens after the prompt follow the largest place of it, as text does.
    """
    known: dict[int, Tensor] = {}
    found: list[Tensor] = []
    for row, prompt in zip(rows, prompts, strict=True):
        if prompt is None:
            found.append(torch.arange(len(row)).expand(3, -1))
            continue
        if id(prompt) not in known:
            known[id(prompt)] = _axes_of_prompt(trunk, prompt)
        start = known[id(prompt)]
        after = start.max() + 1 + torch.arange(len(row) - start.shape[1])
        found.append(torch.cat([start, after.expand(3, -1)], dim=1))
    return found


def foreign_places(
    config: "PretrainedConfig", rows: Sequence[Tensor], prompts: Prompts
) -> list[Tensor]:
    """Placeholders that stand for no medium, which models would search one for.

    Args:
        config: Of the model.
        rows: Tokens of each row.
        prompts: Of each row; (), or None of a row, if there are no media.

    Returns:
        Of each row, [tokens] bool on a CPU.
    """
    ids = torch.tensor(placeholder_ids(config))
    found: list[Tensor] = []
    for row, prompt in zip(rows, prompts or [None] * len(rows), strict=True):
        is_mark = torch.isin(row.cpu(), ids)
        if prompt is not None:
            is_mark[: len(prompt.token_ids)] = False
        found.append(is_mark)
    return found


@contextmanager
def read_as_text(model: "PreTrainedModel", input_ids: Tensor, foreign: Tensor) -> Iterator[Tensor]:
    """Token ids for calls of a model that search no medium at some places, nor change them.

    Args:
        model: Embeds the true token there.
        input_ids: [rows, tokens].
        foreign: [rows, tokens] bool, see `foreign_places`.
    """
    if not foreign.any():
        yield input_ids
        return
    layer = model.get_input_embeddings()
    handle = layer.register_forward_pre_hook(lambda module, args: (input_ids,))
    try:
        yield torch.where(foreign.to(input_ids.device), 0, input_ids)
    finally:
        handle.remove()


def _axes_of_prompt(trunk: "PreTrainedModel", prompt: EncodedPrompt) -> Tensor:
    """[3, tokens], by the rule of the trunk's own class."""
    names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    grids = {name: prompt.tensors[name] for name in names if name in prompt.tensors}
    places, _ = trunk.get_rope_index(
        torch.tensor([prompt.token_ids]),
        mm_token_type_ids=torch.tensor([prompt.token_types]),
        **grids,
    )
    return _behind_media(cast("Tensor", places)[:, 0].cpu(), prompt.token_types or ())


def _behind_media(places: Tensor, types: Sequence[int]) -> Tensor:
    """Text after a medium begins behind it on every axis.

    transformers 5.19 puts text behind the height and width of a video alone, where a long one
    lasts further; Qwen's own code, which the checkpoints were trained with, and vLLM do not.

    Args:
        places: [3, tokens].
        types: Of each token; 0 is text.
    """
    places = places.clone()
    for i in range(1, len(types)):
        if types[i] == 0 and types[i - 1] != 0:
            missing = places[:, :i].max() + 1 - places[:, i].min()
            places[:, i:] += missing.clamp(min=0)
    return places


def pad_right(rows: Sequence[Tensor], width: int) -> Tensor:
    """Values of rows, [..., tokens] each, as [..., rows, width], 0 on padding."""
    return torch.stack([nn.functional.pad(row, (0, width - row.shape[-1])) for row in rows], dim=-2)
