"""A fixed prompt that trainer and engine both score after a weight sync.

It detects what hashes cannot: weights read from the wrong place or under wrong names, two models
that compute different functions, and generation from activations of earlier weights.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from lightrft.engines.base import RolloutEngine, StaleEngineError
from lightrft.engines.media.media import EncodedPrompt, RowMedia
from lightrft.engines.types import Completion, GenerationRequest, SamplingParams, Vocabulary
from lightrft.strategy.distributed.collectives import Group, gather_objects, group_rank
from lightrft.strategy.distributed.sequence_parallel import SharesSequences
from lightrft.strategy.weight_sync.parameter_source import (
    AdaptedModel,
    ParameterSource,
    checkpoint_module,
    reshard_modules,
    vocabulary_of,
)
from lightrft.strategy.weight_sync.verification import WeightSyncError, mix64

CANARY_LENGTH = 64


@dataclass(frozen=True, slots=True)
class CanaryLimits:
    """Differences of logprobs between trainer and engine that end a run.

    Args:
        mean: Mean over the prompt's tokens; it decides.
        largest: Largest difference of one token.
    """

    mean: float
    largest: float


# Two float32 forwards of one model differ by less than 2e-5 at 128 hidden units; a forward in
# bfloat16 differs from one in float32 by up to 0.1 on small models. The prompt is random, so its
# tokens are unlikely ones: where logits are large, single tokens of a healthy model are further
# apart, the mean of all is not. Quantised engines differ most.
CANARY_LIMITS: dict[torch.dtype, CanaryLimits] = {
    torch.float64: CanaryLimits(mean=2e-4, largest=1e-2),
    torch.float32: CanaryLimits(mean=2e-4, largest=1e-2),
    torch.float16: CanaryLimits(mean=0.05, largest=2.0),
    torch.bfloat16: CanaryLimits(mean=0.15, largest=5.0),
}
QUANTISED_LIMITS = CanaryLimits(mean=0.5, largest=10.0)
_MEDIA_TOKENS = 4
# Share of the adapters' effect that rounding may add or take, and deviations of the measurement:
# the share is 0 without adapters, and about 2 if they are applied twice.
_TOLERANCE, _DEVIATIONS = 0.25, 6.0
# A smaller effect, as a share of rounding's effect on a logprob, is not judged.
_SMALLEST_SHARE = 0.1
_ONE_GREEDY_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Canary:
    """The prompt and the trainer's side of the comparison.

    Args:
        token_ids: Tokens of the prompt.
        score: Function for the trainer's logprobs of a sequence at temperature 1, entry 0 being 0.
            Every rank calls it, since a sharded model's forward is a collective.
        limits: Largest differences allowed.
        media: Prompt with media that an engine completed before the update, to detect features that
            it kept from older weights. None if there was none yet.
        num_media_tokens: Number of tokens by which the engine continues it.
        score_base: Function like `score` without the trainer's adapters, if the engine has them
            apart from its weights.
    """

    token_ids: tuple[int, ...]
    score: Callable[[Sequence[int], EncodedPrompt | None], list[float]]
    limits: CanaryLimits
    media: EncodedPrompt | None = None
    num_media_tokens: int = 0
    score_base: Callable[[Sequence[int]], list[float]] | None = None

    def ask(self, engine: RolloutEngine) -> tuple[tuple[int, ...], list[float]]:
        """Let an engine continue the prompt by one token and score the result.

        Scoring computes everything anew. Generation may use caches, and a cache that was not reset
        still holds this prompt under the weights of the previous sync.

        Returns:
            Prompt with the token that the engine generated after it, and the fp32 logprob of each
            from `RolloutEngine.score`.

        Raises:
            WeightSyncError: Generation disagrees with scoring, or the engine itself reports that
                its caches are out of date.
        """
        try:
            request = GenerationRequest(self.token_ids)
            completion = engine.generate([request], _ONE_GREEDY_TOKEN)[0]
            token_ids = (*self.token_ids, completion.output_token_ids[0])
            logprobs = engine.score(token_ids)
        except StaleEngineError as err:
            raise WeightSyncError("caches", str(err)) from err
        generated = completion.output_logprobs[0]
        # Written so that NaN fails.
        if not abs(generated - logprobs[-1]) <= self.limits.largest:
            raise WeightSyncError(
                "caches",
                "the engine gives the token after the canary prompt the logprob "
                f"{generated:.6g} when it generates and {logprobs[-1]:.6g} when it scores: "
                "generation used activations of earlier weights; reset_caches() must drop every "
                "cache",
            )
        return token_ids, logprobs

    def ask_about_media(self, engine: RolloutEngine, media: EncodedPrompt) -> Completion:
        """Let an engine continue the prompt with media.

        Raises:
            WeightSyncError: The engine itself reports that its caches are out of date.
        """
        try:
            params = SamplingParams(
                temperature=0.0, max_tokens=self.num_media_tokens, ignore_eos=True
            )
            return engine.generate([GenerationRequest((), encoded=media)], params)[0]
        except StaleEngineError as err:
            raise WeightSyncError("caches", str(err)) from err

    def check(
        self,
        expected: Sequence[float],
        logprobs: Sequence[float],
        *,
        what: str = "the canary prompt",
    ) -> float:
        """Compare an engine's logprobs with the trainer's.

        Args:
            expected: The trainer's logprobs of the prompt and the token after it.
            logprobs: The engine's logprobs of the same tokens.
            what: Name of the prompt in errors.

        Returns:
            Largest difference between two logprobs.

        Raises:
            WeightSyncError: They are above the limits or not numbers.
        """
        differences = [abs(a - b) for a, b in zip(expected, logprobs, strict=True)]
        mean, limits = sum(differences) / len(differences), self.limits
        # Written so that NaN fails.
        is_near = mean <= limits.mean and all(each <= limits.largest for each in differences)
        if not is_near:
            raise WeightSyncError(
                "canary",
                f"trainer and engine score {what} differently: logprobs differ by "
                f"{mean:.3g} in the mean and {max(differences):.3g} at most, expected at most "
                f"{limits.mean:g} and {limits.largest:g}. The engine holds what was read from the "
                "trainer, so it was read from the wrong place or under wrong names, or the two "
                "compute different functions",
            )
        return max(differences)


def check_effect(
    limits: CanaryLimits,
    expected: Sequence[float],
    base: Sequence[float],
    logprobs: Sequence[float],
) -> float | None:
    """Return the engine's effect of the adapters as a multiple of the trainer's; it should be 1.

        c = <e - b, t - b> / <t - b, t - b>

    with logprobs e of the engine, t and b of the trainer with and without adapters. Least
    squares of e - b = c (t - b) measure how certain c is, so no bound on rounding is needed:
    limits that let a bfloat16 engine pass would hide adapters that it leaves out.

    Args:
        limits: Limits of the canary.
        expected, base, logprobs: t, b and e of the tokens of one sequence.

    Returns:
        Multiple c, or None if the adapters do too little to tell.

    Raises:
        WeightSyncError: c is not 1.
    """
    with_adapters, without, from_engine = (
        torch.tensor(each, dtype=torch.float64) for each in (expected, base, logprobs)
    )
    effect, engine_effect = with_adapters - without, from_engine - without
    size = effect.square().sum()
    if len(effect) < 2 or (size / len(effect)).sqrt() < _SMALLEST_SHARE * limits.mean:
        return None
    share = float(effect @ engine_effect / size)
    rest = engine_effect - share * effect
    deviation = float((rest.square().sum() / (len(rest) - 1) / size).sqrt())
    # Written so that NaN fails.
    if not abs(share - 1) <= _TOLERANCE + _DEVIATIONS * deviation:
        raise WeightSyncError(
            "canary",
            f"the engine shows {share:.2f} of what the adapters do to the canary prompt in the "
            "trainer, expected 1: it does not apply the adapters that it holds, or not once",
        )
    return share


def canary_token_ids(vocab_size: int, length: int = CANARY_LENGTH) -> tuple[int, ...]:
    """Return token ids from the middle of the vocabulary, where no special tokens lie.

    Args:
        vocab_size: Number of tokens of the model.
        length: Number of tokens of the prompt.
    """
    first = vocab_size // 8
    num_choices = max(1, vocab_size // 2 - first)
    return tuple(first + mix64(index) % num_choices for index in range(length))


def actor_canary(
    actor: nn.Module,
    module: nn.Module,
    *,
    dtypes: Iterable[torch.dtype],
    max_length: int | None,
    device: torch.device,
    media: EncodedPrompt | None = None,
    has_adapters: bool = False,
) -> Canary | None:
    """Make the canary of an actor.

    Args:
        actor: Model to call: the strategy's wrapped form of `module`.
        module: Actor or bare transformers model inside.
        dtypes: Types in which either side computes; the coarsest sets the limit.
        max_length: Longest sequence of the engine, or None for the model's limit.
        device: Device of the actor.
        media: Prompt with media, the same on every rank; left out if the actor takes none.
        has_adapters: Whether the engine has the actor's adapters apart from its weights.

    Returns:
        Canary, or None if the module has no transformers language model, hence no vocabulary.
    """
    from transformers import PreTrainedModel

    root = checkpoint_module(module)
    if not isinstance(root, PreTrainedModel):
        return None
    text_config = root.config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)  # none in state spaces
    longest = min(n for n in (max_length, positions, CANARY_LENGTH + 1) if n is not None)
    known = vocabulary_of(module) or Vocabulary()
    vocab_size = known.num_tokens or text_config.vocab_size
    token_ids = canary_token_ids(vocab_size, max(1, longest - 1))
    is_bare = root is module

    def score(sequence: Sequence[int], media: EncodedPrompt | None = None) -> list[float]:
        group = module.sequence_group if isinstance(module, SharesSequences) else None
        if group is None:
            return score_with_actor(actor, sequence, device=device, is_bare=is_bare, media=media)
        # Ranks that share their batches score the sequences of all of them, one after the other.
        sequences = gather_objects(tuple(sequence), group)
        scores = [score_with_actor(actor, each, device=device, media=media) for each in sequences]
        return scores[group_rank(group)]

    def score_base(sequence: Sequence[int]) -> list[float]:
        with module.adapters_off() if isinstance(module, AdaptedModel) else nullcontext():
            return score(sequence)

    room = 0 if media is None or is_bare else longest - len(media.token_ids)
    limits_by_dtype = [CANARY_LIMITS.get(dtype, QUANTISED_LIMITS) for dtype in dtypes]
    return Canary(
        token_ids,
        score,
        max(limits_by_dtype, key=lambda limits: limits.mean),
        media if room > 0 else None,
        min(room, _MEDIA_TOKENS),
        score_base if has_adapters else None,
    )


def media_seen(engine: RolloutEngine, world: Group) -> EncodedPrompt | None:
    """Return one prompt with media that some rank's engine has completed; collective."""
    holders = gather_objects(engine.computes_model and engine.seen_media is not None, world)
    if not any(holders):
        return None
    is_first = group_rank(world) == holders.index(True)
    media_by_rank = gather_objects(engine.seen_media if is_first else None, world)
    return next(media for media in media_by_rank if media is not None)


