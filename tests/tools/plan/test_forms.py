"""Forms of a step: simulated engines against slow ones, formulas, and a simulator's table."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import islice

import pytest
from tests.tools.plan.test_plan import setup_of

from lightrft.cli.errors import ExitCode
from lightrft.cli.main import main
from lightrft.config import ConfigError
from lightrft.rollout.stream_order import GroupFacts
from lightrft.run.gpus import GB, GPUS
from lightrft.tools.plan import forms
from lightrft.tools.plan.constants import CONSTANTS, Constant
from lightrft.tools.plan.duration import Decoding
from lightrft.tools.plan.form_report import (
    ALONE,
    BOTH,
    LAGGING,
    SPLIT,
    STREAMING,
    Form,
    compare_forms,
    form_table,
    recorded_lengths,
)
from lightrft.tools.plan.forms import Engines, Lengths

COST = Decoding(weight_seconds=0.006, token_seconds=3e-8, row_seconds=1e-4, prefill_seconds=1e-5)
GPU = GPUS["h100-80g"]


def token_by_token(engines, rows):
    """The same engine, one decoding step after the other."""
    waiting, active, seconds, is_full = list(rows), [], 0.0, False
    while active or waiting:
        while waiting and not is_full:
            held = sum(context for _, context in active)
            if active and held + waiting[0][1] + len(active) >= engines.cache_tokens:
                break
            active.append(waiting.pop(0))
        seconds += engines.cost.step(len(active), sum(context for _, context in active))
        active = [(left - 1, context + 1) for left, context in active]
        if any(left == 0 for left, _ in active):
            active, is_full = [row for row in active if row[0]], False
        held = sum(context for _, context in active)
        if len(active) > 1 and held + len(active) > engines.cache_tokens:
            last = active.pop()
            waiting.insert(0, last)
            seconds += last[1] * engines.cost.prefill_seconds
            is_full = True
    return seconds


@pytest.mark.parametrize("cache_tokens", [math.inf, 4000, 900])
def test_an_engine_takes_as_long_as_its_steps_one_by_one(cache_tokens):
    rows = [(1 + 37 * i % 190, 20 + 11 * i % 60) for i in range(40)]
    engines = Engines(1, COST, cache_tokens, 20)
    assert engines.decode(rows) == pytest.approx(token_by_token(engines, rows), rel=1e-3)
    assert engines.decode([]) == 0.0


def test_few_rows_decode_hardly_faster_than_many():
    cost = forms.decoding(setup_of("qwen2.5-7b", 8, "h100-80g"), GPU)
    assert cost.step(128, 128 * 2500) < 2.5 * cost.step(1, 2500)
    assert cost.step(8, 8 * 2500) < 1.1 * cost.step(1, 2500)


@pytest.mark.parametrize(("chunk", "num_in_flight"), [(7, 12), (50, 8), (3, 20)])
def test_streaming_samples_and_trains_by_the_rule_of_the_sampler(chunk, num_in_flight):
    """An open response has min(length, chunk x steps since its first), and all are trained."""
    seen, choose = [], forms.groups_to_train

    def noting(groups, num_wanted, **bounds):
        seen.append((list(groups), choose(groups, num_wanted, **bounds)))
        return seen[-1][1]

    drawn = [[1 + (7 * i + 13 * j) % 41 for j in range(2)] for i in range(400)]
    engines = Engines(2, COST, math.inf, 5)
    forms.groups_to_train = noting
    try:
        steps = list(
            islice(
                engines.steps(
                    iter(drawn), 8, chunk=chunk, num_in_flight=num_in_flight, staleness=4
                ),
                20,
            )
        )
    finally:
        forms.groups_to_train = choose
    trained = [each.request_id for _, chosen in seen for each in chosen]
    assert len(set(trained)) == len(trained) == 20 * 8
    assert sum(sum(drawn[i]) for i in trained) == sum(each.trained_tokens for each in steps)
    for number, (groups, _) in enumerate(seen, start=1):
        for each in groups:
            most = chunk * (number - each.begun + 1)
            assert each.num_tokens == sum(min(most, n) for n in drawn[each.request_id])
            assert isinstance(each, GroupFacts)
            assert number - each.begun <= 4


def test_ranks_that_generate_beside_others_take_the_larger_of_both():
    """T = max(a L + b R / (x W), u / (1 - x)) + c, the formula of disjoint ranks with lag 1."""
    longest, rows = 500, 64
    engines = Engines(1, Decoding(0.01, 0.0, 0.0, 0.0), math.inf, 10)
    one_step = 0.01 + CONSTANTS["decode_step_seconds"].value
    generation = engines.decode([(longest, 10)] * rows)
    assert generation == pytest.approx(one_step * longest)
    for update in (0.3 * generation, 3 * generation):
        found = forms.overlapped_seconds([generation], update, 0.5, lag=1)
        assert found == pytest.approx(max(generation, update) + 0.5, rel=1e-9)
    # A long and a short step: one batch ahead hides what none ahead waits for.
    uneven = [2.0, 0.0, 2.0, 0.0]
    alone = forms.overlapped_seconds(uneven, 1.0, 0.0, lag=0)
    assert alone == pytest.approx(2.0)
    assert forms.overlapped_seconds(uneven, 1.0, 0.0, lag=2) < 1.3


def test_lengths_have_the_mean_and_the_bound_that_were_asked_for():
    for sigma in (0.3, 0.9, 2.0):
        found = Lengths.lognormal(sigma, 4096, 16384, 8)
        assert found.average == pytest.approx(4096, rel=0.08)
        assert max(map(max, found.groups)) <= 16384
    first = list(islice(found.drawn(4), 3))
    assert [len(group) for group in first] == [4, 4, 4]
    assert first == list(islice(found.drawn(4), 3))


# Seconds of a step that waits for all, gains of partial rollouts and of no barrier at all on
# separate ranks: a simulation of Qwen2.5-7B on H100 with other engines, steps and rules.
TABLE = {
    (0.6, 16384): (316, 1.27, 1.65),
    (0.9, 32768): (467, 1.67, 2.28),
}


@pytest.mark.full
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_forms_gain_what_another_simulation_found(case, monkeypatch):
    for name, value in (("decode_bandwidth_share", 0.7), ("decode_step_seconds", 0.0025)):
        monkeypatch.setitem(CONSTANTS, name, Constant(value, "of that simulation"))
    sigma, longest = case
    setup = long_run(longest, init_kl_coef=0.0)
    found = compare_forms(setup, GPU, Lengths.lognormal(sigma, 4096, longest, 8))
    seconds = {each.name: each.seconds for each in found}
    expected, streaming, no_barrier = TABLE[case]
    assert seconds[ALONE] == pytest.approx(expected, rel=0.15)
    assert seconds[LAGGING] == seconds[ALONE]
    assert 0.8 * streaming < seconds[ALONE] / seconds[STREAMING] < 1.2 * streaming
    # The ceiling: our steps have a barrier each.
    assert 0.65 * no_barrier < seconds[ALONE] / seconds[BOTH] < no_barrier
    assert 1.0 < seconds[ALONE] / seconds[SPLIT] < 1.35


def long_run(longest, gpus=8, name="qwen2.5-7b", gpu="h100-80g", **options):
    return setup_of(
        name,
        gpus,
        gpu,
        **{
            "fsdp": True,
            "gradient_checkpointing": True,
            "rollout_batch_size": 128,
            "train_batch_size": 1024,
            "micro_train_batch_size": 1,
            "n_samples_per_prompt": 8,
            "prompt_max_len": 512,
            "generate_max_len": longest,
            "engine_mem_util": 0.55,
            **options,
        },
    )


@pytest.mark.full
def test_a_chunk_far_below_the_longest_over_the_bound_of_age_wins_nothing():
    lengths = Lengths.lognormal(0.9, 4096, 16384, 8)

    def gain(**options):
        found = compare_forms(long_run(16384, **options), GPU, lengths)
        return found[0].seconds / found[2].seconds

    assert gain(stream_chunk=1024, stream_prompts=384) < 1.0
    assert gain(stream_chunk=4096, stream_prompts=384) > 1.1


@pytest.mark.full
def test_a_form_that_does_not_fit_is_never_the_fastest():
    few = {"rollout_batch_size": 16, "train_batch_size": 128, "engine_mem_util": 0.4}
    setup = long_run(16384, gpus=2, gpu="h200-141g", **few)
    found = compare_forms(setup, GPUS["h200-141g"], Lengths.lognormal(0.9, 4096, 16384, 8))
    by_name = {each.name: each for each in found}
    assert "ranks that train:" in by_name[BOTH].problem
    assert by_name[BOTH].timing is not None
    assert by_name[BOTH].timing.seconds < by_name[STREAMING].seconds
    assert by_name[BOTH].seconds == math.inf
    last = form_table(found, Lengths(((1,),))).splitlines()[-1]
    assert last.startswith("fastest that fits: --stream_chunk")
    assert "rollout_ranks" not in last
    nothing = [Form(ALONE, {}, problem="too large")]
    assert form_table(nothing, Lengths(((1,),))).endswith("no form fits")


@pytest.mark.full
def test_what_a_run_may_not_have_says_so():
    lengths = Lengths.lognormal(0.9, 500, 1024, 8)
    alone = compare_forms(long_run(1024, gpus=1), GPU, lengths)
    assert "of 1 ranks no two parts" in alone[3].problem
    episodes = long_run(1024, environment="openenv:http://127.0.0.1:9", apply_chat_template=True)
    found = {each.name: each for each in compare_forms(episodes, GPU, lengths)}
    assert "stream_chunk" in found[STREAMING].problem
    assert found[STREAMING].problem.startswith("refused: ")
    assert found[ALONE].seconds < math.inf


@pytest.mark.full
def test_lengths_of_a_run_are_those_it_recorded(tmp_path, capsys):
    line = {
        "step": 1,
        "prompt_ids": [1],
        "response_ids": list(range(9)),
        "reward": 1.0,
        "accuracy": 1.0,
        "truncated": False,
        "masked": False,
        "held_out": False,
        "has_media": False,
        "weights_version": 0,
    }
    samples = [
        (0, 0, [[0, 9]]),
        (1, 0, [[0, 2], [5, 6]]),
        (2, 1, [[0, 4]]),
    ]
    text = "".join(
        json.dumps({**line, "sample_id": i, "group_id": group, "sampled_spans": spans}) + "\n"
        for i, group, spans in samples
    )
    (tmp_path / "rollouts.jsonl").write_text(text)
    assert recorded_lengths(tmp_path, 8).groups == ((8, 3), (4,))
    with pytest.raises(ConfigError, match="--save_rollouts"):
        recorded_lengths(tmp_path / "nowhere", 8)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no samples"):
        recorded_lengths(tmp_path / "empty.jsonl", 8)
    (tmp_path / "bad.jsonl").write_text(text + "{}\n")
    with pytest.raises(ConfigError, match="line 4"):
        recorded_lengths(tmp_path / "bad.jsonl", 8)
    plan = ["plan", "--pretrain", "qwen2.5-0.5b", "--gpus", "2", "--fsdp", "--gpu", "h100-80g"]
    assert main([*plan, "--lengths_of", str(tmp_path)]) == ExitCode.OK
    assert "responses of 5 tokens on average" in capsys.readouterr().out
    assert main([*plan, "--lengths_of", "x", "--length_sigma", "1"]) == ExitCode.USAGE
    assert "exclude each other" in capsys.readouterr().err
    assert main([*plan, "--stage", "sft", "--length_sigma", "1"]) == ExitCode.USAGE
    assert "sft has none" in capsys.readouterr().err


def test_weights_of_split_ranks_cross_from_gpu_to_gpu_or_through_the_host():
    """By hand: 15.2 GB; links of a node have 450 GB/s, of it 0.7 in collectives."""

    def seconds(gpus, num_generating, **options):
        setup = long_run(16384, gpus=gpus, rollout_ranks=num_generating, rollout_lag=1, **options)
        side = replace(setup, world_size=num_generating)
        total = side.compute_bytes * side.actor_size.parameters / GB
        return forms.bridge_seconds(side, gpus - num_generating, GPU) / total

    assert seconds(2, 1) == pytest.approx(1 / (450 * 0.7))
    assert seconds(8, 4) == pytest.approx((1 / 4 + 3 / 4) / (450 * 0.7))
    assert seconds(16, 8) == pytest.approx((1 / 8 + 7 / 8) / (50 * 0.7))
    shared = seconds(2, 1, devices_shared=True)
    assert shared == pytest.approx(2 / 25 + 1 / 1.5)


@pytest.mark.full
def test_the_memory_of_two_ranks_of_one_device_is_added():
    lengths = Lengths.lognormal(0.9, 500, 1024, 8)

    def split(**options):
        setup = long_run(1024, gpus=2, name="qwen2.5-0.5b", engine_mem_util=0.5, **options)
        return next(each for each in compare_forms(setup, GPU, lengths) if each.name == SPLIT)

    apart = split()
    shared = split(rollout_ranks=1, rollout_lag=1, devices_shared=True)
    assert shared.changes["devices_shared"] is True
    assert shared.memory_bytes > 0.5 * GPU.memory_bytes + 1e9
    assert shared.timing.seconds > apart.timing.seconds
