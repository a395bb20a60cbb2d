"""What is particular to DeepSpeed: its configuration, outputs, masters, files and refusals."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.models.tiny import tiny_model
from tests.ranks import run_multiprocess

from lightrft.strategy.checkpoints.folders import SaveRequest, write_checkpoint
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.deepspeed.engine_config import check_stage, inference_config, training_config
from lightrft.strategy.fake import FakeStrategy

SETTINGS = {
    "actor_learning_rate": 1e-2,
    "lr_warmup_ratio": 0.0,
    "bf16": False,
    "engine_type": "hf",
    "timeout_minutes": 2.0,
}
VOCAB = 97


def build(seed: int = 0, *, dtype: torch.dtype = torch.float32):

    from lightrft.models.actor import Actor

    return Actor(
        tiny_model(
            vocab_size=VOCAB,
            intermediate_size=64,
            tie_word_embeddings=True,
            max_position_embeddings=64,
            seed=seed,
        ).to(dtype)
    )


def rows_of_step(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, 9), generator=torch.Generator().manual_seed(step))


def train(strategy, ready, steps, rank: int, world_size: int):
    found = []
    for step in steps:
        rows = rows_of_step(step)
        own = rows.chunk(world_size)[rank]
        with strategy.accumulation(len(own), ready.optimizer):
            total = 0.0
            for ids in own.split(1):
                output = ready.model(ids, torch.ones_like(ids, dtype=torch.bool))
                share = -output.logprobs.sum() / rows[:, 1:].numel()
                strategy.backward(share, ready.model, ready.optimizer)
                result = strategy.optimizer_step(ready.optimizer, ready.model, None)
                total += share.item()
        found.append([strategy.all_reduce(total, op="sum"), result.grad_norm])
    return found


def make(stage: int, world_size: int, **changes):
    from lightrft.strategy.deepspeed.strategy import DeepspeedStrategy

    settings = {**SETTINGS, **changes}
    return DeepspeedStrategy(1, 1.0, 1, world_size, zero_stage=stage, args=settings)


def prepared(strategy, seed: int = 0):
    model = build(seed)
    return strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2), None))


def weights(strategy, model) -> list[torch.Tensor]:
    return [p.local_shard.clone() for p in strategy.parameter_source(model).parameters()]


def plain_cell(stage, rank, world_size, **changes):
    """An actor returns a dataclass; losses and norms must still be those of one process."""
    with make(stage, world_size, **changes) as strategy:
        return train(strategy, prepared(strategy), range(3), rank, world_size)


def checkpointed_cell(stage, rank, world_size):
    """Gradient checkpointing: the same numbers from activations that are computed again."""
    with make(stage, world_size) as strategy:
        model = build()
        model.gradient_checkpointing_enable()
        calls = []
        model.model.base_model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
        ready = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2), None))
        ready.model.train()
        losses = train(strategy, ready, range(3), rank, world_size)
        # Every micro-batch ran the layer twice: forward, and again in the backward pass.
        return losses, len(calls) == 2 * sum(
            len(rows_of_step(step).chunk(world_size)[rank]) for step in range(3)
        )


def bfloat16_cell(stage, rank, world_size):
    with make(stage, world_size, bf16=True) as strategy:
        ready = prepared(strategy)
        buffers = dict(ready.model.module.named_buffers())
        reference = strategy.prepare_model(build(dtype=torch.bfloat16))
        average = strategy.prepare_model(build())
        start = [p.float() for p in weights(strategy, average)]
        losses = train(strategy, ready, range(3), rank, world_size)
        strategy.moving_average(ready.model, average, beta=0.5)
        now = [p.float() for p in weights(strategy, ready.model)]
        found = [p.float() for p in weights(strategy, average)]
        rows = rows_of_step(0)
        with torch.no_grad():
            scored = reference(rows, torch.ones_like(rows, dtype=torch.bool)).logprobs
            averaged = average(rows, torch.ones_like(rows, dtype=torch.bool)).logprobs
        return {
            "losses": losses,
            "parameters": str(weights(strategy, ready.model)[0].dtype),
            "frequencies": {str(b.dtype) for n, b in buffers.items() if "inv_freq" in n},
            "average error": max(
                float((a - (b + c) / 2).abs().max())
                for a, b, c in zip(found, start, now, strict=True)
            ),
            "averaged score moved": float((averaged - scored).abs().max()),
            "offload is harmless": strategy.offload_model(reference) is not None,
        }


def padding_cell(rank, world_size):
    """What stage 3 adds to fill equal partitions, masters included, after memory was used."""
    from deepspeed.utils import safe_get_local_fp32_param

    for _ in range(50):
        used = [torch.full((size,), 7.0) for size in (1, 2, 3, 4, 8, 16)]
        del used
    with make(3, world_size) as strategy:
        model = torch.nn.Linear(3, 1)
        ready = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2), None))
        return [
            values.view(-1)[max(0, parameter.ds_numel - rank * values.numel()) :].tolist()
            for parameter in ready.model.module.parameters()
            for values in (parameter.ds_tensor, safe_get_local_fp32_param(parameter))
        ]


def two_rank_program(rank: int, world_size: int, folder: str):
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    results = {
        "padding": padding_cell(rank, world_size),
        "zero 2": plain_cell(2, rank, world_size),
        "zero 3": plain_cell(3, rank, world_size),
        "zero 2 offload": plain_cell(2, rank, world_size, adam_offload=True),
        "zero 3 offload": plain_cell(3, rank, world_size, adam_offload=True),
        "zero 2 overlap": plain_cell(2, rank, world_size, overlap_comm=True),
        "zero 2 checkpointed": checkpointed_cell(2, rank, world_size),
        "zero 3 checkpointed": checkpointed_cell(3, rank, world_size),
        "bf16 1": bfloat16_cell(1, rank, world_size),
        "bf16 3": bfloat16_cell(3, rank, world_size),
    }
    with make(2, world_size, bf16=True) as strategy:
        ready = prepared(strategy)
        train(strategy, ready, range(3), rank, world_size)
        strategy.save_ckpt(ready, folder, "two")
        results["next"] = train(strategy, ready, range(3, 4), rank, world_size)
    return results


def refusal(action) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "accepted"


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, proof: str) -> None:
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (self.proof,)


def poison(source: Path, folder: Path, tag: str, proof: Path) -> None:
    """A complete, correctly hashed checkpoint whose optimizer file holds pickled code."""

    def write(target: Path, _: object) -> None:
        for path in source.iterdir():
            if path.is_dir() and path.name != "rng":
                shutil.copytree(path, target / path.name)
        for path in (target / "deepspeed").glob("*optim_states.pt"):
            torch.save({"optimizer_state_dict": Evil(str(proof))}, path)

    details = {"zero_stage": 2}
    request = SaveRequest(folder, "DeepspeedStrategy", tag, details=details, save_latest=False)
    write_checkpoint(request, write)


def one_rank_program(rank: int, world_size: int, folder: str):
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    results = {}
    proof = Path(folder) / "proof"
    with make(2, world_size, bf16=True) as strategy:
        ready = prepared(strategy, seed=3)
        results["other world"] = refusal(lambda: strategy.load_ckpt(ready, folder, "two"))
        strategy.load_ckpt(ready, folder, "two", load_module_only=True)
        results["next"] = train(strategy, ready, range(3, 4), rank, world_size)
        strategy.save_ckpt(ready, folder, "one")
        poison(Path(folder) / "one", Path(folder), "evil", proof)
        results["evil"] = refusal(lambda: strategy.load_ckpt(ready, folder, "evil"))
        results["evil weights"] = refusal(
            lambda: strategy.load_ckpt(ready, folder, "evil", load_module_only=True)
        )
        results["has run"] = proof.exists()
        results["no engine"] = refusal(
            lambda: strategy.backward(torch.zeros(()), build(), ready.optimizer)
        )
    with make(1, world_size, bf16=True) as strategy:
        other = prepared(strategy)
        results["other stage"] = refusal(lambda: strategy.load_ckpt(other, folder, "one"))
    # Positive control: without the guard the same file does run its code.
    name = next((Path(folder) / "evil" / "deepspeed").glob("*optim_states.pt"))
    torch.load(name, weights_only=False)
    results["control"] = proof.exists()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("deepspeed"))


@pytest.fixture(scope="module")
def two_ranks(folder):
    return run_multiprocess(two_rank_program, 2, timeout_seconds=280, args=(folder,))


@pytest.fixture(scope="module")
def one_rank(two_ranks, folder):
    return run_multiprocess(one_rank_program, 1, timeout_seconds=200, args=(folder,))[0]


@pytest.fixture(scope="module")
def expected():
    with FakeStrategy(1, 1.0, 1, 1, args=SETTINGS) as strategy:
        return train(strategy, prepared(strategy), range(4), 0, 1)


@pytest.mark.multiprocess
@pytest.mark.deepspeed
def test_actors_train_like_one_process_at_every_stage(two_ranks, expected):
    for result in two_ranks:
        for name in ("zero 2", "zero 3", "zero 2 offload", "zero 3 offload", "zero 2 overlap"):
            assert result[name] == [pytest.approx(row, rel=1e-5) for row in expected[:3]], name


@pytest.mark.multiprocess
@pytest.mark.deepspeed
def test_padding_of_partitions_is_not_what_memory_held(two_ranks):
    # Three weights and one bias over two ranks: the second one's last places are padding.
    assert [result["padding"] for result in two_ranks] == [[[]] * 4, [[0.0]] * 4]


@pytest.mark.multiprocess
@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_checkpointing_changes_no_number(two_ranks, expected, stage):
    for result in two_ranks:
        losses, has_recomputed = result[f"zero {stage} checkpointed"]
        assert losses == [pytest.approx(row, rel=1e-5) for row in expected[:3]]
        assert has_recomputed


@pytest.mark.multiprocess
@pytest.mark.deepspeed
def test_bfloat16_keeps_rotary_frequencies_and_averages_exactly(two_ranks, expected):
    for result in two_ranks:
        for name in ("bf16 1", "bf16 3"):
            cell = result[name]
            assert cell["parameters"] == "torch.bfloat16"
            assert cell["frequencies"] == {"torch.float32"}
            for (loss, _), (wanted, _) in zip(cell["losses"], expected, strict=False):
                assert loss == pytest.approx(wanted, rel=2e-2)
            # Half a bfloat16 unit of the largest weights; the weights moved by 0.03.
            assert cell["average error"] <= 2**-8
            assert cell["averaged score moved"] > 1e-3


@pytest.mark.multiprocess
@pytest.mark.deepspeed
def test_weights_of_another_number_of_ranks_are_read_from_the_masters(two_ranks, one_rank):
    ((loss, norm),) = two_ranks[0]["next"]
    assert one_rank["next"] == [pytest.approx([loss, norm], rel=2e-2)]


@pytest.mark.multiprocess
@pytest.mark.deepspeed
def test_optimizer_states_of_another_run_shape_are_refused(one_rank):
    assert "written by 2 ranks" in one_rank["other world"]
    assert "was written with zero_stage 2: got 1" in one_rank["other stage"]
    assert "is no DeepSpeed engine" in one_rank["no engine"]


@pytest.mark.multiprocess
@pytest.mark.deepspeed
def test_pickled_code_in_a_checkpoint_is_not_run(one_rank):
    assert "weights_only" in one_rank["evil"].lower() or "Unpickling" in one_rank["evil"]
    assert one_rank["evil weights"] != "accepted"
    assert not one_rank["has run"]
    assert one_rank["control"]


def first_start(rank: int, world_size: int, extensions: str) -> list[str]:
    from lightrft.strategy.deepspeed.strategy import DeepspeedStrategy

    os.environ["TORCH_EXTENSIONS_DIR"] = extensions
    with DeepspeedStrategy(args=SETTINGS, train_batch_size=world_size) as strategy:
        model = torch.nn.Linear(2, 2)
        ready = strategy.prepare((model, strategy.create_optimizer(model), None))
        strategy.backward(ready.model(torch.ones(1, 2)).sum(), ready.model, ready.optimizer)
        strategy.optimizer_step(ready.optimizer, ready.model, None)
    return os.listdir(extensions)


@pytest.mark.multiprocess
@pytest.mark.deepspeed
def test_the_first_start_on_a_cpu_compiles_nothing(tmp_path):
    assert run_multiprocess(first_start, 1, args=(str(tmp_path),)) == [[]]


def test_accumulation_and_schedule_stay_with_the_strategy():
    options = StrategyConfig(zero_stage=2, max_norm=0.5)
    config = training_config(options, uses_bf16=True, has_gpu=False)
    assert config["gradient_accumulation_steps"] == 1
    assert config["gradient_clipping"] == 0.5
    assert config["communication_data_type"] == "fp32"
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert "scheduler" not in config
    assert inference_config(options, uses_bf16=False)["zero_optimization"]["stage"] == 3


def test_every_option_reaches_deepspeed():
    options = StrategyConfig(
        zero_stage=3, adam_offload=True, zpg=4, grad_accum_dtype="fp32", overlap_comm=True
    )
    config = training_config(options, uses_bf16=True, has_gpu=True)
    zero = config["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert zero["zero_hpz_partition_size"] == 4
    assert zero["overlap_comm"] is True
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}


def test_no_model_gets_a_buffer_larger_than_itself():
    options = StrategyConfig(zero_stage=2)
    for num_trained, expected in ((1000, 1000), (10**10, 50_000_000)):
        config = training_config(options, uses_bf16=True, has_gpu=False, num_trained=num_trained)
        assert config["zero_optimization"]["reduce_bucket_size"] == expected


def test_stage_0_is_refused_where_deepspeed_gets_it_wrong():
    with pytest.raises(ValueError, match="zero_stage 1"):
        check_stage(StrategyConfig(zero_stage=0), uses_bf16=True)
    with pytest.raises(ValueError, match="adam_offload needs"):
        check_stage(StrategyConfig(zero_stage=0, adam_offload=True), uses_bf16=False)
