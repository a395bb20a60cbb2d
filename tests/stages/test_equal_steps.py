"""One optimizer step of every stage on given rows is the same, however it is carried out.

What it is compared with is one process that passes one item at a time, whose loss and gradient the
tests of each stage compare with formulas in float64. A cover of all pairs of options runs by
default, and with `-m slow` their whole product.
"""

import itertools
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from tests.models.tiny import tiny_model
from tests.pairwise import pairwise_cover
from tests.ranks import run_multiprocess
from tests.stages.distillation import divergence_world
from tests.stages.preference import preference_world
from tests.stages.reward import reward_world
from tests.stages.stage_world import STILL, distance, distances, row, train_step
from tests.stages.supervised import supervised_world

from lightrft.config.registry import STAGES
from lightrft.models import proof
from lightrft.strategy import get_fake_strategy

pytestmark = pytest.mark.shard("stages")

SFT, DIVERGENCE = supervised_world.build_stage, divergence_world.build_stage
PREFER, REWARD = preference_world.build_stage, reward_world.build_stage
# Of each stage: losses of one row, of pairs, of whole steps; trained tokens differ by a factor of
# 100, and where a row may have none, one of two ranks has none.
CASES = {
    "sft": (SFT, supervised_world.RAGGED, {}),
    "sft of rows": (SFT, supervised_world.RAGGED, {"sft_loss": "seq-mean-token-mean"}),
    "sft dft": (SFT, supervised_world.RAGGED, {"sft_loss": "dft"}),
    "prefer dpo": (PREFER, preference_world.RAGGED, {"preference_args": {"beta": 0.3}}),
    "prefer aot sft": (PREFER, preference_world.RAGGED, {"preference_loss": ("aot", "sft")}),
    "prefer kto": (PREFER, preference_world.RAGGED, {"preference_loss": ("kto",)}),
    "prefer kto of answers": (PREFER, preference_world.LABELLED, {"preference_loss": ("kto",)}),
    "reward": (REWARD, reward_world.PAIRS, {"centering_coef": 0.3}),
    "reward of rankings": (REWARD, reward_world.RANKED, {"reward_loss": "rao_kupper"}),
    "reward of answers": (REWARD, reward_world.LABELLED, {}),
    "reward of steps": (REWARD, reward_world.STEPS, {}),
    "divergence": (DIVERGENCE, supervised_world.RAGGED, {}),
    "divergence jsd": (DIVERGENCE, supervised_world.RAGGED, {"teacher_form": "jsd"}),
}
# Those that a default run has beside each other way.
QUICK = ("sft", "sft of rows", "prefer dpo", "prefer aot sft", "prefer kto")
QUICK += ("reward", "reward of steps", "divergence")
PLAIN = "one item a pass"
WAYS = {
    PLAIN: {},
    "two items a pass": {"micro_train_batch_size": 2},
    "four items a pass": {"micro_train_batch_size": 4},
    "by tokens": {"micro_batch_tokens": 260},
    "packed": {"micro_train_batch_size": 4, "packing_samples": True, "max_row_tokens": 110},
    "packed, by tokens": {"packing_samples": True, "micro_batch_tokens": 140},
    "prefixes once": {
        "micro_train_batch_size": 4,
        "packing_samples": True,
        "max_row_tokens": 110,
        "shared_prefix": "auto",
    },
    "recomputed": {"micro_train_batch_size": 2, "gradient_checkpointing": True},
    "unfused": {"micro_train_batch_size": 2, "fused_linear_logprob": False},
}
BACKENDS = {"fake": (1,), "fsdp": (1, 2), "zero2": (1, 2)}
OPTIONS = {
    "case": tuple(CASES),
    "way": tuple(WAYS),
    "backend": tuple(BACKENDS),
    "world_size": (1, 2),
    "sp_size": (1, 2),
    "has_adapters": (False, True),
}
ADAPTERS = {"lora_rank": 2, "target_modules": ("q_proj", "down_proj")}


def is_meaningful(choice):
    has_fused_form = choice["case"].startswith(("sft", "prefer"))
    return (
        choice["world_size"] in BACKENDS[choice["backend"]]
        and choice["sp_size"] <= choice["world_size"]
        and (choice["way"] != "unfused" or has_fused_form)
    )


def product():
    """Every meaningful choice of a value of each option."""
    found = (dict(zip(OPTIONS, v, strict=True)) for v in itertools.product(*OPTIONS.values()))
    return [choice for choice in found if is_meaningful(choice)]


def build(strategy, case, *, way=PLAIN, has_adapters=False, **changes):
    """The stage of a case, with its items."""
    builder, items, options = CASES[case]
    options = {**options, **WAYS[way], **(ADAPTERS if has_adapters else {}), **changes}
    return builder(strategy, items, held_out=items[: 1 if has_adapters else -1], **options), items


