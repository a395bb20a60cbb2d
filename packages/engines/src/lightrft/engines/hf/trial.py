"""Trial of a model's cache: decoded tokens have the log-probabilities of the whole forward pass.

Neither the class of a cache nor a signature tells what it does, so random rows are decoded, each
alone and all together. Log-probabilities must agree to half of the digits of the model's dtype: the
norm of the difference, in norms of the deviations from their mean over the vocabulary. A model
without a cache is tried with passes over whole rows.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from lightrft.engines.hf.decode import RowForward
from lightrft.engines.hf.forward import (
    CacheRefusedError,
    MissingCacheError,
    ModelTraits,
    WholeBatchForward,
)
from lightrft.engines.hf.padded import PaddedForward, UncachedForward
from lightrft.kernels.names import first_line

_logger = logging.getLogger(__name__)
# Numbers of tokens of the prompts, and of the steps before and after rows change their places.
LENGTHS, NUM_STEPS = (11, 3, 7), (2, 2)
# Prompt of each row that is decoded with the others.
ROWS = (0, 1, 2, 0)


TextForward = type[PaddedForward] | type[UncachedForward]


@torch.inference_mode()
def text_forward(model: PreTrainedModel, traits: ModelTraits) -> TextForward | None:
    """Try a model; return how prompts of other lengths are decoded together, None if not at all.

    Args:
        model: Model in eval mode, with its weights.
        traits: Traits of the model.

    Raises:
        CacheRefusedError: Rows that are decoded differ from the whole forward pass.
    """
    allowed, name = _tokens(model, traits), type(model).__name__
    drawn = torch.randint(
        len(allowed),
        (len(LENGTHS), max(LENGTHS) + sum(NUM_STEPS)),
        generator=torch.Generator().manual_seed(0),
    )
    rows = [row[: n + sum(NUM_STEPS)] for n, row in zip(LENGTHS, allowed[drawn], strict=True)]
    whole = torch.stack([_whole(model, traits, row) for row in rows])[..., allowed]
    if not whole.isfinite().all():  # what samples tokens says so
        return None
    limit = torch.finfo(model.dtype).eps ** 0.5
    kind = _kind(model, traits, rows, whole, allowed)
    try:
        forward = partial(kind, model, traits)
        together = _decoded(model, forward, rows, prompt_of_row=ROWS)[..., allowed]
    except Exception as error:  # noqa: BLE001  the model's own code, with a mask it may not know
        reason = first_line(error)
    else:
        change = _distance(together, whole[list(ROWS)])
        if change <= limit:
            return kind
        reason = f"by {change:.2g} of their norm, at most {limit:.2g} is rounding"
    reason = f"{name} computes other numbers for prompts with padding ({reason})"
    if kind is UncachedForward:
        raise CacheRefusedError(f"{reason} and keeps no cache: take another --engine_type")
    _logger.warning(
        "%s: only prompts of equal length are decoded together, and finished rows stay until the "
        "last one ends",
        reason,
    )
    return None


def _kind(
    model: PreTrainedModel,
    traits: ModelTraits,
    rows: Sequence[torch.Tensor],
    whole: torch.Tensor,
    allowed: torch.Tensor,
) -> TextForward:
    """Decode rows alone; return what decodes rows together, without a cache if it is of no use."""

    def whole_batch(prompts: Sequence[Sequence[int]], _: Sequence[int]) -> RowForward:
        return WholeBatchForward(model, traits, prompts)

    name, limit = type(model).__name__, torch.finfo(model.dtype).eps ** 0.5
    try:
        alone = torch.cat([_decoded(model, whole_batch, [row]) for row in rows])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  the model's own code
        is_missing = isinstance(error, MissingCacheError)
        what = "keeps no cache" if is_missing else f"fails with a cache ({first_line(error)})"
        _logger.warning("%s %s: each token takes a pass over its whole row", name, what)
        return UncachedForward
    change = _distance(alone[..., allowed], whole)
    if change <= limit:
        return PaddedForward
    raise CacheRefusedError(
        f"the cache of {name} gives other log-probabilities than its whole forward pass: "
        f"they differ by {change:.2g} of their norm, at most {limit:.2g} is rounding; "
        "the hf engine cannot sample from it: take another --engine_type"
    )


def _tokens(model: PreTrainedModel, traits: ModelTraits) -> torch.Tensor:
    """Return some tokens that may be sampled, [tokens] int64 on the host."""
    size = min(traits.num_tokens or model.config.get_text_config().vocab_size, 4096)
    forbidden = [] if traits.forbidden is None else traits.forbidden.tolist()
    return torch.tensor(sorted(set(range(size)).difference(forbidden)))


def _whole(model: PreTrainedModel, traits: ModelTraits, row: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities of the tokens after the prompt, [steps, vocab] on the host."""
    logits = model(input_ids=row[None].to(model.device), use_cache=False).logits[0]
    return traits.sampled(logits[-sum(NUM_STEPS) - 1 :]).float().log_softmax(-1).cpu()


def _decoded(
    model: PreTrainedModel,
    forward_of: Callable[..., RowForward],
    rows: Sequence[torch.Tensor],
    prompt_of_row: Sequence[int] = (0,),
) -> torch.Tensor:
    """Return log-probabilities of decoded rows, [rows, steps, vocab] on the host."""
    prompts = [row[: -sum(NUM_STEPS)].tolist() for row in rows]
    forward = forward_of(prompts, prompt_of_row)
    later = torch.stack([rows[i][-sum(NUM_STEPS) :] for i in prompt_of_row]).to(model.device)
    order = torch.arange(len(prompt_of_row), device=model.device)
    steps = [forward.start()]
    for step in range(sum(NUM_STEPS)):
        if step == NUM_STEPS[0] and forward.can_drop_rows:
            order = order.flip(0)
            forward.keep(order)
        logits = forward.advance(later[order, step])
        steps.append(logits[order])  # a reversed order is its own inverse
    return torch.stack(steps, dim=1).float().log_softmax(-1).cpu()


def _distance(decoded: torch.Tensor, whole: torch.Tensor) -> float:
    """Return the largest relative difference of a row."""
    sizes = (whole - whole.mean(-1, keepdim=True)).flatten(1).norm(dim=1)
    shares = (decoded - whole).flatten(1).norm(dim=1) / sizes
    return float(shares.nan_to_num(torch.inf).max())
