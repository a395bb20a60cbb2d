"""Faults that overlapping brings, planted: default settings find each before it is trained on."""

import re
from dataclasses import replace
from functools import partial

import pytest
from tests.ranks import run_multiprocess
from tests.trainer.test_random_kills import RUN_SECONDS
from tests.trainer.test_rollout_ranks import options_of, prepared

from lightrft.engines.hf.engine import HFEngine
from lightrft.rollout.ledger_records import LedgerError


def old_caches(engine_class):
    """Prompts that were seen before an update go on from keys and values of before it."""
    generate, seen, weights = engine_class.generate, {}, []

    def stale(engine, requests, params, **named):
        model = engine.native
        now = {name: value.clone() for name, value in model.state_dict().items()}
        if not weights or engine.weights_version != weights[-1][0]:
            weights.append((engine.weights_version, now))
        first = [seen.setdefault(request.prompt_token_ids, len(weights)) for request in requests]
        model.load_state_dict(weights[min(first) - 1][1])
        try:
            return generate(engine, requests, params, **named)
        finally:
            model.load_state_dict(now)

    engine_class.generate = stale


def writes_while_it_samples(engine_class):
    """Weights change between two tokens of a response, and are the right ones again afterwards."""
    generate, num_passes = engine_class.generate, []

    def changing(engine, requests, params, **named):
        weight = engine.native.get_output_embeddings().weight

        def later(*_):
            num_passes.append(0)
            if len(num_passes) == 2:
                weight.data.mul_(1.05)

        before = weight.data.clone()
        is_training = params.n > 1 or len(requests) > 1
        hook = engine.native.register_forward_hook(later) if is_training else None
        num_passes.clear()
        try:
            return generate(engine, requests, params, **named)
        finally:
            if hook is not None:
                hook.remove()
            weight.data.copy_(before)

    engine_class.generate = changing


def labels_of_the_next_version(engine_class):
    """Completions and ledger agree, both a version too late."""
    poll = engine_class.poll

    def mislabelled(engine):
        true = engine.weights_version
        engine.weights_version = true + 1
        try:
            return poll(engine)
        finally:
            engine.weights_version = true

    engine_class.poll = mislabelled


def weights_of_the_first_step(*_):
    """The weights that are sent are those of an older step."""
    from lightrft.strategy.split.remote_engine import RemoteEngine

    load, first = RemoteEngine.load_shards, {}

    def older(engine, layout, group, sources, **named):
        for spec in layout.specs:
            first.setdefault(spec.name, sources(spec.name).clone())
        return load(engine, layout, group, first.__getitem__, **named)

    RemoteEngine.load_shards = older


def hashes_of_the_first_step(engine_class):
    """The engine says what it held before."""
    hashes, first = engine_class.hash_parameters, []

    def older(engine, names=None):
        first.append(hashes(engine, names))
        return first[0]

    engine_class.hash_parameters = older


def denominators_of_other_weights(*_):
    """Rows come with the logprobs of other weights than those that sampled them."""
    import lightrft.experience.delivery as delivery

    tabulate = delivery.tabulate

    def other(scored):
        table = tabulate(scored)
        return replace(table, rollout_logprobs=table.rollout_logprobs - 0.01)

    delivery.tabulate = other


def changes_what_is_held(change):
    from lightrft.stages.policy.split.generating_side import Generator

    draw = Generator.draw

    def wrong(generator, number, *others):
        if number == 3:
            flights = generator.flights
            flights[2] = replace(flights[2], held=change(flights))
        draw(generator, number, *others)

    Generator.draw = wrong


def drops_a_group(*_):
    """What was sampled for a step is forgotten."""
    changes_what_is_held(lambda flights: ())


def trains_a_row_twice(*_):
    """What was trained on comes once more."""
    changes_what_is_held(lambda flights: flights[1].held)


# Where each is planted (the rank that trains is 0), and what finds it.
SPLIT = {
    weights_of_the_first_step: (0, "do not hold what was sent|hash"),
    hashes_of_the_first_step: (1, "hash"),
    old_caches: (1, "earlier weights|otherwise than it sampled it|canary"),
    writes_while_it_samples: (1, "otherwise than it sampled it"),
    labels_of_the_next_version: (1, "is said to be of version"),
    denominators_of_other_weights: (1, "rollout_logprobs .bits. differ"),
    # The versions of the rows that come instead are other ones, too.
    drops_a_group: (1, "trained twice or are lost|is said to be of version"),
    trains_a_row_twice: (1, "trained twice or are lost|is said to be of version"),
}


def plant(fault, rank):
    if rank == SPLIT[fault][0]:
        fault(HFEngine)


def run_each(rank, world_size, folder):
    """What the ranks of each faulty run say, and how they end."""
    from tests.forked_run import Ranks

    folder, told = prepared(folder), {}
    for fault in SPLIT:
        options = options_of(folder, fault.__name__, rollout_ranks=1, actor_learning_rate=3e-2)
        ranks = Ranks(options | {"async_save": False, "max_steps": 4}, 2, partial(plant, fault))
        codes = ranks.wait(RUN_SECONDS)
        ranks.kill(ranks.running())
        told[fault.__name__] = codes, ranks.log.read_text()
    return told


@pytest.fixture(scope="module")
def split_runs(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("faults"))
    return run_multiprocess(run_each, 1, timeout_seconds=1200, args=(folder,))[0]


@pytest.mark.slow
@pytest.mark.shard("overlap")
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("fault", SPLIT, ids=lambda fault: fault.__name__)
def test_ranks_that_generate(split_runs, fault):
    codes, text = split_runs[fault.__name__]
    assert 0 not in codes, text[-3000:]
    lines = [line for line in text.splitlines() if "Error" in line]
    assert any(re.search(SPLIT[fault][1], line) for line in lines), text[-3000:]


FAULTS = (old_caches, writes_while_it_samples, labels_of_the_next_version)


@pytest.mark.parametrize("options", [{"rollout_lag": 1}, {"rollout_lag": 1, "stream_chunk": 3}])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_sequential_form(build_world, monkeypatch, fault, options):
    from lightrft.strategy.weight_sync.verification import WeightSyncError

    for name in ("generate", "poll"):
        monkeypatch.setattr(HFEngine, name, getattr(HFEngine, name))
    world = build_world(num_prompts=32, args={**options, "actor_learning_rate": 3e-2})
    fault(HFEngine)
    with pytest.raises((LedgerError, WeightSyncError)):
        for _number in range(1, 5):
            world.step()
