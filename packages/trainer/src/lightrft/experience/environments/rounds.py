"""Episodes of all ranks in lock step: a round samples one turn of each, then answers its calls."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.suffix import ChatTokenizer, TemplateRefusedError, TurnSuffix
from lightrft.datasets.types import Prompt
from lightrft.engines.raw_completions import request_seed
from lightrft.engines.types import Completion, GenerationRequest, SamplingParams
from lightrft.experience.environments.calls import (
    MalformedCallError,
    ToolCall,
    check_call,
    choose_parser,
    whole_turn,
)
from lightrft.experience.environments.episode import Episode
from lightrft.experience.environments.journal import JOURNAL_FOLDER, Journal
from lightrft.experience.environments.pool import EnvironmentPool, EpisodeError, Host
from lightrft.experience.types import AnsweredCall, Rollout
from lightrft.rewards.types import RewardError, RewardResult
from lightrft.strategy.strategy_base import StrategyBase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Work = Callable[[Episode, Host], None]
# Every turn draws under a seed of its own.
_SEED_STEP = 2_000_003
# Of an observation that would not fit: less is not worth a turn.
MIN_OBSERVATION_TOKENS = 8


class ToolTokenizer:
    """A tokenizer whose chat template shows the tools.

    Args:
        tokenizer: Of the model.
        schemas: Of the tools.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, object]]
    ) -> None:
        self._tokenizer = tokenizer
        self._schemas = list(schemas) or None
        self.chat_template = cast("str | None", tokenizer.chat_template)

    def __call__(
        self, text: list[str], *, add_special_tokens: bool
    ) -> Mapping[str, list[list[int]]]:
        """Token ids under the key `input_ids`."""
        found: Mapping[str, list[list[int]]] = self._tokenizer(
            text, add_special_tokens=add_special_tokens
        )
        return found

    def apply_chat_template(
        self, conversation: list[dict[str, object]], *, tokenize: bool, add_generation_prompt: bool
    ) -> object:
        """The rendered conversation with the tools."""
        return self._tokenizer.apply_chat_template(
            conversation,
            tools=self._schemas,
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
        )


