"""Inputs of a vision-language model beside the tokens of a batch."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from lightrft.engines.media.families import VisionFamily, placeholder_ids
from lightrft.engines.media.media import EncodedPrompt, MediaSpan

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Prompts = Sequence[EncodedPrompt | None]
# Lays out values of each row's tokens, [..., tokens of the row], as the inputs lie.
Place = Callable[[Sequence[Tensor]], Tensor]


def media_inputs(
    family: VisionFamily,
    rows: Sequence[Tensor],
    prompts: Prompts,
    *,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
    place: Place | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of the media of all rows.

    Args:
        family: Family of the model.
        rows: Tokens of each row.
        prompts: Encoded prompt of each row.
        width: Number of tokens of a padded row.
        device: Device of the inputs.
        dtype: Type of the pixels, for families without a row, whose classes may not convert them.
        place: Layout of the tokens; None pads rows on the right.
    """
    inputs_by_row: list[Mapping[str, Tensor]] = [
        {} if prompt is None else prompt.tensors for prompt in prompts
    ]
    lay_out = place or (lambda values: pad_right(values, width))
    kinds = () if family.attends_to_images else family.token_axis
    inputs = _kind_inputs(kinds, rows, inputs_by_row, lambda values: lay_out(values).to(device))
    for name in dict.fromkeys(chain(*inputs_by_row)):
        if name in inputs:
            continue
        is_token_axis = name in family.token_axis
        tensors = [
            _extended(row_inputs[name], len(row), is_token_axis=is_token_axis)
            if name in row_inputs
            else None
            for row, row_inputs in zip(rows, inputs_by_row, strict=True)
        ]
        axis = next(p.axes.get(name, 0) for p in prompts if p is not None and name in p.tensors)
        joined = family.join(axis, tensors)
        if is_token_axis:
            missing = joined.new_zeros(len(rows), width - joined.shape[1], *joined.shape[2:])
            joined = torch.cat([joined, missing], dim=1)
        is_cast = family.inputs is not None and joined.is_floating_point()
        inputs[name] = joined.to(device, dtype if is_cast else None)
    return inputs


def _kind_inputs(
    names: Sequence[str],
    rows: Sequence[Tensor],
    inputs_by_row: Sequence[Mapping[str, Tensor]],
    place: Place,
) -> dict[str, Tensor]:
    """Return inputs with a kind of each token, if a row has media."""
    return {
        name: place([_kinds(r, i.get(name)) for r, i in zip(rows, inputs_by_row, strict=True)])
        for name in names
        if any(inputs_by_row)
    }


def _kinds(row: Tensor, kinds: Tensor | None) -> Tensor:
    """Return the kinds of a row's tokens, [tokens] int64: those of its prompt, and 0 for text."""
    if kinds is None:
        return torch.zeros(len(row), dtype=torch.int64)
    return nn.functional.pad(kinds[0], (0, len(row) - kinds.shape[1]))


def _extended(tensor: Tensor, length: int, *, is_token_axis: bool) -> Tensor:
    """Extend an input to all tokens: a response repeats the entry of the prompt's last token."""
    if not is_token_axis:
        return tensor
    last = tensor[:, -1:].expand(-1, length - tensor.shape[1], *tensor.shape[2:])
    return torch.cat([tensor, last], dim=1)


def token_types(rows: Sequence[Tensor], prompts: Prompts) -> list[Tensor]:
    """Return the token kinds of each row: [tokens] int64 each, 0 for text and responses."""
    types_by_row: list[Tensor] = []
    for row, prompt in zip(rows, prompts, strict=True):
        types = torch.zeros(len(row), dtype=torch.int64)
        if prompt is not None and prompt.token_types is not None:
            types[: len(prompt.token_types)] = torch.tensor(prompt.token_types)
        types_by_row.append(types)
    return types_by_row


def axes_of_rows(
    trunk: "PreTrainedModel", rows: Sequence[Tensor], prompts: Prompts
) -> list[Tensor]:
    """Return each row's token places, as time, height and width: [axes, tokens] int64 each.

    Tokens after the prompt follow its largest place, as text does.
    """
    known: dict[int, Tensor] = {}
    rope = trunk.config.get_text_config().rope_parameters
    num_axes = len(rope.get("mrope_section", "thw"))
    axes: list[Tensor] = []
    for row, prompt in zip(rows, prompts, strict=True):
        if prompt is None:
            axes.append(torch.arange(len(row)).expand(num_axes, -1))
            continue
        if id(prompt) not in known:
            known[id(prompt)] = _axes_of_prompt(trunk, prompt)
        start = known[id(prompt)]
        after = start.max() + 1 + torch.arange(len(row) - start.shape[1])
        axes.append(torch.cat([start, after.expand(num_axes, -1)], dim=1))
    return axes


