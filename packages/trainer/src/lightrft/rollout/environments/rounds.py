"""Episodes of all ranks in lock step: a round samples one turn of each, then answers its calls."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.media import VisionPrompts, as_parts
from lightrft.datasets.suffix import ChatTokenizer, TemplateRefusedError, TurnSuffix
from lightrft.datasets.types import Prompt
from lightrft.engines.ledger import hash_context
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.raw_completions import request_seed
from lightrft.engines.types import Completion, GenerationRequest, SamplingParams
from lightrft.records.media import encode_prompt, encode_row
from lightrft.records.rollout import AnsweredCall, Rollout
from lightrft.rewards.types import RewardError, RewardResult
from lightrft.rollout.environments.calls import MalformedCallError, ToolCall, check_call
from lightrft.rollout.environments.content import Parts, from_json
from lightrft.rollout.environments.episode import Episode
from lightrft.rollout.environments.journal import JOURNAL_FOLDER, Journal, journal_path
from lightrft.rollout.environments.kinds import Kinds, ToolTokenizer
from lightrft.rollout.environments.observations import ImageRefusedError, Observations
from lightrft.rollout.environments.play import TURN_STEP, ChangedAnswerError, Play
from lightrft.rollout.environments.pool import EnvironmentPool, EpisodeError, Host
from lightrft.strategy.strategy_base import StrategyBase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Work = Callable[[Episode, Host], None]
_IMAGE = {"type": "image"}
# More than a chat template writes before a turn, where it may begin to think for the model.
HEADER_TOKENS = 64


class Environments:
    """Samples responses of several turns; a context manager that ends its workers.

    Args:
        config: Its options `environment`, `tools` and those that say they act with them.
        tokenizer: Of the model.
        has_system: Whether prompts begin with a system message.
        folder: Of the run, for the journal; None writes none.
        pool: Workers that run already; None starts them.
        vision: Renders and encodes the prompts of a model that reads images; None for one of text.

    Attributes:
        encoder: Of a model that reads images; None for one of text.

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
        vision: VisionPrompts | None = None,
    ) -> None:
        self._config = config
        self.encoder = None if vision is None else vision.encoder
        check_family(self.encoder)
        self._tokenizer = tokenizer
        self._folder = None if folder is None else folder / JOURNAL_FOLDER
        self._pool = pool or EnvironmentPool(config, reads_images=vision is not None)
        self.special_ids = forging_ids(tokenizer)
        try:
            self._kinds = Kinds(self._pool.specs, tokenizer, config.tool_parser, vision)
            shown, self.spec = self._kinds.tokenizer, self._kinds.whole
            self.prompt_tokenizer: ToolTokenizer | VisionPrompts = shown
            if vision is not None:
                self.prompt_tokenizer = VisionPrompts(vision.encoder, shown)
            self._suffix = TurnSuffix(
                cast("ChatTokenizer", vision or tokenizer),
                tools=self.spec.schemas,
                has_system=has_system,
                is_conversation=self.spec.answers_turns,
                encoder=self.encoder,
            )
        except (TemplateRefusedError, ConfigError) as error:
            self._pool.close()
            raise ConfigError(str(error)) from error
        self._observations = Observations(config, tokenizer, self._suffix)
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
        return tuple(sorted(self.spec.functions))

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
        batch: int = 0,
        on_group: Callable[[list[Rollout]], None] | None = None,
    ) -> tuple[list[Rollout], list[RewardResult | None]]:
        """Whole episodes of this rank's prompts, `params.n` of each; collective.

        A round waits for all its tools on all ranks, so timing changes nothing; with `late_join`
        it waits for half of this rank's episodes, and the others join a later one.

        Args:
            strategy: Generates; the engine stays awake.
            prompts: This rank's; shares may be unequal or empty.
            request_ids: Number of each prompt; fixes its random numbers.
            params: Of one turn.
            group_ids: Of each prompt.
            step: Of the run, for the journal; None writes none.
            batch: Of prompts within the step, with dynamic sampling.
            on_group: Called with the responses to a prompt when the last of them has ended.

        Returns:
            The responses, prompt after prompt, and the reward of each by its environment; None
            where that failed.

        Raises:
            RewardError: An environment failed on some rank, and failures are not masked.
        """
        end = self._suffix.verdict.end_of_turn
        if end is not None:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, end))
        episodes = self._begin(prompts, request_ids, group_ids, params)
        journal = self._open_journal(strategy, episodes, params, step=step, batch=batch)
        play = Play(strategy, params, episodes, journal)
        try:
            problem = self._reset(play)
            for episode in episodes:
                journal.reset(episode)
            num_rounds = 0
            while self._agree(play, problem):
                journal.leave(num_rounds)
                problem = self._round(play, num_rounds)
                num_rounds += 1
                if on_group is not None:
                    for group in play.finished_groups():
                        on_group(group)
            journal.leave(num_rounds)
            results = self._finish(play)
        finally:
            journal.close()
        return [episode.as_rollout() for episode in episodes], results

    def _open_journal(
        self,
        strategy: StrategyBase,
        episodes: Sequence[Episode],
        params: SamplingParams,
        *,
        step: int | None,
        batch: int,
    ) -> Journal:
        """The journal of this rank; what all ranks recorded of the same step is followed."""
        rank, sync = strategy.get_rank(), strategy.last_weight_sync
        if self._folder is None or step is None:
            return Journal(None, {})
        prompts = [i for e in episodes for i in (e.request_id, *e.prompt.token_ids)]
        images = [image.digest for e in episodes for image in e.prompt.images]
        header = {
            "step": step,
            "batch": batch,
            "rank": rank,
            "world_size": strategy.world_size,
            "weights": 0 if sync is None else sync.engine_hash,
            "prompts": hash_context(prompts),
            "sampling": [params.seed, params.temperature, params.top_p, params.top_k],
            "environment": {**asdict(self.spec), "stateless": sorted(self.spec.stateless)},
            **({"images": sha256("".join(images).encode()).hexdigest()} if images else {}),
        }
        journal = Journal(journal_path(self._folder, step, batch, rank), header)
        # A round counts if the process of each rank wrote it down.
        journal.follow(min(strategy.gather_objects(len(journal.recorded.rounds))))
        return journal

    def _begin(
        self,
        prompts: Sequence[Prompt],
        request_ids: Sequence[int],
        group_ids: Sequence[int],
        params: SamplingParams,
    ) -> list[Episode]:
        episodes: list[Episode] = []
        for prompt, request_id, group_id in zip(prompts, request_ids, group_ids, strict=True):
            kind = self._kinds.of(prompt.row)
            for index in range(params.n):
                own = request_id * params.n + index
                row = dict(prompt.row)
                if kind.spec.takes_seed:
                    row.setdefault("seed", request_seed(params.seed, own, 0) % 2**31)
                episodes.append(
                    Episode(
                        number=len(episodes),
                        prompt=prompt,
                        request_id=own,
                        group_id=group_id,
                        sample_id=group_id * params.n + index,
                        row=row,
                        kind=kind,
                    )
                )
        return episodes

    def _begin_work(self, play: Play, episodes: Sequence[Episode], work: Work) -> None:
        """Does something to episodes on their hosts; `_collect` waits for it."""
        by_number = {episode.number: episode for episode in episodes}

        def on_host(number: int, host: Host) -> None:
            episode = by_number[number]
            known = play.journal.recorded.failures.get((episode.sample_id, len(episode.segments)))
            if known is not None and self._config.reward_failure == "mask":
                raise EpisodeError(known)  # a deadline is never decided twice
            work(episode, host)

        play.busy |= self._pool.begin(list(by_number), on_host)

    def _collect(self, play: Play, must_wait: Callable[[], bool]) -> Exception | None:
        """Waits for work on hosts; what is to be raised, unless failures are masked."""
        first: Exception | None = None
        while play.busy:
            for episode in play.episodes:
                future = play.busy.get(episode.number)
                if future is None or not future.done():
                    continue
                del play.busy[episode.number]
                try:
                    outcome = future.result()
                except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
                    first = first or error
                    continue
                if isinstance(outcome, ChangedAnswerError):
                    play.start_over(episode, outcome)
                elif outcome is not None:
                    problem = self._failed(play, episode, outcome)
                    first = first or problem
                elif episode.is_answered:
                    try:
                        self._observe(play, episode)
                    except ImageRefusedError as error:
                        problem = self._failed(play, episode, EpisodeError(str(error)))
                        first = first or problem
            if play.busy and must_wait():
                wait(play.busy.values(), return_when=FIRST_COMPLETED)
            elif play.busy:
                break
        return first

    def _each(self, play: Play, episodes: Sequence[Episode], work: Work) -> Exception | None:
        """Does something to episodes on their hosts, and waits for all of it."""
        self._begin_work(play, episodes, work)
        return self._collect(play, lambda: True)

    def _failed(self, play: Play, episode: Episode, error: EpisodeError) -> Exception | None:
        """Closes an episode; what is to be raised, unless failures are masked."""
        play.journal.failed(episode, str(error))
        episode.failure, episode.is_open = error, False
        if self._config.reward_failure == "mask":
            return None
        return RewardError(f"the environment failed for prompt {episode.prompt.id}: {error}")

    def _agree(self, play: Play, problem: Exception | None) -> bool:
        """Whether any rank has an open episode; raises on all ranks if one has a problem."""
        own = (
            sum(episode.is_open for episode in play.episodes),
            None if problem is None else str(problem),
            tuple(play.notes),
        )
        play.notes.clear()
        everyone: list[tuple[int, str | None, tuple[str, ...]]]
        everyone = play.strategy.gather_objects(own)
        for note in (note for _, _, notes in everyone for note in notes):
            play.strategy.print(note)
        if problem is not None:
            raise problem
        failed = [(rank, text) for rank, (_, text, _) in enumerate(everyone) if text is not None]
        if failed:
            raise RewardError(f"rank {failed[0][0]}: {failed[0][1]}")
        return any(count for count, _, _ in everyone)

    def _reset(self, play: Play) -> Exception | None:
        """Begins the episodes; each prompt gets what its `reset` says."""

        def reset(episode: Episode, host: Host) -> None:
            episode.host_on(host, seconds=self._config.tool_timeout_seconds)

        problem = self._each(play, play.episodes, reset)
        for episode in play.episodes:
            if episode.failure is None:
                prompt = episode.prompt
                try:
                    episode.prompt = self._with_told(episode, episode.told_parts)
                except EpisodeError as error:
                    problem = self._failed(play, episode, error) or problem
                before = play.journal.recorded.resets.get(episode.sample_id)
                has_images = episode.prompt.images[len(prompt.images) :]
                if has_images and before is not None and before["told"] != episode.told:
                    # Tokens alone do not tell one image from another.
                    play.start_over(episode, ChangedAnswerError("reset answered otherwise"))
        return problem

    def _with_told(self, episode: Episode, told: Parts) -> Prompt:
        """The prompt with texts and images at the end of its last user message."""
        prompt = episode.prompt
        messages = [dict(message) for message in prompt.messages]
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        content = messages[last]["content"]
        if isinstance(content, str) and all(isinstance(part, str) for part in told):
            messages[last]["content"] = "".join((content, *map(str, told)))
        else:
            own = ({"type": "text", "text": p} if isinstance(p, str) else _IMAGE for p in told)
            messages[last]["content"] = [*as_parts(content), *own]
        if not messages[last]["content"]:
            raise EpisodeError("the row has no prompt, and reset gave none")
        if not any(told):
            return prompt
        images = (*prompt.images, *(part for part in told if not isinstance(part, str)))
        found = self._rendered(episode, replace(prompt, images=images, messages=tuple(messages)))
        if len(found.token_ids) > self._config.prompt_max_len:
            raise EpisodeError(
                f"the prompt has {len(found.token_ids)} tokens with what reset added, more than "
                f"prompt_max_len {self._config.prompt_max_len}"
            )
        return found

    def _rendered(self, episode: Episode, prompt: Prompt) -> Prompt:
        """A prompt with text and ids of its messages and media."""
        tokenizer = episode.kind.tokenizer
        messages = [dict(message) for message in prompt.messages]
        text = cast(
            "str",
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        )
        if not prompt.images and not prompt.videos:
            ids = tuple(tokenizer([text], add_special_tokens=False)["input_ids"][0])
            return replace(prompt, text=text, token_ids=ids)
        try:
            encoded = encode_prompt(replace(prompt, text=text), self.encoder)
        except (ValueError, IndexError, StopIteration) as error:
            raise EpisodeError(f"the images of reset do not fit the prompt: {error}") from error
        return replace(prompt, text=text, token_ids=encoded.token_ids)

    def _round(self, play: Play, number: int) -> Exception | None:
        """One turn of each episode that waits for none, and the calls in it; collective."""
        recorded = play.journal.recorded.rounds
        if number < len(recorded):
            waiting, found = play.repeated(recorded[number])
        else:
            waiting = [e for e in play.episodes if e.is_open and e.number not in play.busy]
            found = play.strategy.gather_and_generate(
                play.one_turn, [self._request(play, e) for e in waiting], sleep_engine=False
            )
        for episode, completion in zip(waiting, found, strict=True):
            text = self._tokenizer.decode(completion.output_token_ids, skip_special_tokens=True)
            episode.add_turn(completion, str(text))
        play.journal.round(number, waiting)
        for episode in waiting:
            self._read(play, episode)
        self._begin_work(play, [e for e in waiting if e.is_open], partial(self._call, play))

        def must_wait() -> bool:
            open_episodes = [e for e in play.episodes if e.is_open]
            if number + 1 < len(recorded):
                own = recorded[number + 1]
                return any(e.number in play.busy and e.sample_id in own for e in open_episodes)
            if not self._config.late_join:
                return True
            return 2 * (len(open_episodes) - len(play.busy)) < len(open_episodes)

        return self._collect(play, must_wait)

    def _request(self, play: Play, episode: Episode) -> GenerationRequest:
        """Of the next turn, which has random numbers of its own in whatever round."""
        context = episode.context
        media = encode_row(episode.as_rollout(), self.encoder)
        if media is not None:
            media = media.continued(context[len(media.token_ids) :])
        return GenerationRequest(
            prompt_token_ids=context,
            request_id=episode.request_id + TURN_STEP * len(episode.segments),
            max_tokens=self._observations.turn_tokens(len(context), play.params.max_tokens),
            encoded=media,
        )

    def _read(self, play: Play, episode: Episode) -> None:
        """Finds the calls of the last turn, or ends the episode.

        A call whose answer nobody would see is not made.
        """
        turn = episode.last
        episode.pending.clear()
        calls, problem = ([], None) if turn is None else self._calls(episode, turn)
        may_follow = self.spec.answers_turns or self._may_follow(episode, max(1, len(calls)))
        if not (calls or problem) or not may_follow:
            episode.is_open = False
            return
        episode.pending += calls
        wrong = () if problem is None else (AnsweredCall("", {}, "malformed", as_error(problem)),)
        episode.answers.append([*wrong])
        for answer in wrong:
            play.journal.answer(episode, answer)

    def _may_follow(self, episode: Episode, count: int) -> bool:
        """Whether so many answers would be seen, and another turn can follow them."""
        turn = episode.last
        if turn is None or turn.finish_reason != "stop":
            return False
        if len(episode.segments) >= self._config.max_turns:
            return False
        size = len(episode.context)
        return self._observations.has_room(turn.output_token_ids, size, count)

    def _call(self, play: Play, episode: Episode, host: Host) -> None:
        """Makes the calls of the last turn, in their order. Runs in a thread: no tokenizer here.

        What the journal of a killed process says about them must be said again.
        """
        key = (episode.sample_id, len(episode.segments) - 1)
        known, answered = play.journal.recorded.answers.get(key, []), episode.answers.pop()
        if episode.pending:
            seconds = self._config.tool_timeout_seconds
            episode.host_on(host, seconds=seconds, stateless=self.spec.stateless)
        episode.answers.append(answered)
        for call in episode.pending:
            before = known[len(answered)] if len(answered) < len(known) else None
            answer = self._made(episode, call, host, before)
            if before is not None and before.said != answer.said:
                raise ChangedAnswerError(
                    f"turn {key[1]}: {call.name} answered {answer.text[:80]!r}, where the journal "
                    f"says {before.text[:80]!r}"
                )
            play.journal.answer(episode, answer)
            answered.append(answer)
            if answer.ends_episode:
                break

    def _observe(self, play: Play, episode: Episode) -> None:
        """Appends the answers of the last turn, or ends the episode."""
        turn, answers = episode.last, episode.answers[-1]
        if turn is None or answers[-1].ends_episode or not self._may_follow(episode, len(answers)):
            episode.is_open = False
            return
        found = self._observations.after(
            turn.output_token_ids, len(episode.context), [answer.shown for answer in answers]
        )
        if found is None:
            episode.is_open = False
            return
        episode.add_observation(found)
        play.journal.observation(episode)

    def _calls(self, episode: Episode, turn: Completion) -> tuple[list[ToolCall], str | None]:
        """The calls in a turn, or what is wrong with them."""
        is_ended = turn.finish_reason == "stop"
        ids = turn.output_token_ids[:-1] if is_ended else turn.output_token_ids
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        header = turn.prompt_token_ids[-HEADER_TOKENS:]
        before = self._tokenizer.decode(header, skip_special_tokens=False)
        try:
            return episode.kind.parse(str(text), is_ended, str(before)), None
        except MalformedCallError as error:
            return [], str(error)

    def _made(
        self, episode: Episode, call: ToolCall, host: Host, before: AnsweredCall | None
    ) -> AnsweredCall:
        """One call and its answer; never an exception of the tool."""
        try:
            arguments = check_call(call, episode.kind.functions)
        except MalformedCallError as error:
            return AnsweredCall("", {}, "malformed", as_error(str(error)))
        limit = self._config.max_tool_calls
        if limit is not None and episode.num_calls >= limit:
            text = as_error(f"no calls are left: {limit} were allowed")
            return AnsweredCall(call.name, arguments, "refused", text)
        # The journal names images and does not hold them.
        if before is not None and call.name in self.spec.stateless and self.encoder is None:
            return before
        start, deadline = time.perf_counter(), self._config.tool_timeout_seconds
        key, asked = str(episode.number), {"name": call.name, "arguments": arguments}
        answer = cast("dict[str, object]", host.ask("call", key, seconds=deadline, **asked))
        seconds, text = time.perf_counter() - start, str(answer["text"])
        if "error" in answer:
            return AnsweredCall(call.name, arguments, "error", text, seconds)
        content = from_json(answer.get("content"), f"an image that {call.name} answered with")
        is_last = "ends_episode" in answer
        return AnsweredCall(call.name, arguments, "ok", text, seconds, is_last, content)

    def _finish(self, play: Play) -> list[RewardResult | None]:
        """Rewards of the environments; None where one failed."""
        rewards: dict[int, RewardResult] = {}

        def reward(episode: Episode, host: Host) -> None:
            rewards[episode.number] = self._reward(episode, host)

        problem = self._each(play, [e for e in play.episodes if e.failure is None], reward)
        self._agree(play, problem)
        results = []
        for episode in play.episodes:
            found = None if episode.failure is not None else rewards[episode.number]
            play.journal.end(
                episode, None if found is None else [found.reward, dict(found.components)]
            )
            results.append(found)
        return results

    def _reward(self, episode: Episode, host: Host) -> RewardResult:
        key, seconds = str(episode.number), self._config.tool_timeout_seconds
        if not episode.kind.spec.has_reward:
            return RewardResult(0.0)
        episode.host_on(host, seconds=seconds, stateless=self.spec.stateless)
        answer = host.ask("reward", key, seconds=seconds)
        host.ask("close", key, seconds=seconds)
        if answer is None:
            raise EpisodeError("get_reward returned None")
        total, parts = cast("tuple[float, dict[str, float]]", answer)
        return RewardResult(total, {str(episode.kind.spec.name): total, **parts})


def check_family(encoder: PromptEncoder | None) -> None:
    """Raises a ConfigError if images cannot stand behind a prompt of a model's family."""
    if encoder is not None and encoder.family.attends_to_images:
        raise ConfigError(
            f"models of type {encoder.family.model_type} attend to images beside the text, which "
            "turns of an environment cannot extend: take another family, or leave environment and "
            "tools out"
        )


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
    told = json.dumps({"error": text}, ensure_ascii=False)
    return told.encode("utf-8", "replace").decode()  # halves of surrogate pairs
