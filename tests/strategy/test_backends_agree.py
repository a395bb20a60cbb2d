"""One program, every backend: the same losses, gradient norms and weights."""

from __future__ import annotations

import math
from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch
from tests.models.tiny import tiny_model
from tests.ranks import run_multiprocess
from torch import nn

from lightrft.strategy.fake import FakeStrategy

# One process for each world runs every backend, a minute in all.
pytestmark = pytest.mark.full
VOCAB = 251
NUM_STEPS = 3


class Scorer(nn.Module):
    """Logprob of every next token, entered through one forward like an actor."""

    is_actor = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids):
        logits = self.model(input_ids=token_ids, use_cache=False).logits.float()
        chosen = token_ids[:, 1:, None]
        return torch.log_softmax(logits[:, :-1], -1).gather(-1, chosen).sum(-1)


def build(*, is_tied: bool = True, seed: int = 0) -> Scorer:

    return Scorer(
        tiny_model(
            vocab_size=VOCAB, tie_word_embeddings=is_tied, max_position_embeddings=64, seed=seed
        )
    )


def batch_of_step(step: int) -> list[list[torch.Tensor]]:
    """[rank][micro-batch] token ids; 2 or 3 micro-batches, unequal lengths, two ranks' worth."""
    generator = torch.Generator().manual_seed(100 + step)
    num_micro_batches = 2 + step % 2
    return [
        [
            torch.randint(0, VOCAB, (2, 5 + 3 * ((k + rank + step) % 3)), generator=generator)
            for k in range(num_micro_batches)
        ]
        for rank in range(2)
    ]


def own_micro_batches(step: int, rank: int, world_size: int) -> list[torch.Tensor]:
    per_rank = batch_of_step(step)
    return per_rank[rank] if world_size == 2 else [ids for part in per_rank for ids in part]


def token_count(step: int) -> int:
    return sum(ids[:, 1:].numel() for part in batch_of_step(step) for ids in part)


def train_step(strategy, ready, step: int, rank: int, world_size: int, *, poison: bool = False):
    """One optimizer step by shares of the token mean; returns the batch loss and the result."""
    micro_batches = own_micro_batches(step, rank, world_size)
    total, result = 0.0, None
    with strategy.accumulation(len(micro_batches), ready.optimizer):
        for ids in micro_batches:
            share = -ready.model(ids).sum() / token_count(step)
            if poison:
                share = share * float("nan")
            strategy.backward(share, ready.model, ready.optimizer)
            result = strategy.optimizer_step(
                ready.optimizer, ready.model, ready.scheduler, name="actor"
            )
            total += share.item()
    return strategy.all_reduce(total, op="sum"), result


def weight_norm(strategy, model) -> float:
    """Over all parameters, read through the interface that every backend offers."""
    source = strategy.parameter_source(model)
    total = sum(
        float(p.local_shard.double().square().sum()) / (1 if p.is_sharded else strategy.world_size)
        for p in source.parameters()
    )
    return strategy.all_reduce(total, op="sum") ** 0.5


def copy_of_weights(strategy, model) -> list[torch.Tensor]:
    return [p.local_shard.clone() for p in strategy.parameter_source(model).parameters()]


def are_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def prepared(strategy, *, is_tied: bool = True, seed: int = 0):
    model = build(is_tied=is_tied, seed=seed)
    return strategy.prepare_models_and_optimizers(model, None, None, None, None, 10)[0]


def agreement_cell(strategy, rank: int, world_size: int, *, is_tied: bool = True):
    """Three steps, then a reference model."""
    ready, _, _, reference = strategy.prepare_models_and_optimizers(
        build(is_tied=is_tied), None, None, build(is_tied=is_tied), None, 10
    )
    losses, norms, rates = [], [], []
    for step in range(NUM_STEPS):
        loss, result = train_step(strategy, ready, step, rank, world_size)
        losses.append(loss)
        norms.append(result.grad_norm)
        rates.append(result.learning_rate)
        assert not result.is_skipped
    with torch.no_grad():
        reference_sum = float(reference(batch_of_step(0)[0][0]).sum())
    return {
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "weight_norm": weight_norm(strategy, ready.model),
        "reference": reference_sum,
    }


