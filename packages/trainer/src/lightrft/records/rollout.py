"""Samples of a step: a prompt, the response to it, and its reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Literal

from lightrft.datasets.types import Prompt
from lightrft.engines.media.media import LaterImages, Media
from lightrft.engines.types import Completion
from lightrft.rewards.types import KeptEnvironment

if TYPE_CHECKING:
    from lightrft.engines.media.sources import ImageSource


@dataclass(frozen=True, slots=True)
class TurnSegment:
    """A part of a response that one call of the engine added, and the observation after it.

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
        reward: Paid with the answer.
    """

    name: str
    arguments: Mapping[str, object]
    outcome: Literal["ok", "error", "malformed", "refused"]
    text: str
    seconds: float = 0.0
    ends_episode: bool = False
    content: tuple[str | ImageSource, ...] = ()
    reward: float = 0.0

    @property
    def shown(self) -> tuple[str | ImageSource, ...]:
        """What the model is to see, in order."""
        return self.content or (self.text,)

    @property
    def said(self) -> tuple[str, str]:
        """What a repeated call must give again."""
        return self.outcome, self.text


@dataclass(frozen=True, slots=True)
class ResponseTurns:
    """A response of several turns, for people and for metrics.

    Args:
        turns: What was said in each, special tokens removed.
        answers: Calls of each turn that was answered.
        num_restarts: How often it started over, since a continued run was answered otherwise.
    """

    turns: tuple[str, ...]
    answers: tuple[tuple[AnsweredCall, ...], ...]
    num_restarts: int = 0

    @property
    def turn_rewards(self) -> list[float]:
        """What was paid with the answers to each turn that was answered."""
        return [sum(answer.reward for answer in turn) for turn in self.answers]


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
        environment: What its environment kept, where a reward function reads that.
    """

    prompt: Prompt
    completion: Completion
    group_id: int
    sample_id: int
    response_text: str
    token_versions: tuple[int, ...] | None = None
    segments: tuple[TurnSegment, ...] = ()
    conversation: ResponseTurns | None = None
    later: tuple[LaterImages, ...] = ()
    environment: KeptEnvironment | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and response."""
        return (*self.completion.prompt_token_ids, *self.completion.output_token_ids)

    @property
    def messages(self) -> list[dict[str, object]]:
        """The conversation: the prompt's messages, then what was said and what tools answered.

        A prompt without a chat template is one message of the user. In it a part
        `{"type": "image"}` and the like stands for each medium.
        """
        own = self.prompt.messages or ({"role": "user", "content": self.prompt.text},)
        found = [dict(message) for message in own]
        if self.conversation is None:
            return [*found, {"role": "assistant", "content": self.response_text}]
        answers = (*self.conversation.answers, *repeat((), len(self.conversation.turns)))
        for turn, answered in zip(self.conversation.turns, answers, strict=False):
            found.append({"role": "assistant", "content": turn})
            found += [{"role": "tool", "name": a.name, "content": a.text} for a in answered]
        return found

    @property
    def media(self) -> Media:
        """Of prompt and response, in order."""
        return sum((each.media for each in self.later), self.prompt.media)

    @property
    def prompt_media(self) -> Media:
        """Of what the first turn was given, in order."""
        stop = len(self.completion.prompt_token_ids)
        shown = (each.media for each in self.later if each.start < stop)
        return sum(shown, self.prompt.media)

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
        is_masked: Excluded from the loss (a reward that could not be decided, or
            failed under `--reward_failure=mask`).
        unshaped_reward: The reward before the length shaping; None means `reward`.
    """

    rollout: Rollout
    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    is_masked: bool = False
    unshaped_reward: float | None = None

    @property
    def unshaped(self) -> float:
        """The reward before shaping."""
        return self.reward if self.unshaped_reward is None else self.unshaped_reward

    @property
    def accuracy(self) -> float:
        """The component "accuracy" if there is one, else the reward before shaping."""
        return self.components.get("accuracy", self.unshaped)
