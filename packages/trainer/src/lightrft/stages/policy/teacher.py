"""Proofs about the teacher of a run: the student's tokens, and a difference of 0 from itself."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lightrft.config import ConfigError, TrainConfig
from lightrft.engines.media.families import family_of
from lightrft.models import load_tokenizer
from lightrft.models.loading import load_config
from lightrft.records.batch import ExperienceBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.strategy.strategy_base import StrategyBase


def require_same_tokens(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Proves that every id stands for the same bytes in teacher and student.

    Args:
        config: Names both models.
        tokenizer: Of the student.

    Raises:
        ConfigError: An id differs; the message shows the first. Or a model reads images, or the
            teacher has no logprob for ids that the student can sample.
    """
    path = str(config.teacher)
    models = load_config(str(config.pretrain)), load_config(path)
    if any(family_of(model) is not None for model in models):
        raise ConfigError("teacher: student and teacher of images are not supported so far")
    sizes = [int(model.get_text_config().vocab_size) for model in models]
    if sizes[1] < sizes[0]:
        raise ConfigError(
            f"teacher: {path} scores {sizes[1]} ids, and the student samples from {sizes[0]}: take "
            "a teacher with at least as many"
        )
    pairs = zip_longest(token_texts(tokenizer), token_texts(load_tokenizer(path)))
    for token_id, (own, other) in enumerate(pairs):
        if own != other:
            shown = [each[0] if each else "no token" for each in (own, other)]
            raise ConfigError(
                f"teacher: token {token_id} is {shown[0]!r} in {config.pretrain} and {shown[1]!r} "
                f"in {path}: its log-probabilities are of other texts; take a teacher with the "
                "same tokenizer"
            )


def token_texts(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """The entry of each id in the vocabulary, and its text alone.

    An entry and the text that a decoder makes of it settle its bytes; the text alone would not:
    parts of characters look alike.
    """
    ids = list(range(len(tokenizer)))
    entries = tokenizer.convert_ids_to_tokens(ids)
    texts = tokenizer.batch_decode(
        [[each] for each in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return [(str(entry), text) for entry, text in zip(entries, texts, strict=True)]


def check_first_step(batch: ExperienceBatch, config: TrainConfig, strategy: StrategyBase) -> None:
    """Compares student and teacher before the first update where both are one model; collective.

    Raises:
        ParityError: Their logprobs differ.
    """
    if not is_own_teacher(config):
        return
    outputs, mask = batch.outputs, batch.rollouts.response_mask
    if outputs.old_logprobs is None or outputs.teacher_logprobs is None:
        raise RuntimeError("a teacher is compared with the logprobs before the update")
    distance = (outputs.old_logprobs - outputs.teacher_logprobs).abs().masked_fill(~mask, 0.0)
    sums = torch.stack([distance.double().sum(), mask.sum().double()])
    total, count = strategy.context.reduce_over_data(sums, "sum").tolist()
    require_zero(total / max(count, 1.0), config, strategy)


def is_own_teacher(config: TrainConfig) -> bool:
    """Whether student and teacher are read from one place."""
    return Path(str(config.teacher)).resolve() == Path(str(config.pretrain)).resolve()


def require_zero(mean: float, config: TrainConfig, strategy: StrategyBase) -> None:
    """Proves that a model has no distance from itself, given its mean a token in nats.

    Raises:
        ParityError: It has.
    """
    from lightrft.stages.policy.parity import ParityError, parity_limits

    limit = parity_limits([strategy.context.compute_dtype]).mean
    if not mean <= limit:  # NaN, too
        raise ParityError(
            f"student and teacher are one model, {config.teacher}, and differ by {mean:.2e} nats a "
            f"token before the first update (limit {limit:g})"
        )
    strategy.context.print_detail(f"teacher = student gives 0: {mean:.1e} nats a token")
