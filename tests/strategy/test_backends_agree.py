"""One program, every backend: the same losses, gradient norms and weights."""

import math
from importlib.util import find_spec

import pytest
import torch
from tests.ranks import run_multiprocess
from tests.strategy.backend_world import (
    BACKENDS,
    ZERO,
    are_equal,
    batch_of_step,
    build,
    largest_difference,
    logprobs,
    make,
    micro_batches,
    prepared,
    train_step,
    weights,
)
from transformers import AutoModelForCausalLM

from lightrft.models import Actor

# A schedule, a decay and rates of parts that show.
OPTIONS = {
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.2,
    "l2": 0.1,
    "learning_rate_factors": {"self_attn": 0.25, ".*norm.*": 3.0},
}


def weight_norm(strategy, model):
    """Over all parameters, read through the interface that every backend offers."""
    source = strategy.parameter_source(model)
    total = sum(
        float(p.local_shard.double().square().sum()) / (1 if p.is_sharded else strategy.world_size)
        for p in source.parameters()
    )
    return strategy.all_reduce(total, op="sum") ** 0.5


def agreement_cell(strategy, *, is_tied=True):
    """Three steps, then a reference model."""
    ready, _, _, reference = strategy.prepare_models_and_optimizers(
        build(is_tied=is_tied), None, None, build(is_tied=is_tied), None, 10
    )
    steps = [train_step(strategy, ready, step) for step in range(3)]
    assert not any(result.is_skipped for _, result in steps)
    with torch.no_grad():
        reference_sum = float(logprobs(reference, batch_of_step(0)[0][0]).sum())
    return {
        "losses": [loss for loss, _ in steps],
        "norms": [result.grad_norm for _, result in steps],
        "rates": [result.learning_rate for _, result in steps],
        "weight_norm": weight_norm(strategy, ready.model),
        "reference": reference_sum,
    }


def skip_cell(strategy):
    """A good step, a step with a NaN on the last rank, an abandoned step, a good step."""
    ready = prepared(strategy)
    losses = [train_step(strategy, ready, step)[0] for step in (1, 3)]
    before = weights(strategy, ready.model)
    is_last = strategy.get_rank() == strategy.world_size - 1
    _, skipped = train_step(strategy, ready, 2, factor=math.nan if is_last else 1.0)
    is_unchanged = are_equal(before, weights(strategy, ready.model))
    try:
        with strategy.accumulation(2, ready.optimizer):
            strategy.backward(logprobs(ready.model, batch_of_step(7)[0][0]).sum(), *ready[:2])
            strategy.optimizer_step(*ready[1::-1], ready.scheduler)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    last, good = train_step(strategy, ready, 2)
    return {
        "losses": [*losses, last],
        "norms": [good.grad_norm],
        "rates": [good.learning_rate],
        "skips": [skipped.is_skipped, not math.isfinite(skipped.grad_norm), is_unchanged],
        "count": strategy.num_skipped_steps["actor"],
        "weight_norm": weight_norm(strategy, ready.model),
    }


def two_model_cell(strategy):
    """Two models trained in turn, one with gradients 100 times those of the other."""
    pairs = [(prepared(strategy, seed=1), 0.01), (prepared(strategy, seed=2), 1.0)]
    results = [
        train_step(strategy, ready, step, factor=factor)[1]
        for step in range(2)
        for ready, factor in pairs
    ]
    return {
        "norms": [result.grad_norm for result in results],
        "weight_norms": [weight_norm(strategy, ready.model) for ready, _ in pairs],
    }


def mean_loss_cell(strategy):
    """The other way to accumulate: mean losses, no context; 2 micro-batches on each of 2 ranks."""
    ready = prepared(strategy)
    acted = []
    for ids in micro_batches(strategy, 0)[: strategy.accumulated_gradient]:
        loss = -logprobs(ready.model, ids)[:, 1:].mean()
        strategy.backward(loss, ready.model, ready.optimizer)
        acted.append(strategy.optimizer_step(ready.optimizer, ready.model, ready.scheduler))
    return {
        "acted": [result is not None for result in acted],
        "norms": [acted[-1].grad_norm],
        "weight_norm": weight_norm(strategy, ready.model),
    }


def average_cell(strategy):
    """How far a moving average is from what it has to be."""
    ready, average = prepared(strategy), strategy.prepare_model(build())
    start = weights(strategy, average)
    for step in range(2):
        train_step(strategy, ready, step)
    for _ in range(2):
        strategy.moving_average(ready.model, average, beta=0.9)
    now = weights(strategy, ready.model)
    expected = [0.81 * old + 0.19 * new for old, new in zip(start, now, strict=True)]
    return largest_difference(weights(strategy, average), expected)


