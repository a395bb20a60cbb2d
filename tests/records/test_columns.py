"""A new fact of an engine costs a line of the table, the adapter that fills it and a consumer.

The fact here is the log-probability of the fifth-best token. It is planted beside the columns that
are there, and must come through every way that a sample can take.
"""

import ast
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engines.fake_engine import FakeEngine
from tests.records import exchange_cases as cases

from lightrft.datasets.chat_ids import Rendered
from lightrft.datasets.types import Prompt
from lightrft.engines.rows import cut_at_token, joined
from lightrft.engines.sampling import pack_ids
from lightrft.engines.types import (
    KEPT_IDS,
    ROUTES,
    Completion,
    EngineConfig,
    GenerationRequest,
    SamplingParams,
)
from lightrft.experience.ledger_gate import check_ledger, rebuild
from lightrft.models.layout import LayoutPolicy
from lightrft.records.batch import (
    ExperienceBatch,
    PolicyOutputs,
    collate,
    select_experience,
    select_rollouts,
)
from lightrft.records.columns import COLUMNS, Column, join_facts, pack_kept_ids
from lightrft.records.rollout import ScoredRollout, TurnSegment
from lightrft.records.table import deliver_rows, exchange, join_tables, merge, tabulate
from lightrft.rollout.environments.episode import Episode
from lightrft.rollout.environments.journal import Journal
from lightrft.rollout.environments.journal_reading import FORMAT, event_line, read_journal
from lightrft.rollout.in_flight import from_parts, to_bytes
from lightrft.rollout.ledger_records import LedgerError, deliver_evidence, take_evidence
from lightrft.rollout.open_groups import OpenGroup, OpenSample, StreamState
from lightrft.rollout.source import InFlight

CPU = torch.device("cpu")
NAME = "fifth_logprobs"
# The line. No logprob is positive, so what was filled can be told from what was sampled.
FIFTH = Column(NAME, np.float32, fill=1.0, is_vouched=True)


def fifth(token_id, logprob):
    """In float32, as it is sent: follows from the token, so that every place can be checked."""
    return float(np.float32(2 * logprob - token_id - 1))


class FifthEngine(FakeEngine):
    """The adapter."""

    def complete(self, row, request, params):
        raw = super().complete(row, request, params)
        pairs = zip(raw.token_ids, raw.logprobs, strict=True)
        facts = {NAME: tuple(fifth(*pair) for pair in pairs)}
        facts[KEPT_IDS] = tuple(map(kept, raw.token_ids))
        return replace(raw, facts={**facts, ROUTES: routes(row.prompt, raw.token_ids)})


def routes(prompt, token_ids):
    """Experts of the positions before each token: two bytes that follow from their ids."""
    before = [prompt, *([each] for each in token_ids[:-1])]
    return tuple(bytes(experts(part)).hex() for part in before)


def experts(token_ids):
    return [byte for i in token_ids for byte in (i % 8, (i + 3) % 8)]


def kept(token_id):
    """Recorded ids of a token: itself, and as many others as its last digit says; none for 9."""
    return "" if token_id % 10 == 9 else pack_ids(range(token_id, token_id + 1 + token_id % 10))


def mean_gap(batch):
    """The consumer: how far the fifth-best token is below the sampled one, on average."""
    gaps = batch.rollout_logprobs - batch.facts[NAME]
    return float(gaps[batch.response_mask].double().mean())


@pytest.fixture
def planted(monkeypatch):
    monkeypatch.setitem(COLUMNS, NAME, FIFTH)


class Rank(cases.ThreadRank):
    """One rank with an engine of its own."""

    def __init__(self, world, rank, engine):
        super().__init__(world, rank)
        self.inference_engine = self.engine = engine
        self.context = self


