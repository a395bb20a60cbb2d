"""Teachers of a run, and proofs about them: equal tokens, equal answers, 0 to oneself."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from lightrft.config import ConfigError, ModelOptions, RowRunOptions, TrainConfig
from lightrft.config.options import mask_address
from lightrft.config.parts.learning import TeacherOptions, is_served
from lightrft.config.registry import TEACHER_SERVERS
from lightrft.engines.media.families import has_row
from lightrft.experience.teachers import (
    LogprobServer,
)
from lightrft.models import load_tokenizer
from lightrft.models.loading import is_classifier, load_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.strategy.distributed.context import DistributedContext


# Decoders write it for bytes that are no whole character.
PART_OF_CHARACTER = "\ufffd"


MAX_PROOF_TEXTS, MAX_PROOF_TOKENS = 4, 512


def open_server(place: str, config: TrainConfig) -> LogprobServer:
    """Return the server of a teacher.

    Raises:
        ConfigError: The address is invalid.
    """
    make = cast("Callable[[str, TrainConfig], LogprobServer]", TEACHER_SERVERS.load("http"))
    return make(place, config)


def prove_teachers(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Sequence[int]],
) -> None:
    """Prove what can be known about the teachers before a model is built.

    Only the first process asks servers; the other processes start with it or not at all.

    Args:
        config: Options that name the teachers.
        tokenizer: Tokenizer of the student.
        texts: Token ids of some rows, which servers score twice.

    Raises:
        ConfigError: A teacher has other tokens than the student, or its answers differ.
        TeacherError: A server gives no usable answer.
    """
    for place in config.teacher_places.values():
        if not is_served(place):
            require_same_tokens(config, place, tokenizer)
        elif os.environ.get("RANK", "0") == "0":
            server = open_server(place, config)
            try:
                require_same_texts(server, place, tokenizer)
                require_equal_answers(server, place, texts, config)
            finally:
                server.close()


def require_same_texts(
    server: LogprobServer, place: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Prove that a server reads every id as the student does.

    Parts of characters have no text, so only the existence of their ids is checked.

    Raises:
        ConfigError: An id has another text; the message shows the first.
        TeacherError: The server gives no usable answer.
    """
    ours = [text for _, text in token_texts(tokenizer)]
    shown = mask_address(place)
    for token_id, text in enumerate(server.token_texts(range(len(ours)))):
        if PART_OF_CHARACTER not in ours[token_id] and text != ours[token_id]:
            raise ConfigError(
                f"teacher: token {token_id} is {ours[token_id]!r} to the student and {text!r} to "
                f"{shown}: its log-probabilities are of other texts; serve a model with the same "
                "tokenizer"
            )


def require_equal_answers(
    server: LogprobServer, place: str, texts: Sequence[Sequence[int]], config: TeacherOptions
) -> None:
    """Prove that a server scores the same tokens alike twice.

    Raises:
        ConfigError: The answers differ by more than `teacher_tolerance`.
        TeacherError: The server gives no usable answer.
    """
    asked = [text[:MAX_PROOF_TOKENS] for text in texts if len(text) > 1][:MAX_PROOF_TEXTS]
    first, second = (server.score(asked) for _ in range(2)) if asked else ([], [])
    distances = [
        np.abs(a.logprobs[1:] - b.logprobs[1:]) for a, b in zip(first, second, strict=True)
    ]
    worst = max((float(each.mean()) for each in distances), default=0.0)
    if not worst <= config.teacher_tolerance:
        raise ConfigError(
            f"teacher: {mask_address(place)} scores the same tokens otherwise the second time, by "
            f"{worst:.2g} nats a token in the mean (teacher_tolerance {config.teacher_tolerance:g}"
            "): that noise would be a signal; serve it in float32 or from one replica, or raise "
            "teacher_tolerance"
        )


def require_same_tokens(
    config: ModelOptions, path: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Prove that every id stands for the same bytes in teacher and student.

    Args:
        config: Options that name the student.
        path: Path of the teacher.
        tokenizer: Tokenizer of the student.

    Raises:
        ConfigError: An id differs; the message shows the first. Or a model reads images, or the
            teacher has no logprob for ids that the student can sample.
    """
    models = load_config(str(config.pretrain)), load_config(path)
    if any(map(has_row, models)):
        raise ConfigError("teacher: student and teacher of images are not supported so far")
    if is_classifier(models[1]):
        raise ConfigError(f"teacher: {path} is a reward model: give a language model")
    sizes = [int(model.get_text_config().vocab_size) for model in models]
    if sizes[1] < sizes[0]:
        raise ConfigError(
            f"teacher: {path} scores {sizes[1]} ids, and the student samples from {sizes[0]}: take "
            "a teacher with at least as many"
        )
    pairs = zip_longest(token_texts(tokenizer), token_texts(load_tokenizer(path)))
    for token_id, (mine, other) in enumerate(pairs):
        if mine != other:
            shown = [each[0] if each else "no token" for each in (mine, other)]
            raise ConfigError(
                f"teacher: token {token_id} is {shown[0]!r} in {config.pretrain} and {shown[1]!r} "
                f"in {path}: its log-probabilities are of other texts; take a teacher with the "
                "same tokenizer"
            )


def token_texts(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Return the entry of each id in the vocabulary, and its text alone.

    Entry and decoded text together determine the bytes of an id. The text alone does not: parts of
    characters look alike.
    """
    ids = list(range(len(tokenizer)))
    entries = tokenizer.convert_ids_to_tokens(ids)
    texts = tokenizer.batch_decode(
        [[each] for each in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return [(str(entry), text) for entry, text in zip(entries, texts, strict=True)]


def is_own_teacher(config: RowRunOptions) -> bool:
    """Return whether the student begins as its only teacher: from the same folder, unchanged."""
    folder = config.teacher_folders.get("")
    if not folder or config.quantize or config.lora_path:
        return False
    return Path(folder).resolve() == Path(str(config.pretrain)).resolve()


def require_zero(mean: float, config: TeacherOptions, context: DistributedContext) -> None:
    """Prove that a model has no distance from itself, from its mean per token in nats.

    Raises:
        ParityError: The distance exceeds the rounding limit.
    """
    from lightrft.stages.parity_limits import ParityError, parity_limits

    limit = parity_limits([context.compute_dtype]).mean
    if not mean <= limit:  # NaN, too
        raise ParityError(
            f"student and teacher are one model, {config.teacher}, and differ by {mean:.2e} nats a "
            f"token before the first update (limit {limit:g})"
        )
    context.print_detail(f"teacher = student gives 0: {mean:.1e} nats a token")