def checkpoint_cell(strategy, folder):
    """Save, go on; load into a fresh model, go on: the same to the last bit."""
    ready = prepared(strategy)
    first_rate = ready.optimizer.param_groups[0]["lr"]
    for step in (3, 0):
        train_step(strategy, ready, step)
    torch.manual_seed(1000 + strategy.get_rank())
    state = {"global_step": 1, "kl": 0.25, "moments": torch.arange(3.0)}
    strategy.save_ckpt(ready, folder, client_state=state)
    at_save = weights(strategy, ready.model)
    expected_draw = torch.rand(3)
    expected_loss = [train_step(strategy, ready, s) for s in (1, 2)]
    expected_weights = weights(strategy, ready.model)

    fresh = prepared(strategy, seed=9)
    train_step(strategy, fresh, 5)
    path, loaded = strategy.load_ckpt(fresh.model, folder)
    is_weights_equal = are_equal(at_save, weights(strategy, fresh.model))
    draw = torch.rand(3)
    again = [train_step(strategy, fresh, s) for s in (1, 2)]

    only = prepared(strategy, seed=8)
    before = torch.get_rng_state()
    strategy.load_ckpt(only, folder, "global_step1", load_module_only=True)
    weights_only = weights(strategy, only.model)
    is_rng_kept = torch.equal(before, torch.get_rng_state())
    _, first = train_step(strategy, only, 1)
    return {
        "path": path,
        "client_state": [loaded["global_step"], loaded["kl"], loaded["moments"].tolist()],
        "checks": {
            "weights": is_weights_equal,
            "draw": torch.equal(draw, expected_draw),
            "losses": again == expected_loss,
            "later weights": are_equal(expected_weights, weights(strategy, fresh.model)),
            "module only": are_equal(at_save, weights_only),
            "module only leaves generators": is_rng_kept,
            "module only leaves the schedule": first.learning_rate == first_rate > 0,
            "module only: same norm": first.grad_norm
            == pytest.approx(expected_loss[0][1].grad_norm, rel=1e-6),
        },
    }


def export_cell(strategy, folder):
    """Written as a Hugging Face model, read by transformers and by `load_model`."""
    results = {}
    for is_tied in (True, False):
        target = f"{folder}/tied-{is_tied}"
        ready = prepared(strategy, is_tied=is_tied)
        for step in (1, 4):
            train_step(strategy, ready, step)
        strategy.save_model(ready.model, None, target)
        plain = Actor(AutoModelForCausalLM.from_pretrained(target))
        ids = batch_of_step(3)[0][0]
        with torch.no_grad():
            read, trained, first = (
                logprobs(model, ids) for model in (plain, ready.model, build(is_tied=is_tied))
            )
        other = prepared(strategy, is_tied=is_tied, seed=5)
        strategy.load_model(other.model, target)
        results[is_tied] = {
            "difference": float((read - trained).abs().max()),
            "changed": float((read - first).abs().max()),
            "is_equal": are_equal(*(weights(strategy, each.model) for each in (other, ready))),
            # Masters were set too: a step from here equals a step of the exported model.
            "norms": [train_step(strategy, each, 2)[1].grad_norm for each in (other, ready)],
        }
    return results


def short_cells(backend):
    with make(backend, **OPTIONS) as strategy:
        return {"tied": agreement_cell(strategy), "skip": skip_cell(strategy)}


def all_cells(backend, folder):
    with make(backend, **OPTIONS) as strategy:
        return {
            "tied": agreement_cell(strategy),
            "untied": agreement_cell(strategy, is_tied=False),
            "skip": skip_cell(strategy),
            "two models": two_model_cell(strategy),
            "mean loss": mean_loss_cell(strategy),
            "average": average_cell(strategy),
            "checkpoint": checkpoint_cell(strategy, f"{folder}/checkpoints"),
            "export": export_cell(strategy, folder),
        }


def program(rank, world_size, backends, folder):
    """Cells of several backends in one process group: its start costs more than they do."""
    torch.distributed.init_process_group("gloo")
    if folder is None:
        return {name: short_cells(name) for name in backends}
    return {name: all_cells(name, f"{folder}/{name}") for name in backends}


