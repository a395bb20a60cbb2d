"""Agents of a run, and the source that turns their calls into rows."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.config import ConfigError, RolloutOptions
from lightrft.datasets.chat_ids import ChatIds, TemplateRefusedError
from lightrft.datasets.media import Modality, as_parts
from lightrft.datasets.suffix import TurnSuffix
from lightrft.datasets.types import Prompt
from lightrft.engines.types import Completion, GenerationRequest, SamplingParams
from lightrft.records.rollout import Rollout
from lightrft.records.sample_ledger import ENVIRONMENT, SampleLedger
from lightrft.rewards.types import RewardError, RewardResult
from lightrft.rollout.agents.agent_pool import AgentEnd, AgentPool
from lightrft.rollout.agents.agent_worker import MAX_OPEN_FILES
from lightrft.rollout.agents.conversations import AgentEpisode, CalledTurn, Conversations
from lightrft.rollout.agents.endpoint import Endpoint, WaitingCall
from lightrft.rollout.agents.http_server import MEDIA_LIMITS, HttpLimits
from lightrft.rollout.agents.rendering_check import are_sent, fault_of
from lightrft.rollout.agents.rounds import AnswerRules, RunSampling, answer_round
from lightrft.rollout.environments.environments import check_turns, control_token_ids
from lightrft.rollout.environments.journal import JOURNAL_FOLDER, Journal, images_fact
from lightrft.rollout.scoring import finished_samples, open_scorer
from lightrft.rollout.single_turn import generate
from lightrft.rollout.source import SampleRequests, Samples, SourceParts, agree, task_seeds
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.distributed.network import raise_open_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A round begins after this long without a new call, so that simultaneous calls share a batch.
_QUIET_SECONDS = 0.01
_QUIET_SHARE = 0.02
_MAX_QUIET_SECONDS = 1.0
# Maximum share of an episode's deadline for which calls wait for idle episodes.
_STALL_SHARE = 0.25


class Agents:
    """Agents of a run and the endpoint of this rank.

    Args:
        config: Options of the rollout: `agent` and the options that depend on it.
        tokenizer: Tokenizer of the model.
        folder: Folder of the run, for the journal; None writes no journal.
        modality: Renderer and encoder of prompts.

    Raises:
        ConfigError: The agent cannot be loaded, or its chat template or model is not supported.
    """

    answers_calls = True
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        config: RolloutOptions,
        tokenizer: PreTrainedTokenizerBase,
        *,
        folder: Path | None = None,
        modality: Modality,
    ) -> None:
        check_turns(modality, config)
        self.config, self.tokenizer = config, tokenizer
        self.encoder, self.prompt_tokenizer = modality.encoder, modality.renderer
        self.folder = None if folder is None else folder / JOURNAL_FOLDER
        self.chat = ChatIds(tokenizer, modality)
        try:
            TurnSuffix(self.chat)  # refuses templates without turns
        except TemplateRefusedError as error:
            raise ConfigError(str(error)) from error
        self.special_ids = control_token_ids(tokenizer)
        raise_open_files(MAX_OPEN_FILES)
        limits = MEDIA_LIMITS if self.encoder.reads_media else HttpLimits()
        limits = replace(limits, call_seconds=config.agent_timeout_seconds)
        self.endpoint = Endpoint(tokenizer, limits)
        try:
            self.pool = AgentPool(config)
        except BaseException:
            self.endpoint.close()
            raise

    def source(self, parts: SourceParts) -> AgentSource:
        """Return the source of the episodes of a run."""
        return AgentSource(self, parts)

    def close(self) -> None:
        """Close workers and endpoint; calling it twice is allowed."""
        self.pool.close()
        self.endpoint.close()


class AgentSource:
    """Source of rows that agents produce.

    Every rank answers the calls of its episodes in rounds. A round is the batch of all waiting
    calls. It begins once every open episode waits for an answer, so timing does not change the
    batches; with `late_join`, half of the episodes are enough. A round waits at most a quarter of
    the deadline: an agent that used another agent's key would otherwise block both until both
    fail. Ranks that share an engine run their rounds in lock step.

    Args:
        agents: Agents of the run.
        parts: Parts of the run that sources share.
    """

    def __init__(self, agents: Agents, parts: SourceParts) -> None:
        self._agents, self._parts = agents, parts
        self._told: set[str] = set()

    def sample(self, requests: SampleRequests) -> Samples:
        """Run the agents and return the samples of this rank.

        Raises:
            RewardError: An agent failed on some rank, and failures are not masked.
        """
        with open_scorer(self._parts, requests) as scorer:
            with requests.timer.stage("rollout"), requests.recording(self._parts):
                episodes = self.episodes(requests)
            rows = [episode.rollouts() for episode in episodes]
            results = [_result_of(episode) for episode in episodes]
            for episode, rollouts in zip(episodes, rows, strict=True):
                note_episode(requests.ledger, episode, rollouts)
            samples = finished_samples(
                self._parts,
                requests,
                [first for first, *_ in rows],
                scorer=scorer,
                environment_results=results,
                special_ids=self._agents.special_ids,
                branches={branch[0].sample_id: branch[1:] for branch in rows},
            )
        return replace(samples, agent_counts=[e.counts for e in episodes])

    def episodes(self, requests: SampleRequests) -> list[AgentEpisode]:
        """Run the episodes of this rank to their end; collective."""
        session, problem = self._parts.session, None
        episodes = self._begin(requests)
        sampling = RunSampling(
            self._agents.chat.with_end_of_turn(requests.params),
            takes_stops=not session.shares_engine,
        )
        config = self._parts.config
        rules = AnswerRules(
            self._agents.chat,
            config.tool_parser,
            sampling,
            self._agents.config.max_episode_tokens,
            config.max_agent_calls,
        )
        journal = self._open_journal(requests, episodes)
        run = _AgentRun(self._agents, self._parts, episodes, rules, journal)
        try:
            session.wake_up()
            run.go()
        except Exception as error:  # noqa: BLE001 - sent to all ranks, then raised
            problem = error
        finally:
            run.close()
        failed = next((e for e in episodes if e.failure), None)
        if problem is None and failed is not None and config.reward_failure != "mask":
            problem = RewardError(
                f"the agent failed for prompt {failed.prompt.id}: {failed.failure}"
            )
        self._agree(problem, sampling)
        return episodes

    def _begin(self, requests: SampleRequests) -> list[AgentEpisode]:
        params = requests.params
        return [
            AgentEpisode(
                number=number,
                prompt=prompt,
                group_id=group_id,
                sample_id=group_id * params.n + index,
                row=task_seeds(params, request_id, index) | shown_row(prompt),
                talk=Conversations(self._agents.chat, request_id * params.n + index),
            )
            for number, (prompt, request_id, group_id, index) in enumerate(requests.begin())
        ]

    def _open_journal(
        self, requests: SampleRequests, episodes: Sequence[AgentEpisode]
    ) -> CallJournal:
        """Open the journal of this rank, with the turns that a killed process wrote."""
        journal = CallJournal.of_requests(
            self._agents.folder,
            requests,
            self._parts,
            prompts=[(episode.talk.episode_id, episode.prompt) for episode in episodes],
            environment={
                "name": self._agents.pool.name,
                "schemas": [],
                "answers_turns": True,
            },
        )
        known, engine = journal.recorded.turns.values(), self._parts.session.engine
        version = -1 if engine is None else engine.weights_version
        if engine is not None:
            sampling = requests.params.distribution
            engine.ledger.restore([turn.entry(version, sampling) for turn in known])
        completions = {turn.sampled.request_id: turn.completion((), version) for turn in known}
        for episode in episodes:
            episode.known = completions
        return journal

    def _agree(self, problem: Exception | None, sampling: RunSampling) -> None:
        """Raise any rank's error on all ranks; report sampling options that were ignored.

        Collective.
        """
        new = [text for name, text in sampling.differences.items() if name not in self._told]
        self._told |= sampling.differences.keys()
        text = "agents asked for other sampling options than the run's, which count:"
        agree(self._parts.context, problem, None, [f"{text} {', '.join(sorted(new))}"] * bool(new))


def note_episode(ledger: SampleLedger, episode: AgentEpisode, rows: Sequence[Rollout]) -> None:
    """Record the rows of an episode in the ledger, with their rewards and faults."""
    for row, turns in zip(rows, episode.rows, strict=True):
        entry = ledger.of(row.sample_id)
        entry.group_id, entry.prompt = episode.group_id, row.prompt
        entry.fault = fault_of(turns, episode.talk.chat)
        if turns and not are_sent(row.images, turns[-1]):
            entry.fault = "its images are not those that its client sent"
    first = ledger.of(episode.sample_id)
    first.has_failed = bool(episode.failure)
    times = Counter(segment.request_id for row in rows for segment in row.segments)
    delivered = [turn.request_id for turn in episode.talk.turns if turn.is_delivered]
    if not episode.failure and any(times[request_id] != 1 for request_id in delivered):
        first.fault = "an answer that its client has is in no row, or in several"
    result = _result_of(episode)
    if result is not None:
        first.reward_is(ENVIRONMENT, result, rows[0].token_ids)


def shown_row(prompt: Prompt) -> dict[str, object]:
    """Return the row that an agent receives: messages as clients send them, images as data URLs."""
    images, messages = iter(prompt.images), list[dict[str, object]]()
    for message in prompt.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                {"type": "image_url", "image_url": {"url": next(images).data_address()}}
                if part == {"type": "image"}
                else part
                for part in as_parts(content)
            ]
        messages.append({**message, "content": content})
    return {**prompt.row, **({"prompt": messages} if messages else {})}


def _result_of(episode: AgentEpisode) -> RewardResult | None:
    """Return the agent's reward for its episode; None if it failed."""
    return None if episode.failure else episode.reward or RewardResult(0.0)