def skip_cell(strategy, rank: int, world_size: int):
    """A good step, a step with a NaN on the last rank, an abandoned step, a good step."""
    ready = prepared(strategy)
    first, _ = train_step(strategy, ready, 1, rank, world_size)
    second, _ = train_step(strategy, ready, 3, rank, world_size)
    before = copy_of_weights(strategy, ready.model)
    _, result = train_step(strategy, ready, 2, rank, world_size, poison=rank == world_size - 1)
    is_unchanged = are_equal(before, copy_of_weights(strategy, ready.model))
    try:
        with strategy.accumulation(2, ready.optimizer):
            strategy.backward(ready.model(batch_of_step(7)[0][0]).sum(), *ready[:2])
            strategy.optimizer_step(*ready[1::-1], ready.scheduler)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    last, good = train_step(strategy, ready, 2, rank, world_size)
    return {
        "losses": [first, second, last],
        "norms": [good.grad_norm],
        "rates": [good.learning_rate],
        "skips": [result.is_skipped, not math.isfinite(result.grad_norm), is_unchanged],
        "count": strategy.num_skipped_steps["actor"],
        "weight_norm": weight_norm(strategy, ready.model),
    }


def two_model_cell(strategy, rank: int, world_size: int):
    """Two models trained in turn, one with gradients 100 times those of the other."""
    small, large = prepared(strategy, seed=1), prepared(strategy, seed=2)
    norms = []
    for step in range(2):
        for ready, factor in ((small, 0.01), (large, 1.0)):
            micro_batches = own_micro_batches(step, rank, world_size)
            with strategy.accumulation(len(micro_batches), ready.optimizer):
                for ids in micro_batches:
                    share = -factor * ready.model(ids).sum() / token_count(step)
                    strategy.backward(share, ready.model, ready.optimizer)
                    result = strategy.optimizer_step(ready.optimizer, ready.model, None)
            norms.append(result.grad_norm)
    return {
        "norms": norms,
        "weight_norms": [weight_norm(strategy, ready.model) for ready in (small, large)],
    }


def mean_loss_cell(strategy, rank: int, world_size: int):
    """The other way to accumulate: mean losses, no context; 2 micro-batches on each of 2 ranks."""
    ready = prepared(strategy)
    acted = []
    for ids in own_micro_batches(0, rank, world_size)[: strategy.accumulated_gradient]:
        loss = -ready.model(ids).mean()
        strategy.backward(loss, ready.model, ready.optimizer)
        acted.append(strategy.optimizer_step(ready.optimizer, ready.model, ready.scheduler))
    return {
        "acted": [result is not None for result in acted],
        "norms": [acted[-1].grad_norm],
        "weight_norm": weight_norm(strategy, ready.model),
    }


def checkpoint_cell(strategy, rank: int, world_size: int, folder: str):
    """Save, go on; load into a fresh model, go on: the same to the last bit."""
    ready = prepared(strategy)
    first_rate = ready.optimizer.param_groups[0]["lr"]
    for step in (3, 0):
        train_step(strategy, ready, step, rank, world_size)
    torch.manual_seed(1000 + rank)
    state = {"global_step": 1, "kl": 0.25, "moments": torch.arange(3.0)}
    strategy.save_ckpt(ready, folder, client_state=state)
    at_save = copy_of_weights(strategy, ready.model)
    expected_draw = torch.rand(3)
    expected_loss = [train_step(strategy, ready, s, rank, world_size) for s in (1, 2)]
    expected_weights = copy_of_weights(strategy, ready.model)

    fresh = prepared(strategy, seed=9)
    train_step(strategy, fresh, 5, rank, world_size)
    path, loaded = strategy.load_ckpt(fresh.model, folder)
    is_weights_equal = are_equal(at_save, copy_of_weights(strategy, fresh.model))
    draw = torch.rand(3)
    again = [train_step(strategy, fresh, s, rank, world_size) for s in (1, 2)]

    only = prepared(strategy, seed=8)
    before = torch.get_rng_state()
    strategy.load_ckpt(only, folder, "global_step1", load_module_only=True)
    weights_only = copy_of_weights(strategy, only.model)
    is_rng_kept = torch.equal(before, torch.get_rng_state())
    _, first = train_step(strategy, only, 1, rank, world_size)
    return {
        "path": path,
        "client_state": [loaded["global_step"], loaded["kl"], loaded["moments"].tolist()],
        "checks": {
            "weights": is_weights_equal,
            "draw": torch.equal(draw, expected_draw),
            "losses": again == expected_loss,
            "later weights": are_equal(expected_weights, copy_of_weights(strategy, fresh.model)),
            "module only": are_equal(at_save, weights_only),
            "module only leaves generators": is_rng_kept,
            "module only leaves the schedule": first.learning_rate == first_rate > 0,
            "module only: same norm": first.grad_norm
            == pytest.approx(expected_loss[0][1].grad_norm, rel=1e-6),
        },
    }