def media_numbers(rows: Sequence[Tensor], prompts: Prompts) -> list[Tensor]:
    """Return numbers of the tokens of each row, [tokens] int64 each: 0 outside media.

    Tokens of media that were encoded together have one number, which is that of the same model
    inputs in other rows.

    Args:
        rows: Tokens of each row.
        prompts: Encoded prompt of each row.
    """
    known: list[Mapping[str, Tensor]] = []

    def number_of(tensors: Mapping[str, Tensor]) -> int:
        for number, other in enumerate(known, start=1):
            if tensors is other or (
                tensors.keys() == other.keys()
                and all(torch.equal(value, other[name]) for name, value in tensors.items())
            ):
                return number
        known.append(tensors)
        return len(known)

    numbers: list[Tensor] = []
    for row, prompt in zip(rows, prompts, strict=True):
        numbers.append(torch.zeros(len(row), dtype=torch.int64))
        for span in () if prompt is None else spans_of(prompt):
            numbers[-1][span.start : span.stop] = number_of(span.tensors)
    return numbers


def spans_of(prompt: EncodedPrompt) -> Sequence[MediaSpan]:
    """Return the parts of a prompt's inputs; all of it, if they cannot be told apart."""
    whole = MediaSpan(0, len(prompt.token_ids), prompt.tensors)
    return prompt.spans or ((whole,) if prompt.tensors else ())


def unshared_media(
    family: VisionFamily, prompts: Prompts, num_shared: Sequence[int]
) -> list[EncodedPrompt | None]:
    """Return the prompts without the media among the first tokens of their rows.

    Args:
        family: Family of the model.
        prompts: Encoded prompt of each row.
        num_shared: Number of tokens of each row whose media another row has; no medium begins
            before and ends behind them.
    """
    kept: list[EncodedPrompt | None] = []
    for prompt, count in zip(prompts, num_shared, strict=True):
        if prompt is not None and count:
            tensors = [span.tensors for span in spans_of(prompt) if span.start >= count]
            joined = family.joined(tensors, prompt.axes) if tensors else {}
            prompt = replace(prompt, tensors=joined)
        kept.append(prompt)
    return kept


def foreign_places(
    config: "PretrainedConfig", rows: Sequence[Tensor], prompts: Prompts
) -> list[Tensor]:
    """Return masks of placeholder tokens that stand for no medium.

    Models would expect a medium for them.

    Args:
        config: Configuration of the model.
        rows: Tokens of each row.
        prompts: Encoded prompt of each row; None for a row without media, () if no row has any.

    Returns:
        Mask of each row, [tokens] bool on a CPU.
    """
    ids = torch.tensor(placeholder_ids(config), dtype=torch.int64)
    masks: list[Tensor] = []
    for row, prompt in zip(rows, prompts or [None] * len(rows), strict=True):
        is_mark = torch.isin(row.cpu(), ids)
        if prompt is not None:
            is_mark[: len(prompt.token_ids)] = False
        masks.append(is_mark)
    return masks


@contextmanager
def read_as_text(model: "PreTrainedModel", input_ids: Tensor, foreign: Tensor) -> Iterator[Tensor]:
    """Yield token ids with which a model reads foreign placeholders as text.

    Args:
        model: Model, which embeds the true tokens within the context.
        input_ids: True token ids, [rows, tokens].
        foreign: Mask by `foreign_places`, [rows, tokens] bool.
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
    """Return the places [axes, tokens] by the rule of the trunk's class."""
    taken = inspect.signature(trunk.get_rope_index).parameters
    grids = {name: value for name, value in prompt.tensors.items() if name in taken}
    places, _ = trunk.get_rope_index(
        torch.tensor([prompt.token_ids]),
        mm_token_type_ids=torch.tensor([prompt.token_types]),
        **grids,
    )
    return _behind_videos(cast("Tensor", places)[:, 0].cpu(), prompt.token_types or ())


def _behind_videos(places: Tensor, types: Sequence[int]) -> Tensor:
    """Move text after a video behind it on every axis.

    transformers 5.19 puts text behind the height and width of a video only, although a long video
    extends further in time. vLLM and Qwen's code, which trained the checkpoints, do not.

    Args:
        places: Places of the tokens, [axes, tokens].
        types: Kind of each token; 0 is text, 2 a video.
    """
    places = places.clone()
    for i in range(1, len(types)):
        if types[i] == 0 and types[i - 1] == 2:
            missing = places[:, :i].max() + 1 - places[:, i].min()
            places[:, i:] += missing.clamp(min=0)
    return places


def pad_right(rows: Sequence[Tensor], width: int) -> Tensor:
    """Pad values of rows, [..., tokens] each, with 0 to [..., rows, width]."""
    return torch.stack([nn.functional.pad(row, (0, width - row.shape[-1])) for row in rows], dim=-2)
