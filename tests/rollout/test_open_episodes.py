"""Episodes that go on over several steps: what they sample, when, and that nobody notices how."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from tests.datasets import chat_families as families
from tests.engines.fake_engine import FakeEngine
from tests.records.exchange_cases import ThreadRank, ThreadWorld
from tests.rollout.stages import check_rows, load_rows, options_of, pool_of

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.types import EngineConfig
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
from lightrft.rollout.open_turns import OpenTurns, ResponsePart
from lightrft.rollout.sampler import RolloutSampler, build_source, training_params
from lightrft.rollout.source import InFlight, SampleRequests, SourceParts, own_positions
from lightrft.rollout.streaming import GroupFacts, groups_to_train
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


class Session:
    """An engine of one rank."""

    shares_engine, last_weight_sync = False, None

    def __init__(self, context, script=say):
        self.context = context
        self.engine = FakeEngine(EngineConfig("fake", ""), script=script)
        self.engine.eos_ids = (TOKENIZER.eos_token_id,)
        self.engine.set_weights_version(0)
        self.calls, self.fails = [], False

    def gather_and_generate(self, batch, params, on_finished, *, sleep_engine):
        self.calls.append([(r.request_id, r.max_tokens) for r in batch.token_ids])
        told = on_finished if self.fails or len(self.calls) % 2 else None  # not every engine tells
        asked = batch.token_ids
        found = self.engine.generate(asked, params, on_finished=told) if asked else []
        if self.fails:
            self.fails = False
            raise OSError("lost")
        return found


class Lengths:
    name, needs_labels = "lengths", False

    def score(self, prompts, responses, labels, columns):
        return [RewardResult(float(len(text) % 5)) for text in responses]


class Player:
    """One rank of a run: it samples step after step."""

    def __init__(self, config, tmp_path, context=None, *, script=say, reward=None, stops=()):
        self.config = config
        self.context = context or ThreadRank(ThreadWorld(1), 0)
        # Ranks are threads here, and a tokenizer is no thread's while it splits special tokens.
        tokenizer = copy.deepcopy(TOKENIZER)
        self.environments = Environments(config, tokenizer, pool=pool_of(config, self.context.rank))
        self.session = Session(self.context, script)
        parts = SourceParts(self.session, config, tokenizer, reward or Lengths())
        self.batches = self.environments.source(parts)
        self.source = build_source(parts, self.batches, needs_greedy=False)
        own = tmp_path / str(self.context.rank)  # ranks are threads: each writes its own file
        own.mkdir(exist_ok=True)
        rows = [{"input": f"Mix {i}.", "target": i} for i in range(NUM_PROMPTS)]
        self.prompts = load_rows(own, rows, self.environments.prompt_tokenizer, config)
        self.knows_end = True
        self.params = replace(training_params(config), stop_token_ids=tuple(stops))
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


def sampled_of(rollout):
    return sum(rollout.completion.is_sampled)


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


def simulated(ages, *, in_flight, max_staleness):
    """What each step trains on, and the version of every token, by the rule alone.

    Args:
        ages: By episode, see `ages_of`.
    """
    num_prompts = len(ages) // SIZE
    open_groups, num_begun, steps = [], 0, []
    for number in range(1, num_prompts // WANTED + 1):
        left = num_prompts - (number - 1) * WANTED
        waiting = [each for each in open_groups if not each["begun"]]
        while num_begun < num_prompts and (
            len(open_groups) < WANTED
            or (len(open_groups) < in_flight and len(open_groups) + WANTED <= left)
            or (not waiting and len(open_groups) + WANTED <= left)
        ):
            for _ in range(WANTED):
                open_groups.append({"id": num_begun, "begun": 0, "waited": 0})
                num_begun += 1
            waiting = open_groups
        for each in sorted(open_groups, key=lambda e: e["id"])[:in_flight]:
            each["begun"] = each["begun"] or number
        facts = []
        for each in open_groups:
            if each["begun"]:
                whole_at = each["begun"] + max(ages[each["id"], i][1] for i in range(SIZE))
                complete = whole_at if whole_at <= number else 0
                facts.append(GroupFacts(each["id"], each["begun"], complete, 0))
        chosen = groups_to_train(facts, WANTED, round_number=number, max_staleness=max_staleness)
        taken = sorted((e.complete or number, e.request_id, e.begun) for e in chosen)
        versions = {
            (i, index): [min(begun + age, number) - 1 for age in ages[i, index][0]]
            for _, i, begun in taken
            for index in range(SIZE)
        }
        steps.append(([i for _, i, _ in taken], versions))
        gone = {each.request_id for each in chosen}
        open_groups = [each for each in open_groups if each["id"] not in gone]
    return steps


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_every_step_trains_what_a_simulation_of_the_rule_says(tmp_path, whole, seed, lag):
    rng = np.random.default_rng(seed)
    chunk, bound = int(rng.integers(9, 150)), int(rng.integers(max(1, lag), 4))
    in_flight = int(rng.integers(WANTED, (bound + 1) * WANTED + 1))
    options = {"stream_chunk": chunk, "stream_prompts": in_flight, "max_staleness": bound}
    player = Player(config_of(tool_lag=lag, **options), tmp_path)
    ages = {key: ages_of(turns_of(found), chunk, lag) for key, found in whole.items()}
    expected = simulated(ages, in_flight=in_flight, max_staleness=bound)
    sampled = Counter()
    for number, (ids, versions) in enumerate(expected):
        samples = player.step()
        assert [i.rollout.prompt.id for i in samples.scored[::SIZE]] == sorted(ids)
        order = sorted(samples.scored, key=lambda item: item.rollout.sample_id)
        played = by_episode(samples)
        assert [item.rollout.prompt.id for item in order[::SIZE]] == ids
        for item in order:
            rollout = item.rollout
            key = rollout.prompt.id, rollout.sample_id % SIZE
            assert played[key] == whole[key]
            own = [v for v in rollout.token_versions if v >= 0]
            assert own == versions[key]
            mask = [v >= 0 for v in rollout.token_versions]
            assert mask == list(rollout.completion.is_sampled)
            right = rebuild(rollout.sample_id, samples.evidence)
            assert tuple(right.token_ids.tolist()) == rollout.token_ids
            num_prompt = len(rollout.completion.prompt_token_ids)
            assert right.versions[num_prompt:].tolist() == list(rollout.token_versions)
            assert samples.evidence.ledger.entries[rollout.sample_id].problem == ""
            sampled[sampled_of(rollout)] += 1
        for group in player.stream.groups:
            for index, sample in enumerate(group.samples):
                since = number + 2 - group.begun if group.begun else 0
                own, end = ages[group.prompt.id, index]
                assert sample.num_sampled == sum(age < since for age in own)
                assert (sample.finish_reason is not None) == (end < since)
    assert sampled == Counter(len(own) for own, _ in ages.values())
    num_versions = [len(set(each)) for _, versions in expected for each in versions.values()]
    assert max(num_versions) > 1 or in_flight == WANTED


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
LATE = {"stream_chunk": 120, "stream_prompts": 8, "max_staleness": 5, "tool_lag": 1}
LATER = {"stream_chunk": 150, "stream_prompts": 14, "max_staleness": 9, "tool_lag": 2}


@pytest.fixture(scope="module", params=[STREAM, LATE, LATER], ids=["waited for", "late", "later"])
def stream(request):
    return request.param


@pytest.fixture(scope="module")
def streamed(stream, tmp_path_factory):
    """A run that nothing disturbs, step by step."""
    found = play(Player(config_of(**stream), tmp_path_factory.mktemp("streamed")))
    assert sum(len(set(f[1]) - {-1}) > 2 for step in map(facts, found) for f in step) > 2
    return list(map(facts, found))


@pytest.mark.full
def test_with_long_chunks_every_step_is_the_synchronous_one(tmp_path, monkeypatch):
    """With random numbers of a real engine: turns have the same ids of requests."""
    from lightrft.rollout.environments.calls import ToolCall

    def calls(text, *others):
        return [ToolCall("mix", {"number": len(text)})] if len(text) % 5 else []

    monkeypatch.setattr(specs, "choose_parser", lambda *given: calls)
    given = {"script": None, "stops": range(9)}
    plain = Player(config_of(), tmp_path, **given)
    options = {"stream_chunk": 4 * LIMIT, "stream_prompts": WANTED}
    player = Player(config_of(**options), tmp_path, **given)
    lengths = set()
    for number in range(4):
        plain.session.engine.set_weights_version(number)
        requests = SampleRequests(
            plain.draw(), range(WANTED), WANTED, plain.params, number * WANTED
        )
        expected = facts(plain.source.sample(requests))
        assert facts(player.step()) == expected
        lengths |= {len(each[2]) for each in expected}
    assert len(lengths) > 2


def test_delays_of_tools_change_nothing(tmp_path, stream, streamed):
    player = Player(config_of("Late", **stream), tmp_path)
    assert list(map(facts, play(player)[:7])) == streamed[:7]


def test_two_ranks_play_the_episodes_of_one(tmp_path, stream, streamed):
    world = ThreadWorld(2)

    def one_rank(context):
        return list(map(facts, play(Player(config_of(**stream), tmp_path, context))))

    for number, (mine, theirs) in enumerate(zip(*world.run(one_rank), strict=True)):
        key = lambda fact: fact[0][0]  # noqa: E731 - the prompt names the episode
        assert sorted(mine + theirs, key=key) == sorted(streamed[number], key=key)


@pytest.mark.cover(3)
@pytest.mark.parametrize("breaks", [(1,), (3, 4), range(11)])
def test_a_resumed_run_goes_on_in_the_middle_of_episodes(tmp_path, stream, streamed, breaks):
    found = play(Player(config_of(**stream), tmp_path), breaks)
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


def test_ranks_go_on_with_the_episodes_of_others(tmp_path, stream, streamed):
    """Three steps on two ranks, and the rest on one."""
    world = ThreadWorld(2)

    def one_rank(context):
        player = Player(config_of(**stream), tmp_path, context)
        for _ in range(3):
            player.step()
        return to_bytes(InFlight(player.first, stream=player.stream), context.rank), player

    parts, (before, _) = zip(*world.run(one_rank), strict=True)
    player = Player(config_of(**stream), tmp_path)
    player.first, player.drawn, player.number = before.first, before.drawn, 3
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
    player, found = Player(config_of(**stream), tmp_path), []
    generate = player.session.gather_and_generate
    for number in range(len(streamed)):
        left = [number % 4]

        def failing(*given, left=left, **named):
            left[0] -= 1
            if left[0] == -1:
                raise OSError("lost")
            return generate(*given, **named)

        player.session.gather_and_generate = failing
        found.append(player.step_or_again())
    assert list(map(facts, found)) == streamed


def say_twice(request, index):
    """As `say`, with two calls in a turn."""
    ids, logprobs = say(request, index)
    text = TOKENIZER.decode(ids)
    place = text.find("\n<tool_call>")
    if place < 0 or len(ids) < 30:
        return ids, logprobs
    end = text.index("<|im_end|>")
    twice = TOKENIZER(text[:end] + text[place:], add_special_tokens=False)["input_ids"]
    return twice, logprobs[:1] * len(twice)


@pytest.mark.parametrize("lag", [0, 1])
def test_calls_of_a_step_that_was_given_up_do_not_reach_the_step_done_again(tmp_path, lag):
    """The engine fails after turns have ended, whose calls are under way."""
    options = {**STREAM, "stream_chunk": 200, "tool_lag": lag}
    runs = []
    for fails in (False, True):
        player, found = Player(config_of("Late", **options), tmp_path, script=say_twice), []
        for _ in range(6):
            player.session.fails = fails
            found.append(player.step_or_again())
        runs.append([list(map(content, (i.rollout for i in s.scored))) for s in found])
    assert runs[0] == runs[1]
    counts = {text.count("<tool_call>") for step in runs[0] for each in step for text in [each[5]]}
    assert max(counts) > 2


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
    num_before = len(found)
    assert list(map(facts, found)) == streamed[:num_before]
    mood.touch()
    player.resumed()
    generate, counts = player.session.gather_and_generate, []

    def counting(*given, **named):
        parts = generate(*given, **named)
        counts.append(sum(len(part.output_token_ids) for part in parts))
        return parts

    player.session.gather_and_generate = counting
    after = [player.step()]
    assert after[0].report.num_sampled_tokens == sum(counts)
    said = player.context.world.said
    open_prompts = {item.rollout.prompt.id for item in after[0].scored}
    open_prompts |= {group.prompt.id for group in player.stream.groups}
    names = {f"sample {index} of prompt {i}" for i in open_prompts for index in range(SIZE)}
    assert said
    assert {text.split(" starts over: mix answered otherwise")[0] for text in said} <= names
    for group in player.stream.groups:
        for sample in group.samples:
            most = stream["stream_chunk"] * (num_before + 2 - group.begun) if group.begun else 0
            assert sample.num_sampled <= most
            is_full = "tool_lag" in stream or sample.num_sampled == most
            assert is_full or (sample.finish_reason and most)
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


@pytest.mark.full
def test_episodes_of_a_worker_that_ended_are_brought_back(tmp_path, stream, streamed, whole):
    player = Player(config_of("Leaving", reward_failure="mask", **stream), tmp_path)
    found = play(player, (4,))
    masked = [item.is_masked for each in found for item in each.scored]
    assert 0 < sum(masked) < len(masked)
    for samples in found:
        for key, played in by_episode(samples).items():
            item = next(
                i
                for i in samples.scored
                if (i.rollout.prompt.id, i.rollout.sample_id % SIZE) == key
            )
            assert item.is_masked or played == whole[key]


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


def test_checkpoints_that_name_no_options_go_on(tmp_path):
    player = Player(config_of(**STREAM), tmp_path)
    player.step()
    player.resumed()
    player.stream = replace(player.stream, options={})
    player.step()
    assert player.stream.options


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
        turns.extended(player.stream.groups, part)


def test_what_a_model_says_in_calls_can_be_read_back_from_a_checkpoint():
    """Numbers of any size, and values as deep as calls may be."""
    from lightrft.rollout.environments.call_formats import MalformedCallError, ToolCall
    from lightrft.rollout.environments.call_schema import check_call

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
