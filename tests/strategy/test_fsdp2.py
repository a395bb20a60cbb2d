"""What is particular to FSDP2: units, meshes, meta tensors, master weights, other rank counts."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from tests.models.tiny import tiny_model
from tests.ranks import run_multiprocess
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightrft.strategy.checkpoints.moving_averages import MovingAverages
from lightrft.strategy.fake import FakeStrategy
from lightrft.strategy.fsdp2.sharding import find_blocks, find_ends
from lightrft.strategy.meta_init import parameters_on_meta
from lightrft.strategy.optimizers import AdamSettings, MasterWeightsAdamW
from lightrft.strategy.weight_sync.parameter_source import module_parameter_source

SETTINGS = {
    "actor_learning_rate": 1e-2,
    "lr_warmup_ratio": 0.0,
    "bf16": False,
    "engine_type": "hf",
    "timeout_minutes": 2.0,
}
VOCAB = 97


class Scorer(nn.Module):
    is_actor = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids):
        logits = self.model(input_ids=token_ids, use_cache=False).logits.float()
        return torch.log_softmax(logits[:, :-1], -1).gather(-1, token_ids[:, 1:, None]).sum(-1)


def causal_lm(seed: int = 0) -> nn.Module:

    return tiny_model(
        vocab_size=VOCAB,
        intermediate_size=64,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        seed=seed,
    )


def build(seed: int = 0) -> Scorer:
    return Scorer(causal_lm(seed))


def train(strategy, ready, steps, rank: int, world_size: int) -> list[float]:
    """Losses of the steps; the batch of a step is the same whatever the number of ranks."""
    losses = []
    for step in steps:
        rows = torch.randint(0, VOCAB, (4, 9), generator=torch.Generator().manual_seed(step))
        own = rows.chunk(world_size)[rank]
        total = 0.0
        with strategy.accumulation(len(own), ready[1]):
            for ids in own.split(1):
                share = -ready[0](ids).sum() / rows[:, 1:].numel()
                strategy.backward(share, ready[0], ready[1])
                result = strategy.optimizer_step(ready[1], ready[0], None)
                total += share.item()
        losses.append([strategy.all_reduce(total, op="sum"), result.grad_norm])
    return losses


def full_weights(strategy, model) -> list[torch.Tensor]:
    parts = [p.local_shard.clone() for p in strategy.parameter_source(model).parameters()]
    return [torch.cat([part.clone() for part in strategy.gather_objects(p)]) for p in parts]


def make(world_size: int, **changes):
    from lightrft.strategy.fsdp2.strategy import FSDPV2Strategy

    return FSDPV2Strategy(1, 1.0, 1, world_size, args={**SETTINGS, **changes})


def trained_by(strategy, model, **options):
    model = strategy.prepare_model(model, is_training=True, **options)
    return model, strategy.create_optimizer(model, lr=1e-2)


def hybrid_cell(strategy, rank, world_size):
    """Whole copies that exchange gradients, and an optimizer made before sharding."""
    hybrid = trained_by(strategy, build(), shard_size=1)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    late = strategy.prepare((model, optimizer))
    return {
        "hybrid": train(strategy, hybrid, range(3), rank, world_size),
        "late optimizer": train(strategy, late, range(3), rank, world_size),
        "is_prepared_once": strategy.prepare_model(hybrid[0]) is hybrid[0],
        "clamped": train(
            strategy, trained_by(strategy, build(), shard_size=8), range(1), rank, world_size
        ),
    }


def meta_cell(strategy, rank, world_size):
    """Only rank 0 has weights; unsaved buffers must arrive as well."""
    with torch.device("cpu" if rank == 0 else "meta"):
        model = build(seed=rank)
    is_meta = next(model.parameters()).is_meta
    ready = trained_by(strategy, model)
    return {"is_meta": is_meta, "losses": train(strategy, ready, range(3), rank, world_size)}


def streamed_cell(strategy, rank, world_size, folder):
    """No rank has weights: each reads its rows of the files. A head in no file keeps its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = f"{folder}/causal_lm"
    if rank == 0:
        causal_lm().save_pretrained(path)
    strategy.barrier()
    with strategy.init_model_context(meta_init=True):
        model = Scorer(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)))
        with parameters_on_meta(False):
            model.head = nn.Linear(2, 2)
    inner = model.model
    is_meta = [parameter.is_meta for parameter in inner.parameters()]
    has_buffers = not any(buffer.is_meta for buffer in inner.buffers())
    is_tied = inner.lm_head.weight is inner.model.embed_tokens.weight
    # Ranks need not have drawn the same values: rank r holds row r of its own.
    head = model.head.weight.detach().clone()[rank]
    ready = trained_by(strategy, model)
    with strategy.init_model_context(meta_init=True):
        nowhere = causal_lm()
    try:
        strategy.prepare_model(nowhere)
    except ValueError as error:
        refusal = str(error)
    return {
        "checks": [all(is_meta), has_buffers, is_tied],
        "head": torch.equal(ready[0].head.weight.full_tensor()[rank], head),
        "refusal": refusal,
        "losses": train(strategy, ready, range(3), rank, world_size),
    }


