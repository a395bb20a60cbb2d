"""Facts of samples, noted where they arise, before they pass through other code.

The engine's ledger notes what was sampled; this one notes prompts, answers and rewards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightrft.datasets.types import Prompt
from lightrft.engines.ledger import hash_context
from lightrft.rewards.types import UNDECIDED, RewardResult

if TYPE_CHECKING:
    from lightrft.engines.media.sources import ImageSource

# Sources of a sample's rewards, in the order in which they are added.
SOURCES = FUNCTION, MODELS, ENVIRONMENT = "function", "models", "environment"


@dataclass(slots=True)
class SampleEntry:
    """Facts of one sample.

    Args:
        group_id, prompt: Group and prompt as requested, with the message of `reset`.
        request_id: Number of the prompt in the run; -1 is unknown.
        answers: By turn, the answers to its calls: texts and images.
        given: Text, label and columns of the prompt as the reward function got them.
        rewards: Rewards by their source.
        scored: Hashes of the ids that were scored.
        penalty: Addend to the rewards for the length; None adds no component.
        has_failed: Whether some reward is missing.
        is_abandoned: Whether its group was dropped; rewards that still arrive do not count.
        is_filler: Whether its group only keeps the batch full.
        is_dismissed: Whether its group is not trained on.
        lacks_baseline: Whether its group's greedy completion has no reward.
        fault: Fault of its answers; "" is none.
    """

    group_id: int = -1
    prompt: Prompt | None = None
    answers: dict[int, list[tuple[str | ImageSource, ...]]] = field(default_factory=dict)
    given: tuple[str, str | None, Mapping[str, object]] | None = None
    rewards: dict[str, RewardResult] = field(default_factory=dict)
    scored: set[str] = field(default_factory=set)
    penalty: float | None = None
    has_failed: bool = False
    is_abandoned: bool = False
    is_filler: bool = False
    is_dismissed: bool = False
    lacks_baseline: bool = False
    fault: str = ""
    request_id: int = -1

    def reward_is(self, source: str, reward: RewardResult, token_ids: Sequence[int] = ()) -> None:
        """Note a reward, and the ids of prompt and response that were scored."""
        self.rewards[source] = reward
        self.has_failed |= reward is UNDECIDED
        if token_ids:
            self.scored.add(hash_context(token_ids))

    def share(self, first: SampleEntry, token_ids: Sequence[int]) -> None:
        """Note that it shares the rewards of another row of its episode.

        Args:
            first: Entry of that row.
            token_ids: Ids of prompt and response.
        """
        self.given, self.penalty = first.given, first.penalty
        self.has_failed, self.is_abandoned = first.has_failed, first.is_abandoned
        for source, reward in first.rewards.items():
            self.reward_is(source, reward, token_ids)

    @property
    def problem(self) -> str:
        """Contradiction in its facts; "" is none."""
        if not self.has_failed and FUNCTION not in self.rewards:
            return "nobody wrote down its reward"
        if self.prompt is None:
            return "nobody wrote down its prompt"
        text, label, columns = self.given or (self.prompt.text, self.prompt.label, {})
        pairs: dict[str, tuple[object, object]] = {
            "text": (text, self.prompt.text),
            "label": (label, self.prompt.label),
        }
        for name, value in columns.items():
            pairs[f"column {name!r}"] = value, self.prompt.columns.get(name)
        for name, (value, asked) in pairs.items():
            if value is not asked:
                return f"the reward got another {name} than the prompt has"
        return self.fault

    @property
    def is_masked(self) -> bool:
        """Return whether it is left out of the loss."""
        return self.has_failed or self.is_filler or self.lacks_baseline

    @property
    def unshaped(self) -> float:
        """Sum of the rewards."""
        total = 0.0
        for each in self._counted:
            total += each.reward
        return total

    @property
    def reward(self) -> float:
        """Sum of the rewards and the length penalty."""
        return self.unshaped + (0.0 if self.has_failed else self.penalty or 0.0)

    @property
    def components(self) -> dict[str, float]:
        """Components of all rewards, by name; of a failed one only whether it was undecided."""
        if self.has_failed:
            is_undecided = not self.is_abandoned and self.rewards.get(FUNCTION) is UNDECIDED
            return dict(UNDECIDED.components) if is_undecided else {}
        parts = {name: value for each in self._counted for name, value in each.components.items()}
        if self.penalty is not None:
            parts["overlong"] = self.penalty
        return parts

    @property
    def accuracy(self) -> float:
        """Accuracy as in `ScoredRollout`."""
        return self.components.get("accuracy", self.unshaped)

    @property
    def _counted(self) -> list[RewardResult]:
        if self.has_failed:
            return []
        return [self.rewards[name] for name in SOURCES if name in self.rewards]


class SampleLedger:
    """Entries of the samples that one rank makes in a step."""

    def __init__(self) -> None:
        self.entries: dict[int, SampleEntry] = {}
        self._greedy: SampleLedger | None = None

    @property
    def greedy(self) -> SampleLedger:
        """Ledger of the greedy samples beside them."""
        self._greedy = self._greedy or SampleLedger()
        return self._greedy

    def of(self, sample_id: int) -> SampleEntry:
        """Return the entry of a sample; any thread may ask."""
        return self.entries.setdefault(sample_id, SampleEntry())

    def ask(
        self,
        prompts: Iterable[Prompt],
        group_ids: Iterable[int],
        group_size: int,
        request_ids: Iterable[int],
    ) -> None:
        """Note which prompt each sample answers."""
        for prompt, group_id, request_id in zip(prompts, group_ids, request_ids, strict=True):
            for index in range(group_size):
                entry = self.of(group_id * group_size + index)
                entry.group_id, entry.prompt, entry.request_id = group_id, prompt, request_id

    def lack_baselines(self, group_ids: Iterable[int]) -> None:
        """Note the groups whose greedy completions have no reward."""
        lacking = set(group_ids)
        for entry in self.entries.values():
            entry.lacks_baseline |= entry.group_id in lacking
