"""One episode: its ids so far, its turns and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import cast

from lightrft.records.rollout import AnsweredCall, ResponseTurns, Rollout
from lightrft.rewards.types import KeptEnvironment, RewardResult
from lightrft.rollout.environments.call_formats import ToolCall
from lightrft.rollout.environments.content import Parts, from_json
from lightrft.rollout.environments.pool import Host, NoRoomError
from lightrft.rollout.environments.specs import RowEnvironment
from lightrft.rollout.open_groups import OpenSample
from lightrft.rollout.transcript import Transcript
from lightrft.rollout.workers import EpisodeError

# Distance between an episode's request ids: each turn samples with another id.
TURN_STEP = 2**40


class OtherAnswerError(EpisodeError):
    """An environment that was being restored answered differently."""


@dataclass(slots=True, kw_only=True)
class Episode(Transcript):
    """An episode in progress.

    Args:
        number: Number in the rank; determines which worker hosts it.
        request_id: Request of its first turn; differs after each start.
        group_id, sample_id: As in `Rollout`.
        row: Arguments of `reset`.
        environment: Environment of the row.
        seeds: Seeds of `reset`, shared by all samples of a prompt, and of later calls.
        max_sampled: Limit of sampled tokens for now; None is unlimited.
        no_room: Error that delays its start.
        work: Work of its host that is not collected yet.
        is_late: This work goes on while other episodes sample.
        value: Its value between the parts of an open episode; None while it goes on.
        num_restarts, num_forgotten: Number of restarts, and of tokens sampled before them.
        reward: Reward by its environment.
        kept: Final attributes of its environment, if a reward function reads them.
    """

    number: int
    request_id: int
    group_id: int
    sample_id: int
    row: dict[str, object]
    environment: RowEnvironment
    seeds: tuple[int, int]
    answers: list[list[AnsweredCall]] = field(default_factory=list)
    is_open: bool = True
    work: Future[EpisodeError | None] | None = None
    is_late: bool = False
    value: OpenSample | None = None
    max_sampled: int | None = None
    failure: EpisodeError | None = None
    no_room: NoRoomError | None = None
    reset_message: str | None = None
    reset_parts: Parts = ()
    generation: int = 0
    num_restarts: int = 0
    num_forgotten: int = 0
    pending: list[ToolCall] = field(default_factory=list)
    reward: RewardResult | None = None
    kept: KeptEnvironment | None = None

    @property
    def result(self) -> RewardResult | None:
        """Reward of an episode that has ended; None if its environment failed."""
        return None if self.failure is not None else self.reward

    @property
    def num_turns(self) -> int:
        """Number of turns that have begun."""
        return len(self.turn_texts)

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the model sampled."""
        return sum(self.sampled)

    @property
    def may_sample(self) -> bool:
        """Return whether it goes on for now."""
        is_free = self.is_open and not self.is_late
        return is_free and (self.max_sampled is None or self.num_sampled < self.max_sampled)

    @property
    def turn_so_far(self) -> tuple[int, ...]:
        """Ids of a turn that goes on."""
        return self.last.output_token_ids if self.is_cut and self.last is not None else ()

    @property
    def is_answered(self) -> bool:
        """Return whether the calls of the last turn are answered and not yet appended."""
        is_so = self.is_open and 0 < self.num_turns == len(self.answers)
        return is_so and not self.segments[-1].observation

    @property
    def made_calls(self) -> list[AnsweredCall]:
        """Calls that reached their tools."""
        return [c for turn in self.answers for c in turn if c.outcome in ("ok", "error")]

    @property
    def next_request_id(self) -> int:
        """Id of the next call of the engine, which determines its random numbers."""
        return self.request_id + TURN_STEP * len(self.segments)

    def start_over(self) -> None:
        """Forget all turns; the prompt stays."""
        self.num_forgotten += self.num_sampled
        for turns in (
            self.token_ids,
            self.logprobs,
            self.sampled,
            self.versions,
            self.segments,
            self.turn_texts,
            self.answers,
            self.pending,
            self.later,
        ):
            turns.clear()
        self.facts = {}
        self.last, self.is_open, self.is_cut, self.generation = None, True, False, -1
        self.reward = self.kept = None
        self.num_restarts += 1

    def host_on(self, host: Host) -> None:
        """Reset the environment, or restore it after the end of its worker.

        Every call is repeated and must have the same answer. Stateless functions are skipped.

        Raises:
            EpisodeError: It cannot be reset.
            OtherAnswerError: An answer differs.
        """
        if self.generation == host.generation:
            return
        is_new = self.generation == 0
        answer = host.ask("reset", draws=(self.seeds[0], -1), row=self.row)
        message = answer["text"] if isinstance(answer, dict) else answer
        if not is_new and message != self.reset_message:
            raise OtherAnswerError("reset answered otherwise when it was repeated")
        self.reset_message = None if message is None else str(message)
        self.reset_parts = () if message is None else (str(message),)
        if isinstance(answer, dict):
            self.reset_parts = from_json(answer["content"], "an image of reset")
        for number, call in enumerate(self.made_calls):
            if call.name in host.stateless:
                continue
            if self.call(host, call.name, call.arguments, number)["text"] != call.text:
                raise OtherAnswerError(f"{call.name} answered otherwise when it was repeated")
        self.generation = host.generation

    def settle(self) -> None:
        """Wait until its host has no work on it."""
        wait([] if self.work is None else [self.work])

    def call(
        self, host: Host, name: str, arguments: Mapping[str, object], number: int
    ) -> dict[str, object]:
        """Make the call of the episode with this number; its number determines its draws."""
        draws = self.seeds[1], number
        answer = host.ask("call", draws=draws, name=name, arguments=arguments)
        return cast("dict[str, object]", answer)

    def ask(self, host: Host, operation: str) -> object:
        """Perform an operation at the end of the episode on its restored environment."""
        self.host_on(host)
        return host.ask(operation, draws=(self.seeds[1], len(self.made_calls)))

    def as_rollout(self) -> Rollout:
        """Return the finished episode as a sample."""
        answers = tuple(tuple(turn) for turn in self.answers)
        return self.as_sample(
            self.request_id,
            self.group_id,
            self.sample_id,
            text="\n".join(self.turn_texts),
            conversation=ResponseTurns(tuple(self.turn_texts), answers, self.num_restarts),
            kept=self.kept,
        )