def sampled(num_rows=8, first=0):
    """Rows of one or two turns that the engine sampled, and the engine, whose ledger is full."""
    engine = FifthEngine(EngineConfig("fake", "", options={"eos_token_id": -1}))
    engine.set_weights_version(2)
    rng = np.random.default_rng(first)
    scored = []
    with engine.ledger.recording():
        for sample_id in range(first, first + num_rows):
            episode = episode_of(sample_id, tuple(rng.integers(2, 90, 3).tolist()))
            for turn in range(1 + sample_id % 2):
                if turn:
                    episode.add_observation(Rendered((91, 5, 6), ((1, 3),)))
                episode.add_turn(turn_of(engine, episode, turn, int(rng.integers(1, 7))), "")
            is_masked = sample_id == first + 3
            reward = 0.0 if is_masked else 1.0
            scored.append(ScoredRollout(episode.as_rollout(), reward, is_masked=is_masked))
    return scored, engine


HEADER = {"weights": 17, "environment": {"schemas": [], "answers_turns": False}}


def episode_of(sample_id, prompt):
    row = Prompt(sample_id, "", prompt)
    return Episode(
        number=0,
        prompt=row,
        request_id=sample_id,
        group_id=sample_id // 4,
        sample_id=sample_id,
        row={},
        environment=None,
        seeds=(0, 0),
    )


def turn_of(engine, episode, turn, max_tokens):
    request = GenerationRequest(episode.context, request_id=1000 * turn + episode.sample_id)
    return engine.generate([request], SamplingParams(max_tokens=max_tokens))[0]


def expected(token_ids, logprobs, is_sampled):
    triples = zip(token_ids, logprobs, is_sampled, strict=True)
    return [fifth(i, x) if flag else FIFTH.fill for i, x, flag in triples]


def assert_right(table):
    """Every value of a table follows from its own token."""
    assert len(table) > 0
    responses = np.zeros(len(table.token_ids), bool)
    starts = np.cumsum(table.lengths) - table.lengths
    for start, prompt, length in zip(starts, table.prompt_lengths, table.lengths, strict=True):
        responses[start + prompt : start + length] = True
    ids = table.token_ids[responses]
    values = expected(ids.tolist(), table.rollout_logprobs.tolist(), table.is_sampled.tolist())
    assert table[NAME].dtype == np.float32
    assert table[NAME].tolist() == values
    stops, ends = np.cumsum(table["num_kept"]), np.cumsum(table.response_lengths)
    for row, (stop, end) in enumerate(zip(stops, ends, strict=True)):
        places = slice(end - table.response_lengths[row], end)
        pairs = zip(ids[places].tolist(), table.is_sampled[places].tolist(), strict=True)
        values = pack_kept_ids(0, [kept(i) if flag else "" for i, flag in pairs], ())
        assert table[KEPT_IDS][stop - table["num_kept"][row] : stop].tolist() == values.tolist()
    # All tokens but the last of each row, observations included.
    is_read = np.ones(len(table.token_ids), bool)
    is_read[np.cumsum(table.lengths) - 1] = False
    assert table[ROUTES].tolist() == experts(table.token_ids[is_read].tolist())


def collated(table):
    return collate(table, temperature=1.0, device=CPU)


def test_it_is_tabulated_taken_and_joined(planted):
    scored, _ = sampled()
    table = tabulate(scored)
    assert_right(table)
    order = np.array([5, 0, 3])
    assert_right(table.take(order))
    whole = join_tables([tabulate(scored[4:]), tabulate(scored[:4])])
    assert_right(whole)
    np.testing.assert_array_equal(whole[NAME], table[NAME])
    wrong = replace(table, facts={**table.facts, NAME: np.roll(table[NAME], 1)})
    with pytest.raises(AssertionError):
        assert_right(wrong)


def test_without_the_line_nothing_of_it_is_kept():
    scored, _ = sampled(num_rows=1)
    assert set(scored[0].rollout.completion.facts) == {KEPT_IDS, ROUTES}
    assert NAME not in tabulate(scored).columns
    assert set(collated(tabulate(scored)).facts) == {ROUTES}