def export_cell(strategy, rank: int, world_size: int, folder: str):
    """Written as a Hugging Face model, read by transformers and by `load_model`."""
    from transformers import AutoModelForCausalLM

    results = {}
    for is_tied in (True, False):
        target = f"{folder}/tied-{is_tied}"
        ready = prepared(strategy, is_tied=is_tied)
        for step in (1, 4):
            train_step(strategy, ready, step, rank, world_size)
        strategy.save_model(ready.model, None, target)
        plain = Scorer(AutoModelForCausalLM.from_pretrained(target))
        ids = batch_of_step(3)[0][0]
        with torch.no_grad():
            difference = (plain(ids) - ready.model(ids)).abs().max()
            changed = (build(is_tied=is_tied)(ids) - plain(ids)).abs().max()
        other = prepared(strategy, is_tied=is_tied, seed=5)
        strategy.load_model(other.model, target)
        weights = copy_of_weights(strategy, other.model)
        # Masters were set too: a step from here equals a step of the exported model.
        norm = train_step(strategy, other, 2, rank, world_size)[1].grad_norm
        results[is_tied] = {
            "difference": float(difference),
            "changed": float(changed),
            "is_equal": are_equal(weights, copy_of_weights(strategy, ready.model)),
            "norms": [norm, train_step(strategy, ready, 2, rank, world_size)[1].grad_norm],
        }
    return results


def first_changes(strategy, rank: int, world_size: int):
    """Change of every weight in a first step by its name, and the learning rate that is told."""
    ready = prepared(strategy)
    before = copy_of_weights(strategy, ready.model)
    rate = train_step(strategy, ready, 0, rank, world_size)[1].learning_rate
    parameters = strategy.parameter_source(ready.model).parameters()
    pairs = zip(parameters, before, strict=True)
    return {p.checkpoint_name: p.local_shard.double() - old.double() for p, old in pairs}, rate


def run_factors(backend: str, rank: int, world_size: int, folder: str) -> dict[str, object]:
    """A first step of Adam with factors of the learning rate beside one without."""
    with make(backend, world_size) as strategy:
        plain, rate = first_changes(strategy, rank, world_size)
    with make(backend, world_size, **FACTORS) as strategy:
        changed, told = first_changes(strategy, rank, world_size)
        checks = checkpoint_cell(strategy, rank, world_size, folder)["checks"] if folder else {}
    shares = {}
    for name, change in plain.items():
        factor = 0.25 if "self_attn" in name else 3.0 if "norm" in name else 1.0
        off = (changed[name] - factor * change).abs().max() if change.numel() else 0.0
        shares.setdefault(factor, []).append(float(off))
    return {
        "off": {factor: max(found) for factor, found in shares.items()},
        "rates": [rate, told],
        "checks": checks,
    }


def run_cells(strategy, rank: int, world_size: int, folder: str) -> dict[str, object]:
    cells = {
        "tied": agreement_cell(strategy, rank, world_size),
        "untied": agreement_cell(strategy, rank, world_size, is_tied=False),
        "skip": skip_cell(strategy, rank, world_size),
        "two models": two_model_cell(strategy, rank, world_size),
        "mean loss": mean_loss_cell(strategy, rank, world_size),
    }
    if folder:
        cells["checkpoint"] = checkpoint_cell(strategy, rank, world_size, f"{folder}/checkpoints")
        cells["export"] = export_cell(strategy, rank, world_size, folder)
    return cells


SETTINGS = {
    "actor_learning_rate": 1e-2,
    "lr_warmup_ratio": 0.2,
    "l2": 0.1,
    "bf16": False,
    "engine_type": "hf",
    "timeout_minutes": 1.0,
}


FACTORS = {"learning_rate_factors": {"self_attn": 0.25, ".*norm.*": 3.0}}


def make(backend: str, world_size: int, **changes):
    # 4 samples a step: 2 micro-batches on each of 2 ranks, 4 on one.
    settings = SETTINGS | changes
    if backend == "fake":
        return FakeStrategy(1, 1.0, 1, 4, args=settings)
    if backend == "fsdp2":
        from lightrft.strategy.fsdp2.strategy import FSDPV2Strategy

        return FSDPV2Strategy(1, 1.0, 1, 4, args=settings)
    from lightrft.strategy.deepspeed.strategy import DeepspeedStrategy

    stage = int(backend.removeprefix("zero"))
    return DeepspeedStrategy(1, 1.0, 1, 4, zero_stage=stage, args=settings)


def program(rank: int, world_size: int, backends: tuple[str, ...], folder: str):
    """Every cell of several backends in one process group."""
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    results = {}
    for backend in backends:
        with make(backend, world_size) as strategy:
            results[backend] = run_cells(strategy, rank, world_size, f"{folder}/{backend}")
        own = run_factors(backend, rank, world_size, f"{folder}/{backend}-factors")
        results[backend]["factors"] = own
    return results


