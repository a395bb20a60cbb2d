"""Proof at load: rows with images are computed as the model's own forward pass computes each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightrft.engines.media.families import family_of
from lightrft.engines.media.inputs import media_inputs, token_types
from lightrft.engines.media.media import EncodedPrompt, RowMedia
from lightrft.models.actor import Actor
from lightrft.models.attention import MissingBoundsError
from lightrft.models.loading import ModelLoadError
from lightrft.models.proof import EAGER, Proof, projected, refusing, require_causality
from lightrft.models.sequence_model import trunk_output
from lightrft.models.types import LayoutRefusedError

if TYPE_CHECKING:
    from lightrft.engines.media.encoder import PromptEncoder
    from lightrft.engines.media.families import VisionFamily
    from lightrft.strategy.distributed.context import DistributedContext

# Widths and heights of the pictures of each row.
SIZES: tuple[tuple[tuple[int, int], ...], ...] = (((64, 64),), (), ((160, 64), (64, 96)))
_TEXT_ALONE = "train its text alone with --text_only"


class MediaProof(Proof):
    """Passes of a model over rows with one image, none and two; see `Proof`.

    Args:
        model, context: As for `Proof`.
        encoder: Encoder of the model's prompts, equal on all ranks.
    """

    def __init__(
        self, model: nn.Module, context: DistributedContext, encoder: PromptEncoder
    ) -> None:
        rng = np.random.default_rng(0)
        self.prompts: list[EncodedPrompt | None] = []
        self._siblings: list[tuple[Tensor, EncodedPrompt | None]] = []
        for sizes in SIZES:
            pictures = [rng.integers(0, 255, (h, w, 3), dtype=np.uint8) for w, h in sizes]
            shown = encoder.encode(*encoder.question("image", pictures)) if pictures else None
            self.prompts.append(shown)
        super().__init__(model, context)

    @property
    def distance_of_pictures(self) -> float:
        """Distance of a row from itself with its picture in negative: what a swap would change."""
        with self._attending(EAGER):
            other = self._own_of(self.rows[0], self._negative)
        return self.largest_of_ranks(float((other - self.expected[0]).abs().max()))

    @property
    def _first(self) -> EncodedPrompt:
        return cast("EncodedPrompt", self.prompts[0])

    @property
    def _negative(self) -> EncodedPrompt:
        """First prompt with its picture in negative, whose tokens are the same."""
        first = self._first
        negative = {n: -t if t.is_floating_point() else t for n, t in first.tensors.items()}
        spans = tuple(replace(span, tensors=negative) for span in first.spans)
        return replace(first, tensors=negative, spans=spans)

    @property
    def _family(self) -> VisionFamily:
        return cast("VisionFamily", family_of(self.inner.config))

    def _drawn_rows(self) -> list[Tensor]:
        rows = []
        for prompt, text in zip(self.prompts, super()._drawn_rows(), strict=True):
            ids = () if prompt is None else prompt.token_ids
            rows.append(torch.cat([text.new_tensor(ids), text]))
        return rows

    def _is_scored(self, row: Tensor, prompt: EncodedPrompt | None) -> Tensor:
        """Return whether each token is text behind the images, [tokens] bool."""
        start = 1 if prompt is None else len(prompt.token_ids)
        return torch.arange(len(row), device=row.device) >= start

    def _own(self, row: Tensor, *, like: Tensor | None = None) -> Tensor:
        like = row if like is None else like
        return self._own_of(row, self._prompt_of(like), like=like)

    def _own_of(
        self, row: Tensor, prompt: EncodedPrompt | None, *, like: Tensor | None = None
    ) -> Tensor:
        """Return the values of a row by the model's own pass, with the media of a prompt."""
        if prompt is not None:
            family, host = self._family, row.cpu()
            self.own_inputs = media_inputs(
                family,
                [host],
                [prompt],
                width=len(row),
                device=row.device,
                dtype=next(self.inner.parameters()).dtype,
            )
            if family.token_types is not None:
                types = torch.stack(token_types([host], [prompt])).to(row.device)
                self.own_inputs[family.token_types] = types
            self.own_inputs["attention_mask"] = torch.ones_like(row)[None]
        try:
            return super()._own(row, like=like).where(self._is_scored(row, prompt), 0.0)
        finally:
            self.own_inputs = {}

    def _prompt_of(self, row: Tensor) -> EncodedPrompt | None:
        known = [*zip(self.rows, self.prompts, strict=True), *self._siblings]
        return next(prompt for each, prompt in known if each is row)

    def _as_run(self, rows: Sequence[Tensor], *, is_training: bool = False) -> list[Tensor]:
        token_ids = pad_sequence(list(rows), batch_first=True)
        mask = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], True)
        prompts = tuple(map(self._prompt_of, rows))
        is_scored = pad_sequence(list(map(self._is_scored, rows, prompts)), True)
        media = RowMedia(prompts)
        forward = self.inner.forward

        def run(ids: Tensor, is_real: Tensor) -> Tensor:
            if isinstance(self.inner, Actor):
                output = forward(ids, is_real, scored_mask=is_scored, media=media)
                return cast("Tensor", output.logprobs)
            layout = self.inner.lay_out(ids, is_real, media=media)
            hidden = trunk_output(
                self.inner.pretrained, layout, media, family=self.inner.family
            ).last_hidden_state
            return layout.scatter(projected(layout.select(hidden)))

        values = self._through(run, token_ids, mask, is_training=is_training)
        values = values.where(is_scored, 0.0)
        return [value[is_real] for value, is_real in zip(values, mask, strict=True)]

    def require_packing(self) -> None:
        """Prove that rows of a model that packs already are computed as alone; collective.

        Raises:
            LayoutRefusedError: They are not.
        """
        try:
            distance = self.distance_of_layout()
        except MissingBoundsError as error:
            raise LayoutRefusedError(f"{error}; train without packing_samples") from error
        if numbers := self.beyond_rounding(distance):
            raise LayoutRefusedError(
                f"{self.name} computes packed rows with images otherwise: "
                f"{numbers}; train without packing_samples and sp_size"
            )

    def require_sharing(self) -> None:
        """Prove that rows of a model that shares prefixes are computed as alone; collective.

        They have one picture, and one of them another picture with the same tokens.

        Raises:
            LayoutRefusedError: They are not.
        """
        (first, text), start = self.rows[:2], len(self._first.token_ids)
        self._siblings = [
            (torch.cat([first[: start + 4], text]), self._first),
            (torch.cat([first[:start], text]), self._first),
            (first.clone(), self._negative),
            (text.flip(0), None),
        ]
        *rows, other = (row for row, _ in self._siblings)
        rows = [text, first, *rows]
        expected, least = self.values_alone(rows), self.inner.layout_policy.min_shared_tokens
        self.inner.share_prefixes(1)
        if numbers := self.mixing(rows, expected, other):
            raise LayoutRefusedError(
                f"{self.name} mixes rows with images that begin alike: {numbers}"
            )
        self.inner.share_prefixes(least)


