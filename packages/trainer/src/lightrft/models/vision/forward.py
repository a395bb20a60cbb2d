"""The forward pass of a trunk over rows of which some have images or videos."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from lightrft.models.vision.families import VisionFamily, placeholder_ids
from lightrft.models.vision.media import EncodedPrompt, MediumKind, RowMedia

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import MoeModelOutputWithPast

    from lightrft.models.layout import TokenLayout

# What `nn.Module` passes to hooks.
Arguments = tuple[tuple[object, ...], dict[str, object]]


class RopeIndex(Protocol):
    """Places tokens along time, height and width, as the model's family does it."""

    def __call__(self, token_ids: Tensor, types: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """[3, 1, tokens] of a prompt [1, tokens] with media."""


def vision_inputs(
    trunk: "PreTrainedModel", family: VisionFamily, layout: "TokenLayout", media: RowMedia
) -> dict[str, object]:
    """What the forward pass is given beside token ids and bounds.

    Args:
        trunk: The model up to its last hidden states.
        family: Of the model.
        layout: Of the batch.
        media: Of its rows.

    Raises:
        ValueError: The tokens of a row do not begin with its encoded prompt.
    """
    rows = layout.rows_of_tokens
    prompts = media.prompts or (None,) * len(rows)
    _check_prompts(rows, prompts)
    found: dict[str, object] = {"position_ids": layout.position_ids}
    if family.has_axes:
        found["position_ids"] = _axes(trunk, layout, prompts)
    if family.takes_types and layout.bounds is None and media.kinds:
        types = [_types(len(row), prompt) for row, prompt in zip(rows, prompts, strict=True)]
        found[str(family.token_types)] = layout.place(types)
    present = [prompt for prompt in prompts if prompt is not None]
    for name in {name: None for prompt in present for name in prompt.tensors}:
        tensors = [
            None if prompt is None or name not in prompt.tensors
            else _extended(prompt.tensors[name], len(row), is_token_axis=name in family.token_axis)
            for row, prompt in zip(rows, prompts, strict=True)
        ]  # fmt: skip
        joined = family.join(name, tensors)
        if name in family.token_axis:
            width = layout.input_ids.shape[1]
            joined = torch.cat([joined, joined.new_zeros(len(rows), width, *joined.shape[2:])], 1)
            joined = joined[:, :width]
        found[name] = joined.to(layout.input_ids.device)
    return found


def image_blocks(layout: "TokenLayout", media: RowMedia) -> Tensor:
    """Of each token of a stream, the image whose tokens all see each other; -1 outside images."""
    prompts = media.prompts or (None,) * len(layout.rows_of_tokens)
    types = [
        _types(len(row), prompt) for row, prompt in zip(layout.rows_of_tokens, prompts, strict=True)
    ]
    is_image = layout.place(types)[0] > 0
    starts = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:-1]
    return torch.where(is_image, starts.long().cumsum(0) - 1, -1)


def _check_prompts(rows: Sequence[Tensor], prompts: Sequence[EncodedPrompt | None]) -> None:
    if len(rows) != len(prompts):
        raise ValueError(f"a batch of {len(rows)} rows got the media of {len(prompts)}")
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        if prompt is None:
            continue
        start = tuple(row[: len(prompt.token_ids)].tolist())
        if start != prompt.token_ids:
            raise ValueError(
                f"row {i} does not begin with the prompt its media were encoded for: got "
                f"{len(row)} tokens, expected the {len(prompt.token_ids)} of the processor first; "
                "the engine and the trainer must read one processor"
            )


def _types(length: int, prompt: EncodedPrompt | None) -> Tensor:
    types = torch.zeros(length, dtype=torch.int64)
    if prompt is not None and prompt.token_types is not None:
        types[: len(prompt.token_types)] = torch.tensor(prompt.token_types)
    return types


def _extended(tensor: Tensor, length: int, *, is_token_axis: bool) -> Tensor:
    """With an entry for each token: those of the response see what the prompt's last one sees."""
    if not is_token_axis:
        return tensor
    last = tensor[:, -1:].expand(-1, length - tensor.shape[1], *tensor.shape[2:])
    return torch.cat([tensor, last], dim=1)


def _axes(
    trunk: "PreTrainedModel", layout: "TokenLayout", prompts: Sequence[EncodedPrompt | None]
) -> Tensor:
    """[4, batch or 1, tokens]: place in the text, then time, height and width.

    The first tells the model where sequences of a stream begin.
    """
    index = rope_index(trunk)
    known: dict[int, Tensor] = {}
    places: list[Tensor] = []
    for row, prompt in zip(layout.rows_of_tokens, prompts, strict=True):
        if prompt is None:
            places.append(torch.arange(len(row)).expand(3, -1))
            continue
        if id(prompt) not in known:
            ids = torch.tensor([prompt.token_ids])
            known[id(prompt)] = index(ids, torch.tensor([prompt.token_types]), prompt.tensors)[:, 0]
        start = known[id(prompt)].cpu()
        after = start.max() + 1 + torch.arange(len(row) - start.shape[1])
        places.append(torch.cat([start, after.expand(3, -1)], dim=1))
    return torch.cat([layout.position_ids[None], layout.place(places)])


