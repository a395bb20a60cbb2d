"""Environments of a run, and the source of responses of several turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightrft.config import ConfigError, RolloutOptions, StreamingOptions
from lightrft.datasets.chat_ids import ChatIds, TemplateRefusedError, special_ids
from lightrft.datasets.media import Modality, TextModality
from lightrft.datasets.suffix import TurnSuffix
from lightrft.engines.text import Tokenizer
from lightrft.engines.types import Completion, SamplingParams
from lightrft.records.rollout import Rollout
from lightrft.records.sample_ledger import SampleLedger
from lightrft.rewards.types import RewardResult
from lightrft.rollout.environments.calls import calls_in_turns
from lightrft.rollout.environments.episode import Episode
from lightrft.rollout.environments.episode_batch import EpisodeBatch
from lightrft.rollout.environments.journal import JOURNAL_FOLDER, Journal
from lightrft.rollout.environments.pool import EnvironmentPool
from lightrft.rollout.environments.specs import EnvironmentSpecs
from lightrft.rollout.environments.turns import Turns
from lightrft.rollout.scoring import finished_samples, open_scorer
from lightrft.rollout.source import SampleRequests, Samples, SampleTask, SourceParts, task_seeds
from lightrft.rollout.workers import EpisodeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnGroup = Callable[[list[Rollout]], None]
# Pause before a full environment is retried, if no episode goes on.
_ROOM_SECONDS = 0.1


class Environments:
    """Environments and tools of a run; a context manager that ends their workers.

    Args:
        config: Options `environment`, `tools` and those that depend on them.
        tokenizer: Tokenizer of the model.
        has_system: Whether prompts begin with a system message.
        folder: Folder of the run, for the journal; None writes none.
        pool: Running workers; None starts them.
        modality: Renderer and encoder of prompts; None is that of a text model.

    Attributes:
        spec: Merged specification of all environments.
        prompt_tokenizer: Tokenizer that renders prompts with the tools of their environments.
        special_ids: Ids that no text of an observation may have.

    Raises:
        ConfigError: The class, a tool or the chat template is invalid.
    """

    answers_calls = True

    def __init__(
        self,
        config: RolloutOptions,
        tokenizer: PreTrainedTokenizerBase,
        *,
        has_system: bool = False,
        folder: Path | None = None,
        pool: EnvironmentPool | None = None,
        modality: Modality | None = None,
    ) -> None:
        self.config = config
        modality = modality or TextModality(tokenizer)
        check_turns(modality, config)
        self.encoder = modality.encoder
        self.folder = None if folder is None else folder / JOURNAL_FOLDER
        self.pool = pool or EnvironmentPool(config, reads_images="image" in self.encoder.marks)
        self.special_ids = control_token_ids(tokenizer)
        try:
            self.specs = EnvironmentSpecs(
                self.pool.specs, tokenizer, config.tool_parser, modality.renderer
            )
            self.spec = self.specs.whole
            self.prompt_tokenizer: Tokenizer = modality.showing(self.specs.tokenizer)
            chat = ChatIds(tokenizer, modality)
            self.suffix = TurnSuffix(
                chat,
                tools=self.spec.schemas,
                has_system=has_system,
                is_conversation=self.spec.answers_turns,
                read_calls=calls_in_turns(chat, self.specs.parse),
            )
            if self.spec.schemas and not self.suffix.shows_tools and not has_system:
                raise ConfigError(
                    "the chat template does not show tools to the model: describe them in "
                    "--system_prompt, or give another template with --chat_template FILE"
                )
        except (TemplateRefusedError, ConfigError) as error:
            self.pool.close()
            raise ConfigError(str(error)) from error
        self.turns = Turns(config, self.suffix, self.spec)

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings before a run about differences between training and serving."""
        return tuple(
            f"chat template: {text}; training is exact on what was sampled, serving with this "
            "template shows the model another history"
            for text in self.suffix.differences
        )

    def source(self, parts: SourceParts) -> EpisodeSource:
        """Return the source of the episodes of a run."""
        return EpisodeSource(self, parts)

    def close(self) -> None:
        """End the workers; may be called twice."""
        self.pool.close()