def test_rows_of_an_engine_that_does_not_say_are_filled(planted):
    scored, _ = sampled()
    silent = replace(scored[0].rollout.completion, facts={})
    item = replace(scored[0], rollout=replace(scored[0].rollout, completion=silent))
    length = len(silent.output_token_ids)
    assert tabulate([item, scored[1]])[NAME][:length].tolist() == [1.0] * length


def both_ranks(
    change=lambda batch: batch,
    change_table=lambda table, rank: table,
    change_rows=lambda rows: rows,
):
    """Samples change ranks and pass the gate there; the batch of each rank."""
    world = cases.ThreadWorld(2)
    shares = [sampled(first=0), sampled(first=8)]

    def one_rank(strategy):
        scored, engine = shares[strategy.rank]
        strategy = Rank(world, strategy.rank, engine)
        table = change_table(exchange(scored, strategy), strategy.rank)
        # Half of the rows of each rank go to the other one.
        wanted = [np.arange(0, 16, 2), np.arange(1, 16, 2)]
        rows = change_rows(deliver_rows(table, tabulate(scored), wanted, strategy))
        evidence = take_evidence(
            [item.rollout for item in scored], strategy, ledger=cases.ledger_of(scored)
        )
        ids = [table.sample_ids[each].tolist() for each in wanted]
        evidence = deliver_evidence(evidence, ids, strategy)
        batch = change(collated(rows))
        check_ledger(
            batch,
            rows,
            evidence,
            (table, None),
            policy=LayoutPolicy(packs_samples=False),
            slices=[slice(0, 4), slice(4, 8)],
            context=strategy,
        )
        return rows, batch, evidence

    return world.run(one_rank)


def test_it_is_delivered_with_its_row_and_with_its_evidence(planted):
    for rank, (rows, batch, evidence) in enumerate(both_ranks()):
        assert rows.sample_ids.tolist() == list(range(rank, 16, 2))
        assert_right(rows)
        for sample_id in rows.sample_ids.tolist():
            row = rebuild(sample_id, evidence)
            ids, turns = row.token_ids.tolist(), row.turns
            logprobs = row.vouched["rollout_logprobs"].tolist()
            assert row.vouched[NAME].tolist() == expected(ids, logprobs, turns >= 0)
        values = batch.facts[NAME][batch.response_mask].tolist()
        ids = batch.token_ids[batch.response_mask].tolist()
        logprobs = batch.rollout_logprobs[batch.response_mask].tolist()
        assert values == [fifth(*pair) for pair in zip(ids, logprobs, strict=True)]


def swapped_tokens(batch):
    values = batch.facts[NAME].clone()
    row, columns = 0, batch.response_mask[0].nonzero()[:2, 0]
    values[row, columns] = values[row, columns.flip(0)]
    return replace(batch, facts={**batch.facts, NAME: values})


def swapped_rows(batch):
    return replace(batch, facts={NAME: batch.facts[NAME].flip(0)})


def on_padding(batch):
    values = batch.facts[NAME].clone()
    row = int(batch.attention_mask.sum(1).argmin())
    values[row, -1] = 0.0
    return replace(batch, facts={**batch.facts, NAME: values})


@pytest.mark.parametrize("fault", [swapped_tokens, swapped_rows, on_padding])
def test_the_gate_finds_values_at_the_wrong_place(planted, fault):
    with pytest.raises(LedgerError, match=rf"{NAME} \(bits\) differ"):
        both_ranks(fault)


def unmasked_on(rank):
    """Rank 1 trains the row; it counts into the mean of its group on rank 0, too."""

    def change(table, own_rank):
        is_masked = table.is_masked & (own_rank != rank)
        return replace(table, is_masked=is_masked)

    return change


def exchanged_groups(table, rank):
    groups = table.group_ids.copy()
    groups[[3, 4]] = groups[[4, 3]]
    return replace(table, group_ids=groups)


