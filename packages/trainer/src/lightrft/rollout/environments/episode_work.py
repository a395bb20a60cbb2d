"""Work on episodes that is independent of how turns are sampled: begin, answer, reward, end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from lightrft.datasets.types import Prompt
from lightrft.engines.types import SamplingParams
from lightrft.records.rollout import AnsweredCall
from lightrft.records.sample_ledger import ENVIRONMENT, SampleLedger
from lightrft.rewards.types import KeptEnvironment, ReadsEnvironments, RewardResult
from lightrft.rollout.environments.call_formats import MalformedCallError, ToolCall
from lightrft.rollout.environments.call_schema import check_call
from lightrft.rollout.environments.calls import as_error
from lightrft.rollout.environments.content import from_json
from lightrft.rollout.environments.episode import Episode
from lightrft.rollout.environments.episode_batch import ChangedAnswerError, EpisodeBatch
from lightrft.rollout.environments.journal import Journal
from lightrft.rollout.environments.pool import EnvironmentPool, Host
from lightrft.rollout.environments.specs import EnvironmentSpecs
from lightrft.rollout.environments.turns import Turns
from lightrft.rollout.source import SourceParts, task_seeds
from lightrft.rollout.workers import EpisodeError


class EpisodeWork:
    """Work on the episodes of a run.

    Args:
        parts: Parts of the run.
        pool: Workers that host the environments.
        specs: Specifications of the environments.
        turns: Turns as ids and as text.
        special_ids: Ids that no text of an observation may have.
    """

    def __init__(
        self,
        parts: SourceParts,
        pool: EnvironmentPool,
        specs: EnvironmentSpecs,
        turns: Turns,
        special_ids: frozenset[int],
    ) -> None:
        self.parts, self.pool, self.specs, self.turns = parts, pool, specs, turns
        self.special_ids = special_ids

    def new_episode(
        self, prompt: Prompt, request_id: int, index: int, params: SamplingParams
    ) -> Episode:
        """Return an episode that has not begun.

        Args:
            prompt: Data row.
            request_id: Number of the prompt in the run.
            index: Index of the sample in its group.
            params: Sampling parameters of the run.
        """
        environment = self.specs.of(prompt.row)
        known = task_seeds(params, request_id, index) | {"max_turns": self.parts.config.max_turns}
        arguments = {name: known[name] for name in environment.spec.takes}
        sample_id = request_id * params.n + index
        return Episode(
            number=sample_id,
            prompt=prompt,
            request_id=sample_id,
            group_id=request_id,
            sample_id=sample_id,
            row=arguments | dict(prompt.row),
            environment=environment,
            seeds=(known["seed"], known["sample_seed"]),
        )

    def batch(
        self,
        episodes: Sequence[Episode],
        params: SamplingParams,
        *,
        journal: Journal,
        ledger: SampleLedger,
    ) -> EpisodeBatch:
        """Collect episodes that are sampled together.

        Args:
            episodes: Episodes of this rank.
            params: Sampling parameters of the run; the template's end of a turn is added.
            journal, ledger: See `EpisodeBatch`.
        """
        end = self.turns.observations.suffix.chat.end_of_turn
        if end is not None:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, end))
        damage = journal.damage
        return EpisodeBatch(
            self.parts.session,
            params,
            self.pool,
            episodes,
            journal,
            masks_failures=self.parts.config.reward_failure == "mask",
            observe=self.turns.observe,
            notes=[] if damage is None else [f"{damage}: what follows is sampled again"],
            ledger=ledger,
        )

    def reset(self, batch: EpisodeBatch) -> Exception | None:
        """Begin the episodes; add the message of `reset` to each prompt."""
        for episode in batch.episodes:
            episode.no_room = None
        problem = batch.each(batch.episodes, Episode.host_on)
        for episode in batch.episodes:
            if episode.failure is None and episode.no_room is None:
                try:
                    self.turns.prepare(batch, episode)
                except EpisodeError as error:
                    problem = batch.failed(episode, error) or problem
        return problem

    @property
    def _is_kept(self) -> bool:
        """Whether reward functions read environments."""
        function = self.parts.reward_function
        return isinstance(function, ReadsEnvironments) and function.reads_environments

    def keep(self, batch: EpisodeBatch) -> Exception | None:
        """Store what reward functions read of the episodes that have ended."""
        if not self._is_kept:
            return None
        ended = [e for e in batch.episodes if not e.is_open and e.failure is None]
        return batch.after_end([e for e in ended if e.kept is None], self._keep)

    def reward(self, batch: EpisodeBatch, episode: Episode, host: Host) -> None:
        """Reward an episode that has ended; runs in a thread of the host."""
        if self._is_kept and episode.kept is None:
            self._keep(episode, host)
        result = episode.reward = self._reward(episode, host)
        entry = batch.ledger.of(episode.sample_id)
        entry.reward_is(ENVIRONMENT, result, episode.context)

    def finish(
        self, batch: EpisodeBatch, problem: Exception | None = None
    ) -> dict[int, RewardResult | None]:
        """Reward and close episodes that have ended; collective.

        Args:
            batch: Episodes that have ended.
            problem: Error of this rank, raised on all.

        Returns:
            Rewards by number of the episode; None where an environment failed.
        """
        unpaid = [e for e in batch.episodes if e.failure is None and e.reward is None]
        reward_problem = batch.each(unpaid, partial(self.reward, batch))
        batch.close()
        batch.is_open_anywhere(problem or reward_problem)
        results: dict[int, RewardResult | None] = {}
        for episode in batch.episodes:
            result = None if episode.failure is not None else episode.reward
            batch.journal.end(episode.sample_id, result, episode.failure)
            results[episode.number] = result
        return results

    def answer_calls(self, batch: EpisodeBatch, episode: Episode, host: Host) -> None:
        """Make the remaining calls of the last turn in order; runs in a thread of the host.

        Answers must equal those in the journal of a killed process.
        """
        key = (episode.sample_id, episode.num_turns - 1)
        known, answered = batch.journal.recorded.answers.get(key, []), episode.answers[-1]
        if episode.pending:
            episode.host_on(host)
        for call in episode.pending[len(answered) :]:
            before = known[len(answered)] if len(answered) < len(known) else None
            answer = self._execute_call(episode, call, host, before)
            if before is not None and before.said != answer.said:
                raise ChangedAnswerError(
                    f"turn {key[1]}: {call.name} answered {answer.text[:80]!r}, where the journal "
                    f"says {before.text[:80]!r}"
                )
            batch.journal.answer(episode, answer)
            batch.ledger.of(episode.sample_id).answers[key[1]].append(answer.shown)
            answered.append(answer)
            if answer.ends_episode:
                break

    def _execute_call(
        self, episode: Episode, call: ToolCall, host: Host, before: AnsweredCall | None
    ) -> AnsweredCall:
        """Make one call; return its answer, never raise an exception of the tool."""
        try:
            arguments = check_call(call, episode.environment.functions)
        except MalformedCallError as error:
            return AnsweredCall("", {}, "malformed", as_error(str(error)))
        limit = self.parts.config.max_tool_calls
        if limit is not None and episode.num_calls >= limit:
            text = as_error(f"no calls are left: {limit} were allowed")
            return AnsweredCall(call.name, arguments, "refused", text)
        is_stateless = call.name in host.stateless
        # A journal names images but does not hold them: request them again.
        if before is not None and is_stateless and not self.turns.encoder.reads_media:
            return before
        start = time.perf_counter()
        key, asked = str(episode.number), {"name": call.name, "arguments": arguments}
        response = host.ask("call", key, draws=episode.draws, **asked)
        answer = cast("dict[str, object]", response)
        seconds, text = time.perf_counter() - start, str(answer["text"])
        reward = float(cast("float", answer.get("reward", 0.0)))
        content = from_json(answer.get("content"), f"an image that {call.name} answered with")
        return AnsweredCall(
            call.name,
            arguments,
            "error" if "error" in answer else "ok",
            text,
            seconds,
            ends_episode="ends_episode" in answer,
            content=content,
            reward=reward,
        )

    def _keep(self, episode: Episode, host: Host) -> None:
        """Store the attributes of an environment for reward functions."""
        episode.host_on(host)
        attributes = host.ask("keep", str(episode.number), draws=episode.draws)
        episode.kept = KeptEnvironment(
            *cast("tuple[str, dict[str, dict[str, object]]]", attributes)
        )

    def _reward(self, episode: Episode, host: Host) -> RewardResult:
        """Return the reward of an episode by its environment."""
        if not episode.environment.spec.has_reward:
            return RewardResult(0.0)
        episode.host_on(host)
        answer = host.ask("reward", str(episode.number), draws=episode.draws)
        if answer is None:
            raise EpisodeError("get_reward returned None")
        at_end, parts = cast("tuple[float, dict[str, float]]", answer)
        total = sum(call.reward for turn in episode.answers for call in turn) + at_end
        return RewardResult(total, {str(episode.environment.spec.name): total, **parts})
