"""Open responses on several ranks: who gets what, in how many bytes, and that nobody notices."""

import hashlib

import numpy as np
import pytest
from tests.exchange_bytes import StepSamples, predict_exchange
from tests.records.exchange_cases import ThreadWorld
from tests.rollout.scripted_session import Session

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.types import SamplingParams
from lightrft.experience.ledger_gate import rebuild
from lightrft.experience.minibatches import plan_minibatches
from lightrft.records.columns import COLUMNS
from lightrft.records.table import deliver_rows, tabulate
from lightrft.rewards.types import RewardResult
from lightrft.rollout.in_flight import from_parts, to_bytes
from lightrft.rollout.ledger_records import deliver_evidence
from lightrft.rollout.open_groups import NOTHING_OPEN
from lightrft.rollout.source import (
    InFlight,
    SampleRequests,
    SourceParts,
    own_positions,
)
from lightrft.rollout.streaming import StreamSource

SIZE, LIMIT, END = 2, 900, 1000


def length_of(request_id):
    """A long tail: a few are four times as long as the others."""
    digest = hashlib.sha256(str(request_id).encode()).digest()
    return LIMIT if digest[0] < 32 else 150 + digest[1]


def rest(request, index):
    """The rest of a response, whose token t follows from its request and t."""
    so_far, length = len(request.prompt_token_ids) - 100, length_of(request.request_id)
    tokens = [(request.request_id * 7 + t) % 1000 for t in range(so_far, length)]
    if length < LIMIT:
        tokens[-1] = END
    return tokens, [-float(t + 1) / 8 for t in range(so_far, length)]


class Sums:
    name, needs_labels, pad_token_id = "sums", False, 0

    def score(self, prompts, responses, labels, columns):
        return [RewardResult(float(len(text) % 5)) for text in responses]

    def decode(self, token_ids, *, skip_special_tokens):
        return "x" * len(token_ids)


def run_rounds(world_size, *, num_wanted, num_rounds=5, chunk=200, saves=()):
    """By rank and round: what a rank trains, and the bytes that it got and needed."""
    config = TrainConfig(
        rollout_batch_size=num_wanted,
        train_batch_size=num_wanted * SIZE,
        n_samples_per_prompt=SIZE,
        stream_chunk=chunk,
        max_staleness=3,
        generate_max_len=LIMIT,
    )
    world = ThreadWorld(world_size)

    def one_rank(context):
        session, sums = Session(context, rest, END), Sums()
        source = StreamSource(SourceParts(session, config, sums, sums))
        stream, first, found, drawn = NOTHING_OPEN, 0, [], [0]

        def draw():
            positions = own_positions(context, num_wanted, first=drawn[0])
            drawn[0] += num_wanted
            return [Prompt(i, "", tuple(range(i, i + 100))) for i in positions]

        for number in range(num_rounds):
            session.engine.set_weights_version(number)
            before = world.received[context.rank]
            samples = source.sample(
                SampleRequests(
                    draw(),
                    own_positions(context, num_wanted),
                    num_wanted,
                    SamplingParams(max_tokens=LIMIT, n=SIZE, seed=1),
                    first,
                    next_prompts=draw,
                    stream=stream,
                )
            )
            table = samples.table
            plan = plan_minibatches(
                table.lengths,
                train_batch_size=len(table),
                world_size=world_size,
                seed=1,
                step=number,
            )
            wanted = [plan.row_index(rank) for rank in range(world_size)]
            rows = deliver_rows(table, tabulate(samples.scored), wanted, context)
            ids = [table.sample_ids[each].tolist() for each in wanted]
            evidence = deliver_evidence(samples.evidence, ids, context)
            for row, sample_id in enumerate(rows.sample_ids.tolist()):
                right = rebuild(sample_id, evidence)
                stop = int(rows.lengths[: row + 1].sum())
                own = rows.token_ids[stop - int(rows.lengths[row]) : stop]
                assert right.token_ids.tolist() == own.tolist()
            assert sorted(evidence.accounts) == sorted(rows.sample_ids.tolist())
            needed = rows.token_ids.nbytes + rows.rollout_logprobs.nbytes
            found.append((rows, world.received[context.rank] - before, needed, samples.report))
            first, stream = first + samples.num_prompts, samples.stream
            if number in saves:  # as a checkpoint keeps them
                parts = context.gather_objects(to_bytes(InFlight(stream=stream), context.rank))
                again = from_parts(parts, 0, rank=context.rank, world_size=world_size)
                assert again.stream == stream
        return found

    return world.run(one_rank)