@pytest.mark.parametrize(
    "fault, message",
    [
        (unmasked_on(0), "sample 3: is_masked differ: True was written down .*, False"),
        (unmasked_on(1), "sample 3: is_masked differ: True was written down .*, False"),
        (exchanged_groups, "sample 4: group_ids differ: 1 was written down as it arose, 0 is"),
    ],
)
def test_the_gate_finds_rows_that_one_rank_knows_otherwise(fault, message):
    with pytest.raises(LedgerError, match=message):
        both_ranks(change_table=fault)


def test_the_gate_does_not_look_at_what_the_ledger_does_not_vouch_for(monkeypatch):
    monkeypatch.setitem(COLUMNS, NAME, replace(FIFTH, is_vouched=False))
    assert len(both_ranks(swapped_rows)) == 2


def test_it_is_padded_selected_and_consumed(planted):
    scored, _ = sampled()
    table = tabulate(scored)
    batch = collated(table)
    mask = batch.response_mask
    assert batch.facts[NAME].shape == batch.token_ids.shape
    assert (batch.facts[NAME][~mask] == FIFTH.fill).all()  # of a masked row, too
    assert not mask[3].any()
    gaps = [
        logprob - fifth(token, logprob)
        for item in scored
        if not item.is_masked
        for token, logprob, flag in zip(
            item.rollout.completion.output_token_ids,
            item.rollout.completion.output_logprobs,
            item.rollout.completion.is_sampled,
            strict=True,
        )
        if flag
    ]
    assert mean_gap(batch) == pytest.approx(np.mean(gaps), rel=1e-6)
    part = select_rollouts(batch, slice(2, 5))
    width = part.token_ids.shape[1]
    assert torch.equal(part.facts[NAME], batch.facts[NAME][2:5, :width])
    zeros = torch.zeros(mask.shape)
    whole = ExperienceBatch(batch, PolicyOutputs(zeros, None, None, None), zeros, zeros)
    micro = select_experience(whole, slice(2, 5))
    assert torch.equal(micro.rollouts.facts[NAME], part.facts[NAME])
    assert micro.advantages.shape == part.token_ids.shape
    alone = collated(table.take(np.arange(2, 5)))
    assert torch.equal(alone.facts[NAME], part.facts[NAME])


def test_it_is_in_the_journal(planted, tmp_path):
    engine = sampled(num_rows=0)[1]
    path = tmp_path / "step.jsonl"
    journal = Journal(path, HEADER)
    episode = episode_of(5, (3, 4))
    turns = []
    for number in range(2):
        turns.append(turn_of(engine, episode, number, 4))
        episode.add_turn(turns[-1], "")
        journal.turn(episode)
        journal.round([episode.sample_id])
        episode.add_observation(Rendered((8,), ()))
    journal.leave()
    journal.close()
    found = read_journal(path)
    for number, turn in enumerate(turns):
        followed = found.turns[5, number]
        again = followed.completion(turn.prompt_token_ids, turn.weights_version)
        assert again == turn
        assert followed.entry(2).facts == turn.facts


def test_journals_without_it_are_read_and_written_as_before(tmp_path):
    line = {
        "event": "turn",
        "sample_id": 5,
        "turn": 0,
        "request_id": 5,
        "text": "",
        "context_hash": "c",
        "token_ids": [1],
        "logprobs": [-0.5],
        "logprobs_mode": "temperature",
        "finish_reason": "stop",
        "weights_version": 0,
    }
    begin = {"event": "begin", "format": FORMAT, **HEADER}
    path, check = tmp_path / "old.jsonl", 0
    with path.open("wb") as file:
        for each in (begin, line, {"event": "round", "round": 0, "sample_ids": [5]}):
            text, check = event_line(each, check)
            file.write(text)
    completion = read_journal(path).turns[5, 0].completion((1, 2), 0)
    assert completion.facts == {}
    episode = episode_of(5, (1, 2))
    episode.add_turn(completion, "")
    journal = Journal(tmp_path / "new.jsonl", HEADER)
    journal.turn(episode)
    journal.round([episode.sample_id])
    journal.leave()
    journal.close()
    written = [json.loads(each) for each in (tmp_path / "new.jsonl").read_text().splitlines()]
    assert set(written[1]) == {*line, "check"}


