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
    """Part of a response that one call of the engine added, and the observation after it.

    Args:
        request_id, sample_index: Ids under which the engine sampled it.
        observation: Token ids that were appended without sampling; () if there are none.
        text_spans: [start, stop) of parts of `observation` that are external text, where no
            special token may stand.
    """

    request_id: int
    sample_index: int = 0
    observation: tuple[int, ...] = ()
    text_spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """Call of a tool and its answer.

    Args:
        name, arguments: Name and arguments as the tool got them; "" and none for a malformed call.
        outcome: "error" of the tool, "malformed" by the model, "refused" beyond a limit, or "ok".
        text: Answer before it was cut to tokens; images by their digests.
        seconds: Duration of the call.
        ends_episode: Whether the environment is done; the answer is then not shown.
        content: Texts and images in order if there are images; () if `text` is all.
        reward: Reward that came with the answer.
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
        """Content for the model, in order."""
        return self.content or (self.text,)

    @property
    def said(self) -> tuple[str, str]:
        """Outcome and text, which a repeated call must reproduce."""
        return self.outcome, self.text


@dataclass(frozen=True, slots=True)
class ResponseTurns:
    """Response of several turns, for people and for metrics.

    Args:
        turns: Text of each turn, without special tokens.
        answers: Calls of each turn that was answered.
        num_restarts: Number of restarts, since a continued run was answered differently.
    """

    turns: tuple[str, ...]
    answers: tuple[tuple[AnsweredCall, ...], ...]
    num_restarts: int = 0

    @property
    def turn_rewards(self) -> list[float]:
        """Rewards that came with the answers to each answered turn."""
        return [sum(answer.reward for answer in turn) for turn in self.answers]


@dataclass(frozen=True, slots=True)
class Rollout:
    """Prompt and the response to it.

    Args:
        prompt: Row of the data.
        completion: Response; only its ids from the engine are trained on.
        group_id: Id that completions of one prompt in one step share; global over ranks.
        sample_id: Unique within the step and global over ranks: group_id * group_size + index.
        response_text: Sampled tokens, decoded turn by turn, without special tokens.
        token_versions: Version of the weights that sampled each token, -1 for observations; None
            means the completion's version for all.
        segments: Parts of the response, one for each call of the engine.
        conversation: With an environment or tools, the turns and their answers.
        later: Images in its observations; places count from the start of the prompt.
        environment: State that its environment kept for a reward function.
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
        """Ids of prompt and response."""
        return (*self.completion.prompt_token_ids, *self.completion.output_token_ids)

    @property
    def messages(self) -> list[dict[str, object]]:
        """Conversation: the prompt's messages, then turns and answers of tools.

        A prompt without a chat template is one message of the user. A part `{"type": "image"}` or
        alike stands for each of its media.
        """
        messages = self.prompt.messages or ({"role": "user", "content": self.prompt.text},)
        conversation = [dict(message) for message in messages]
        if self.conversation is None:
            return [*conversation, {"role": "assistant", "content": self.response_text}]
        answers = (*self.conversation.answers, *repeat((), len(self.conversation.turns)))
        for turn, answered in zip(self.conversation.turns, answers, strict=False):
            conversation.append({"role": "assistant", "content": turn})
            conversation += [{"role": "tool", "name": a.name, "content": a.text} for a in answered]
        return conversation

    @property
    def media(self) -> Media:
        """Media of prompt and response, in order."""
        return sum((each.media for each in self.later), self.prompt.media)

    @property
    def prompt_media(self) -> Media:
        """Media of the first turn's prompt, in order."""
        stop = len(self.completion.prompt_token_ids)
        shown = (each.media for each in self.later if each.start < stop)
        return sum(shown, self.prompt.media)

    @property
    def images(self) -> tuple[ImageSource, ...]:
        """Images of prompt and response, in order."""
        return self.media.images


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """Rollout and its reward.

    Args:
        rollout: Sample.
        reward: Scalar that the advantage is estimated from, shaping included.
        components: Every reward component by name, unweighted (logged as `reward/<name>`).
        is_masked: Whether it is excluded from the loss (its reward could not be decided, or
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
        """Reward before shaping."""
        return self.reward if self.unshaped_reward is None else self.unshaped_reward

    @property
    def accuracy(self) -> float:
        """Component "accuracy" if there is one, else the reward before shaping."""
        return self.components.get("accuracy", self.unshaped)
