"""Forward pass of a trunk over rows, some of which have images or videos."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from lightrft.engines.media.cross_attention import only_own_images
from lightrft.engines.media.families import VisionFamily, family_of, language_model
from lightrft.engines.media.inputs import (
    axes_of_rows,
    foreign_places,
    media_inputs,
    read_as_text,
    token_types,
    unshared_media,
)
from lightrft.engines.media.media import EncodedPrompt, RowMedia

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import MoeModelOutputWithPast

    from lightrft.models.layout import TokenLayout

# Arguments that `nn.Module` passes to hooks.
Arguments = tuple[tuple[object, ...], dict[str, object]]


class WholeTrunk(nn.Module):
    """Trunk of a model whose whole forward pass puts features between the tokens.

    Args:
        model: Model, which computes the logits of the last token, too.
        trunk: Its part that gives hidden states, which reads text alone.
    """

    def __init__(self, model: "PreTrainedModel", trunk: nn.Module) -> None:
        super().__init__()
        self.model, self.trunk, self.config = model, trunk, model.config

    def get_input_embeddings(self) -> nn.Module:
        """Return the layer that embeds tokens."""
        return cast("nn.Module", self.model.get_input_embeddings())

    def forward(self, **inputs: object) -> "MoeModelOutputWithPast":
        """Return the output of the trunk for the inputs of the model."""
        outputs: list[MoeModelOutputWithPast] = []
        with self.trunk.register_forward_hook(lambda _, __, output: outputs.append(output)):
            self.model(**inputs, logits_to_keep=1)
        return outputs[0]

    def get_image_features(self, pixel_values: Tensor, *, return_dict: bool) -> Tensor:
        """Return the projected features; the model's method leaves the projector out."""
        model = cast("PreTrainedModel", self.model)
        states = model.get_image_features(pixel_values, return_dict=return_dict).last_hidden_state
        features: Tensor = model.multi_modal_projector(states.flatten(0, -2))
        return features


def reading_trunk(model: "PreTrainedModel", trunk: nn.Module) -> nn.Module:
    """Return the trunk of a model for rows with media: itself, if it reads them."""
    family = family_of(model.config)
    taken = inspect.signature(trunk.forward).parameters
    if family is None or not family.reads or any(name in taken for name in family.kinds.values()):
        return trunk
    return WholeTrunk(model, trunk)


def vision_inputs(
    trunk: "PreTrainedModel", family: VisionFamily, layout: "TokenLayout", media: RowMedia
) -> dict[str, object]:
    """Return the inputs of the forward pass beside token ids and bounds.

    Args:
        trunk: Model up to its last hidden states.
        family: Family of the model.
        layout: Layout of the batch.
        media: Media of its rows.

    Raises:
        ValueError: The tokens of a row do not begin with its encoded prompt.
    """
    rows = layout.rows_of_tokens
    prompts = list(media.of_rows(len(rows)))
    _check_prompts(rows, prompts)
    inputs_by_name: dict[str, object] = {"position_ids": layout.position_ids}
    if family.has_axes:
        axes = layout.place(axes_of_rows(trunk, rows, prompts))
        # Some models see by the place in the text where sequences of a stream begin; attention
        # within bounds does not need it, and not every class takes it.
        is_taken = family.inputs is None
        places = torch.cat([layout.position_ids[None], axes]) if is_taken else axes
        inputs_by_name["position_ids"] = places
    if family.takes_types and layout.bounds is None and media.kinds:
        inputs_by_name[str(family.token_types)] = layout.place(token_types(rows, prompts))
    if family.attends_to_images and media.present and not media.kinds:
        prompts[0] = _unseen(family, media.present["image"], rows[0])
    if layout.num_shared.any():
        prompts = unshared_media(family, prompts, layout.num_shared.tolist())
    return inputs_by_name | media_inputs(
        family,
        rows,
        prompts,
        width=layout.input_ids.shape[1],
        device=layout.input_ids.device,
        dtype=next(trunk.parameters()).dtype,
        place=layout.place,
    )


def image_blocks(layout: "TokenLayout", media: RowMedia) -> Tensor:
    """Return the image of each token of a stream, whose tokens see each other; -1 outside."""
    rows = layout.rows_of_tokens
    is_image = layout.place(token_types(rows, media.of_rows(len(rows))))[0] > 0
    starts = is_image & ~nn.functional.pad(is_image, (1, 0))[:-1]
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