def test_an_episode_that_starts_over_forgets_it(planted):
    engine = sampled(num_rows=0)[1]
    episode = episode_of(0, (3, 4))
    episode.add_turn(turn_of(engine, episode, 0, 4), "")
    episode.start_over()
    assert episode.facts == {}


def test_it_is_carried_to_the_next_step(planted):
    engine = sampled(num_rows=0)[1]
    prompt = Prompt(1, "", (3, 4))
    sample = OpenSample()
    with engine.ledger.recording():
        for chunk in range(3):
            request = GenerationRequest((*prompt.token_ids, *sample.token_ids), request_id=chunk)
            (part,) = engine.generate([request], SamplingParams(max_tokens=2))
            sample = sample.extended(part, max_tokens=6)
    values = expected(sample.token_ids, sample.logprobs, [True] * 6)
    assert list(sample.facts[NAME]) == values
    group = OpenGroup(1, prompt, (sample,), "temperature", 1, 2)
    entries = tuple(engine.ledger.take())
    state = StreamState((group,), 3, 2, entries)
    written = to_bytes(InFlight(stream=state), 0)
    again = from_parts([written], 0, rank=0, world_size=1).stream
    assert again == state
    (completion,) = again.groups[0].completions()
    assert list(completion.facts[NAME]) == values
    assert [entry.facts for entry in again.entries] == [entry.facts for entry in entries]
    assert again.entries[0].facts[NAME] == tuple(values[:2])


def test_a_checkpoint_without_it_is_read():
    text = (
        '{"held": [], "stream": {"groups": [{"request_id": 3, "prompt": {"id": 1, "text": "t", '
        '"token_ids": [1, 2], "label": null, "columns": {"a": [1, {"b": 2}]}}, "samples": '
        '[{"token_ids": [5], "logprobs": [-0.5], "versions": [1], "finish_reason": null, '
        '"segments": [{"request_id": 7, "sample_index": 1}]}], "logprobs_mode": "temperature", '
        '"begun": 1, "complete": 0}], "num_calls": 2, "num_rounds": 1, "entries": [{"request_id": '
        '7, "sample_index": 1, "context_hash": "x", "token_ids": [5], "logprobs": [-0.5], '
        '"weights_version": 1}]}}'
    )
    state = from_parts([text.encode()], 0, rank=0, world_size=1).stream
    assert state.groups[0].prompt.columns == {"a": [1, {"b": 2}]}
    assert state.groups[0].samples == (OpenSample((5,), (-0.5,), (1,), None, (TurnSegment(7, 1),)),)
    assert state.entries[0].key == (7, 1, "x")


def test_completions_in_parts_join_and_cut_it(planted):
    params = SamplingParams(max_tokens=4)
    engine = sampled(num_rows=0)[1]
    request = GenerationRequest((3, 4))
    raws = []
    stream = engine.stream_rows  # what the backend gave, before completions are made of it

    def noted(rows, params):
        for part in stream(rows, params):
            raws.extend(raw for _, raw in part)
            yield part

    engine.stream_rows = noted
    engine.generate([request, replace(request, request_id=1)], params)
    whole = joined(*raws, params, None)
    assert whole.facts[NAME] == raws[0].facts[NAME] + raws[1].facts[NAME]
    cut = cut_at_token(whole, {whole.token_ids[2]}, min_tokens=3)
    assert cut.facts[NAME] == whole.facts[NAME][: len(cut.token_ids)]
    assert join_facts((2, {}), (1, {NAME: (-3.0,)})) == {NAME: (1.0, 1.0, -3.0)}