def trained(ranks):
    """By round: ids, tokens, logprobs and versions of the rows of all ranks, in order."""
    found = []
    for rounds in zip(*ranks, strict=True):
        rows = {}
        for table, *_ in rounds:
            stops, ends = np.cumsum(table.lengths), np.cumsum(table.response_lengths)
            for row, sample_id in enumerate(table.sample_ids.tolist()):
                tokens = table.token_ids[stops[row] - table.lengths[row] : stops[row]]
                own = slice(ends[row] - table.response_lengths[row], ends[row])
                rows[sample_id] = (
                    tokens.tolist(),
                    table.rollout_logprobs[own].tolist(),
                    table.token_versions[own].tolist(),
                )
        found.append(sorted(rows.items()))
    return found


WORLDS = [2, 4, pytest.param(8, marks=(pytest.mark.slow, pytest.mark.shard("measures")))]


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_rank_gets_little_more_than_the_rows_it_trains_need(world_size):
    ranks = run_rounds(world_size, num_wanted=8 * world_size)
    num_open = sum(found[-1].num_open for found in ranks[0])
    assert num_open > 0
    moved = np.array([[entry[1] for entry in found] for found in ranks], float)
    needed = np.array([[entry[2] for entry in found] for found in ranks], float)
    # The gate has a source of its own: as much again. Of W ranks 1 / W need not move.
    assert moved.sum() <= 1.3 * 2 * needed.sum() * (world_size - 1) / world_size
    assert (moved <= 1.3 * 2 * needed).all()
    # Gathering all new tokens of each round would be more, from four ranks on.
    if world_size > 2:
        sampled = sum(found[-1].num_sampled_tokens for found in ranks[0])
        assert moved.sum() < 2 * 13 * sampled * (world_size - 1) * (0.8 if world_size == 4 else 0.5)


@pytest.mark.full
def test_what_is_trained_does_not_depend_on_the_number_of_ranks():
    one = trained(run_rounds(1, num_wanted=8, saves=(1, 3)))
    for world_size in (2, 4):
        assert trained(run_rounds(world_size, num_wanted=8, saves=(2,))) == one
    assert trained(run_rounds(1, num_wanted=8, chunk=100)) != one  # the comparison can tell


@pytest.mark.parametrize("world_size, tokens", [(64, 4096), (512, 16_000)])
def test_at_scale_open_rows_cost_little(world_size, tokens):
    samples = StepSamples(8192, 200, tokens, num_turns=4)
    found = predict_exchange(samples, world_size=world_size, num_open_groups=2 * 8192 // 8)
    trained_bytes = 8192 / world_size * samples.token_bytes
    assert found.rows + found.tokens <= 1.3 * trained_bytes
    assert found.total <= 1.3 * 2 * trained_bytes


@pytest.mark.full
def test_the_predicted_bytes_are_the_measured_ones():
    ranks = run_rounds(4, num_wanted=32)
    tables = [entry[0] for found in ranks for entry in found]
    count, num_rounds = sum(map(len, tables)), len(ranks[0])
    responses = sum(int(table.response_lengths.sum()) for table in tables) / count
    turns = np.mean([len(set(v)) for found in trained(ranks) for _, (_, _, v) in found])
    samples = StepSamples(count // num_rounds, 100, responses, num_turns=turns)
    found = predict_exchange(samples, world_size=4, num_open_groups=48)
    measured = np.mean([[entry[1] for entry in found] for found in ranks])
    assert measured == pytest.approx(found.total, rel=0.1)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_runs_end_where_their_values_end(count):
    column = COLUMNS["token_versions"]
    values = np.array([3, 3, -1, 2, 2, 2, 9], np.int32)[:count]
    data = column.to_wire(values) + b"\xff\x01" * 9
    found, rest = column.from_wire(memoryview(data), count)
    assert found.dtype == np.int32
    assert found.tolist() == values.tolist()
    assert bytes(rest) == b"\xff\x01" * 9