def compiled_cell(rank, world_size):
    """Every block compiled, with gradient checkpointing on and off."""
    from torch._dynamo.utils import counters

    results = {}
    for checkpoints in (False, True):
        torch.compiler.reset()
        counters.clear()
        with make(world_size, compile_backend="aot_eager") as strategy:
            # Built without the factory, and still told of no option without effect.
            assert strategy.config.unused_options() == []
            model = build()
            if checkpoints:
                model.model.gradient_checkpointing_enable()
                model.train()
            ready = trained_by(strategy, model)
            results[checkpoints] = {
                "losses": train(strategy, ready, range(3), rank, world_size),
                "graphs": counters["stats"]["unique_graphs"],
            }
    return results


def average_cell(strategy, rank, world_size):
    ready = trained_by(strategy, build())
    average = strategy.prepare_model(build())
    start = full_weights(strategy, average)
    train(strategy, ready, range(2), rank, world_size)
    for _ in range(2):
        strategy.moving_average(ready[0], average, beta=0.9)
    now = full_weights(strategy, ready[0])
    found = full_weights(strategy, average)
    expected = [0.81 * old + 0.19 * new for old, new in zip(start, now, strict=True)]
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def offload_cell(rank, world_size):
    with make(world_size, adam_offload=True) as strategy:
        ready = trained_by(strategy, build())
        losses = train(strategy, ready, range(1), rank, world_size)
        for step in range(1, 3):
            assert strategy.maybe_load_optimizer(ready[1]) is ready[1]
            losses += train(strategy, ready, [step], rank, world_size)
            assert strategy.maybe_offload_optimizer(ready[1]) is ready[1]
            strategy.maybe_offload_optimizer(ready[1])
    return losses


def cpu_offload_cell(rank, world_size, folder):
    """Shards, gradients and states on the CPU; a checkpoint of it continues without the offload."""
    found = {}
    with make(world_size, fsdp_cpu_offload=True) as strategy:
        ready = trained_by(strategy, build())
        found["losses"] = train(strategy, ready, range(2), rank, world_size)
        strategy.save_ckpt(ready[0], folder, "offloaded", optimizer=ready[1])
        expected = train(strategy, ready, range(2, 3), rank, world_size)
    with make(world_size) as strategy:
        fresh = trained_by(strategy, build(seed=3))
        strategy.load_ckpt(fresh[0], folder, "offloaded", optimizer=fresh[1])
        found["continues"] = train(strategy, fresh, range(2, 3), rank, world_size) == expected
    return found