ZERO = ("zero0", "zero1", "zero2", "zero3")
# Starting a process costs more than all cells, so one per rank runs every backend there is.
BACKENDS = ("fsdp2", *(ZERO if find_spec("deepspeed") is not None else ()))
CELLS = [
    pytest.param(
        backend,
        world_size,
        marks=[pytest.mark.multiprocess, *([pytest.mark.deepspeed] if backend in ZERO else [])],
        id=f"{backend}-{world_size}",
    )
    for world_size in (1, 2)
    for backend in ("fsdp2", *ZERO)
]
on_every_backend = pytest.mark.parametrize(("backend", "world_size"), CELLS)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(backend, world size, cell) -> results by rank, of one spawn per world size."""
    spawned = {}

    def find(backend: str, world_size: int, cell: str):
        if world_size not in spawned:
            folder = str(tmp_path_factory.mktemp(f"world{world_size}"))
            spawned[world_size] = run_multiprocess(
                program, world_size, timeout_seconds=270, args=(BACKENDS, folder)
            )
        return [results[backend][cell] for results in spawned[world_size]]

    return find


@pytest.fixture(scope="module")
def expected():
    with make("fake", 1) as strategy:
        return run_cells(strategy, 0, 1, "")


def assert_agrees(found: dict[str, object], reference: dict[str, object]) -> None:
    for key, tolerance in (
        ("losses", {"abs": 1e-6}),
        ("norms", {"rel": 1e-5}),
        ("rates", {"rel": 1e-12}),
        ("weight_norm", {"rel": 1e-5}),
        ("weight_norms", {"rel": 1e-5}),
        ("reference", {"rel": 1e-5}),
    ):
        if key in reference:
            assert found[key] == pytest.approx(reference[key], **tolerance), key


@on_every_backend
def test_losses_norms_and_weights_equal_those_of_one_process(found, expected, backend, world_size):
    for cell in ("tied", "untied"):
        for result in found(backend, world_size, cell):
            assert_agrees(result, expected[cell])


def test_the_comparison_catches_a_wrong_factor(expected):
    wrong = {**expected["tied"], "norms": [2 * norm for norm in expected["tied"]["norms"]]}
    with pytest.raises(AssertionError):
        assert_agrees(wrong, expected["tied"])


@on_every_backend
def test_a_nan_on_one_rank_makes_all_ranks_skip_and_leaves_no_trace(
    found, expected, backend, world_size
):
    assert expected["skip"]["skips"] == [True, True, True]
    for result in found(backend, world_size, "skip"):
        assert result["skips"] == [True, True, True]
        assert result["count"] == 1
        assert_agrees(result, expected["skip"])


@on_every_backend
def test_every_model_is_clipped_by_its_own_norm(found, expected, backend, world_size):
    for result in found(backend, world_size, "two models"):
        assert_agrees(result, expected["two models"])
    small, large = expected["two models"]["norms"][:2]
    assert small < 1.0 < large


@on_every_backend
def test_mean_losses_accumulate_to_their_average(found, expected, backend, world_size):
    for result in found(backend, world_size, "mean loss"):
        assert_agrees(result, expected["mean loss"])
        assert result["acted"].count(True) == 1
        assert result["acted"][-1]


@on_every_backend
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(found, backend, world_size):
    for result in found(backend, world_size, "checkpoint"):
        assert result["checks"] == dict.fromkeys(result["checks"], True)
        assert result["client_state"] == [1, 0.25, [0.0, 1.0, 2.0]]
        assert result["path"].endswith("global_step1")


@on_every_backend
def test_parts_with_a_factor_change_by_so_much_more_or_less(found, backend, world_size):
    for result in found(backend, world_size, "factors"):
        # The rate is 0.01 and Adam's first change is nearly that; rounding is of weights below 2.
        assert set(result["off"]) == {0.25, 3.0, 1.0}
        assert max(result["off"].values()) < 1e-6
        assert result["rates"] == [pytest.approx(result["rates"][1], rel=1e-12)] * 2
        assert result["checks"] == dict.fromkeys(result["checks"], True)


@on_every_backend
def test_an_exported_model_is_read_by_transformers_and_by_load_model(found, backend, world_size):
    for by_tie in found(backend, world_size, "export"):
        for result in by_tie.values():
            assert result["difference"] < 1e-5
            assert result["changed"] > 1e-3
            assert result["is_equal"]
            assert result["norms"][0] == pytest.approx(result["norms"][1], rel=1e-6)
