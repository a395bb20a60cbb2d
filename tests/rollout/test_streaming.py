"""Which groups a round trains on, and how many tokens an open response has."""

from collections import Counter

import numpy as np
import pytest
from tests.records.exchange_cases import ThreadRank, ThreadWorld
from tests.rollout.scripted_session import Session

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.media.media import Media
from lightrft.engines.media.sources import ImageSource
from lightrft.engines.types import SamplingParams
from lightrft.rewards.types import RewardResult
from lightrft.rollout.open_groups import NOTHING_OPEN
from lightrft.rollout.source import SampleRequests, SourceParts
from lightrft.rollout.streaming import GroupFacts, StreamSource, groups_to_train

LIMIT, SIZE, END = 30, 2, 1000


def tokens_of(length):
    """A response of a length; one at the limit has no end."""
    return (*range(length - 1), END if length < LIMIT else length - 1)


def rest(request, index):
    """The rest of response j of a prompt, whose length is the prompt's token j."""
    ids = request.prompt_token_ids
    length, so_far = ids[request.request_id % SIZE], len(ids) - SIZE
    return tokens_of(length)[so_far:], [-float(t) for t in range(so_far, length)]


def session_of_one():
    return Session(ThreadRank(ThreadWorld(1), 0), rest, END)


class Nothing:
    name, needs_labels = "nothing", False
    pad_token_id = 0

    def score(self, prompts, responses, labels, columns):
        return [RewardResult(0.0) for _ in responses]

    def decode(self, token_ids, *, skip_special_tokens):
        return ""


def rounds(lengths, *, chunk, in_flight, max_staleness, num_wanted=2):
    """Each round's trained groups as (lengths, rounds since the first), report and state."""
    config = TrainConfig(
        rollout_batch_size=num_wanted,
        train_batch_size=num_wanted * SIZE,
        micro_train_batch_size=1,
        n_samples_per_prompt=SIZE,
        stream_chunk=chunk,
        stream_prompts=in_flight,
        max_staleness=max_staleness,
        generate_max_len=LIMIT,
        ledger_gate=False,
    )
    session, nothing = session_of_one(), Nothing()
    source = StreamSource(SourceParts(session, config, nothing, nothing))
    stream, first, found = NOTHING_OPEN, 0, []
    waiting = [Prompt(i, "", tuple(pair)) for i, pair in enumerate(lengths)]

    def draw():
        taken, waiting[:] = waiting[:num_wanted], waiting[num_wanted:]
        return taken

    while len(waiting) >= 2 * in_flight:
        session.engine.set_weights_version(len(found))
        samples = source.sample(
            SampleRequests(
                draw(),
                range(num_wanted),
                num_wanted,
                SamplingParams(max_tokens=LIMIT, n=SIZE, seed=5),
                first,
                next_prompts=draw,
                stream=stream,
            )
        )
        first, stream = first + samples.num_prompts, samples.stream
        found.append((samples, stream))
    return session, found


def trained_lengths(samples):
    return [len(item.rollout.completion.output_token_ids) for item in samples.scored]