INSTALLED = ("fsdp2", *(ZERO if find_spec("deepspeed") is not None else ()))
CASES = [
    pytest.param(
        backend,
        world_size,
        marks=[pytest.mark.deepspeed] if backend in ZERO else [],
        id=f"{backend}-{world_size}",
    )
    for world_size in (1, 2)
    for backend in BACKENDS
]
on_every_backend = pytest.mark.parametrize(
    "backend, world_size",
    [
        pytest.param("fake", 1, id="fake"),
        *(
            pytest.param(*case.values, marks=[*case.marks, pytest.mark.full], id=case.id)
            for case in CASES
        ),
    ],
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What one process without a group computes."""
    return all_cells("fake", tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A function that gives, by rank, the table of several backends' results, of one start."""
    started = {}

    def table(world_size, backends, *, is_short=False):
        key = world_size, backends, is_short
        if key not in started:
            folder = None if is_short else str(tmp_path_factory.mktemp(f"world{world_size}"))
            started[key] = run_multiprocess(
                program, world_size, timeout_seconds=270, args=(backends, folder)
            )
        return started[key]

    return table


@pytest.fixture
def results(tables, expected):
    """A function that gives what each rank has of a cell."""

    def of(backend, world_size, cell):
        if backend == "fake":
            return [expected[cell]]
        return [table[backend][cell] for table in tables(world_size, INSTALLED)]

    return of


def assert_agrees(result, reference):
    for key, tolerance in (
        ("losses", {"abs": 1e-6}),
        ("norms", {"rel": 1e-5}),
        ("rates", {"rel": 1e-12}),
        ("weight_norm", {"rel": 1e-5}),
        ("weight_norms", {"rel": 1e-5}),
        ("reference", {"rel": 1e-5}),
    ):
        if key in reference:
            assert result[key] == pytest.approx(reference[key], **tolerance), key


def assert_skips(result, reference):
    assert result["skips"] == [True, True, True]
    assert result["count"] == 1
    assert_agrees(result, reference)


@pytest.fixture
def short(tables, backend, world_size):
    """What each rank has of a backend's short cells."""
    together = ("fsdp2",) if backend == "fsdp2" else INSTALLED[1:]
    return [table[backend] for table in tables(world_size, together, is_short=True)]


# DeepSpeed's own tests have those of its stages on two ranks, where imports alone take longer.
@pytest.mark.parametrize("backend, world_size", CASES[: len(BACKENDS) + 1])
def test_three_steps_and_a_skipped_one_are_those_of_one_process(short, expected):
    for result in short:
        assert_agrees(result["tied"], expected["tied"])
        assert_skips(result["skip"], expected["skip"])


@on_every_backend
def test_losses_norms_and_weights_equal_those_of_one_process(
    results, expected, backend, world_size
):
    for cell in ("tied", "untied"):
        for result in results(backend, world_size, cell):
            assert_agrees(result, expected[cell])


def test_the_comparison_catches_a_wrong_factor(expected):
    wrong = {**expected["tied"], "norms": [2 * norm for norm in expected["tied"]["norms"]]}
    with pytest.raises(AssertionError):
        assert_agrees(wrong, expected["tied"])


@on_every_backend
def test_a_nan_on_one_rank_makes_all_ranks_skip_and_leaves_no_trace(
    results, expected, backend, world_size
):
    for result in results(backend, world_size, "skip"):
        assert_skips(result, expected["skip"])


@on_every_backend
def test_every_model_is_clipped_by_its_own_norm(results, expected, backend, world_size):
    for result in results(backend, world_size, "two models"):
        assert_agrees(result, expected["two models"])
    small, large = expected["two models"]["norms"][:2]
    assert small < 1.0 < large


@on_every_backend
def test_mean_losses_accumulate_to_their_average(results, expected, backend, world_size):
    for result in results(backend, world_size, "mean loss"):
        assert_agrees(result, expected["mean loss"])
        assert result["acted"].count(True) == 1
        assert result["acted"][-1]


@on_every_backend
def test_a_moving_average_follows_part_by_part(results, backend, world_size):
    assert max(results(backend, world_size, "average")) < 1e-6


@on_every_backend
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(results, backend, world_size):
    for result in results(backend, world_size, "checkpoint"):
        assert result["checks"] == dict.fromkeys(result["checks"], True)
        assert result["client_state"] == [1, 0.25, [0.0, 1.0, 2.0]]
        assert result["path"].endswith("global_step1")


@on_every_backend
def test_an_exported_model_is_read_by_transformers_and_by_load_model(results, backend, world_size):
    for by_tie in results(backend, world_size, "export"):
        for result in by_tie.values():
            assert result["difference"] < 1e-5
            assert result["changed"] > 1e-3
            assert result["is_equal"]
            assert result["norms"][0] == pytest.approx(result["norms"][1], rel=1e-6)
