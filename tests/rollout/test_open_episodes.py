"""Episodes that go on over several steps: what they sample, when, and that nobody notices how."""

import copy
import hashlib
import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from tests.datasets import chat_families as families
from tests.records.exchange_cases import ThreadRank, ThreadWorld
from tests.rollout.scripted_session import Session
from tests.rollout.stages import check_rows, load_rows, options_of, pool_of

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.experience.ledger_gate import rebuild
from lightrft.records.rollout import AnsweredCall
from lightrft.rewards.types import RewardResult
from lightrft.rollout.environments import specs
from lightrft.rollout.environments.environments import Environments
from lightrft.rollout.in_flight import from_parts, to_bytes
from lightrft.rollout.open_groups import (
    NOTHING_OPEN,
    EpisodeState,
    OpenGroup,
    OpenSample,
    StreamState,
)
from lightrft.rollout.sampler import RolloutSampler, build_source, training_params
from lightrft.rollout.source import InFlight, SampleRequests, SourceParts, own_positions
from lightrft.rollout.streaming import OpenTurns, ResponsePart
from lightrft.strategy.distributed.deadlines import StepTimer

CASES = Path(__file__).with_name("mixing_environment.py")
TOKENIZER = families.family_tokenizer("Qwen2.5")
HEADER = TOKENIZER("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
SIZE, WANTED, NUM_PROMPTS, LIMIT = 2, 2, 22, 150


def config_of(kind="Mixer", **options):
    given = {
        "environment": f"{CASES}:{kind}",
        "n_samples_per_prompt": SIZE,
        "train_batch_size": SIZE * WANTED,
        "micro_train_batch_size": 1,
        "generate_max_len": LIMIT,
        "max_turns": 4,
        "max_len": 3000,
        "environment_workers": 2,
        "max_staleness": 3,
    }
    return TrainConfig(**options_of(WANTED, **{**given, **options}))


def digest(*items):
    return int.from_bytes(hashlib.sha256(repr(items).encode()).digest()[:8], "big")


def say(request, index):
    """The rest of a turn, which follows from all before it; some are long, and some are cut."""
    ids = list(request.prompt_token_ids)
    start = max(i for i in range(len(ids)) if ids[i : i + len(HEADER)] == HEADER) + len(HEADER)
    before, so_far = ids[:start], ids[start:]
    number = digest(before)
    words = "ab" * (number % 12 if number % 5 else 20 + number % 60)
    call = json.dumps({"name": "mix", "arguments": {"number": number % 1009}})
    text = f"{words}\n<tool_call>\n{call}\n</tool_call>" if number % 4 else f"{words} done"
    turn = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
    assert turn[: len(so_far)] == so_far
    rest = turn[len(so_far) :]
    places = range(len(so_far), len(turn))
    return rest, [-(1 + digest(number, place) % 1000) / 256 for place in places]


class Lengths:
    name, needs_labels = "lengths", False

    def score(self, prompts, responses, labels, columns):
        return [RewardResult(float(len(text) % 5)) for text in responses]


class Player:
    """One rank of a run: it samples step after step."""

    def __init__(self, config, tmp_path, context=None, *, reward=None):
        self.config = config
        self.context = context or ThreadRank(ThreadWorld(1), 0)
        # Ranks are threads here, and a tokenizer is no thread's while it splits special tokens.
        tokenizer = copy.deepcopy(TOKENIZER)
        self.environments = Environments(config, tokenizer, pool=pool_of(config, self.context.rank))
        self.session = Session(self.context, say, TOKENIZER.eos_token_id)
        parts = SourceParts(self.session, config, tokenizer, reward or Lengths())
        self.batches = self.environments.source(parts)
        self.source = build_source(parts, self.batches, needs_greedy=False)
        own = tmp_path / str(self.context.rank)  # ranks are threads: each writes its own file
        own.mkdir(exist_ok=True)
        rows = [{"input": f"Mix {i}.", "target": i} for i in range(NUM_PROMPTS)]
        self.prompts = load_rows(own, rows, self.environments.prompt_tokenizer, config)
        self.knows_end = True
        self.params = training_params(config)
        self.stream, self.first, self.drawn, self.number = NOTHING_OPEN, 0, 0, 0

    def draw(self):
        if self.drawn >= len(self.prompts):
            return ()
        positions = own_positions(self.context, WANTED, first=self.drawn)
        self.drawn += WANTED
        return [self.prompts[i] for i in positions]

    def whole(self):
        """All episodes in one synchronous step."""
        count = len(self.prompts)
        return self.source.sample(SampleRequests(self.prompts, range(count), count, self.params))

    def step(self):
        self.session.engine.set_weights_version(self.number)
        left = (len(self.prompts) // WANTED - self.number) * WANTED
        num_open = self.stream.num_groups
        has_all = self.knows_end and num_open >= WANTED and num_open + WANTED > left
        samples = self.source.sample(
            SampleRequests(
                () if has_all else self.draw(),
                own_positions(self.context, WANTED),
                WANTED,
                self.params,
                self.first,
                next_prompts=self.draw,
                stream=self.stream,
                most_groups=left if self.knows_end else None,
            )
        )
        self.number += 1
        self.first, self.stream = self.first + samples.num_prompts, samples.stream
        return samples

    def step_or_again(self):
        """A step, which is done again if the engine fails."""
        before = self.stream, self.first, self.drawn
        try:
            return self.step()
        except OSError:
            self.stream, self.first, self.drawn = before
            self.session.engine.ledger.take()
            return self.step()

    def resumed(self):
        """The same in another process, from a checkpoint."""
        part = to_bytes(InFlight(self.first, stream=self.stream), self.context.rank)
        found = from_parts([part], self.first, rank=0, world_size=1)
        assert found.stream == self.stream
        self.stream = found.stream


def content(rollout):
    found = rollout.completion
    return (
        found.prompt_token_ids,
        found.output_token_ids,
        found.output_logprobs,
        found.is_sampled,
        found.finish_reason,
        rollout.response_text,
        rollout.messages,
    )


def paid(item):
    """Parts of the reward; its sum has the name of the class."""
    return {name: value for name, value in item.components.items() if name.islower()}


def by_episode(samples):
    """Content and reward, by prompt and place in its group."""
    return {
        (item.rollout.prompt.id, item.rollout.sample_id % SIZE): (
            content(item.rollout),
            item.reward,
            paid(item),
        )
        for item in samples.scored
    }


def turns_of(played):
    """Tokens that the model sampled in each turn."""
    return [len(list(run)) for is_own, run in groupby(played[0][3]) if is_own]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Every episode as the synchronous source plays it."""
    return by_episode(Player(config_of(), tmp_path_factory.mktemp("whole")).whole())


def play(player, breaks=()):
    found = []
    for number in range(len(player.prompts) // WANTED):
        if number in breaks:
            player.resumed()
        found.append(player.step())
    assert player.stream.groups == ()
    return found


def ages_of(turns, chunk, lag):
    """After how many rounds each token is sampled, and the episode has ended, by the rule alone.

    Args:
        turns: Tokens that the model samples in each.
        lag: Rounds from a turn to the next one, or to the end.
    """
    ages, age, left = [], 0, chunk
    for length in turns:
        for _ in range(length):
            age, left = (age, left) if left else (age + 1, chunk)
            ages.append(age)
            left -= 1
        age, left = age + lag, chunk if lag else left
    return ages, age


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_have_the_versions_of_the_rule_and_whole_episodes_are_trained_in_time(
    tmp_path, whole, seed, lag
):
    rng = np.random.default_rng(seed)
    chunk, bound = int(rng.integers(9, 150)), int(rng.integers(max(1, lag), 4))
    in_flight = int(rng.integers(WANTED, (bound + 1) * WANTED + 1))
    options = {"stream_chunk": chunk, "stream_prompts": in_flight, "max_staleness": bound}
    player = Player(config_of(tool_lag=lag, **options), tmp_path)
    ages = {key: ages_of(turns_of(found), chunk, lag) for key, found in whole.items()}
    begun, trained = {}, []
    for number in range(1, NUM_PROMPTS // WANTED + 1):
        samples = player.step()
        played = by_episode(samples)
        for item in samples.scored:
            rollout = item.rollout
            key = rollout.prompt.id, rollout.sample_id % SIZE
            assert played[key] == whole[key]
            first = begun.get(rollout.prompt.id, number)
            assert number - first <= bound
            own = [version for version in rollout.token_versions if version >= 0]
            assert own == [min(first + age, number) - 1 for age in ages[key][0]]
            check_rows([rollout], samples.evidence)
            right = rebuild(rollout.sample_id, samples.evidence)
            num_prompt = len(rollout.completion.prompt_token_ids)
            assert right.versions[num_prompt:].tolist() == list(rollout.token_versions)
            assert samples.evidence.ledger.entries[rollout.sample_id].problem == ""
            trained.append(key)
        begun = {group.prompt.id: group.begun for group in player.stream.groups if group.begun}
        assert len(begun) <= in_flight
        for group in player.stream.groups:
            for index, sample in enumerate(group.samples):
                since = number + 1 - group.begun if group.begun else 0
                own, end = ages[group.prompt.id, index]
                assert sample.num_sampled == sum(age < since for age in own)
                assert (sample.finish_reason is not None) == (end < since)
    assert sorted(trained) == sorted(whole)


def facts(samples):
    """All that a step trains on, in its order, but for the time that calls took."""
    ordered = sorted(samples.scored, key=lambda item: item.rollout.sample_id)
    return [
        (
            content(item.rollout),
            item.rollout.token_versions,
            [segment.request_id for segment in item.rollout.segments],
            item.reward,
            paid(item),
            item.is_masked,
        )
        for item in ordered
    ]


STREAM = {"stream_chunk": 50, "stream_prompts": 6, "max_staleness": 3}


# A chunk holds most turns, so that episodes wait for answers and not for their chunks.
LATE = {"stream_chunk": 120, "stream_prompts": 14, "max_staleness": 9, "tool_lag": 2}


@pytest.fixture(scope="module", params=[STREAM, LATE], ids=["waited for", "late"])
def stream(request):
    return request.param


@pytest.fixture(scope="module")
def streamed(stream, tmp_path_factory):
    """A run that nothing disturbs, step by step."""
    found = play(Player(config_of(**stream), tmp_path_factory.mktemp("streamed")))
    assert sum(len(set(f[1]) - {-1}) > 2 for step in map(facts, found) for f in step) > 2
    return list(map(facts, found))


def test_delays_of_tools_change_nothing(tmp_path, stream, streamed):
    player = Player(config_of("Late", **stream), tmp_path)
    assert list(map(facts, play(player)[:7])) == streamed[:7]


def test_a_resumed_run_goes_on_in_the_middle_of_episodes(tmp_path, stream, streamed):
    found = play(Player(config_of(**stream), tmp_path), range(11))
    assert list(map(facts, found)) == streamed


def test_open_episodes_keep_the_prompt_that_they_began_with(
    tmp_path, stream, streamed, monkeypatch
):
    """A chat template may write another text by now, of the date, say."""
    player = Player(config_of(**stream), tmp_path)
    for _ in range(4):
        player.step()
    is_open = {group.prompt.id for group in player.stream.groups if group.begun}
    render = specs.ToolTokenizer.apply_chat_template

    def another_day(tokenizer, *given, **named):
        return f"Monday. {render(tokenizer, *given, **named)}"

    monkeypatch.setattr(specs.ToolTokenizer, "apply_chat_template", another_day)
    later = Player(config_of(**stream), tmp_path)
    player.resumed()
    later.stream, later.first, later.drawn = player.stream, player.first, player.drawn
    later.number, seen = 4, set()
    expected = [fact[0] for step in streamed for fact in step]
    while not is_open <= seen:
        samples = later.step()
        for item in samples.scored:
            if item.rollout.prompt.id in is_open:
                seen.add(item.rollout.prompt.id)
                assert content(item.rollout) in expected
                check_rows([item.rollout], samples.evidence)


def test_two_ranks_play_the_episodes_of_one_which_goes_on_with_them(tmp_path, stream, streamed):
    """Five steps on two ranks, and the rest on one."""
    world = ThreadWorld(2)

    def one_rank(context):
        player = Player(config_of(**stream), tmp_path, context)
        steps = [facts(player.step()) for _ in range(5)]
        return steps, to_bytes(InFlight(player.first, stream=player.stream), context.rank), player

    (first, second), parts, (before, _) = zip(*world.run(one_rank), strict=True)
    for mine, theirs, expected in zip(first, second, streamed, strict=False):
        key = lambda fact: fact[0][0]  # noqa: E731 - the prompt names the episode
        assert sorted(mine + theirs, key=key) == sorted(expected, key=key)
    player = Player(config_of(**stream), tmp_path)
    player.first, player.drawn, player.number = before.first, before.drawn, 5
    player.stream = from_parts(parts, player.first, rank=0, world_size=1).stream
    while player.number < len(streamed):
        assert facts(player.step()) == streamed[player.number - 1]


@pytest.mark.full
def test_an_evaluation_between_steps_disturbs_no_open_episode(tmp_path, stream, streamed):
    player, evaluated = Player(config_of(**stream), tmp_path), []
    for expected in streamed:
        assert facts(player.step()) == expected
        player.session.engine.ledger.take()
        prompts = player.prompts[:5]
        requests = SampleRequests(prompts, range(5), 5, player.params, is_recorded=False)
        evaluated.append(by_episode(player.batches.sample(requests)))
    assert evaluated == evaluated[:1] * len(streamed)


FORMS = {
    "turns": {"environment": f"skyrl_gym:{CASES}:Talker"},
    "tools alone": {"environment": None, "tools": (f"{CASES}:mix",)},
}


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_environments_stay_open_too(tmp_path, form):
    plain = Player(config_of(**FORMS[form]), tmp_path)
    expected, found = by_episode(plain.whole()), {}
    player = Player(config_of(**STREAM, **FORMS[form]), tmp_path)
    for samples in play(player, (2, 5, 6)):
        found |= by_episode(samples)
    assert found == expected
    assert any(len(each[0][-1]) > 4 for each in found.values())


def test_groups_that_teach_nothing_are_left_out_in_resumed_runs_alike(tmp_path):
    """Dynamic sampling: a batch of it is a round."""
    options = {"dynamic_sampling": True, "max_num_gen_batches": 3, **STREAM}
    runs = []
    for breaks in ((), (1, 2)):
        player, steps = Player(config_of(**options), tmp_path, reward=Lengths()), []
        for number in range(3):
            if number in breaks:
                player.resumed()
            player.knows_end = False
            samples = player.step()
            steps.append((facts(samples), samples.selection.num_groups, samples.num_rounds))
        runs.append(steps)
    assert runs[0] == runs[1]
    assert sum(each[1] for each in runs[0]) >= 3 * WANTED


def test_a_step_that_was_given_up_is_sampled_again_with_the_same_numbers(
    tmp_path, stream, streamed
):
    """The engine fails after turns have ended, whose calls are under way."""
    player, found = Player(config_of("Late", **stream), tmp_path), []
    generate = player.session.gather_and_generate
    for number in range(len(streamed)):
        left = [number % 4]

        def failing(*given, left=left, **named):
            made = generate(*given, **named)
            left[0] -= 1
            if left[0] == -1:
                raise OSError("lost")
            return made

        player.session.gather_and_generate = failing
        found.append(player.step_or_again())
    assert list(map(facts, found)) == streamed


def test_an_environment_that_answers_otherwise_after_a_resume_starts_over(
    tmp_path, stream, streamed, monkeypatch
):
    mood = tmp_path.parent / "mood"  # the workers of both forms look there
    mood.unlink(missing_ok=True)
    monkeypatch.setenv("MOOD", str(mood))
    player = Player(config_of("Moody", environment_env=("MOOD",), **stream), tmp_path)
    found = [player.step() for _ in range(4)]
    while not any(
        sample.finish_reason is None and sample.episode.answers
        for group in player.stream.groups
        for sample in group.samples
    ):
        found.append(player.step())
    assert list(map(facts, found)) == streamed[: len(found)]
    mood.touch()
    player.resumed()
    after = [player.step()]
    said = player.context.world.said
    open_prompts = {item.rollout.prompt.id for item in after[0].scored}
    open_prompts |= {group.prompt.id for group in player.stream.groups}
    names = {f"sample {index} of prompt {i}" for i in open_prompts for index in range(SIZE)}
    assert said
    assert {text.split(" starts over: mix answered otherwise")[0] for text in said} <= names
    while player.number < len(streamed):
        after.append(player.step())
    restarts = 0
    for samples in after:
        for item in samples.scored:
            restarts += item.rollout.conversation.num_restarts
            check_rows([item.rollout], samples.evidence)
            assert samples.evidence.ledger.entries[item.rollout.sample_id].problem == ""
    assert restarts == len(said)
    assert player.stream.groups == ()


class Reading(Lengths):
    """Pays what environments kept."""

    reads_environments = True

    def score(self, prompts, responses, labels, columns):
        return [
            RewardResult(float(each.attributes["state"]["json"]))
            for each in columns["environments"]
        ]


@pytest.mark.full
def test_reward_functions_read_environments_that_ended_in_earlier_steps(tmp_path):
    player = Player(config_of(**STREAM), tmp_path, reward=Reading())
    for samples in play(player, range(11)):
        for item in samples.scored:
            state = round(item.reward - item.components["Mixer"])
            assert state % 7 == item.components["mixed"]


def test_an_observation_that_is_not_the_answer_is_found(tmp_path):
    player = Player(config_of(**STREAM), tmp_path)
    player.step()
    changed = []

    def other(sample):
        seen = sample.segments[-1].observation if sample.segments else ()
        if not seen or changed or sample.finish_reason:
            return sample
        changed.append(True)
        place = len(sample.token_ids) - len(seen) + sample.segments[-1].text_spans[0][0]
        ids = list(sample.token_ids)
        ids[place] += 1
        segment = replace(sample.segments[-1], observation=tuple(ids[len(ids) - len(seen) :]))
        segments = (*sample.segments[:-1], segment)
        return replace(sample, token_ids=tuple(ids), segments=segments)

    problems = []
    while player.number < 11:
        groups = tuple(
            replace(group, samples=tuple(map(other, group.samples)))
            for group in player.stream.groups
        )
        player.stream = replace(player.stream, groups=groups)
        samples = player.step()
        problems += [e.problem for e in samples.evidence.ledger.entries.values() if e.problem]
    assert changed
    assert [text.split(": ")[1] for text in problems] == [
        "what the model was shown is not what was answered"
    ]


def test_tool_lag_acts_with_episodes_of_a_stream_and_opens_more_of_them():
    assert config_of(**STREAM).num_prompts_in_flight == 6
    given = {"stream_chunk": 50, "max_staleness": 9}
    assert config_of(**given).num_prompts_in_flight == 3
    assert config_of(**given, tool_lag=1).num_prompts_in_flight == 3 + 3 * WANTED
    assert config_of(**given, tool_lag=9).num_prompts_in_flight == 10 * WANTED
    says = "tool_lag acts only with stream_chunk and environment or tools"
    assert says in config_of(tool_lag=1).unused_options()
    with pytest.raises(ConfigError, match=r"tool_lag must be at most max_staleness.* got 4 and 3"):
        config_of(**STREAM, tool_lag=4)


OTHERS = {
    "generate_max_len: 150 -> 40": {"generate_max_len": 40},
    "n_samples_per_prompt: 2 -> 4": {"n_samples_per_prompt": 4, "train_batch_size": 8},
    "max_observation_tokens": {"max_observation_tokens": 16},
    "environment and tools: Mixer -> none": {"environment": None},
    "environment and tools: Mixer -> Late": {"environment": f"{CASES}:Late"},
}


@pytest.mark.parametrize("says", OTHERS)
def test_open_responses_do_not_go_on_under_other_options(tmp_path, says):
    player = Player(config_of(**STREAM), tmp_path)
    player.step()
    player.resumed()
    config = config_of(**STREAM).replaced(OTHERS[says])
    parts = SourceParts(player.session, config, TOKENIZER, Lengths())
    episodes = player.batches if config.environment else None
    player.source = build_source(parts, episodes, needs_greedy=False)
    with pytest.raises(ConfigError, match=f"has open responses.*{says}"):
        player.step()


def test_a_source_of_other_episodes_is_refused(tmp_path):
    player = Player(config_of(**STREAM), tmp_path)
    with pytest.raises(TypeError, match="plays no episodes of a SingleTurnSource"):
        RolloutSampler(SourceParts(player.session, player.config, TOKENIZER, Lengths()))


def test_open_responses_are_not_dropped_by_a_run_that_does_not_stream(tmp_path):
    player = Player(config_of(**STREAM), tmp_path)
    player.step()
    parts = SourceParts(player.session, config_of(), TOKENIZER, Lengths())
    sampler = RolloutSampler(parts)
    with pytest.raises(ConfigError, match="prompts: give stream_chunk as before"):
        sampler.collect([], first_request_id=0, timer=StepTimer(), stream=player.stream)


def test_responses_of_one_turn_are_not_made_of_open_episodes(tmp_path):
    player = Player(config_of(**STREAM), tmp_path)
    player.step()
    part = ResponsePart({}, player.params, 2, 2)
    turns = OpenTurns(SourceParts(player.session, player.config, TOKENIZER, Lengths()))
    with pytest.raises(ValueError, match="unfinished episodes: start with their --environment"):
        turns.extended(player.stream.groups, [], part)


def test_what_a_model_says_in_calls_can_be_read_back_from_a_checkpoint():
    """Numbers of any size, and values as deep as calls may be."""
    from lightrft.rollout.environments.call_formats import MalformedCallError, ToolCall
    from lightrft.rollout.environments.calls import check_call

    schemas = {"f": {"parameters": {"properties": {"a": {}}}}}

    def nested(depth):
        return json.loads("[" * depth + "]" * depth)

    for value in (10**30, [10**30], {"b": -(10**400)}, nested(98)):
        arguments = check_call(ToolCall("f", {"a": value}), schemas)
        call = AnsweredCall("f", arguments, "ok", "answer")
        state = EpisodeState(1, answers=((call,),), noted=((("answer",),),))
        group = OpenGroup(1, Prompt(0, "", (1,)), (OpenSample(episode=state),), "temperature", 1)
        stream = StreamState((group,))
        part = to_bytes(InFlight(stream=stream), 0)
        assert from_parts([part], 0, rank=0, world_size=1).stream == stream
    with pytest.raises(MalformedCallError, match="nested deeper than 100 levels"):
        check_call(ToolCall("f", {"a": nested(150)}), schemas)


def test_an_episode_that_reaches_its_bound_in_a_cut_turn_ends_there(tmp_path):
    bound = {"prompt_max_len": 900, "max_len": 900 + LIMIT}
    plain = Player(config_of(**bound), tmp_path)
    longest = max(len(prompt.token_ids) for prompt in plain.prompts)
    bound = {"prompt_max_len": longest + 20, "max_len": longest + 20 + 2 * LIMIT}
    expected = by_episode(Player(config_of(**bound), tmp_path).whole())
    found = {}
    for samples in play(Player(config_of(**STREAM, **bound), tmp_path), (3,)):
        found |= by_episode(samples)
    assert found == expected
    full = [f[0] for f in expected.values() if len(f[0][0]) + len(f[0][1]) == bound["max_len"]]
    assert full
    assert any(each[4] == "length" and len(each[6]) > 2 for each in full)