def prove_media(
    model: nn.Module, context: DistributedContext, encoder: PromptEncoder
) -> MediaProof | None:
    """Prove that a prepared model computes rows with images as its own pass does; collective.

    Args:
        model: Sequence model with everything that a strategy has put around it.
        context: Ranks.
        encoder: Encoder of its prompts.

    Returns:
        Proof, for a test of packing; None if the plain pass gives no finite numbers, or the model
        reads no images.

    Raises:
        ModelLoadError: It computes something else, or sees no images.
    """
    if "image" not in encoder.marks:
        return None
    family = encoder.family
    if family.token_axis and not family.attends_to_images and context.world_size > 1:
        raise ModelLoadError(
            f"models of type {family.model_type} read {family.token_axis[0]}, and may send images "
            "through weights for which ranks without images would wait: got "
            f"{context.world_size} ranks, expected 1; or {_TEXT_ALONE}"
        )
    with refusing(model, "cannot compute rows with images", _TEXT_ALONE):
        proof = MediaProof(model, context, encoder)
        if not proof.is_finite:
            return None
        require_causality(proof)
        seen, distance = proof.distance_of_pictures, proof.distance_of_layout()
    # In bfloat16 an image may change less than rounding does; what ignores it changes nothing.
    if seen <= proof.floor:
        raise ModelLoadError(
            f"{proof.name} computes the same for other images: they change {seen:.2g}; "
            f"{_TEXT_ALONE}"
        )
    if numbers := proof.beyond_rounding(distance):
        raise ModelLoadError(
            f"rows with images are not computed by {proof.name} as each row alone: "
            f"{numbers}; {_TEXT_ALONE}"
        )
    return proof