class CallJournal(Journal):
    """The journal of one rank and one step; nothing is written without a path.

    Each call is written as an episode of one turn, so readers of environment journals can read
    these too. A context is stored as the part appended to its parent call's context.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._numbers: dict[int, int] = {}

    def calls(self, made: Sequence[tuple[AgentEpisode, CalledTurn]]) -> None:
        """Write the answered turns of one round, each with its episode."""
        new = [pair for pair in made if pair[1].request_id not in self._numbers]
        for episode, turn in new:
            number = self._numbers[turn.request_id] = len(self._numbers)
            parent = None if turn.parent is None else self._numbers[turn.parent.request_id]
            self._write(
                number,
                "reset",
                episode=episode.sample_id,
                parent=parent,
                told=None,
                prompt_token_ids=turn.before.token_ids,
                **images_fact(chain(*(each.images for each in turn.before.later))),
            )
            self._turn((number, 0), turn.message.text, turn.context, turn.sampled)
        self.round([self._numbers[turn.request_id] for _, turn in new])
        self.leave()


@dataclass(slots=True)
class _AgentRun:
    """Rounds of the episodes of one call of the source."""

    agents: Agents
    parts: SourceParts
    all_episodes: Sequence[AgentEpisode]
    rules: AnswerRules
    journal: CallJournal
    waiting: list[WaitingCall] = field(default_factory=list)
    last_seconds: float = 0.0

    def go(self) -> None:
        """Run rounds until all episodes have ended, on all ranks if they share an engine."""
        endpoint = self.agents.endpoint
        for episode in self.all_episodes:
            episode.key = endpoint.open(episode)
        tasks = {e.number: (endpoint.base_url, e.key, e.row) for e in self.all_episodes}
        self.agents.pool.run(tasks, endpoint.events.put)
        while self._goes_on():
            self._gather()
            calls, self.waiting = self.waiting, []
            started = time.monotonic()
            made = answer_round(calls, self.rules, self._sample)
            self.last_seconds = time.monotonic() - started
            self.journal.calls(made)
        self.journal.leave(is_over=True)

    def close(self) -> None:
        """Close all keys; later calls are refused."""
        for episode in self.all_episodes:
            self.agents.endpoint.close_key(episode.key)
        self.journal.close()

    def _goes_on(self) -> bool:
        is_open = bool(self._open())
        if not self.parts.session.shares_engine:
            return is_open
        return any(self.parts.context.gather_objects(is_open))

    def _open(self) -> list[AgentEpisode]:
        return [episode for episode in self.all_episodes if episode.is_open]

    def _gather(self) -> None:
        """Wait until a round may begin."""
        quiet = min(_MAX_QUIET_SECONDS, max(_QUIET_SECONDS, _QUIET_SHARE * self.last_seconds))
        stall = _STALL_SHARE * self.parts.config.agent_timeout_seconds
        while True:
            seconds = quiet if self._is_ready() else stall if self.waiting else None
            try:
                event = self.agents.endpoint.events.get(timeout=seconds)
            except queue.Empty:
                return
            self._take(event)
            if not self._open():
                return

    def _is_ready(self) -> bool:
        """Return whether enough episodes wait for an answer."""
        self.waiting = [call for call in self.waiting if not call.is_gone]
        numbers = {call.episode.number for call in self.waiting}
        num_open, num_waiting = len(self._open()), len(numbers)
        if self.parts.config.late_join:
            return num_open <= 2 * num_waiting
        return num_open == num_waiting

    def _take(self, event: object) -> None:
        if isinstance(event, int):
            self.all_episodes[event].restart()
        elif isinstance(event, AgentEnd):
            self._end(self.all_episodes[event.number], event)
        elif isinstance(event, WaitingCall) and event.episode.is_open:  # else of an earlier step
            self.waiting.append(event)

    def _end(self, episode: AgentEpisode, end: AgentEnd) -> None:
        if not episode.is_open:
            return
        self.agents.endpoint.close_key(episode.key)
        # Errors of clients may quote the key.
        failure = end.failure.replace(episode.key, "sk-...")
        episode.reward, episode.failure = end.reward, failure
        if not episode.failure and not episode.talk.branches():
            episode.failure = "it ended without a call that was answered: there is nothing to train"
        if not episode.failure and end.reward is None and not self.parts.config.num_rewards:
            episode.failure = "it returned no reward, and there is no --reward_fn"
        self.journal.end(episode.sample_id, episode.reward, episode.failure or None)

    def _sample(
        self, params: SamplingParams, requests: list[GenerationRequest]
    ) -> list[Completion]:
        session = self.parts.session
        if session.shares_engine:
            return generate(session, params, requests)
        with phase("generate", session.context.timeout):
            return session.generate_local(requests, params)
