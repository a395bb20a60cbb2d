"""Rewards from models in the trainer's processes, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.datasets.chat_ids import end_of_turn
from lightrft.datasets.chat_template import template_of
from lightrft.datasets.messages import Message, with_texts
from lightrft.datasets.text_ids import TextIds, prompt_ids
from lightrft.engines.media.media import MediumKind, RowMedia
from lightrft.engines.media.text_encoder import TEXT_ENCODER, Encoder
from lightrft.models import RewardModel
from lightrft.models.layout import pad_rows
from lightrft.records.media import agree_on_kinds, encode_row
from lightrft.records.rollout import Rollout
from lightrft.rewards.types import RewardRecipes, RewardResult
from lightrft.strategy.backend import inner_module

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.strategy.backend import Backend

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ScoringModel:
    """A prepared reward model.

    Args:
        name: Name of its reward component, also used in recipes.
        model: [batch, seq] token ids and attention mask -> [batch] scores; see
            `lightrft.models.reward_model.RewardModel`.
        tokenizer: Tokenizer of the model; None if it reads the sampled ids.
        weight: Weight of its score in the reward, without recipes.
    """

    name: str
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None = None
    weight: float = 1.0


class ModelRewards:
    """Scorer of the rollouts of all ranks, with one model after another.

    A model is on the device only while it scores. All ranks call sharded models equally often, and
    a rank without further rows passes a row of padding.

    Args:
        backend: Backend that prepared the models.
        models: Models that score.
        micro_batch_size: Number of rows in one forward pass.
        recipes: Weights by row instead of those of the models; None uses those of the models.
    """

    def __init__(
        self,
        backend: Backend,
        models: Sequence[ScoringModel],
        *,
        micro_batch_size: int,
        recipes: RewardRecipes | None = None,
    ) -> None:
        self._backend = backend
        self._models = tuple(models)
        self._readers = [
            None if each.tokenizer is None else OwnTexts(each.tokenizer) for each in models
        ]
        self._micro_batch_size = micro_batch_size
        self._recipes = recipes
        for entry in models:
            backend.move_model(entry.model, HOST)

    def score(
        self, rollouts: Sequence[Rollout], encoder: Encoder = TEXT_ENCODER
    ) -> list[RewardResult]:
        """Score this rank's rollouts with the models; collective.

        Args:
            rollouts: Rollouts of this rank.
            encoder: Encoder of prompts with media, equal on all ranks.

        Returns:
            One result per rollout: the weighted sum, and unweighted scores by name.

        Raises:
            RewardError: A row has no recipe.
            ValueError: A row has images or videos that a model cannot see.
        """
        weights = [self._weights(rollout) for rollout in rollouts]
        scores: list[dict[str, float]] = [{} for _ in rollouts]
        present = encoder.blanks(self._kinds(rollouts, encoder))
        encoded = [encode_row(rollout, encoder) for rollout in rollouts]
        for entry, reader in zip(self._models, self._readers, strict=True):
            wanted = [i for i, row in enumerate(weights) if entry.name in row]
            texts = [(reader or sampled_ids)(rollouts[i]) for i in wanted]
            media = RowMedia(tuple(encoded[i] for i in wanted), present)
            values = self._score_texts(entry.model, texts, media)
            for i, value in zip(wanted, values, strict=True):
                scores[i][entry.name] = value
        return [
            RewardResult(sum(row[name] * value for name, value in values.items()), values)
            for row, values in zip(weights, scores, strict=True)
        ]

    def _weights(self, rollout: Rollout) -> Mapping[str, float]:
        if self._recipes is None:
            return {entry.name: entry.weight for entry in self._models}
        return self._recipes.weights_of(rollout.prompt.columns.get(self._recipes.column))

    def _kinds(self, rollouts: Sequence[Rollout], encoder: Encoder) -> frozenset[MediumKind]:
        """Return the kinds of media on any rank; raise on all ranks if a model cannot see them."""
        if not encoder.reads_media:
            return frozenset()
        local_kinds = {kind for rollout in rollouts for kind in rollout.media.kinds}
        present = agree_on_kinds(self._backend.context, local_kinds)
        for entry in self._models if present else ():
            module = inner_module(entry.model)
            is_seeing = isinstance(module, RewardModel) and module.reads_media
            if entry.tokenizer is not None or not is_seeing:
                raise ValueError(
                    f"the reward model {entry.name} cannot see the images of the prompts: give a "
                    "vision-language reward model with the vocabulary of the actor, or leave media "
                    "out with --text_only"
                )
        return present

    @torch.no_grad()
    def _score_texts(
        self, model: nn.Module, texts: Sequence[Sequence[int]], media: RowMedia
    ) -> list[float]:
        size, context = self._micro_batch_size, self._backend.context
        num_batches = max(context.gather_objects(-(-len(texts) // size)))
        # Texts of similar length share a batch.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        scores = [0.0] * len(texts)
        self._backend.move_model(model, context.device)
        for number in range(num_batches):
            rows = order[number * size : (number + 1) * size]
            token_ids, mask = pad_rows([texts[i] for i in rows] or [(0,)], context.device)
            if media.present:
                prompts = tuple(media.prompts[i] for i in rows) or (None,)
                batch_media = RowMedia(prompts, media.present)
                outputs: Tensor = model(token_ids, mask, media=batch_media)
            else:
                outputs = model(token_ids, mask)
            for i, value in zip(rows, outputs.tolist(), strict=False):
                scores[i] = value
        self._backend.move_model(model, HOST)
        return scores


def sampled_ids(rollout: Rollout) -> Sequence[int]:
    """Return the sampled token ids of prompt and response."""
    return (*rollout.completion.prompt_token_ids, *rollout.completion.output_token_ids)


class OwnTexts:
    """Encoder of rollouts into the same token ids that `lightrft reward` trains on.

    Messages are rendered with the reward model's chat template. Texts get the frame of its
    tokenizer. A response that was cut by its length limit has no end-of-turn token.

    Args:
        tokenizer: Tokenizer of the reward model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._end = end_of_turn(tokenizer)
        self._texts = TextIds(tokenizer, self._end)

    def __call__(self, rollout: Rollout) -> Sequence[int]:
        """Return the token ids of prompt and response."""
        is_ended = rollout.completion.finish_reason == "stop"
        if rollout.prompt.messages:
            return self._chat(rollout, is_ended=is_ended)
        text = rollout.prompt.text + rollout.response_text
        return self._texts(text).token_ids if is_ended else prompt_ids(self._tokenizer, [text])[0]

    def _chat(self, rollout: Rollout, *, is_ended: bool) -> Sequence[int]:
        asked = with_texts([dict(message) for message in rollout.prompt.messages])
        answer: Message = {"role": "assistant", "content": rollout.response_text}
        template = template_of(self._tokenizer)
        texts = [template.render(asked, asks=True), template.render([*asked, answer])]
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        before, whole = encoded
        # Text after the end-of-turn token is not part of the turn.
        ends = [i for i in range(len(before), len(whole)) if whole[i] == self._end]
        return whole[: ends[-1] + is_ended] if ends else whole
