"""Checks of generation requests and their grouping into batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightrft.engines.media.prompts import EncodedPrompt
from lightrft.engines.types import GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    """One completion to sample.

    Args:
        index: Its place in the prompt-major result.
        request_id: The request it answers.
        sample_index: 0 .. n-1.
        prompt: Prompt token ids, not empty.
        max_tokens: Most tokens to sample.
        media: The encoded prompt, if it has images or videos.
    """

    index: int
    request_id: int
    sample_index: int
    prompt: tuple[int, ...]
    max_tokens: int
    media: EncodedPrompt | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a model.

    Args:
        vocab_size: Token ids are below this.
        max_model_len: Longest prompt plus completion, in tokens; None is unlimited.
        engine_name: Names the engine in errors.
        reads_media: Whether prompts may have images and videos.
    """

    vocab_size: int
    max_model_len: int | None
    engine_name: str
    reads_media: bool = False


def rows_of_requests(
    requests: Sequence[GenerationRequest],
    params: SamplingParams,
    limits: Limits,
    *,
    encode: Callable[[str], tuple[int, ...]],
    encode_media: Callable[[GenerationRequest], EncodedPrompt | None],
) -> list[Row]:
    """Checks requests and lists their completions, prompt-major.

    Args:
        requests: The requests.
        params: Completions for each request, and the bound of those without one of their own.
        limits: What the model can take.
        encode: Turns a prompt text into token ids, for requests without ids.
        encode_media: Encodes a prompt with images or videos; None leaves its ids as they are.

    Raises:
        ValueError: A request is malformed; the message names its id.
    """
    rows: list[Row] = []
    seen: set[int] = set()
    for request in requests:
        if request.request_id in seen:
            raise ValueError(
                f"request ids must be unique within one generate() call: got "
                f"{request.request_id} twice"
            )
        seen.add(request.request_id)
        bound = params.max_tokens if request.max_tokens is None else request.max_tokens
        media = _media(request, limits, encode_media)
        prompt = _checked_prompt(request, bound, limits, media.token_ids if media else None, encode)
        start = len(rows)
        rows += [
            Row(start + i, request.request_id, i, prompt, bound, media) for i in range(params.n)
        ]
    return rows


def _media(
    request: GenerationRequest,
    limits: Limits,
    encode: Callable[[GenerationRequest], EncodedPrompt | None],
) -> EncodedPrompt | None:
    if request.encoded is None and request.multi_modal.is_empty:
        return None
    if not limits.reads_media:
        raise ValueError(
            f"request {request.request_id} has images or videos, but the {limits.engine_name} "
            "engine reads text only; "
            "use a vision-language model with an engine that supports it"
        )
    return request.encoded or encode(request)


def _checked_prompt(
    request: GenerationRequest,
    bound: int,
    limits: Limits,
    encoded: tuple[int, ...] | None,
    encode: Callable[[str], tuple[int, ...]],
) -> tuple[int, ...]:
    name = f"request {request.request_id}"
    prompt = encoded or tuple(request.prompt_token_ids)
    if not prompt and request.prompt_text:
        prompt = encode(request.prompt_text)
    if not prompt:
        raise ValueError(f"{name} has an empty prompt; give prompt_token_ids or prompt_text")
    # Marks of media may lie behind the vocabulary.
    if encoded is None and (min(prompt) < 0 or max(prompt) >= limits.vocab_size):
        raise ValueError(
            f"{name} has token ids outside the vocabulary: got {min(prompt)} .. {max(prompt)}, "
            f"expected 0 .. {limits.vocab_size - 1}"
        )
    if bound < 1:
        raise ValueError(f"{name}: max_tokens must be at least 1: got {bound}")
    if limits.max_model_len is not None and len(prompt) + bound > limits.max_model_len:
        raise ValueError(
            f"{name} needs {len(prompt)} prompt tokens + {bound} new tokens, more than "
            f"max_model_len {limits.max_model_len}; shorten the prompt or lower max_tokens"
        )
    return prompt


def chunks_of_rows(
    rows: Sequence[Row], *, max_rows: int, equal_lengths: bool
) -> list[Sequence[Row]]:
    """Splits rows into batches that are decoded together.

    Args:
        rows: All rows.
        max_rows: Most rows of a batch; 0 is unlimited.
        equal_lengths: Whether the prompts of a batch must have one length.
    """
    if not rows:
        return []
    ordered = list(rows)
    if equal_lengths or 0 < max_rows < len(rows):
        # Prompts of similar length together leave few holes in the cache.
        ordered.sort(key=lambda row: len(row.prompt))
    chunks: list[list[Row]] = [[]]
    for row in ordered:
        last = chunks[-1]
        is_full = 0 < max_rows <= len(last)
        differs = equal_lengths and bool(last) and len(last[0].prompt) != len(row.prompt)
        if is_full or differs:
            chunks.append([row])
        else:
            last.append(row)
    return list(chunks)
