"""What is particular to FSDP2: units, meshes, meta tensors, master weights, other rank counts."""

from contextlib import nullcontext

import pytest
import torch
from tests.ranks import run_multiprocess
from tests.strategy.backend_world import (
    SETTINGS,
    build,
    logprobs,
    make,
    near,
    prepared,
    refusal,
    train,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from lightrft.models import Actor
from lightrft.strategy.backend import PreparedModel
from lightrft.strategy.checkpoints.moving_averages import MovingAverages
from lightrft.strategy.fsdp2.sharding import find_blocks, find_ends
from lightrft.strategy.meta_init import parameters_on_meta
from lightrft.strategy.optimizers import AdamSettings, MasterWeightsAdamW
from lightrft.strategy.weight_sync.parameter_source import module_parameter_source


def trained_by(strategy, model, **options):
    model = strategy.prepare_model(model, is_training=True, **options)
    return PreparedModel(model, strategy.create_optimizer(model, lr=1e-2), None)


def resumed(strategy, ready, folder, steps):
    """Return whether a fresh actor goes on from a checkpoint as this one goes on from there."""
    strategy.save_ckpt(ready.model, folder, optimizer=ready.optimizer)
    expected = train(strategy, ready, steps)
    with make("fsdp2", bf16=strategy.config.bf16, use_mp_opt=strategy.config.use_mp_opt) as other:
        fresh = prepared(other, seed=3)
        other.load_ckpt(fresh.model, folder, optimizer=fresh.optimizer)
        return train(other, fresh, steps) == expected


def hybrid_cell(strategy):
    """Whole copies that exchange gradients, and an optimizer made before sharding."""
    hybrid = trained_by(strategy, build(), shard_size=1)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    late = PreparedModel(*strategy.prepare((model, optimizer)), None)
    return {
        "hybrid": train(strategy, hybrid, range(3)),
        "late optimizer": train(strategy, late, range(3)),
        "is_prepared_once": strategy.prepare_model(hybrid.model) is hybrid.model,
        "clamped": train(strategy, trained_by(strategy, build(), shard_size=8), range(1)),
    }


def meta_cell(strategy):
    """Only rank 0 has weights; unsaved buffers must arrive as well."""
    rank = strategy.get_rank()
    with torch.device("cpu" if rank == 0 else "meta"):
        model = build(seed=rank)
    is_meta = next(model.parameters()).is_meta
    return {"is_meta": is_meta, "losses": train(strategy, prepared(strategy, model), range(3))}


def streamed_cell(strategy, folder):
    """No rank has weights: each reads its rows of the files. A head in no file keeps its own."""
    path, rank = f"{folder}/causal_lm", strategy.get_rank()
    if rank == 0:
        build().model.save_pretrained(path)
    strategy.barrier()
    with strategy.init_model_context(meta_init=True):
        model = Actor(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)))
        with parameters_on_meta(False):
            model.extra = nn.Linear(2, 2)
    inner = model.model
    checks = [
        all(parameter.is_meta for parameter in inner.parameters()),
        not any(buffer.is_meta for buffer in inner.buffers()),
        inner.lm_head.weight is inner.model.embed_tokens.weight,
    ]
    # Ranks need not have drawn the same values: rank r holds row r of its own.
    extra = model.extra.weight.detach().clone()[rank]
    ready = trained_by(strategy, model)
    checks.append(torch.equal(ready.model.extra.weight.full_tensor()[rank], extra))
    with strategy.init_model_context(meta_init=True):
        nowhere = build().model
    return {
        "checks": checks,
        "refusal": refusal(lambda: strategy.prepare_model(nowhere)),
        "losses": train(strategy, ready, range(3)),
    }


def compiled_cell():
    """Every block compiled, with gradient checkpointing on and off."""
    from torch._dynamo.utils import counters

    from lightrft.strategy.fsdp2.strategy import FSDPV2Strategy

    results = {}
    for checkpoints in (False, True):
        torch.compiler.reset()
        counters.clear()
        options = {**SETTINGS, "compile_backend": "aot_eager"}
        with FSDPV2Strategy(1, 1.0, 1, 4, args=options) as strategy:
            # Built without the factory, and still told of no option without effect.
            assert strategy.config.unused_options() == []
            model = build()
            if checkpoints:
                model.gradient_checkpointing_enable()
                model.train()
            losses = train(strategy, trained_by(strategy, model), range(3))
            results[checkpoints] = losses, counters["stats"]["unique_graphs"]
    return results


def offload_cell():
    with make("fsdp2", adam_offload=True) as strategy:
        ready = prepared(strategy)
        losses = train(strategy, ready, range(1))
        for step in range(1, 3):
            assert strategy.maybe_load_optimizer(ready.optimizer) is ready.optimizer
            losses += train(strategy, ready, [step])
            assert strategy.maybe_offload_optimizer(ready.optimizer) is ready.optimizer
            strategy.maybe_offload_optimizer(ready.optimizer)
    return losses