def low_precision_cell(rank, world_size, folder):
    """bfloat16 compute, with float32 shards and with master weights; the latter resumed."""
    results = {}
    for use_mp_opt in (False, True):
        with make(world_size, bf16=True, use_mp_opt=use_mp_opt) as strategy:
            ready = trained_by(strategy, build())
            dtype = next(ready[0].parameters()).dtype
            losses = train(strategy, ready, range(4), rank, world_size)
            target = f"{folder}/bf16-{use_mp_opt}"
            strategy.save_ckpt(ready[0], target, optimizer=ready[1])
            expected = train(strategy, ready, range(4, 6), rank, world_size)
            fresh = trained_by(strategy, build(seed=3))
            strategy.load_ckpt(fresh[0], target, optimizer=fresh[1])
            again = train(strategy, fresh, range(4, 6), rank, world_size)
            results[use_mp_opt] = {
                "dtype": str(dtype),
                "losses": losses,
                "resumes": again == expected,
            }
    return results


def remembered_passes(model) -> int:
    """Entries that FSDP2 holds for a backward pass."""
    # Private of PyTorch: there is no other way to see what a pass has left behind.
    states = [u._get_fsdp_state() for u in model.modules() if isinstance(u, FSDPModule)]
    lists = {id(s._comm_ctx.post_forward_order): s._comm_ctx.post_forward_order for s in states}
    groups = [s._fsdp_param_group for s in states if s._fsdp_param_group is not None]
    return sum(map(len, [*lists.values(), *(g._post_forward_indices for g in groups)]))


def evaluation_cell(strategy, rank, world_size):
    """What passes leave behind: without gradients, of either kind of model, and with them."""
    reference = strategy.prepare_model(build(), is_training=False)
    ready, counts = trained_by(strategy, build()), []
    ids = torch.arange(9)[None]
    for _ in range(3):
        with torch.no_grad():
            reference(ids), ready[0](ids)
        counts.append([remembered_passes(reference), remembered_passes(ready[0])])
    loss = ready[0](ids).sum()
    with_gradients = remembered_passes(ready[0])
    strategy.backward(loss, ready[0], ready[1])
    return {"counts": counts, "with gradients": with_gradients}


def two_rank_program(rank: int, world_size: int, folder: str):
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    with make(world_size) as strategy:
        results = {
            "hybrid": hybrid_cell(strategy, rank, world_size),
            "meta": meta_cell(strategy, rank, world_size),
            "streamed": streamed_cell(strategy, rank, world_size, folder),
            "average": average_cell(strategy, rank, world_size),
            "evaluation": evaluation_cell(strategy, rank, world_size),
        }
        ready = trained_by(strategy, build())
        train(strategy, ready, range(2), rank, world_size)
        strategy.save_ckpt(ready[0], folder, "two", optimizer=ready[1])
        results["continued"] = train(strategy, ready, range(2, 4), rank, world_size)
    torch.distributed.destroy_process_group()
    # Each strategy now starts and ends its own group, one after the other in one process.
    results["offload"] = offload_cell(rank, world_size)
    results["cpu offload"] = cpu_offload_cell(rank, world_size, folder)
    results["compiled"] = compiled_cell(rank, world_size)
    results["low precision"] = low_precision_cell(rank, world_size, folder)
    return results


def one_rank_program(rank: int, world_size: int, folder: str):
    with make(world_size) as strategy:
        ready = trained_by(strategy, build(seed=4))
        strategy.load_ckpt(ready[0], folder, "two", optimizer=ready[1])
        continued = train(strategy, ready, range(2, 4), rank, world_size)
        try:
            other = trained_by(strategy, build().model)
            strategy.load_ckpt(other[0], folder, "two", optimizer=other[1])
        except RuntimeError as error:
            strict = str(error)
        strategy.load_ckpt(other[0], folder, "two", load_module_strict=False, load_module_only=True)
        try:
            strategy.backward(torch.zeros((), requires_grad=True), build(), ready[1])
        except ValueError as error:
            unsharded = str(error)
    return {"continued": continued, "strict": strict, "unsharded": unsharded}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("fsdp2"))


@pytest.fixture(scope="module")
def two_ranks(folder):
    return run_multiprocess(two_rank_program, 2, timeout_seconds=200, args=(folder,))


@pytest.fixture(scope="module")
def expected():
    with FakeStrategy(1, 1.0, 1, 1, args=SETTINGS) as strategy:
        model = build()
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        return train(strategy, (model, optimizer), range(6), 0, 1)


