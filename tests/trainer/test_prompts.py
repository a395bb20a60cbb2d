import pytest
from torch.utils.data import DataLoader

from lightrft.config import TrainConfig
from lightrft.datasets.batch_stream import BatchStream, batches_per_episode, planned_steps
from lightrft.datasets.types import Prompt
from lightrft.strategy.sampler import DistributedSampler


def prompts(count):
    return [Prompt(i, str(i), (i,)) for i in range(count)]


def loader(rank, world_size, *, count=13, batch=2):
    data = prompts(count)
    sampler = DistributedSampler(data, world_size, rank, seed=5, drop_last=True)
    return DataLoader(data, batch_size=batch, sampler=sampler, drop_last=True, collate_fn=list)


def take(stream, steps):
    return [[prompt.id for prompt in stream.next_batch()] for _ in range(steps)]


@pytest.mark.parametrize("stop_after", range(1, 8))
@pytest.mark.parametrize("kind", ["loader", "list"])
def test_a_stream_resumed_anywhere_continues_with_the_unseen_prompts(stop_after, kind):
    def batches():
        if kind == "loader":
            return loader(1, 2)
        data = prompts(12)
        return [data[i : i + 2] for i in range(0, 12, 2)]

    whole = take(BatchStream(batches(), world_size=2), 10)
    first = BatchStream(batches(), world_size=2)
    seen = take(first, stop_after)
    second = BatchStream(
        batches(), world_size=2, episode=first.episode, num_consumed=first.num_consumed
    )
    assert seen + take(second, 10 - stop_after) == whole


def test_every_pass_has_its_own_order():
    stream = BatchStream(loader(0, 1, count=8), world_size=1)
    first, second = take(stream, 4), take(stream, 4)
    assert first != second
    for order in (first, second):
        assert sorted(i for batch in order for i in batch) == list(range(8))
    assert stream.episode == 1


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_has_the_same_prompts_at_the_same_positions_for_any_number_of_ranks(world_size):
    alone = take(BatchStream(loader(0, 1, count=24, batch=8), world_size=1), 3)
    ranks = [
        take(
            BatchStream(
                loader(rank, world_size, count=24, batch=8 // world_size), world_size=world_size
            ),
            3,
        )
        for rank in range(world_size)
    ]
    for step in range(3):
        joined = [ranks[i % world_size][step][i // world_size] for i in range(8)]
        assert joined == alone[step]


def test_too_few_prompts_are_named():
    with pytest.raises(ValueError, match="rollout_batch_size"):
        BatchStream(loader(0, 1, count=1), world_size=1).next_batch()
    with pytest.raises(ValueError, match="rollout_batch_size=4"):
        batches_per_episode(loader(0, 1, count=1), world_size=1, batch_size=4)


@pytest.mark.parametrize(
    "options, updates, steps",
    [
        ({}, None, 3),
        ({"num_episodes": 2}, None, 6),
        ({"num_episodes": 2, "max_steps": 4}, None, 4),
        ({}, 8, 1),
        ({}, 9, 2),
        ({"max_epochs": 2}, 9, 1),
    ],
)
def test_length_of_a_run(options, updates, steps):
    config = TrainConfig(
        rollout_batch_size=4, n_samples_per_prompt=8, train_batch_size=4, **options
    )
    batches = loader(0, 2, count=13, batch=2)
    BatchStream(batches, world_size=2, num_consumed=8)  # a resume must not shorten the run
    assert planned_steps(batches, config, 2, num_updates_per_episode=updates) == steps