def cpu_offload_cell(folder):
    """Shards, gradients and states on the CPU; a checkpoint of it continues without the offload."""
    with make("fsdp2", fsdp_cpu_offload=True) as strategy:
        ready = prepared(strategy)
        losses = train(strategy, ready, range(2))
        return losses, resumed(strategy, ready, f"{folder}/offloaded", range(2, 3))


def low_precision_cell(folder, **options):
    """bfloat16 compute, with float32 shards or with master weights, resumed."""
    with make("fsdp2", bf16=True, **options) as strategy:
        ready = prepared(strategy)
        dtype = str(next(ready.model.parameters()).dtype)
        losses = train(strategy, ready, range(4))
        return dtype, losses, resumed(strategy, ready, f"{folder}/{dtype}", range(4, 6))


def remembered_passes(model):
    """Entries that FSDP2 holds for a backward pass."""
    # Private of PyTorch: there is no other way to see what a pass has left behind.
    states = [u._get_fsdp_state() for u in model.modules() if isinstance(u, FSDPModule)]
    lists = {id(s._comm_ctx.post_forward_order): s._comm_ctx.post_forward_order for s in states}
    groups = [s._fsdp_param_group for s in states if s._fsdp_param_group is not None]
    return sum(map(len, [*lists.values(), *(g._post_forward_indices for g in groups)]))


def evaluation_cell(strategy):
    """What passes leave behind: without gradients, of either kind of model, and with them."""
    reference = strategy.prepare_model(build(), is_training=False)
    ready, counts = prepared(strategy), []
    ids = torch.arange(9)[None]
    for is_trained in (False, False, False, True):
        with nullcontext() if is_trained else torch.no_grad():
            logprobs(reference, ids)
            loss = logprobs(ready.model, ids).sum()
        counts.append([remembered_passes(reference), remembered_passes(ready.model)])
    strategy.backward(loss, ready.model, ready.optimizer)
    return counts


def two_rank_program(rank, world_size, folder):
    torch.distributed.init_process_group("gloo")
    with make("fsdp2") as strategy:
        results = {
            "hybrid": hybrid_cell(strategy),
            "meta": meta_cell(strategy),
            "streamed": streamed_cell(strategy, folder),
            "evaluation": evaluation_cell(strategy),
        }
        ready = prepared(strategy)
        train(strategy, ready, range(2))
        strategy.save_ckpt(ready, folder, "two", optimizer=ready.optimizer)
        results["continued"] = train(strategy, ready, range(2, 4))
    torch.distributed.destroy_process_group()
    # Each strategy now starts and ends its own group, one after the other in one process.
    return results | {
        "offload": offload_cell(),
        "cpu offload": cpu_offload_cell(folder),
        "compiled": compiled_cell(),
        "float32 shards": low_precision_cell(folder),
        "master weights": low_precision_cell(folder, use_mp_opt=True),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("fsdp2"))


@pytest.fixture(scope="module")
def two_ranks(folder):
    return run_multiprocess(two_rank_program, 2, timeout_seconds=200, args=(folder,))


@pytest.fixture(scope="module")
def expected():
    with make("fake") as strategy:
        return train(strategy, prepared(strategy), range(6))


@pytest.mark.full
def test_hybrid_meshes_and_late_optimizers_train_like_one_process(two_ranks, expected):
    for result in two_ranks:
        cell = result["hybrid"]
        assert cell["is_prepared_once"]
        for name in ("hybrid", "late optimizer"):
            assert cell[name] == near(expected[:3]), name
        assert cell["clamped"] == near(expected[:1])


@pytest.mark.full
def test_weights_and_buffers_of_rank_0_reach_models_without_memory(two_ranks, expected):
    assert [result["meta"]["is_meta"] for result in two_ranks] == [False, True]
    for result in two_ranks:
        assert result["meta"]["losses"] == near(expected[:3])


@pytest.mark.full
def test_every_rank_reads_its_own_rows_of_a_model_without_memory(two_ranks, expected):
    for result in two_ranks:
        cell = result["streamed"]
        assert cell["checks"] == [True] * 4
        assert "filled from its directory" in cell["refusal"]
        assert cell["losses"] == near(expected[:3])


@pytest.mark.full
@pytest.mark.parametrize("checkpoints", [False, True])
def test_compiled_blocks_train_like_others(two_ranks, expected, checkpoints):
    for result in two_ranks:
        losses, num_graphs = result["compiled"][checkpoints]
        assert num_graphs > 0
        assert losses == near(expected[:3])


@pytest.mark.full
def test_passes_without_gradients_leave_nothing_behind(two_ranks):
    for result in two_ranks:
        *without, (_, with_gradients) = result["evaluation"]
        assert without == [[0, 0]] * 3
        assert with_gradients > 0  # what is counted is what FSDP2 keeps


@pytest.mark.full
def test_offloading_in_pairs_and_unpaired_changes_no_bit(two_ranks, expected):
    for result in two_ranks:
        assert result["offload"] == near(expected[:3])


@pytest.mark.full
def test_training_on_offloaded_shards_changes_no_bit(two_ranks, expected):
    for result in two_ranks:
        losses, continues = result["cpu offload"]
        assert losses == near(expected[:2])
        assert continues