def results(strategy, case, **how):
    """Gradient and metrics of a step, and those of an evaluation."""
    stage, items = build(strategy, case, **how)
    gradient, metrics = train_step(stage, items)
    stage.models.main.model.eval()
    return gradient, metrics | stage.evaluate()


@cache
def plain(case, has_adapters):
    torch.set_num_threads(1)
    return results(get_fake_strategy(STILL), case, has_adapters=has_adapters)


def strategy_of(choice):
    from lightrft.strategy import get_strategy

    backend = choice["backend"]
    args = {**STILL, "sp_size": choice["sp_size"], "fsdp": backend == "fsdp", "zero_stage": 2}
    return get_fake_strategy(args) if backend == "fake" else get_strategy(args)


def measure(rank, world_size, choices, path):
    """Of each choice the distances of its gradient from the plain one, and its metrics."""
    from lightrft.strategy.distributed.process_groups import start_process_group

    if world_size > 1:
        # Kept over all strategies: to end one and start the next at one address is a race.
        start_process_group(None)
    torch.set_num_threads(1)
    proof.MIN_SHARED_TOKENS = 3  # prompts are short; this process has no other task
    plain_gradients, strategies, found = torch.load(path, weights_only=True), {}, []
    for choice in choices:
        key = choice["backend"], choice["sp_size"]
        if key not in strategies:
            strategies[key] = strategy_of(choice)
        how = {name: choice[name] for name in ("case", "way", "has_adapters", "sp_size")}
        gradient, metrics = results(strategies[key], **how)
        expected = plain_gradients[f"{choice['case']} {choice['has_adapters']}"]
        found.append((*distances(gradient, expected), metrics))
    return found


def require_equal(choices, folder):
    """Carries out the step in each of the ways, and compares it with the plain one."""
    has_deepspeed = find_spec("deepspeed") is not None
    choices = [c for c in choices if has_deepspeed or c["backend"] != "zero2"]
    keys = {(c["case"], c["has_adapters"]) for c in choices}
    gradients = {f"{case} {adapters}": plain(case, adapters)[0] for case, adapters in keys}
    torch.save(gradients, folder / "plain")
    wrong = []
    for world_size in sorted({c["world_size"] for c in choices}):
        chosen = [c for c in choices if c["world_size"] == world_size]
        chosen.sort(key=lambda c: (c["backend"], c["sp_size"]))
        ranks = run_multiprocess(
            measure, world_size, timeout_seconds=3000, args=(chosen, str(folder / "plain"))
        )
        for choice, *of_ranks in zip(chosen, *ranks, strict=True):
            expected = plain(choice["case"], choice["has_adapters"])[1]
            for whole, worst, metrics in of_ranks:
                odd = differing(metrics, expected)
                # Written so that NaN fails.
                if odd or not (whole <= 3e-6 and worst <= 1e-4):
                    wrong.append((choice, whole, worst, odd))
    assert not wrong, "\n".join(map(str, wrong))


