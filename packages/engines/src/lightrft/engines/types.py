"""Records passed between a rollout engine and its callers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import compress
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from lightrft.engines.media.media import EncodedPrompt

LogprobsMode = Literal["temperature", "truncated"]
FinishReason = Literal["stop", "length", "abort"]
# Further facts on each sampled token from an engine, by name: a number, or bytes in hexadecimal.
Facts = Mapping[str, tuple[float | str, ...]]


# Fact of a token drawn from a truncated distribution: the ids that it kept, ascending, as int32 in
# hexadecimal; "" if they were not recorded.
KEPT_IDS = "kept_ids"
# Most ids of a kept set that an engine records; larger sets are computed by the trainer.
MOST_KEPT_IDS = 1024

# Fact of a token: experts that the forward pass before its draw chose, as uint8 or uint16 in
# hexadecimal. They are ordered by position, then by layer; the pass ends with the position before
# the token. The first token of a call has the experts of its whole context.
ROUTES = "routes"

# Logits are divided by the temperature in float32, which could overflow below this.
MIN_TEMPERATURE = 1e-5


class EngineStatus(Enum):
    """Presence of the engine's weights and cache in memory (the original LightRFT's names)."""

    SLEEPED = 0
    WAKEUP = 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Distribution of completions, and rules for ending them.

    Args:
        temperature: Softmax temperature, at least `MIN_TEMPERATURE`; 0 is greedy (ties go to the
            lowest token id).
        top_p: Probability that the smallest set of kept tokens reaches; 1 keeps all.
        top_k: Number of most likely tokens to keep; -1 keeps all.
        min_p: Least probability of kept tokens, as a share of the top token's; 0 keeps all.
        max_tokens: Upper bound on generated tokens, the stop token included.
        min_tokens: Number of tokens before which no stop is honoured.
        n: Number of completions per prompt.
        stop: Strings that end a completion, not empty; the matching tokens stay in the output.
        stop_token_ids: Token ids that end a completion besides the model's end-of-sequence ids.
        ignore_eos: Whether to continue at end-of-sequence ids.
        seed: Seed that, with (request id, sample index, position), fixes every random number.
        records_support: Whether completions hold the ids that truncation kept for each token, as
            the fact `KEPT_IDS`, if the engine can tell them.
        records_routes: Whether completions hold the experts that each layer chose, as the fact
            `ROUTES`, if the model has experts and the engine can tell them.

    Raises:
        ValueError: A value is outside its range; the message names all of them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 1024
    min_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    records_support: bool = False
    records_routes: bool = False

    def __post_init__(self) -> None:
        is_warm = self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf
        problems = [
            f"{name}={value!r} (expected {expected})"
            for name, value, expected, is_valid in (
                ("temperature", self.temperature, f"0 or >= {MIN_TEMPERATURE:g}", is_warm),
                ("top_p", self.top_p, "in (0, 1]", 0 < self.top_p <= 1),
                ("top_k", self.top_k, "-1 or >= 1", self.top_k == -1 or self.top_k >= 1),
                ("min_p", self.min_p, "in [0, 1]", 0 <= self.min_p <= 1),
                ("max_tokens", self.max_tokens, ">= 1", self.max_tokens >= 1),
                (
                    "min_tokens",
                    self.min_tokens,
                    "in [0, max_tokens]",
                    0 <= self.min_tokens <= self.max_tokens,
                ),
                ("n", self.n, ">= 1", self.n >= 1),
                ("stop", self.stop, "strings that are not empty", all(self.stop)),
            )
            if not is_valid
        ]
        if problems:
            raise ValueError("invalid sampling parameters: " + ", ".join(problems))

    @property
    def is_greedy(self) -> bool:
        """Return whether the most likely token is taken (temperature 0)."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Return whether some tokens are excluded before a token is drawn."""
        return not self.is_greedy and (self.top_p < 1 or self.top_k != -1 or self.min_p > 0)

    @property
    def distribution(self) -> tuple[float, ...]:
        """Temperature, top_p, top_k and min_p: the first arguments of this class."""
        return self.temperature, self.top_p, self.top_k, self.min_p

    @property
    def logprobs_mode(self) -> LogprobsMode:
        """Measure of these parameters' logprobs (`Completion.logprobs_mode`)."""
        return "truncated" if self.truncates else "temperature"