def compute_dtypes(
    dtype: torch.dtype, engine: RolloutEngine, source: ParameterSource
) -> frozenset[torch.dtype]:
    """Return the dtypes in which trainer or engine compute.

    Args:
        dtype: Type of the trainer's passes.
        engine, source: Weights of both sides.
    """
    stored = {each.dtype for each in engine.parameter_manifest()}
    sent = {each.local_shard.dtype for each in source.parameters()}
    # Both sides compute with integers that both hold in `dtype`.
    codes = {each for each in stored & sent if not each.is_floating_point}
    return frozenset({dtype, *stored, *sent} - codes)


def score_with_actor(
    actor: nn.Module,
    token_ids: Sequence[int],
    *,
    device: torch.device,
    is_bare: bool = False,
    media: EncodedPrompt | None = None,
) -> list[float]:
    """Return the trainer's logprobs at temperature 1, without gradients or dropout.

    Args:
        actor: Model with the call of `PolicyModel`: (token_ids, attention_mask) -> record with
            `logprobs`. Every module keeps its mode.
        token_ids: Tokens of the sequence.
        device: Device of the actor.
        is_bare: Whether the actor is a bare transformers model, which returns logits.
        media: Prompt that the sequence begins with, if it has images.

    Returns:
        One fp32 logprob per token; 0 for the first one and for those of a prompt with images.
    """
    modes = [(module, module.training) for module in actor.modules()]
    tokens = torch.tensor([list(token_ids)], device=device)
    mask = torch.ones_like(tokens)
    actor.eval()
    try:
        with torch.no_grad():
            if is_bare:
                logits = actor(input_ids=tokens, attention_mask=mask, use_cache=False).logits
                logprobs = logits[0, :-1].float().log_softmax(-1)
                scores = logprobs.gather(-1, tokens[0, 1:, None]).squeeze(-1)
                return [0.0, *scores.tolist()]
            options: dict[str, object] = {}
            if media is not None:
                # Placeholders may lie outside of the head's vocabulary (Mllama): none is scored.
                scored = mask.bool()
                scored[:, : len(media.token_ids)] = False
                options = {"media": RowMedia((media,)), "scored_mask": scored}
            values: list[float] = actor(tokens, mask, **options).logprobs[0].float().tolist()
            return values
    finally:
        for module, mode in modes:
            module.training = mode
        # A root unit stays gathered after a forward; the engine needs the memory.
        reshard_modules(actor)