def differing(metrics, expected):
    """Metrics that differ by more than roundings, or that only one of both has."""
    return {
        name: (metrics.get(name), expected.get(name))
        for name in metrics.keys() | expected.keys()
        if metrics.get(name) != pytest.approx(expected.get(name), rel=1e-5, abs=1e-6)
    }


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_cover_of_all_pairs_of_options_gives_the_plain_step(tmp_path):
    quick = [choice for choice in product() if choice["case"] in QUICK]
    require_equal(pairwise_cover(quick), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", CASES)
def test_the_whole_product_of_options_gives_the_plain_step(tmp_path, case):
    require_equal([choice for choice in product() if choice["case"] == case], tmp_path)


def test_every_stage_on_given_rows_is_among_the_cases():
    assert {case.split()[0] for case in CASES} | {"policy"} == set(STAGES)


@pytest.mark.parametrize("case", CASES)
def test_an_item_less_and_a_gradient_of_another_size_are_found(case):
    builder, items, options = CASES[case]
    gradient, metrics = plain(case, has_adapters=False)
    stage = builder(get_fake_strategy(STILL), items[:-1] or items, **options)
    less, other = train_step(stage, items[:-1])
    assert distance(less, gradient) > 1e-3
    assert "loss" in differing(other, metrics)
    scaled = {name: (1 + 1e-5) * value for name, value in gradient.items()}
    assert distance(scaled, gradient) > 3e-6


@pytest.mark.parametrize("case", ["sft", "divergence"])
def test_one_of_two_ranks_trains_no_token_and_a_mean_per_rank_would_be_found(case):
    from lightrft.experience.minibatches import plan_minibatches

    builder, rows, options = CASES[case]
    lengths = [len(each.token_ids) for each in rows]
    plan = plan_minibatches(lengths, train_batch_size=4, world_size=2, seed=42, step=1)
    counts = [sum(rows[place].num_trained for place in plan.row_index(rank)) for rank in (0, 1)]
    assert counts == [101, 0]
    halves = []
    for part in (rows[:1], rows[3:]):
        stage = builder(get_fake_strategy(STILL), part, **options)
        halves.append(train_step(stage, part)[0])
    means = {name: (halves[0][name] + halves[1][name]) / 2 for name in halves[0]}
    assert distance(means, plain(case, has_adapters=False)[0]) > 0.1


@pytest.mark.parametrize("case", ["sft", "divergence", "prefer dpo", "reward"])
def test_adapters_have_the_gradient_of_the_sum_that_they_are_part_of(case):
    """That of W + s B A by the chain rule: s B^T dW for A, s dW A^T for B."""
    strategy = get_fake_strategy(STILL)
    stage, items = build(strategy, case, has_adapters=True)
    adapted = dict(stage.models.main.model.named_parameters())
    scale = stage.models.main.model.scale
    found, metrics = train_step(stage, items)
    whole = reward_world.tiny_classifier() if case == "reward" else tiny_model()
    layers = {n.removesuffix(".lora_A.default.weight") for n in adapted if ".lora_A." in n}
    factors = {
        layer: [adapted[f"{layer}.lora_{n}.default.weight"].detach() for n in "AB"]
        for layer in layers
    }
    with torch.no_grad():
        for layer, (first, second) in factors.items():
            whole.get_parameter(f"{layer.removeprefix('model.')}.weight").add_(
                scale * second @ first
            )
    stage, _ = build(strategy, case, model=whole)
    gradient, expected_metrics = train_step(stage, items)
    expected = {}
    for layer, (first, second) in factors.items():
        of_sum = gradient[f"{layer}.weight"]
        expected[f"{layer}.lora_A.default.weight"] = scale * second.T @ of_sum
        expected[f"{layer}.lora_B.default.weight"] = scale * of_sum @ first.T
    # The head of a reward model is trained whole.
    expected |= {name: gradient[name] for name in found if ".lora_" not in name}
    assert distance(found, expected) <= 1e-5
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-5)


def seen(stage, items):
    """What the embedding of each model is given in a step, and its last hidden states: [tokens]."""
    given, states = [], []
    handles = []
    for module in (stage.models.main.model, *stage.objective.frozen):
        trunk = module.model.base_model
        embedding = trunk.get_input_embeddings()
        handles.append(embedding.register_forward_hook(lambda _, x, __: given.append(x[0][0])))
        handles.append(trunk.norm.register_forward_hook(lambda _, __, y: states.append(y[0])))
    train_step(stage, items)
    for handle in handles:
        handle.remove()
    return list(zip(given, [state.detach() for state in states], strict=True))


def with_other_tokens(item, place):
    """The item with every token of one of its rows changed, none of which then is as before."""

    def changed(each):
        return replace(each, token_ids=((each.token_ids + 1) % 131).astype(np.int32))

    if len(item.rows) == 1:
        return changed(item)
    name = ("chosen", "rejected")[place % 2]
    return replace(item, **{name: changed(getattr(item, name))})


@pytest.mark.parametrize("case", ["sft", "divergence", "prefer dpo", "reward"])
def test_packed_rows_do_not_see_each_other(case):
    stage, items = build(get_fake_strategy(STILL), case, way="packed")
    before = seen(stage, items)
    rows = [each for item in items for each in item.rows]
    # All of them lie in one pass of each model.
    assert {len(ids) for ids, _ in before} == {sum(len(each.token_ids) for each in rows)}
    for place in range(len(items)):
        others = list(items)
        others[place] = with_other_tokens(items[place], place)
        after = seen(stage, others)
        assert len(after) == len(before) >= 1
        for (ids, states), (other_ids, other_states) in zip(before, after, strict=True):
            is_changed = ids != other_ids
            assert 0 < is_changed.sum() < len(ids)
            difference = (states - other_states).abs().amax(-1)
            assert difference[~is_changed].max() <= 1e-6
            assert difference[is_changed].min() > 1e-3


def test_rows_that_do_see_each_other_are_found():
    """Two rows as one: the second half sees the first."""
    one = row(70, 69)
    stage = SFT(get_fake_strategy(STILL), (one,), packing_samples=True)
    ids = one.token_ids.copy()
    ids[:40] = (ids[:40] + 1) % 131
    ((_, before),), ((_, after),) = (
        seen(stage, (each,)) for each in (one, replace(one, token_ids=ids))
    )
    assert (before - after).abs().amax(-1)[40:].min() > 1e-3