@dataclass(frozen=True, slots=True)
class MultiModalInputs:
    """Media of one prompt, in the order of their placeholders.

    Args:
        images, videos: Images and videos of the prompt.
        others: Media of further kinds of `lightrft.engines.media.media`.
    """

    images: tuple[object, ...] = ()
    videos: tuple[object, ...] = ()
    others: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    @property
    def by_kind(self) -> dict[str, tuple[object, ...]]:
        """Media by kind."""
        return {"image": self.images, "video": self.videos, **self.others}

    @property
    def is_empty(self) -> bool:
        """Return whether there are no media."""
        return not any(self.by_kind.values())


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Prompt to complete.

    Args:
        prompt_token_ids: Token ids of the prompt, without padding. Empty only if `prompt_text`
            is set.
        request_id: Id of the request in errors, which fixes its random numbers. It must be unique
            within one `generate` call.
        max_tokens: Bound that overrides `SamplingParams.max_tokens` for this request.
        prompt_text: Text of the prompt, for engines that place multimodal tokens themselves.
        multi_modal: Images and videos of the prompt.
        encoded: Prompt encoded by the model's processor; None leaves encoding to the engine.
    """

    prompt_token_ids: tuple[int, ...]
    request_id: int = 0
    max_tokens: int | None = None
    prompt_text: str | None = None
    multi_modal: MultiModalInputs = field(default_factory=MultiModalInputs)
    encoded: EncodedPrompt | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """Continuation of a prompt; training uses exactly the sampled tokens.

    An engine returns a completion for each call. A response of several turns joins completions
    and the observations between them.

    Args:
        request_id: Id of the request that it answers.
        sample_index: Index among the samples of that request, 0 .. n-1.
        prompt_token_ids: Prompt as the model saw it.
        output_token_ids: Tokens after the prompt, including a sampled stop token.
        output_logprobs: fp32 log-probability of each sampled token under the distribution it was
            drawn from; T = 0 is scored at T = 1. 0 for tokens of an observation.
        logprobs_mode: Distribution of the logprobs: "temperature" for log_softmax(logits / T),
            "truncated" for the renormalised distribution over the kept tokens.
        finish_reason: Reason: "stop" (end-of-sequence, stop id or string), "length" or "abort".
        weights_version: Version of the weights that sampled its end; -1 before the first update.
        sampled: Whether each token after the prompt was sampled, or is part of an observation;
            None if all were sampled.
        facts: Further facts on each token after the prompt, by the name of their column in
            `lightrft.records.columns`.
    """

    request_id: int
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    logprobs_mode: LogprobsMode
    finish_reason: FinishReason
    weights_version: int = -1
    sampled: tuple[bool, ...] | None = None
    facts: Facts = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_tokens = len(self.output_token_ids)
        flags = self.output_token_ids if self.sampled is None else self.sampled
        values = {"logprobs": self.output_logprobs, "flags": flags, **self.facts}
        if any(len(each) != num_tokens for each in values.values()):
            counts = " and ".join(f"{len(each)} {name}" for name, each in values.items())
            raise ValueError(
                "a completion needs one logprob per token, whether it was sampled, and one value "
                f"of each further fact: got {num_tokens} tokens, {counts} for request "
                f"{self.request_id}"
            )

    @property
    def is_sampled(self) -> tuple[bool, ...]:
        """Return whether each token after the prompt was sampled."""
        return (True,) * len(self.output_token_ids) if self.sampled is None else self.sampled

    @property
    def sampled_token_ids(self) -> tuple[int, ...]:
        """Tokens after the prompt, without those of observations."""
        if self.sampled is None:
            return self.output_token_ids
        return tuple(compress(self.output_token_ids, self.sampled))

    def __getitem__(self, name: str) -> object:
        """Return a field by its name."""
        if name not in self.__slots__:
            raise KeyError(f"a completion has no {name!r}; it has {', '.join(self.__slots__)}")
        value: object = getattr(self, name)
        return value


@dataclass(frozen=True, slots=True)
class EngineParameter:
    """Parameter that an engine expects, under its checkpoint name.

    Args:
        name: Name in a Hugging Face checkpoint, before any fusing inside the engine.
        shape: Full, unsharded shape.
        dtype: dtype in which the engine stores it; weights are cast to it before transfer.
        verifiable: Whether `RolloutEngine.hash_parameters` reads it back from final storage.
        tied_to: Name of the parameter whose storage it shares; a tied parameter is never sent.
        fused_with: Names of parameters in the same engine tensor, which must be sent together.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    verifiable: bool = True
    tied_to: str | None = None
    fused_with: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class MediaBounds:
    """Bounds of the media of a run, for which an engine reserves memory.

    Args:
        max_pixels, min_pixels: Bounds to which images are scaled; None for the processor's.
        per_prompt: Most media of a prompt, by kind; kinds without a bound are missing.
        video_fps, video_max_frames: Choice of video frames; see `FrameRules`.
    """

    max_pixels: int | None = None
    min_pixels: int | None = None
    per_prompt: Mapping[str, int] = field(default_factory=dict)
    video_fps: float | None = None
    video_max_frames: int | None = None


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Adapters of one rank.

    Args:
        rank: Rows of A [rank, in] and columns of B [out, rank].
        layers: Checkpoint names of the linear layers with adapters.
        packed: Checkpoint names of the linear layers whose frozen weights have 4 bits.
    """

    rank: int
    layers: tuple[str, ...]
    packed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens of a model according to its tokenizer.

    Args:
        ends: Ids that end completions, besides those in the configurations.
        num_tokens: Number of ids that are tokens; later rows of the output projection are padding,
            which is never sampled. None takes all rows.
    """

    ends: tuple[int, ...] = ()
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine to start.

    Args:
        engine_type: Key of `lightrft.engines.factory.ENGINES`.
        model_path: Directory of a Hugging Face checkpoint (config, tokenizer, weights).
        dtype: Name of the dtype: "float32", "bfloat16" or "float16".
        tensor_parallel_size: Number of ranks that share one engine.
        memory_utilization: Share of device memory the engine may take, in (0, 1].
        max_model_len: Longest prompt plus completion, in tokens; None takes the model's limit.
        seed: Seed of the engine's generator, if it has one.
        enable_sleep: Whether `sleep` must be able to release memory.
        options: Further options under the engine's names; it refuses unknown ones.
        media: Bounds of the media of the run.
        awaits_weights: Whether a trainer will write every weight before the engine generates. The
            engine may then start without those of the directory (vllm does).
        adapters: Adapters that the engine holds beside the weights, if any.
        vocabulary: Tokens that may be sampled, and those that end completions.
    """

    engine_type: str
    model_path: str
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    memory_utilization: float = 0.5
    max_model_len: int | None = None
    seed: int = 0
    enable_sleep: bool = True
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    media: MediaBounds = field(default_factory=MediaBounds)
    awaits_weights: bool = False
    adapters: AdapterShape | None = None
    vocabulary: Vocabulary = Vocabulary()

    @property
    def torch_dtype(self) -> torch.dtype:
        """PyTorch dtype of the weights.

        Raises:
            ValueError: The name is unknown.
        """
        import torch

        known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        if self.dtype not in known:
            raise ValueError(
                f"unknown dtype {self.dtype!r} of the {self.engine_type} engine; known: "
                f"{', '.join(known)}"
            )
        return known[self.dtype]


def tied_names(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the first name of each shared parameter, by its further names."""
    first_names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in named:
        first_name = first_names.setdefault(id(parameter), name)
        if first_name != name:
            tied[name] = first_name
    return tied
