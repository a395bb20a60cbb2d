"""A step that was killed goes on where its journal ends, and a journal replays without anything."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.machine import wait_until
from tests.rollout.journal_edits import events_of, lines_of
from tests.rollout.stages import CASES, Stage, call, check_rows

from lightrft.rollout.environments.episode_batch import EpisodeBatch
from lightrft.rollout.environments.journal import Journal
from lightrft.rollout.environments.journal_reading import read_journal
from lightrft.rollout.ledger_records import take_evidence
from lightrft.rollout.sampler import training_params
from lightrft.rollout.workers import EpisodeError
from lightrft.tools.replay.journal_rounds import Replay, replay_journal

FILE = "step-000001.rank-0.jsonl"
SAY = Stage.say


def counting(request_id):
    """Prompts of two, three and four turns; the n-th call of each is answered by n."""
    calls = [call("count_up")] * (1 + request_id // 2 % 3)
    return [*calls, f"done {request_id}"]


class Played:
    """Rollouts of one call of `sample` in a folder, and what the engine was asked."""

    def __init__(self, folder, script=counting, *, version=3, weights=17, lines=None, **options):
        options = {"environment": "Counter", **options}
        rows = [{"input": f"Find it {i}."} for i in range(3)]
        folder.mkdir(exist_ok=True)
        self.stage = Stage(folder, script, rows=rows, **options)
        self.stage.engine.set_weights_version(version)
        self.stage.strategy.session.last_weight_sync = SimpleNamespace(engine_hash=weights)
        self.path = folder / "journal" / FILE
        if lines is not None:
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(lines, encoding="utf-8")
        self.rollouts, self.rewards = self.stage.sample()
        self.num_requests = len(self.stage.engine.requests)

    @property
    def ids(self):
        return [
            (r.completion.output_token_ids, r.completion.output_logprobs, r.completion.sampled)
            for r in self.rollouts
        ]

    @property
    def lines(self):
        return self.path.read_text(encoding="utf-8")

    @property
    def restarts(self):
        return [r.sample_id for r in self.rollouts if r.conversation.num_restarts]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Played(tmp_path_factory.mktemp("whole") / "run")


def timeless(text):
    """Events in the order of each sample: those of different samples may come in any order."""
    events = events_of(text)
    for event in events:
        event.pop("weights_version", None)
        if "call" in event:
            event["call"].pop("seconds")
    order = sorted(events, key=lambda event: event.get("sample_id", -1))
    return [json.dumps(event, sort_keys=True) for event in order]


def test_what_answered_a_turn_that_is_sampled_again_is_dropped_with_it(whole):
    recorded = read_journal(whole.path)
    recorded.keep(1)
    assert recorded.turns.keys() == recorded.answers.keys() == recorded.observations.keys()


def test_calls_are_answered_while_other_turns_are_sampled(tmp_path):
    path = tmp_path / "run/journal" / FILE

    def script(request_id):
        if request_id == 5:  # the last of its round
            wait_until(lambda: '"event": "answer"' in path.read_text())
        return counting(request_id)

    played = Played(tmp_path / "run", script)
    kinds = [event["event"] for event in events_of(played.lines)]
    first, end = kinds.index("answer"), kinds.index("round")
    assert first < end
    # A process that was killed in a round repeats all of it.
    lines = "".join(played.lines.splitlines(keepends=True)[:end])
    again = Played(tmp_path / "again", lines=lines)
    assert (again.ids, again.num_requests) == (played.ids, played.num_requests)
    assert again.restarts == []


def test_a_new_failure_while_a_journal_is_repeated_lets_the_rest_replace_it(tmp_path, monkeypatch):
    options = {"reward_failure": "mask"}
    lines = Played(tmp_path / "whole", **options).lines.splitlines(keepends=True)
    third = [i for i, line in enumerate(lines) if '"event": "round"' in line][2]
    answer, leave, replaced = EpisodeBatch.answer_calls, Journal.leave, []

    def fails(batch, episode, host):
        if episode.sample_id == 5 and episode.num_turns == 1:
            raise EpisodeError("count_up did not return")
        return answer(batch, episode, host)

    def left(journal, *, is_over=False):
        leave(journal, is_over=is_over)
        replaced.append(is_over or not journal.recorded.turns)

    monkeypatch.setattr(EpisodeBatch, "answer_calls", fails)
    monkeypatch.setattr(Journal, "leave", left)
    Played(tmp_path / "again", lines="".join(lines[: third + 1]), **options)
    assert sum(replaced) > 1


@pytest.mark.full
def test_a_journal_that_ends_anywhere_is_followed_to_the_same_end(whole, tmp_path):
    lines = whole.lines.splitlines(keepends=True)
    sampled = {}
    for number in range(0, len(lines) + 1, 3):
        # Torn in the middle of a line, as a kill leaves it.
        torn = lines[number][: len(lines[number]) // 2] if number < len(lines) else ""
        text = "".join(lines[:number]) + torn
        again = Played(tmp_path / str(number), version=8, lines=text)
        assert again.ids == whole.ids
        assert [r.reward for r in again.rewards] == [r.reward for r in whole.rewards]
        assert again.restarts == []
        again.stage.check_rows(again.rollouts)
        assert timeless(again.lines) == timeless(whole.lines)
        assert set(again.rollouts[0].token_versions) == {8, -1}  # an engine counts from its start
        sampled[number] = again.num_requests
    counts = list(sampled.values())
    assert counts[0] == whole.num_requests
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0
    assert len(set(counts)) == 5  # four rounds


def edited(text, sample_id, old, new):
    """The lines with another text in the answers of one sample."""
    events = events_of(text)
    for event in events:
        if event["event"] == "answer" and event["sample_id"] == sample_id:
            event["call"]["text"] = event["call"]["text"].replace(old, new)
    return lines_of(events)


def test_an_episode_that_is_answered_otherwise_starts_over_alone(whole, tmp_path, capsys):
    text = edited(whole.lines, 5, "2", "9")
    again = Played(tmp_path / "run", lines=text)
    assert again.restarts == [5]
    says = "turn 1: count_up answered '2', where the journal says '9'"
    assert f"sample 1 of prompt 2 starts over: {says}" in capsys.readouterr().out
    assert again.ids == whole.ids  # of a script
    assert again.num_requests == 4  # its four turns
    assert [r.reward for r in again.rewards] == [r.reward for r in whole.rewards]
    # What starts over is followed the next time.
    third = Played(tmp_path / "third", lines=again.lines)
    assert third.num_requests == 0
    assert third.ids == whole.ids
    assert third.restarts == []


@pytest.mark.full
def test_what_starts_over_leaves_nothing_of_its_first_turns_in_the_ledger(
    whole, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        Stage, "say", lambda self, *asked: ((said := SAY(self, *asked))[0], [-0.3] * len(said[0]))
    )
    text = edited(whole.lines, 5, "2", "9")
    again = Played(tmp_path / "run", lines=text)
    asked = {segment.request_id for segment in again.rollouts[5].segments}
    assert asked.isdisjoint(s.request_id for s in whole.rollouts[5].segments)
    evidence = take_evidence(again.rollouts, again.stage.strategy.session)
    assert {key[0] for key in evidence.entries} == {
        segment.request_id for rollout in again.rollouts for segment in rollout.segments
    }
    check_rows(again.rollouts, evidence)
    # A third process goes on under the ids of the second, and a fourth under its own.
    lines = again.lines.splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if f'"request_id": {min(asked)}' in line)
    cut = next(n for n, line in enumerate(lines) if n > first and '"event": "round"' in line)
    third = Played(tmp_path / "third", lines="".join(lines[: cut + 1]))
    assert asked - {r.request_id for r in third.stage.engine.requests} == {min(asked)}
    assert {s.request_id for s in third.rollouts[5].segments} == asked
    fourth = Played(tmp_path / "fourth", lines=edited(third.lines, 5, "2", "9"))
    assert fourth.restarts == [5]
    assert asked.isdisjoint(s.request_id for s in fourth.rollouts[5].segments)


@pytest.mark.full
def test_a_journal_of_other_weights_or_prompts_is_not_followed(whole, tmp_path):
    header, *rest = events_of(whole.lines)
    for name, value in (("weights", 5), ("prompts", "0"), ("world_size", 2), ("batch", 1)):
        changed = lines_of([{**header, name: value}, *rest])
        again = Played(tmp_path / name, lines=changed)
        assert again.num_requests == whole.num_requests
        assert again.ids == whole.ids
    unknown = Played(tmp_path / "unknown", weights=0)
    assert Played(tmp_path / "again", weights=0, lines=unknown.lines).num_requests > 0


@pytest.mark.full
def test_functions_without_state_are_answered_from_the_journal(tmp_path):
    counter = tmp_path / "calls"

    def script(request_id):
        return [call("noted", path=str(counter)), "done"]

    options = {"environment": None, "tools": (f"{CASES}:noted",)}
    first = Played(tmp_path / "first", script, **options)
    assert counter.read_text() == "x" * 6
    again = Played(tmp_path / "again", script, lines=first.lines, **options)
    assert counter.read_text() == "x" * 6
    assert again.ids == first.ids
    # Answers that the model never saw are found by the ids before the next turn.
    text = edited(first.lines, 2, "noted", "not ed")
    third = Played(tmp_path / "third", script, lines=text, **options)
    assert third.restarts == [2]
    assert counter.read_text() == "x" * 7


@pytest.mark.full
def test_a_deadline_is_not_decided_twice(tmp_path):
    def script(request_id):
        return [call("act", what="exit" if request_id == 1 else "none"), "done"]

    options = {"environment": "Naughty", "reward_failure": "mask"}
    first = Played(tmp_path / "first", script, **options)
    assert [r is None for r in first.rewards] == [i == 1 for i in range(6)]
    # The environment behaves this time, but its episode has failed.
    good = Played(
        tmp_path / "again",
        lambda i: [call("act", what="none"), "done"],
        lines=first.lines,
        **options,
    )
    assert [r is None for r in good.rewards] == [i == 1 for i in range(6)]
    assert good.num_requests == 0


@pytest.mark.full
def test_late_episodes_join_later_rounds_with_the_same_tokens(tmp_path):
    gate = tmp_path / "gate"

    def script(request_id):
        # One waits in its first turn, for what another does in its third.
        if request_id == 4:
            return [call("pass_gate", path=str(gate), opens=False), *counting(request_id)]
        if request_id < 4:
            return ["done"]
        opened = call("pass_gate", path=str(gate), opens=True)
        return [call("count_up"), call("count_up"), opened, "done"]

    options = {"environment_workers": 2, "tools": (f"{CASES}:pass_gate",), "prompt_max_len": 2000}
    gate.touch()
    prompt = Played(tmp_path / "prompt", script, **options)
    gate.unlink()
    late = Played(tmp_path / "late", script, late_join=True, **options)
    assert late.ids == prompt.ids
    assert [r.reward for r in late.rewards] == [r.reward for r in prompt.rewards]
    turns, lock_step = (read_journal(each.path).turns for each in (late, prompt))
    assert lock_step[4, 1].round_number == lock_step[5, 1].round_number == 1
    assert turns[4, 1].round_number > turns[5, 2].round_number
    text = late.lines[: late.lines.rindex('{"event": "round"')]
    again = Played(tmp_path / "again", script, late_join=True, lines=text, **options)
    assert again.ids == late.ids
    assert again.num_requests < len(turns)


@pytest.mark.full
def test_episodes_that_missed_a_round_do_not_wait_for_those_that_took_part(tmp_path):
    first, second = (str(tmp_path / name) for name in ("first", "second"))

    def script(request_id):
        # The third is late in its first turn; in their second the others wait for its second.
        if request_id < 2:
            return ["done"]
        if request_id == 2:
            calls = [("pass_gate", first, False)], [("pass_gate", second, True)]
        else:
            calls = [], [("pass_gate", first, True), ("pass_gate", second, False)]
        turns = ["".join(call(n, path=p, opens=o) for n, p, o in turn) for turn in calls]
        return [turns[0] or call("count_up"), turns[1], "done"]

    options = {"environment_workers": 4, "tools": (f"{CASES}:pass_gate",), "prompt_max_len": 2000}
    options |= {"generate_max_len": 800, "max_len": 8000}
    played = Played(tmp_path / "run", script, late_join=True, **options)
    assert [len(r.conversation.turns) for r in played.rollouts] == [1, 1, 3, 3, 3, 3]


def test_each_batch_of_dynamic_sampling_has_a_journal(tmp_path):
    played = Played(tmp_path / "run", dynamic_sampling=True, max_num_gen_batches=3)
    played.path.unlink()
    stage, rounds = played.stage, [0]
    # The rewards of the first batch are constant, of the second they are mixed.
    stage.script = lambda i: [call("count_up")] * (1 + (i % 2 if rounds[0] else 0)) + ["done"]

    def more():
        rounds[0] += 1
        return stage.prompts

    samples = stage.collect(next_prompts=more)
    assert samples.num_rounds == 2
    assert samples.selection.num_constant == 3
    assert sorted(samples.table.rewards.tolist()) == [1.5] * 3 + [3.0] * 3
    assert len(samples.evidence.accounts) == 12
    for name in (FILE, "step-000001.batch-1.rank-0.jsonl"):
        path = played.path.with_name(name)
        assert read_journal(path)
        assert path.read_text().count('"event": "end"') == 6


def replayed(played, text, say=None):
    path = played.path.with_name("replayed.jsonl")
    path.write_text(text, encoding="utf-8")
    engine, found = played.stage.engine, Replay()

    def generate(params, requests):
        return engine.generate(requests, params)

    if say is not None:
        engine.script = say
    config = played.stage.config
    replay_journal(
        read_journal(path),
        replace(training_params(config), n=1),
        config=config,
        tokenizer=played.stage.tokenizer,
        generate=generate,
        into=found,
    )
    engine.script = played.stage.say
    return found


def test_a_replay_without_environment_equals_the_live_run(whole):
    found = replayed(whole, whole.lines)
    assert found.differences == []
    assert (found.num_episodes, found.num_turns) == (6, 2 * (2 + 3 + 4))
    assert found.num_answers == 2 * (1 + 2 + 3)
    assert found.num_tokens == sum(len(r.completion.sampled_token_ids) for r in whole.rollouts)
    assert found.max_difference == 0.0


def test_a_replay_names_what_was_changed(whole):
    changed = replayed(whole, edited(whole.lines, 3, "1", "7"))
    assert changed.differences == [
        "sample 3, turn 0: what the model saw of count_up is not the answer"
    ]

    def other(request, index):
        ids, logprobs = whole.stage.say(request, index)
        if request.request_id % 2**40 == 4 and request.request_id > 2**40:
            ids = [*ids[:2], ids[2] + 1, *ids[3:]]
        return ids, logprobs

    found = replayed(whole, whole.lines, other).differences
    assert found
    assert all(line.startswith("sample 4, turn ") and ", token 2: id " in line for line in found)
    # Both changed together: then what came next was sampled after other ids.
    events = events_of(whole.lines)
    for event in events:
        if event["event"] == "observation" and event["sample_id"] == 5 and event["turn"] == 0:
            start, _ = event["text_spans"][0]
            event["token_ids"][start] += 1
    text = lines_of(events)
    found = replayed(whole, text).differences
    assert found[0] == "sample 5, turn 0: what the model saw of count_up is not the answer"
    assert found[1].startswith("sample 5, turn 1: the ids before it are not those the engine saw")