class Environments:
    """Samples responses of several turns; a context manager that ends its workers.

    Args:
        config: Its options `environment`, `tools` and those that say they act with them.
        tokenizer: Of the model.
        has_system: Whether prompts begin with a system message.
        folder: Of the run, for the journal; None writes none.
        pool: Workers that run already; None starts them.

    Raises:
        ConfigError: The class, a tool or the chat template is not what it must be.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        has_system: bool = False,
        folder: Path | None = None,
        pool: EnvironmentPool | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._folder = None if folder is None else folder / JOURNAL_FOLDER
        self._pool = pool or EnvironmentPool(config)
        self.spec = self._pool.spec
        self.prompt_tokenizer = ToolTokenizer(tokenizer, self.spec.schemas)
        self.special_ids = forging_ids(tokenizer)
        self._functions = self.spec.functions
        try:
            self._parse = (
                whole_turn
                if self.spec.answers_turns
                else choose_parser(config.tool_parser, tokenizer, self.spec.schemas)
            )
            self._suffix = TurnSuffix(
                cast("ChatTokenizer", tokenizer),
                tools=self.spec.schemas,
                has_system=has_system,
                is_conversation=self.spec.answers_turns,
            )
        except (TemplateRefusedError, ConfigError) as error:
            self._pool.close()
            raise ConfigError(str(error)) from error
        verdict = self._suffix.verdict
        if self.spec.schemas and not verdict.shows_tools and not has_system:
            self._pool.close()
            raise ConfigError(
                "the chat template does not show tools to the model: describe them in "
                "--system_prompt, or give another template with --chat_template FILE"
            )

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Of the tools, sorted."""
        return tuple(sorted(self._functions))

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth knowing before a run: where serving will differ from training."""
        return tuple(
            f"chat template: {text}; training is exact on what was sampled, serving with this "
            "template shows the model another history"
            for text in self._suffix.verdict.differences
        )

    def close(self) -> None:
        """Ends the workers; may be called twice."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def sample(
        self,
        strategy: StrategyBase,
        prompts: Sequence[Prompt],
        request_ids: Sequence[int],
        params: SamplingParams,
        *,
        group_ids: Sequence[int],
        step: int | None = None,
    ) -> tuple[list[Rollout], list[RewardResult | None]]:
        """Whole episodes of this rank's prompts, `params.n` of each; collective.

        A round waits for all its tools on all ranks, so timing changes nothing.

        Args:
            strategy: Generates; the engine stays awake.
            prompts: This rank's; shares may be unequal or empty.
            request_ids: Number of each prompt; fixes its random numbers.
            params: Of one turn.
            group_ids: Of each prompt.
            step: Of the run, for the journal; None writes none.

        Returns:
            The responses, prompt after prompt, and the reward of each by its environment; None
            where that failed.

        Raises:
            RewardError: An environment failed on some rank, and failures are not masked.
        """
        journal = Journal(self._folder, step=step, rank=strategy.get_rank())
        end = self._suffix.verdict.end_of_turn
        if end is not None:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, end))
        try:
            episodes = self._begin(prompts, request_ids, group_ids, params)
            problem = self._reset(episodes)
            for episode in episodes:
                journal.reset(episode)
            num_rounds = 0
            while self._agree(strategy, episodes, problem):
                problem = self._round(strategy, episodes, params, num_rounds)
                num_rounds += 1
                for episode in episodes:
                    if len(episode.segments) == num_rounds:
                        journal.turn(episode)
            results = self._finish(strategy, episodes, journal)
        finally:
            journal.close()
        return [episode.as_rollout() for episode in episodes], results

    def _begin(
        self,
        prompts: Sequence[Prompt],
        request_ids: Sequence[int],
        group_ids: Sequence[int],
        params: SamplingParams,
    ) -> list[Episode]:
        episodes: list[Episode] = []
        for prompt, request_id, group_id in zip(prompts, request_ids, group_ids, strict=True):
            for index in range(params.n):
                own = request_id * params.n + index
                row = dict(prompt.row)
                if self.spec.answers_turns:
                    row["prompt"] = [dict(message) for message in prompt.messages]
                if self.spec.takes_seed:
                    row.setdefault("seed", request_seed(params.seed, own, 0) % 2**31)
                episodes.append(
                    Episode(
                        number=len(episodes),
                        prompt=prompt,
                        request_id=own,
                        group_id=group_id,
                        sample_id=group_id * params.n + index,
                        row=row,
                    )
                )
        return episodes

    def _each(self, episodes: Sequence[Episode], work: Work) -> Exception | None:
        """Does something to episodes on their hosts; a failed one is closed, or is the answer."""
        by_number = {episode.number: episode for episode in episodes}

        def on_host(number: int, host: Host) -> None:
            work(by_number[number], host)

        first: Exception | None = None
        try:
            outcomes = self._pool.each(list(by_number), on_host)
        except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
            return error
        for episode, outcome in zip(episodes, outcomes, strict=True):
            if isinstance(outcome, EpisodeError):
                problem = self._failed(episode, outcome)
                first = first or problem
        return first

    def _failed(self, episode: Episode, error: EpisodeError) -> Exception | None:
        """Closes an episode; what is to be raised, unless failures are masked."""
        episode.failure, episode.is_open = error, False
        if self._config.reward_failure == "mask":
            return None
        return RewardError(f"the environment failed for prompt {episode.prompt.id}: {error}")

    def _agree(
        self, strategy: StrategyBase, episodes: Sequence[Episode], problem: Exception | None
    ) -> bool:
        """Whether any rank has an open episode; raises on all ranks if one has a problem."""
        own = (
            sum(episode.is_open for episode in episodes),
            None if problem is None else str(problem),
        )
        everyone: list[tuple[int, str | None]] = strategy.gather_objects(own)
        if problem is not None:
            raise problem
        failed = [(rank, text) for rank, (_, text) in enumerate(everyone) if text is not None]
        if failed:
            raise RewardError(f"rank {failed[0][0]}: {failed[0][1]}")
        return any(count for count, _ in everyone)

    def _reset(self, episodes: Sequence[Episode]) -> Exception | None:
        """Begins the episodes; each prompt gets what its `reset` says."""

        def reset(episode: Episode, host: Host) -> None:
            episode.host_on(host, seconds=self._config.tool_timeout_seconds)

        problem = self._each(episodes, reset)
        for episode in episodes:
            if episode.told and episode.failure is None:
                try:
                    episode.prompt = self._with_text(episode.prompt, episode.told)
                except EpisodeError as error:
                    problem = self._failed(episode, error) or problem
        return problem

    def _with_text(self, prompt: Prompt, told: str) -> Prompt:
        """The prompt with a text at the end of its last user message."""
        messages = [dict(message) for message in prompt.messages]
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        messages[last]["content"] = f"{messages[last]['content']}{told}"
        text = cast(
            "str",
            self.prompt_tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            ),
        )
        ids = tuple(self.prompt_tokenizer([text], add_special_tokens=False)["input_ids"][0])
        if len(ids) > self._config.prompt_max_len:
            raise EpisodeError(
                f"the prompt has {len(ids)} tokens with what reset added, more than prompt_max_len "
                f"{self._config.prompt_max_len}"
            )
        return replace(prompt, text=text, token_ids=ids, messages=tuple(messages))

    def _round(
        self, strategy: StrategyBase, episodes: Sequence[Episode], params: SamplingParams, turn: int
    ) -> Exception | None:
        """One turn of each open episode, and what answers it; collective."""
        waiting = [episode for episode in episodes if episode.is_open]
        limit = self._config.max_episode_tokens
        requests = [
            GenerationRequest(
                prompt_token_ids=(context := episode.context),
                request_id=episode.request_id,
                max_tokens=max(1, min(params.max_tokens, limit - len(context))),
            )
            for episode in waiting
        ]
        params = replace(params, n=1, seed=params.seed + turn * _SEED_STEP)
        found: list[Completion] = strategy.gather_and_generate(params, requests, sleep_engine=False)
        for episode, completion in zip(waiting, found, strict=True):
            text = self._tokenizer.decode(completion.output_token_ids, skip_special_tokens=True)
            episode.add_turn(completion, str(text))
            self._read(episode)
        waiting = [episode for episode in waiting if episode.is_open]
        problem = self._each(waiting, self._call)
        for episode in waiting:
            if episode.failure is None:
                self._observe(episode)
        return problem

    def _read(self, episode: Episode) -> None:
        """Finds the calls of the last turn, or ends the episode.

        A call whose answer nobody would see is not made.
        """
        turn = episode.last
        episode.pending = []
        calls, problem = ([], None) if turn is None else self._calls(turn)
        may_follow = self.spec.answers_turns or self._may_follow(episode, max(1, len(calls)))
        if not (calls or problem) or not may_follow:
            episode.is_open = False
            return
        episode.pending = calls
        wrong = () if problem is None else (AnsweredCall("", {}, "malformed", as_error(problem)),)
        episode.answers.append([*wrong])

    def _may_follow(self, episode: Episode, count: int) -> bool:
        """Whether so many answers would be seen, and another turn can follow them."""
        turn = episode.last
        if turn is None or turn.finish_reason != "stop":
            return False
        if len(episode.segments) >= self._config.max_turns:
            return False
        return self._room_for_text(episode, count) >= MIN_OBSERVATION_TOKENS * count

    def _room_for_text(self, episode: Episode, count: int) -> int:
        """Tokens that so many answers may have, so that one token of a turn can follow."""
        turn = () if episode.last is None else episode.last.output_token_ids
        frame = len(self._suffix.after(turn, [""] * count).token_ids)
        return self._config.max_episode_tokens - len(episode.context) - frame - 1

    def _call(self, episode: Episode, host: Host) -> None:
        """Makes the calls of the last turn, in their order. Runs in a thread: no tokenizer here."""
        if episode.pending:
            answered = episode.answers.pop()
            episode.host_on(host, seconds=self._config.tool_timeout_seconds)
            episode.answers.append(answered)
        for call in episode.pending:
            episode.answers[-1].append(self._made(episode, call, host))
            if episode.answers[-1][-1].ends_episode:
                break

    def _observe(self, episode: Episode) -> None:
        """Appends the answers of the last turn, or ends the episode."""
        turn, answers = episode.last, episode.answers[-1]
        if turn is None or answers[-1].ends_episode or not self._may_follow(episode, len(answers)):
            episode.is_open = False
            return
        room = self._room_for_text(episode, len(answers))
        share = min(self._config.max_observation_tokens, room // len(answers))
        texts = [self._cut(answer.text, share) for answer in answers]
        observation = self._suffix.after(turn.output_token_ids, texts)
        left = self._config.max_episode_tokens - len(episode.context)
        if len(observation.token_ids) >= left:  # a template that writes more than the text
            observation = self._suffix.after(turn.output_token_ids, ["[cut]"] * len(answers))
        episode.add_observation(observation.token_ids, observation.text_spans)

    def _calls(self, turn: Completion) -> tuple[list[ToolCall], str | None]:
        """The calls in a turn, or what is wrong with them."""
        is_ended = turn.finish_reason == "stop"
        ids = turn.output_token_ids[:-1] if is_ended else turn.output_token_ids
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        try:
            return self._parse(str(text), is_ended), None
        except MalformedCallError as error:
            return [], str(error)

    def _made(self, episode: Episode, call: ToolCall, host: Host) -> AnsweredCall:
        """One call and its answer; never an exception of the tool."""
        try:
            arguments = check_call(call, self._functions)
        except MalformedCallError as error:
            return AnsweredCall("", {}, "malformed", as_error(str(error)))
        limit = self._config.max_tool_calls
        if limit is not None and episode.num_calls >= limit:
            text = as_error(f"no calls are left: {limit} were allowed")
            return AnsweredCall(call.name, arguments, "refused", text)
        start, deadline = time.perf_counter(), self._config.tool_timeout_seconds
        key, asked = str(episode.number), {"name": call.name, "arguments": arguments}
        answer = cast("dict[str, str]", host.ask("call", key, seconds=deadline, **asked))
        seconds = time.perf_counter() - start
        if "error" in answer:
            return AnsweredCall(call.name, arguments, "error", answer["text"], seconds)
        is_last = "ends_episode" in answer
        return AnsweredCall(call.name, arguments, "ok", answer["text"], seconds, is_last)

    def _cut(self, text: str, max_tokens: int) -> str:
        """A text of at most so many tokens, and a mark where it was cut."""
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        found = cast("list[int]", ids["input_ids"])
        if len(found) <= max_tokens:
            return text
        mark = "[cut]"
        size = len(cast("list[int]", self._tokenizer(mark, add_special_tokens=False)["input_ids"]))
        kept = self._tokenizer.decode(found[: max(0, max_tokens - size)], skip_special_tokens=False)
        return f"{str(kept).rstrip(chr(0xFFFD))}{mark}"

    def _finish(
        self, strategy: StrategyBase, episodes: Sequence[Episode], journal: Journal
    ) -> list[RewardResult | None]:
        """Rewards of the environments; None where one failed."""
        rewards: dict[int, RewardResult] = {}

        def reward(episode: Episode, host: Host) -> None:
            rewards[episode.number] = self._reward(episode, host)

        problem = self._each([e for e in episodes if e.failure is None], reward)
        self._agree(strategy, (), problem)
        results = []
        for episode in episodes:
            found = None if episode.failure is not None else rewards[episode.number]
            journal.end(episode, None if found is None else [found.reward, dict(found.components)])
            results.append(found)
        return results

    def _reward(self, episode: Episode, host: Host) -> RewardResult:
        key, seconds = str(episode.number), self._config.tool_timeout_seconds
        if not self.spec.has_reward:
            return RewardResult(0.0)
        episode.host_on(host, seconds=seconds)
        answer = host.ask("reward", key, seconds=seconds)
        host.ask("close", key, seconds=seconds)
        if answer is None:
            raise EpisodeError("get_reward returned None")
        total, parts = cast("tuple[float, dict[str, float]]", answer)
        return RewardResult(total, {str(self.spec.name): total, **parts})


def forging_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that no text of a tool may have: special tokens, but not the one of unknown characters.

    That one stays among them where it serves as another special token, too.
    """
    names = cast("Mapping[str, str | list[str]]", tokenizer.special_tokens_map)
    texts = [
        text
        for name, value in names.items()
        if name != "unk_token"
        for text in ([value] if isinstance(value, str) else value)
    ]
    unknown = tokenizer.unk_token
    return frozenset(tokenizer.all_special_ids) - (
        frozenset() if unknown is None or unknown in texts else {tokenizer.unk_token_id}
    )


def as_error(text: str) -> str:
    """An answer that says what was wrong."""
    return json.dumps({"error": text}, ensure_ascii=False)