def rope_index(trunk: "PreTrainedModel") -> RopeIndex:
    """The rule of the trunk's own class."""

    def index(token_ids: Tensor, types: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        given = {name: tensors[name] for name in names if name in tensors}
        places, _ = trunk.get_rope_index(token_ids, mm_token_type_ids=types, **given)
        return cast("Tensor", places)

    return index


def run_trunk(
    trunk: "PreTrainedModel",
    family: VisionFamily,
    layout: "TokenLayout",
    media: RowMedia,
    arguments: Mapping[str, object],
) -> "MoeModelOutputWithPast":
    """Runs the trunk; every rank runs its tower for every kind of `media.present`.

    Args:
        trunk, family, layout, media: As for `vision_inputs`.
        arguments: Of the call.
    """
    input_ids = layout.input_ids
    with ExitStack() as hooks:
        foreign = _foreign_placeholders(trunk, layout, media)
        if foreign.any():
            hooks.enter_context(_embedding(trunk, _true_ids(input_ids), before=True))
            input_ids = torch.where(foreign, 0, input_ids)
        absent = sorted(media.present - media.kinds)
        if absent:
            hooks.enter_context(_embedding(trunk, _with_dummies(trunk, family, absent)))
        if layout.own is not None:
            hooks.enter_context(_cut_tokens(trunk, layout.own))
        output: MoeModelOutputWithPast = trunk(input_ids=input_ids, use_cache=False, **arguments)
    return output


def _foreign_placeholders(
    trunk: "PreTrainedModel", layout: "TokenLayout", media: RowMedia
) -> Tensor:
    """Placeholders behind the prompts: they stand for no medium, and models would look for one."""
    ids = torch.tensor(placeholder_ids(trunk.config))
    prompts = media.prompts or (None,) * len(layout.rows_of_tokens)
    marks: list[Tensor] = []
    for row, prompt in zip(layout.rows_of_tokens, prompts, strict=True):
        is_mark = torch.isin(row.cpu(), ids)
        if prompt is not None:
            is_mark[: len(prompt.token_ids)] = False
        marks.append(is_mark.long())
    return layout.place(marks).bool()


def _true_ids(token_ids: Tensor) -> Callable[..., object]:
    return lambda module, args: (token_ids,)


def _with_dummies(
    trunk: "PreTrainedModel", family: VisionFamily, kinds: Sequence[MediumKind]
) -> Callable[..., object]:
    """Adds nothing, by way of the tower: its parameters are gathered and get zero gradients."""

    def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
        for kind in kinds:
            inputs = family.dummy(trunk.config, kind)
            features = _features(trunk, kind, {k: v.to(output.device) for k, v in inputs.items()})
            for leaf in _floats(features):
                output = output + 0.0 * leaf.sum().to(output.dtype)
        return output

    return hook


def _features(trunk: "PreTrainedModel", kind: MediumKind, inputs: Mapping[str, Tensor]) -> object:
    pixels = next(value for name, value in inputs.items() if name.startswith("pixel_values"))
    dtype = next(trunk.parameters()).dtype
    typed = {k: v.to(dtype) if v is pixels else v for k, v in inputs.items()}
    get = trunk.get_image_features if kind == "image" else trunk.get_video_features
    return get(**typed, return_dict=True)


def _floats(found: object) -> Iterator[Tensor]:
    """The tensors of features, those of inner layers included."""
    if isinstance(found, Tensor):
        if found.is_floating_point():
            yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from _floats(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _floats(value)


@contextmanager
def _embedding(
    trunk: "PreTrainedModel", hook: Callable[..., object], *, before: bool = False
) -> Iterator[None]:
    layer = trunk.get_input_embeddings()
    handle = (
        layer.register_forward_pre_hook(hook) if before else layer.register_forward_hook(hook)
    )
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _cut_tokens(trunk: "PreTrainedModel", own: slice) -> Iterator[None]:
    """Gives the language model this rank's part of the tokens, after all media are in place."""

    def cut(module: nn.Module, args: tuple[object, ...], given: dict[str, object]) -> Arguments:
        embeds, places = given["inputs_embeds"], given["position_ids"]
        assert isinstance(embeds, Tensor)
        assert isinstance(places, Tensor)
        given = {**given, "inputs_embeds": embeds[:, own], "position_ids": places[..., own]}
        marks = given.get("visual_pos_masks")
        if isinstance(marks, Tensor):
            # Features of inner layers lie without gaps: they are cut by the tokens before them.
            before, inside = int(marks[:, : own.start].sum()), int(marks[:, own].sum())
            layers = cast("list[Tensor]", given["deepstack_visual_embeds"])
            given["visual_pos_masks"] = marks[:, own]
            given["deepstack_visual_embeds"] = [x[before : before + inside] for x in layers]
        return args, given

    handle = language_model(trunk).register_forward_pre_hook(cut, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def language_model(trunk: nn.Module) -> nn.Module:
    """The part of a vision-language trunk that reads embeddings."""
    for name in ("language_model", "text_model"):
        part = getattr(trunk, name, None)
        if isinstance(part, nn.Module):
            return part
    return trunk