@pytest.mark.cover(3)
@pytest.mark.parametrize("seed", range(8))
def test_budgets_are_exact_ages_are_bounded_and_nothing_is_lost(seed):
    rng = np.random.default_rng(seed)
    bound, chunk, num_wanted = int(rng.integers(1, 5)), int(rng.integers(1, 9)), 2
    in_flight = int(rng.integers(num_wanted, (bound + 1) * num_wanted + 1))
    lengths = np.minimum(rng.geometric(0.15, size=(120, SIZE)), LIMIT).tolist()
    session, found = rounds(lengths, chunk=chunk, in_flight=in_flight, max_staleness=bound)
    trained, order = [], []
    for number, (samples, stream) in enumerate(found, start=1):
        trained += trained_lengths(samples)
        for item in samples.scored:
            versions = item.rollout.token_versions
            own = item.rollout.prompt.token_ids[item.rollout.sample_id % SIZE]
            assert len(versions) == own
            assert list(versions) == sorted(versions)
            assert 0 <= number - 1 - versions[0] <= bound
            tokens = item.rollout.completion.output_token_ids
            assert tokens == tokens_of(own)
            assert item.rollout.completion.output_logprobs == tuple(-float(t) for t in range(own))
        order.append([item.rollout.prompt.id for item in samples.scored[::SIZE]])
        for group in stream.groups:
            for sample, own in zip(group.samples, group.prompt.token_ids, strict=True):
                since = number - group.begun + 1 if group.begun else 0
                assert len(sample.token_ids) == min(own, chunk * since)
                assert (sample.finish_reason is None) == (len(sample.token_ids) < own)
        assert sum(group.begun > 0 for group in stream.groups) <= in_flight
    asked = [i for each in order for i in each]
    assert len(set(asked)) == len(asked) == len(found) * num_wanted
    left = [group.prompt.id for group in found[-1][1].groups]
    # All that was asked for, once: trained or still in flight, and as multisets of lengths.
    assert sorted(asked + left) == list(range(len(asked) + len(left)))
    expected = Counter(n for i in asked for n in lengths[i])
    assert Counter(trained) == expected
    assert len(set(session.seeds)) == len(session.seeds)


@pytest.mark.parametrize("seed", range(200))
def test_a_feasible_flight_stays_feasible(seed):
    """The rule against a search: nothing becomes too old, whatever completes when."""
    rng = np.random.default_rng(seed)
    bound, wanted = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    most, flight, next_id = (bound + 1) * wanted, [], 0
    for number in range(1, 30):
        while len(flight) < most:
            flight.append(GroupFacts(next_id, number, 0, 0))
            next_id += 1
        flight = [
            each
            if each.complete or rng.random() < 0.6
            else GroupFacts(each.request_id, each.begun, number, 0)
            for each in flight
        ]
        chosen = groups_to_train(flight, wanted, round_number=number, max_staleness=bound)
        assert len(chosen) == wanted
        kept = [each for each in flight if each not in chosen]
        assert len(kept) == len(flight) - wanted
        for later in range(1, bound + 1):
            due = [each for each in kept if each.begun + bound < number + 1 + later]
            assert len(due) <= later * wanted
        flight = kept


def test_groups_that_are_whole_come_in_the_order_of_completion_and_request():
    groups = [
        GroupFacts(0, 1, 0, 5),
        GroupFacts(1, 1, 3, 5),
        GroupFacts(2, 2, 2, 5),
        GroupFacts(3, 2, 3, 5),
        GroupFacts(4, 3, 0, 5),
    ]

    def ids(num_wanted, bound, number=3):
        found = groups_to_train(groups, num_wanted, round_number=number, max_staleness=bound)
        return [each.request_id for each in found]

    assert ids(2, 9) == [2, 1]
    assert ids(3, 9) == [2, 1, 3]
    assert ids(4, 9) == [2, 1, 3, 0]  # too few are whole: the oldest is waited for
    assert ids(2, 2) == [1, 0]  # those of round 1 are due
    assert ids(3, 2) == [2, 1, 0]


def test_too_few_prompts_are_said():
    with pytest.raises(ValueError, match="2 prompts or more: got 1"):
        source = StreamSource(
            SourceParts(session_of_one(), TrainConfig(stream_chunk=2), Nothing(), Nothing())
        )
        params = SamplingParams(max_tokens=LIMIT, n=SIZE)
        source.sample(SampleRequests([Prompt(0, "", (3, 3))] * 1, range(1), 2, params))


def test_hot_first_tokens_are_for_prompts_of_text():
    image = ImageSource("row 1", content=b"png")
    prompt = Prompt(0, "<image>", (1,), media=Media({"image": (image,)}))
    config = TrainConfig(stream_chunk=4, use_fire=True)
    source = StreamSource(SourceParts(session_of_one(), config, None, None))
    with pytest.raises(ConfigError, match="use_fire continues responses"):
        source.sample(SampleRequests([prompt], range(1), 1, SamplingParams(n=SIZE)))