def test_a_completion_needs_one_value_per_token():
    with pytest.raises(ValueError, match=f"got 2 tokens, .* and 1 {NAME} for"):
        Completion(0, 0, (1,), (2, 3), (-1.0, -1.0), "temperature", "stop", facts={NAME: (0.0,)})


def test_packed_values_that_the_ledger_does_not_hold_are_found(planted):
    """The ids of two tokens of a row change places, which their numbers do not show."""

    def exchanged(rows):
        flat, count = rows[KEPT_IDS].copy(), rows.response_lengths[0]
        flat[[count, count + 1]] = flat[[count + 1, count]]
        return replace(rows, facts={**rows.facts, KEPT_IDS: flat})

    with pytest.raises(LedgerError, match="kept_ids differ from what the engine recorded"):
        both_ranks(change_rows=exchanged)


@pytest.mark.parametrize(
    "wrong",
    [{"travels": "exchange"}, {"travels": "stays", "is_vouched": True}],
    ids=["exchange", "stays"],
)
def test_a_line_that_cannot_be_kept_is_refused(wrong):
    with pytest.raises(ValueError, match=NAME):
        Column(NAME, np.float32, **wrong)


def test_a_fact_of_rows_is_known_to_all_and_a_ragged_one_is_delivered(monkeypatch):
    """The ids that the sampling kept, so many for each row as it had."""
    kept = {i: list(range(i % 3)) for i in range(8)}
    number = Column(
        "num_seen",
        np.int64,
        level="row",
        of=lambda item: len(kept[item.rollout.sample_id]),
        travels="exchange",
        wire="<i2",
    )
    ids = Column("seen", np.int32, level="num_seen", of=lambda item: kept[item.rollout.sample_id])
    for column in (number, ids):
        monkeypatch.setitem(COLUMNS, column.name, column)
    scored, _ = sampled()
    world = cases.ThreadWorld(2)

    def one_rank(strategy):
        own = scored[strategy.rank * 4 :][:4]
        table = merge([exchange(own, strategy)])
        wanted = [np.array([7, 2, 1]), np.array([5, 0])]
        return table, deliver_rows(table, tabulate(own), wanted, strategy)

    for rank, (table, rows) in enumerate(world.run(one_rank)):
        assert table["num_seen"].tolist() == [i % 3 for i in range(8)]
        order = ([7, 2, 1], [5, 0])[rank]
        assert rows.sample_ids.tolist() == order
        assert rows["seen"].tolist() == [x for i in order for x in kept[i]]
        assert "seen" not in collated(rows).facts


FACTS = (
    {"token_ids", "output_token_ids"},
    {"logprobs", "output_logprobs", "rollout_logprobs"},
    {"sampled", "is_sampled"},
    {"versions", "token_versions", "weights_version", "weights_versions"},
)
# Where an engine's calls become a response, or an agent's answer, and where batches and files are
# read.
ENDS = {
    "rows",
    "types",
    "fire",
    "open_groups",
    "open_episodes",
    "episode",
    "transcript",
    "replies",
    "journal",
    "journal_reading",
    "journal_rounds",
    "batch",
    "rollouts",
    "audit_recorder",
    "trajectories",
    "samples",
    "version_checks",
}


def functions_that_list_facts(source):
    """Names of the functions that name three of the four facts of a token."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
        names |= {node.arg for node in ast.walk(function) if isinstance(node, ast.keyword)}
        if sum(bool(names & words) for words in FACTS) >= 3:
            found.append(function.name)
    return found


@pytest.mark.full
def test_between_engine_and_loss_nobody_lists_the_facts_of_a_token(repository):
    paths = [*repository.glob("packages/*/src/**/*.py")]
    found = {path: functions_that_list_facts(path.read_text()) for path in paths}
    assert {path.stem for path, functions in found.items() if functions} <= ENDS
    listed = "def tabulate(c):\n    return f(c.token_ids, logprobs=c.logprobs, sampled=c.sampled)"
    assert functions_that_list_facts(listed) == ["tabulate"]