@pytest.mark.full
@pytest.mark.parametrize(
    "cell, kept", [("float32 shards", "torch.float32"), ("master weights", "torch.bfloat16")]
)
def test_bfloat16_trains_close_to_float32_and_resumes_exactly(two_ranks, expected, cell, kept):
    for result in two_ranks:
        dtype, losses, resumes = result[cell]
        assert dtype == kept
        assert resumes
        pairs = [(loss, wanted) for (loss, _), (wanted, _) in zip(losses, expected, strict=False)]
        assert all(loss == pytest.approx(wanted, rel=2e-2) for loss, wanted in pairs)
        assert any(loss != wanted for loss, wanted in pairs)


@pytest.mark.full
def test_another_number_of_ranks_continues_a_checkpoint(two_ranks, folder, expected):
    # In this process: starting another one takes longer than the program.
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with make("fsdp2") as strategy:
            ready = prepared(strategy, seed=4)
            strategy.load_ckpt(ready.model, folder, "two", optimizer=ready.optimizer)
            continued = train(strategy, ready, range(2, 4))
            other = trained_by(strategy, build().model)
            options = {"optimizer": other.optimizer}
            with pytest.raises(RuntimeError, match="names are missing"):
                strategy.load_ckpt(other.model, folder, "two", **options)
            options |= {"load_module_strict": False, "load_module_only": True}
            strategy.load_ckpt(other.model, folder, "two", **options)
            with pytest.raises(ValueError, match="is not sharded"):
                loss = torch.zeros((), requires_grad=True)
                strategy.backward(loss, build(), ready.optimizer)
    finally:
        torch.distributed.destroy_process_group()
    assert continued == near(two_ranks[0]["continued"])
    assert continued == near(expected[2:4])


def test_blocks_are_what_the_model_must_not_split():
    model = build()
    assert find_blocks(model) == list(model.model.model.layers)


def test_ends_with_a_matrix_of_their_own_are_units():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 128, "intermediate_size": 96, "num_key_value_heads": 2}
    for is_tied in (False, True):
        config = AutoConfig.for_model("qwen2", tie_word_embeddings=is_tied, **sizes)
        model = AutoModelForCausalLM.from_config(config)
        assert find_ends(model) == ([] if is_tied else [model.model.embed_tokens, model.lm_head])
    # Its embeddings are a block already.
    assert find_ends(AutoModel.from_config(AutoConfig.for_model("bert", **sizes))) == []
    assert find_ends(nn.Sequential(nn.Embedding(4, 4))) == []


def test_blocks_of_unknown_models_are_their_repeated_layers():
    model = nn.Sequential(
        nn.Embedding(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 4)
    )
    assert find_blocks(model) == list(model[1])
    model[1][1].weight = model[2].weight
    assert find_blocks(model) == [model[1][0], model[1][2]]


def test_a_vision_tower_stays_whole_on_request():
    model = nn.Module()
    model.visual = nn.Module()
    model.visual.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    assert find_blocks(model) == [*model.visual.blocks, *model.layers]
    assert find_blocks(model, keeps_vision_whole=True) == list(model.layers)


def test_master_weights_keep_updates_that_bfloat16_loses():
    torch.manual_seed(0)
    start = torch.randn(64, 8).bfloat16().float()
    # A steady direction, of which every single step is below half a unit.
    gradients = 1.0 + 0.5 * torch.randn(50, 64, 8)
    settings = AdamSettings(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    results = {}
    for name, dtype in (("exact", torch.float32), ("plain", torch.bfloat16), ("master", None)):
        weight = nn.Parameter(start.to(dtype or torch.bfloat16, copy=True))
        groups = [{"params": [weight], "weight_decay": 0.1}]
        if dtype is None:
            optimizer = MasterWeightsAdamW(groups, settings)
        else:
            optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
        for gradient in gradients:
            weight.grad = gradient.to(weight.dtype)
            optimizer.step()
        results[name] = weight.detach().float()
    master = optimizer.state[weight]["master"]
    assert float((master - results["exact"]).norm()) < 1e-3 * float((master - start).norm())
    assert torch.equal(results["master"], master.bfloat16().float())
    lost = float((results["plain"] - results["exact"]).norm())
    assert lost > 0.5 * float((results["exact"] - start).norm())


def test_an_average_in_bfloat16_moves_by_less_than_a_unit():
    model, average = nn.Linear(8, 8), nn.Linear(8, 8)
    average.load_state_dict(model.state_dict())
    average.to(torch.bfloat16)
    before = average.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    sources = module_parameter_source(model), module_parameter_source(average)
    averages = MovingAverages()
    for _ in range(100):
        averages.update(*sources, beta=0.999)
    moved = (average.weight.float() - before.float()).mean().item()
    assert moved == pytest.approx(1 - 0.999**100, rel=0.05)
    with pytest.raises(ValueError, match="same parameters"):
        averages.update(module_parameter_source(nn.Linear(8, 4)), sources[1], beta=0.9)
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\]"):
        averages.update(*sources, beta=1.5)
