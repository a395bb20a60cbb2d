"""Rollouts and training use process groups of their own: their collectives never mix."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from tests.engines.fake_engine import FakeEngine
from tests.ranks import run_multiprocess
from tests.strategy.test_distributed_context import Spanning, sharded

from lightrft.strategy.distributed.deadlines import current_phase, phase


def strategy_of(tp, **settings):
    strategy = sharded(engine_tp_size=tp, plot_every=1, **settings)
    engine_class = Spanning if tp > 1 else FakeEngine
    strategy.inference_engine = engine_class(
        script=lambda request, index: ([sum(request.prompt_token_ids)], [-0.5])
    )
    return strategy


def train(strategy, rank, world_size, number):
    """What a step exchanges: small values, a large tensor, bytes; all of it depends on `number`."""
    context = strategy.context
    with phase(f"train {number}", 60):
        assert context.all_reduce({"loss": rank + number}, "sum") == {"loss": sum_of(number)}
        large = context.all_reduce(torch.full((1000,), float(rank + number)), "sum")
        assert large.tolist() == [float(sum_of(number))] * 1000
        parts = [f"{number}:{rank}->{peer}".encode() for peer in range(world_size)]
        assert context.exchange_bytes(parts) == [
            f"{number}:{peer}->{rank}".encode() for peer in range(world_size)
        ]


def sum_of(number):
    return 2 * number + 1


def roll_out(strategy, rank, world_size, number, delay=0.0):
    """What a rollout exchanges: prompts within the engine's ranks, agreement, rows."""
    time.sleep(delay)
    session = strategy.session
    completions = strategy.gather_and_generate({}, [[rank, number], [100, rank]])
    assert [c.output_token_ids for c in completions] == [(rank + number,), (100 + rank,)]
    assert session.context.gather_objects(("rows", number, rank)) == [
        ("rows", number, peer) for peer in range(world_size)
    ]
    assert session.context.all_gather(10 * number + rank).tolist() == [10 * number, 10 * number + 1]


def in_opposite_orders(rank, world_size, tp):
    """One rank trains before its rollout begins, the other once its rollout has ended."""
    strategy = strategy_of(tp)
    with ThreadPoolExecutor(1) as rollouts:
        for number in range(4):
            if rank == number % 2:
                # After the delay, training is inside its first collective.
                rollout = rollouts.submit(roll_out, strategy, rank, world_size, number, 0.1)
                train(strategy, rank, world_size, number)
                rollout.result()
            else:
                rollouts.submit(roll_out, strategy, rank, world_size, number).result()
                train(strategy, rank, world_size, number)
    assert current_phase() is None
    return strategy.session.num_calls


def groups(rank, world_size):
    ranks = []
    for tp in (1, 2, 4):
        strategy = strategy_of(tp)
        training, rollouts = strategy.context, strategy.session.context
        # A rank that has its engine alone exchanges nothing in that group.
        assert (rollouts.engine_group is training.engine_group) == (tp == 1)
        ranks.append(dist.get_process_group_ranks(rollouts.engine_group))
        assert dist.get_process_group_ranks(rollouts.world_group) == list(range(world_size))
        assert (rollouts.rank, rollouts.world_size) == (rank, world_size)
        assert dist.get_backend(rollouts.world_group) == "gloo"
    strategy = strategy_of(1, sp_size=2)
    training, rollouts = strategy.context, strategy.session.context
    assert rollouts.data_group is not training.data_group
    assert rollouts.reduce_over_data(rank // 2, "sum") == 1
    strategy.close()
    return ranks


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
def test_collectives_of_training_and_rollouts_in_different_orders_do_not_mix(tp):
    calls = run_multiprocess(in_opposite_orders, 2, timeout_seconds=150, args=(tp,))
    assert calls == [4, 4]


def test_groups_of_rollouts_have_the_ranks_of_those_of_training():
    assert run_multiprocess(groups, 4, timeout_seconds=150) == [
        [[rank], [rank // 2 * 2, rank // 2 * 2 + 1], [0, 1, 2, 3]] for rank in range(4)
    ]