def _unseen(family: VisionFamily, blank: EncodedPrompt, row: Tensor) -> EncodedPrompt:
    """Return a row of text with a blank image that no token attends to."""
    first = {n: torch.zeros_like(blank.tensors[n][:, :1]) for n in family.token_axis}
    tensors = {**blank.tensors, **first}
    return EncodedPrompt(tuple(row.tolist()), (), None, tensors, frozenset(), axes=blank.axes)


def run_trunk(
    trunk: "PreTrainedModel",
    family: VisionFamily,
    layout: "TokenLayout",
    media: RowMedia,
    arguments: Mapping[str, object],
) -> "MoeModelOutputWithPast":
    """Run the trunk; every rank runs its tower for every kind of `media.present`.

    Args:
        trunk, family, layout, media: As for `vision_inputs`.
        arguments: Arguments of the call.
    """
    input_ids = layout.input_ids
    with ExitStack() as hooks:
        rows = layout.rows_of_tokens
        marks = foreign_places(trunk.config, rows, media.of_rows(len(rows)))
        foreign = layout.place([mark.long() for mark in marks]).bool()
        input_ids = hooks.enter_context(read_as_text(trunk, input_ids, foreign))
        absent = [prompt for kind, prompt in media.present.items() if kind not in media.kinds]
        if family.attends_to_images:
            if "pixel_values" in arguments:
                hooks.enter_context(only_own_images(trunk, media.of_rows(len(input_ids))))
        elif absent:
            hook = _with_blanks(trunk, family, absent)
            hooks.enter_context(trunk.get_input_embeddings().register_forward_hook(hook))
        if layout.own is not None:
            hooks.enter_context(cut_tokens(trunk, layout.own))
        output: MoeModelOutputWithPast = trunk(input_ids=input_ids, use_cache=False, **arguments)
    return output


def _with_blanks(
    trunk: "PreTrainedModel", family: VisionFamily, blanks: Sequence[EncodedPrompt]
) -> Callable[..., object]:
    """Run the tower without effect: its parameters are gathered and get zero gradients."""

    def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
        # At a real token: gradients of padding may be no numbers, which a factor of 0 keeps.
        output = output.clone()
        for blank in blanks:
            for leaf in _floats(_used(features_of(trunk, family, blank))):
                output[0, 0] += 0.0 * leaf.sum().to(output.dtype)
        return output

    return hook


def features_of(trunk: "PreTrainedModel", family: VisionFamily, prompt: EncodedPrompt) -> object:
    """Return the features of a prompt with media of one kind, as the trunk's method gives them."""
    parameter, pixels = next(trunk.parameters()), family.kinds.values()
    inputs = {
        name: value.to(parameter.device, parameter.dtype if name in pixels else None)
        for name, value in prompt.tensors.items()
    }
    if family.features is not None:
        return family.features(trunk, inputs)
    (kind,) = prompt.media.kinds
    method = getattr(trunk, f"get_{kind}_features")
    taken = inspect.signature(method).parameters
    return method(**{n: v for n, v in inputs.items() if n in taken}, return_dict=True)


def _used(features: object) -> object:
    """Return the features that a model uses: other outputs get no gradient in a real pass.

    ZeRO-3 counts the outputs of a module that the backward pass reaches, and ranks must agree.
    """
    if isinstance(features, Mapping) and features.get("pooler_output") is not None:
        return [features.get(name) for name in ("pooler_output", "deepstack_features")]
    return features


def _floats(found: object) -> Iterator[Tensor]:
    """Yield the tensors of features, including those of inner layers."""
    if isinstance(found, Tensor):
        if found.is_floating_point():
            yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from _floats(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _floats(value)


def cut_tokens(trunk: "PreTrainedModel", own: slice) -> AbstractContextManager[object]:
    """Give the language model this rank's part of the tokens, after all media are in place."""

    def cut(module: nn.Module, args: tuple[object, ...], given: dict[str, object]) -> Arguments:
        embeds, places = given["inputs_embeds"], given["position_ids"]
        assert isinstance(embeds, Tensor)
        assert isinstance(places, Tensor)
        given = {**given, "inputs_embeds": embeds[:, own], "position_ids": places[..., own]}
        marks = given.get("visual_pos_masks")
        if isinstance(marks, Tensor):
            # Features of inner layers have no gaps: they are cut by the media tokens before them.
            before, inside = int(marks[:, : own.start].sum()), int(marks[:, own].sum())
            layers = cast("list[Tensor]", given["deepstack_visual_embeds"])
            given["visual_pos_masks"] = marks[:, own]
            given["deepstack_visual_embeds"] = [x[before : before + inside] for x in layers]
        return args, given

    return language_model(trunk).register_forward_pre_hook(cut, with_kwargs=True)
