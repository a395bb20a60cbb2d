"""The records of one reinforcement learning step, in the order in which they are made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from lightrft.datasets.types import Prompt
from lightrft.engines.media.kinds import Media
from lightrft.engines.media.prompts import NO_MEDIA, LaterImages, RowMedia
from lightrft.engines.media.sources import ImageSource
from lightrft.engines.types import Completion
from lightrft.models.support import SamplingSupport


@dataclass(frozen=True, slots=True)
class Segment:
    """What one call of the engine added to a response, and the observation after it.

    Args:
        request_id, sample_index: Under which the engine sampled it.
        observation: Token ids that were appended, which nobody sampled; () if none were.
        text_spans: [start, stop) of `observation` that are text from outside, in which no special
            token may stand.
    """

    request_id: int
    sample_index: int = 0
    observation: tuple[int, ...] = ()
    text_spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call of a tool and what came back.

    Args:
        name, arguments: As the tool got them; of a malformed call, "" and none.
        outcome: "error" is the tool's, "malformed" the model's; "refused" is beyond a limit.
        text: The answer before it was cut to tokens; images by their digests.
        seconds: Until it came.
        ends_episode: The environment is done; the answer is not shown.
        content: Texts and images in order where there are images; () where `text` is all.
    """

    name: str
    arguments: Mapping[str, object]
    outcome: Literal["ok", "error", "malformed", "refused"]
    text: str
    seconds: float = 0.0
    ends_episode: bool = False
    content: tuple[str | ImageSource, ...] = ()

    @property
    def shown(self) -> tuple[str | ImageSource, ...]:
        """What the model is to see, in order."""
        return self.content or (self.text,)

    @property
    def said(self) -> tuple[str, str]:
        """What a repeated call must give again."""
        return self.outcome, self.text


@dataclass(frozen=True, slots=True)
class Conversation:
    """A response of several turns, for people and for metrics.

    Args:
        turns: What was said in each, special tokens removed.
        answers: Calls of each turn that was answered.
        num_restarts: How often it started over, since a continued run was answered otherwise.
    """

    turns: tuple[str, ...]
    answers: tuple[tuple[AnsweredCall, ...], ...]
    num_restarts: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """A prompt and the response to it.

    Args:
        prompt: The data row.
        completion: The response; of its ids, what the engine sampled is what is trained on.
        group_id: Completions of one prompt in one step share it; global over ranks.
        sample_id: Unique within the step and global over ranks: group_id * group_size + index.
        response_text: What was sampled, decoded turn by turn, special tokens removed.
        token_versions: Version of the weights that sampled each token, -1 for observations; None
            means that of the completion for all.
        segments: How the response came about, call by call of the engine.
        conversation: With an environment or tools, what was said and answered.
        later: Images in its observations; they start at places of prompt and response together.
    """

    prompt: Prompt
    completion: Completion
    group_id: int
    sample_id: int
    response_text: str
    token_versions: tuple[int, ...] | None = None
    segments: tuple[Segment, ...] = ()
    conversation: Conversation | None = None
    later: tuple[LaterImages, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and response."""
        return (*self.completion.prompt_token_ids, *self.completion.output_token_ids)

    @property
    def media(self) -> Media:
        """Of prompt and response, in order."""
        return sum((each.media for each in self.later), self.prompt.media)

    @property
    def images(self) -> tuple[ImageSource, ...]:
        """Of prompt and response, in order."""
        return self.media.images


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout and its reward.

    Args:
        rollout: The sample.
        reward: The scalar the advantage is estimated from, shaping included.
        components: Every reward component by name, unweighted (logged as `reward/<name>`).
        is_masked: Excluded from the loss (a reward failure under `--reward_failure=mask`).
        unshaped_reward: The reward before the length shaping; None means `reward`.
    """

    rollout: Rollout
    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    is_masked: bool = False
    unshaped_reward: float | None = None

    @property
    def accuracy(self) -> float:
        """The component "accuracy" if there is one, else the reward before shaping."""
        unshaped = self.reward if self.unshaped_reward is None else self.unshaped_reward
        return self.components.get("accuracy", unshaped)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Padded tensors of the rows one rank trains on.

    All per-token tensors share [batch, seq]: entry t of a row belongs to `token_ids[:, t]` given
    the tokens before t. Rows are right-padded; values outside `response_mask` are 0.

    Args:
        token_ids: [batch, seq] int64, prompt then response, padded with the pad id.
        attention_mask: [batch, seq] bool, True on prompt and response tokens.
        response_mask: [batch, seq] bool, True on tokens the policy sampled; observations between
            them are context.
        rollout_logprobs: [batch, seq] float32, from the engine.
        rewards: [batch] float32.
        group_ids: [batch] int64.
        sample_ids: [batch] int64.
        temperature: Temperature all rows were sampled at.
        compared_mask: [batch, seq] bool, sampled tokens whose `rollout_logprobs` follow the
            distribution the trainer scores with, or with `support` the truncated one; None if no
            token's do.
        support: What the sampling excluded, to be replayed; None replays nothing.
        media: Images and videos of the rows, by reference.
    """

    token_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    rewards: Tensor
    group_ids: Tensor
    sample_ids: Tensor
    temperature: float
    compared_mask: Tensor | None = None
    support: SamplingSupport | None = None
    media: RowMedia = NO_MEDIA


@dataclass(frozen=True, slots=True)
class PolicyOutputs:
    """What the models say about a `RolloutBatch` before the update; None means "no such model".

    Args:
        old_logprobs: [batch, seq] float32 under the policy at the start of the step; None where
            the update's own logprobs are these, since every row is trained on once, in the one
            optimizer batch of the step.
        ref_logprobs: [batch, seq] float32 under the reference model.
        values: [batch, seq] float32 from the critic: value before token t is sampled.
        entropy: [batch, seq] float32 of the policy's next-token distribution at token t.
        log_kept_mass: [batch, seq] float32, see `lightrft.models.types.ActorOutput`; it comes with
            the old logprobs of rows that have a `support`.
    """

    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    values: Tensor | None
    entropy: Tensor | None
    log_kept_mass: Tensor | None = None

    @property
    def sampling_logprobs(self) -> Tensor | None:
        """The old logprobs under the distribution the engine sampled from, truncation included."""
        if self.old_logprobs is None or self.log_kept_mass is None:
            return self.old_logprobs
        return self.old_logprobs - self.log_kept_mass


@dataclass(frozen=True, slots=True)
class ExperienceBatch:
    """All a policy and value update need.

    Args:
        rollouts: The padded rows.
        outputs: Model outputs before the update.
        advantages: [batch, seq] float32, 0 outside `response_mask`.
        returns: [batch, seq] float32, 0 outside `response_mask`.
    """

    rollouts: RolloutBatch
    outputs: PolicyOutputs
    advantages: Tensor
    returns: Tensor
