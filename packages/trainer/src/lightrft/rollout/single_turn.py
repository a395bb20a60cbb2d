"""Single-turn responses: one request per prompt, with completions scored group by group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING, cast

from lightrft.config import SamplingOptions
from lightrft.config.registry import TURN_SOURCES
from lightrft.datasets.types import Prompt
from lightrft.engines.media.text_encoder import TEXT_ENCODER, Encoder
from lightrft.engines.types import Completion, GenerationRequest, SamplingParams
from lightrft.records.media import media_request
from lightrft.records.rollout import Rollout, TurnSegment
from lightrft.rollout.scoring import finished_samples, open_scorer
from lightrft.rollout.source import SampleRequests, Samples, SourceParts
from lightrft.strategy.distributed.context import report_progress
from lightrft.strategy.engine.generation import PromptBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.strategy.engine.session import EngineSession, OnFinished

# Number of prompts whose media are decoded in one call of the processor.
_TOGETHER = 32


class SingleTurnSource:
    """Source of responses that one engine call samples.

    Args:
        parts: Parts of the run.
    """

    def __init__(self, parts: SourceParts) -> None:
        self._parts = parts

    @staticmethod
    def first_temperature(config: SamplingOptions, prompts: Sequence[Prompt] = ()) -> float | None:
        """Return a separate temperature of the first token; None here.

        Args:
            config: Options of sampling.
            prompts: Prompts to complete in this way.

        Raises:
            ConfigError: A prompt cannot be completed in this way.
        """
        return None

    def sample(self, requests: SampleRequests) -> Samples:
        """Generate and score one group of responses per prompt."""
        parts, prompts, ids = self._parts, requests.prompts, requests.request_ids
        requests.ledger.ask(prompts, requests.positions, requests.params.n, ids)
        with open_scorer(parts, requests) as scorer:
            groups = RolloutGroups(
                prompts,
                ids,
                group_ids=requests.positions,
                group_size=requests.params.n,
                decoder=parts.decoder,
                on_group=scorer.add,
            )
            asked = build_requests(prompts, ids, parts.encoder)
            with requests.timer.stage("rollout"), requests.recording(parts):
                rollouts = self._generate(groups, asked, requests.params)
            return finished_samples(parts, requests, rollouts, scorer=scorer)

    def _generate(
        self, groups: RolloutGroups, asked: Sequence[GenerationRequest], params: SamplingParams
    ) -> list[Rollout]:
        """Return this rank's rollouts; complete groups are scored while others are generated."""
        total, done = len(asked) * params.n, 0

        def take(finished: Sequence[Completion]) -> None:
            nonlocal done
            groups.add(finished)
            done += len(finished)
            report_progress("generate", done, total)

        completions = generate(self._parts.session, params, asked, take)
        report_progress("generate", 0, 0)
        return groups.in_order(completions)


@cache
def turn_source(use_fire: bool) -> type[SingleTurnSource]:
    """Return the source of single-turn responses, with or without a hot first token."""
    return cast("type[SingleTurnSource]", TURN_SOURCES.load("fire" if use_fire else "plain"))


def generate(
    session: EngineSession,
    params: SamplingParams,
    requests: Sequence[GenerationRequest],
    on_finished: OnFinished | None = None,
) -> list[Completion]:
    """Return completions of this rank's requests; collective. The engine stays awake."""
    return session.gather_and_generate(
        PromptBatch(requests), params, on_finished, sleep_engine=False
    )


def build_requests(
    prompts: Sequence[Prompt], request_ids: Sequence[int], encoder: Encoder = TEXT_ENCODER
) -> list[GenerationRequest]:
    """Return one request per prompt; the request id determines its random numbers.

    Args:
        prompts, request_ids: Prompts, and one id per prompt.
        encoder: Encoder of prompts with media.
    """
    if encoder.reads_media:
        shown = [(prompt.text, prompt.media) for prompt in prompts if prompt.media]
        for start in range(0, len(shown), _TOGETHER):
            encoder.kept_all(shown[start : start + _TOGETHER])
    pairs = zip(prompts, request_ids, strict=True)
    return [media_request(prompt, request_id, encoder) for prompt, request_id in pairs]


@dataclass(slots=True)
class RolloutGroups:
    """Groups of one engine call, each built when its last completion arrives.

    Args:
        prompts: Prompts of this rank.
        request_ids, group_ids: Ids of each prompt.
        group_size: Number of completions per prompt.
        decoder: Decoder of sampled ids.
        on_group: Callback for every group that `add` completes, or None.
    """

    prompts: Sequence[Prompt]
    request_ids: Sequence[int]
    group_ids: Sequence[int]
    group_size: int
    decoder: PreTrainedTokenizerBase
    on_group: Callable[[list[Rollout]], None] | None = None
    _open: dict[int, list[Completion]] = field(default_factory=dict, init=False)
    _done: dict[int, list[Rollout]] = field(default_factory=dict, init=False)

    def add(self, completions: Sequence[Completion]) -> None:
        """Add completions in any order; `in_order` reports faults in them."""
        for completion in completions:
            if completion.request_id not in self.request_ids or completion.finish_reason == "abort":
                continue
            index = self.request_ids.index(completion.request_id)
            members = self._open.setdefault(index, [])
            members.append(completion)
            if len(members) == self.group_size:
                self._done[index] = self._group(index, self._open.pop(index))
                if self.on_group is not None:
                    self.on_group(self._done[index])

    def in_order(self, completions: Sequence[Completion]) -> list[Rollout]:
        """Return all rollouts, prompt-major; reuse the objects that `add` built.

        Args:
            completions: All completions, as the engine returned them.

        Raises:
            RuntimeError: The engine returned another number or order of completions than
                requested, or aborted a completion.
        """
        _check_completions(completions, self.request_ids, self.group_size)
        rollouts: list[Rollout] = []
        for index in range(len(self.prompts)):
            start = index * self.group_size
            members = completions[start : start + self.group_size]
            rollouts += self._done.get(index) or self._group(index, members)
        return rollouts

    def _group(self, index: int, completions: Sequence[Completion]) -> list[Rollout]:
        group_id = self.group_ids[index]
        return [
            Rollout(
                prompt=self.prompts[index],
                completion=item,
                group_id=group_id,
                sample_id=group_id * self.group_size + item.sample_index,
                response_text=self.decoder.decode(item.output_token_ids, skip_special_tokens=True),
                segments=(TurnSegment(item.request_id, item.sample_index),),
            )
            for item in sorted(completions, key=lambda c: c.sample_index)
        ]


def _check_completions(
    completions: Sequence[Completion], request_ids: Sequence[int], group_size: int
) -> None:
    expected = [(request_id, index) for request_id in request_ids for index in range(group_size)]
    received = [(item.request_id, item.sample_index) for item in completions]
    if received != expected:
        pairs = enumerate(zip_longest(received, expected))
        position, (got, wanted) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        raise RuntimeError(
            f"the engine must return {group_size} completions for each of {len(request_ids)} "
            f"prompts, prompt after prompt: got {len(received)} completions, first difference at "
            f"position {position}: got (request, sample) {got}, expected {wanted}"
        )
    aborted = [item.request_id for item in completions if item.finish_reason == "abort"]
    if aborted:
        raise RuntimeError(
            f"the engine aborted {len(aborted)} completions (requests {aborted[:10]}); an aborted "
            "completion is not a sample of the policy. Search the engine's output for the cause"
        )