@pytest.mark.multiprocess
def test_hybrid_meshes_and_late_optimizers_train_like_one_process(two_ranks, expected):
    for result in two_ranks:
        cell = result["hybrid"]
        assert cell["is_prepared_once"]
        for name in ("hybrid", "late optimizer"):
            assert cell[name] == [pytest.approx(row, rel=1e-5) for row in expected[:3]], name
        assert cell["clamped"] == [pytest.approx(expected[0], rel=1e-5)]


@pytest.mark.multiprocess
def test_weights_and_buffers_of_rank_0_reach_models_without_memory(two_ranks, expected):
    assert [result["meta"]["is_meta"] for result in two_ranks] == [False, True]
    for result in two_ranks:
        assert result["meta"]["losses"] == [pytest.approx(r, rel=1e-5) for r in expected[:3]]


@pytest.mark.multiprocess
def test_every_rank_reads_its_own_rows_of_a_model_without_memory(two_ranks, expected):
    for result in two_ranks:
        cell = result["streamed"]
        assert cell["checks"] == [True, True, True]
        assert cell["head"]
        assert "filled from its directory" in cell["refusal"]
        assert cell["losses"] == [pytest.approx(r, rel=1e-5) for r in expected[:3]]


@pytest.mark.multiprocess
@pytest.mark.parametrize("checkpoints", [False, True])
def test_compiled_blocks_train_like_others(two_ranks, expected, checkpoints):
    for result in two_ranks:
        cell = result["compiled"][checkpoints]
        assert cell["graphs"] > 0
        assert cell["losses"] == [pytest.approx(r, rel=1e-5) for r in expected[:3]]


@pytest.mark.multiprocess
def test_a_moving_average_follows_shard_by_shard(two_ranks):
    assert max(result["average"] for result in two_ranks) < 1e-6


@pytest.mark.multiprocess
def test_passes_without_gradients_leave_nothing_behind(two_ranks):
    for result in two_ranks:
        cell = result["evaluation"]
        assert cell["counts"] == [[0, 0]] * 3
        assert cell["with gradients"] > 0  # what is counted is what FSDP2 keeps


@pytest.mark.multiprocess
def test_offloading_in_pairs_and_unpaired_changes_no_bit(two_ranks, expected):
    for result in two_ranks:
        assert result["offload"] == [pytest.approx(row, rel=1e-5) for row in expected[:3]]


@pytest.mark.multiprocess
def test_training_on_offloaded_shards_changes_no_bit(two_ranks, expected):
    for result in two_ranks:
        cell = result["cpu offload"]
        assert cell["losses"] == [pytest.approx(r, rel=1e-5) for r in expected[:2]]
        assert cell["continues"]


@pytest.mark.multiprocess
def test_bfloat16_trains_close_to_float32_and_resumes_exactly(two_ranks, expected):
    for result in two_ranks:
        for use_mp_opt, cell in result["low precision"].items():
            assert cell["dtype"] == ("torch.bfloat16" if use_mp_opt else "torch.float32")
            assert cell["resumes"]
            for (loss, _), (wanted, _) in zip(cell["losses"], expected, strict=False):
                assert loss == pytest.approx(wanted, rel=2e-2)
            assert [loss for loss, _ in cell["losses"]] != [loss for loss, _ in expected[:4]]


@pytest.mark.multiprocess
def test_another_number_of_ranks_continues_a_checkpoint(two_ranks, folder, expected):
    # In this process: starting another one takes longer than the program.
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = one_rank_program(0, 1, folder)
    finally:
        torch.distributed.destroy_process_group()
    assert found["continued"] == [pytest.approx(r, rel=1e-5) for r in two_ranks[0]["continued"]]
    assert found["continued"] == [pytest.approx(row, rel=1e-5) for row in expected[2:4]]
    assert "names are missing" in found["strict"]
    assert "is not sharded" in found["unsharded"]


def test_blocks_are_what_the_model_must_not_split():
    model = build()
    assert find_blocks(model) == list(model.model.model.layers)


def test_ends_with_a_matrix_of_their_own_are_units():
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

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