class EpisodeSource:
    """Source of responses of several turns.

    Episodes of all ranks run in lockstep: a round samples one turn of each, and answers its calls
    while it samples the others. A round waits for all its tools on all ranks, so timing changes
    nothing. With `late_join` it waits for half of this rank's episodes, or for all that missed the
    previous round.

    Args:
        environments: Environments of the run.
        parts: Parts of the run.
    """

    def __init__(self, environments: Environments, parts: SourceParts) -> None:
        self.parts, self.environments = parts, environments
        self.pool, self.turns = environments.pool, environments.turns

    def new_episode(self, task: SampleTask, params: SamplingParams, number: int = 0) -> Episode:
        """Return an episode that has not begun.

        Args:
            task: Sample that it plays.
            params: Sampling parameters of the run.
            number: Number in the rank.
        """
        prompt, request_id, group_id, index = task
        environment = self.environments.specs.of(prompt.row)
        known = task_seeds(params, request_id, index) | {"max_turns": self.parts.config.max_turns}
        arguments = {name: known[name] for name in environment.spec.takes}
        return Episode(
            number=number,
            prompt=prompt,
            request_id=request_id * params.n + index,
            group_id=group_id,
            sample_id=group_id * params.n + index,
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
        params = self.turns.chat.with_end_of_turn(params)
        parts = self.parts, self.pool, self.turns
        return EpisodeBatch(*parts, params, episodes, journal, ledger)

    def sample(self, requests: SampleRequests) -> Samples:
        """Sample episodes, and score them.

        Raises:
            RewardError: An environment failed on some rank, and failures are not masked.
        """
        with open_scorer(self.parts, requests) as scorer:
            with requests.timer.stage("rollout"):
                rollouts, results = self.rollouts(requests, scorer.add)
            samples = finished_samples(
                self.parts,
                requests,
                rollouts,
                scorer=scorer,
                environment_results=results,
                special_ids=self.environments.special_ids,
            )
        return replace(samples, tool_names=self.environments.specs.tool_names)

    def rollouts(
        self, requests: SampleRequests, on_group: OnGroup
    ) -> tuple[list[Rollout], list[RewardResult | None]]:
        """Play episodes; return them and their environments' rewards (None: failed); collective.

        Args:
            requests: See `RolloutSource`.
            on_group: Callback for the responses to a prompt when the last of them has ended.
        """
        with requests.recording(self.parts):
            tasks = enumerate(requests.begin())
            episodes = [self.new_episode(task, requests.params, i) for i, task in tasks]
            journal = self._open_journal(requests, episodes)
            batch = self.batch(episodes, requests.params, journal=journal, ledger=requests.ledger)
            try:
                self._run(batch, on_group)
                journal.leave(is_over=True)
            finally:
                batch.journal.close()
        rollouts = [episode.as_rollout() for episode in batch.episodes]
        if self.parts.config.ledger_gate and requests.is_recorded:
            for rollout in rollouts:
                self.turns.check_observations(rollout, batch.ledger.of(rollout.sample_id))
        return rollouts, [episode.result for episode in batch.episodes]

    def _open_journal(self, requests: SampleRequests, episodes: list[Episode]) -> Journal:
        """Open the journal of this rank, with the turns that a killed process wrote."""
        return Journal.of_requests(
            self.environments.folder,
            requests,
            self.parts,
            prompts=[(episode.request_id, episode.prompt) for episode in episodes],
            environment=asdict(self.environments.spec),
        )

    def _run(self, batch: EpisodeBatch, on_group: OnGroup) -> None:
        """Play all rounds; collective.

        Episodes without room in their environment begin when the others have ended.
        """
        wave = batch
        seconds, gather = self.parts.config.tool_timeout_seconds, self.parts.context.gather_objects
        deadline = time.monotonic() + seconds
        while True:
            wave.reset()
            waiting = [episode for episode in wave.episodes if episode.no_room is not None]
            if any(gather(len(waiting) < len(wave.episodes))):
                deadline = time.monotonic() + seconds
            elif time.monotonic() > deadline:
                for episode in waiting:
                    wave.failed(episode, cast("EpisodeError", episode.no_room))
                    episode.no_room = None
                waiting = []
            else:
                time.sleep(_ROOM_SECONDS)
            begun = [episode for episode in wave.episodes if episode.no_room is None]
            self._play(batch, begun, on_group)
            batch.of(begun).finish()
            if not any(gather(bool(waiting))):
                return
            wave = batch.of(waiting)

    def _play(self, batch: EpisodeBatch, begun: Sequence[Episode], on_group: OnGroup) -> None:
        """Play begun episodes to their end."""
        wave = batch.of(begun)
        for episode in begun:
            batch.journal.reset(episode)
            batch.ledger.of(episode.sample_id).prompt = episode.prompt
        while wave.is_open_anywhere():
            batch.journal.leave()
            self._round(wave)
            wave.keep()
            for group in batch.finished_groups():
                on_group(group)

    def _round(self, batch: EpisodeBatch) -> None:
        """Sample a turn of each episode without pending calls, and make its calls; collective."""
        waiting = [e for e in batch.episodes if e.is_open and e.work is None]
        late = [e for e in batch.episodes if e.work is not None]
        take = partial(self._take, batch)
        batch.sample(batch.repeat(waiting, take), take)
        batch.journal.round([episode.sample_id for episode in waiting])

        def must_wait() -> bool:
            if not self.parts.config.late_join:
                return True
            if late and not any(e.work is not None for e in late):
                return False  # or those that missed the round would wait for calls that just began
            open_episodes = [e for e in batch.episodes if e.is_open]
            return 2 * (len(open_episodes) - len(batch.busy)) < len(open_episodes)

        batch.collect(must_wait)

    def _take(self, batch: EpisodeBatch, episode: Episode, completion: Completion) -> None:
        """Append a turn, and begin its calls while other turns are sampled."""
        batch.append(episode, completion)
        batch.journal.turn(episode)
        batch.parse_turn(episode)
        if episode.is_open:
            batch.begin([episode], batch.answer_calls)


def check_turns(modality: Modality, config: StreamingOptions) -> None:
    """Raise a ConfigError if episodes of several turns cannot show what the model reads."""
    modality.check_turns()
    if modality.encoder.reads_media and config.keeps_rows:
        raise ConfigError(
            "rollout_lag and stream_chunk keep rows with the media of their prompts alone, and "
            "episodes may show others: leave them out"
        )


def control_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return ids that no text of a tool may have: special tokens except the unknown token.

    The unknown token is included if it also serves as another special token.
    """
    names = cast("Mapping[str, str | list[str]]", tokenizer.special_tokens_map)
    texts = [
        text
        for name, value in names.items()
        if name != "unk_token"
        for text in ([value] if isinstance(value, str) else value)
    ]
    unknown = tokenizer.unk_token
    return special_ids(tokenizer) - (
        frozenset() if unknown is None or unknown in texts else {tokenizer.unk_token_id}
    )
