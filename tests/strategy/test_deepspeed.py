"""What is particular to DeepSpeed: its configuration, outputs, masters, files and refusals."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from tests.programs import Evil
from tests.ranks import run_multiprocess
from tests.strategy.backend_world import (
    build,
    largest_difference,
    logprobs,
    make,
    near,
    prepared,
    refusal,
    train,
    weights,
)

from lightrft.strategy.checkpoints.folders import SaveRequest, write_checkpoint
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.deepspeed.engine_config import check_stage, inference_config, training_config

# Losses and norms of all of these are those of one process.
PLAIN = {
    "zero2": {},
    "zero3": {},
    "zero2 with offload": {"adam_offload": True},
    "zero3 with offload": {"adam_offload": True},
    "zero2 with overlap": {"overlap_comm": True},
}


def plain_cell(name):
    with make(name[:5], **PLAIN[name]) as strategy:
        return train(strategy, prepared(strategy), range(3))


def bfloat16_cell(backend):
    with make(backend, bf16=True) as strategy:
        ready = prepared(strategy)
        buffers = dict(ready.model.module.named_buffers())
        reference = strategy.prepare_model(build().to(torch.bfloat16))
        average = strategy.prepare_model(build())
        start = weights(strategy, average)
        losses = train(strategy, ready, range(3))
        strategy.moving_average(ready.model, average, beta=0.5)
        now = weights(strategy, ready.model)
        middle = [(a.float() + b.float()) / 2 for a, b in zip(start, now, strict=True)]
        rows = torch.arange(36).view(4, 9)
        with torch.no_grad():
            scored, averaged = (logprobs(model, rows) for model in (reference, average))
        assert strategy.offload_model(reference) is not None
        return {
            "losses": losses,
            "parameters": str(now[0].dtype),
            "frequencies": {str(b.dtype) for n, b in buffers.items() if "inv_freq" in n},
            "average error": largest_difference(weights(strategy, average), middle),
            "averaged score moved": float((averaged - scored).abs().max()),
        }


def padding_cell(rank):
    """What stage 3 adds to fill equal partitions, masters included, after memory was used."""
    from deepspeed.utils import safe_get_local_fp32_param

    for _ in range(50):
        used = [torch.full((size,), 7.0) for size in (1, 2, 3, 4, 8, 16)]
        del used
    with make("zero3") as strategy:
        model = torch.nn.Linear(3, 1)
        ready = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2), None))
        return [
            values.view(-1)[max(0, parameter.ds_numel - rank * values.numel()) :].tolist()
            for parameter in ready.model.module.parameters()
            for values in (parameter.ds_tensor, safe_get_local_fp32_param(parameter))
        ]


def two_rank_program(rank, world_size, folder):
    torch.distributed.init_process_group("gloo")
    results = {
        "padding": padding_cell(rank),
        "plain": {name: plain_cell(name) for name in PLAIN},
        "bf16": {name: bfloat16_cell(name) for name in ("zero1", "zero3")},
    }
    with make("zero2", bf16=True) as strategy:
        ready = prepared(strategy)
        train(strategy, ready, range(3))
        strategy.save_ckpt(ready, folder, "two")
        results["next"] = train(strategy, ready, range(3, 4))
    return results


def poison(source, folder, tag, proof):
    """A complete, correctly hashed checkpoint whose optimizer file holds pickled code."""

    def write(target, _):
        for path in source.iterdir():
            if path.is_dir() and path.name != "rng":
                shutil.copytree(path, target / path.name)
        for path in (target / "deepspeed").glob("*optim_states.pt"):
            torch.save({"optimizer_state_dict": Evil(str(proof))}, path)

    details = {"zero_stage": 2}
    request = SaveRequest(folder, "DeepspeedStrategy", tag, details=details, save_latest=False)
    write_checkpoint(request, write)


def one_rank_program(rank, world_size, folder):
    torch.distributed.init_process_group("gloo")
    results, proof = {}, Path(folder) / "proof"
    extensions = Path(folder) / "extensions"
    extensions.mkdir()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions)
    with make("zero2", bf16=True) as strategy:
        ready = prepared(strategy, seed=3)
        results["other world"] = refusal(lambda: strategy.load_ckpt(ready, folder, "two"))
        strategy.load_ckpt(ready, folder, "two", load_module_only=True)
        results["next"] = train(strategy, ready, range(3, 4))
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
    with make("zero1", bf16=True) as strategy:
        other = prepared(strategy)
        results["other stage"] = refusal(lambda: strategy.load_ckpt(other, folder, "one"))
    # Positive control: without the guard the same file does run its code.
    name = next((Path(folder) / "evil/deepspeed").glob("*optim_states.pt"))
    torch.load(name, weights_only=False)
    return results | {"control": proof.exists(), "compiled": os.listdir(extensions)}


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
    with make("fake") as strategy:
        return train(strategy, prepared(strategy), range(3))


@pytest.mark.full
@pytest.mark.deepspeed
@pytest.mark.parametrize("name", PLAIN)
def test_actors_train_like_one_process_at_every_stage(two_ranks, expected, name):
    for result in two_ranks:
        assert result["plain"][name] == near(expected)


@pytest.mark.deepspeed
def test_padding_of_partitions_is_not_what_memory_held(two_ranks):
    # Three weights and one bias over two ranks: the second one's last places are padding.
    assert [result["padding"] for result in two_ranks] == [[[]] * 4, [[0.0]] * 4]


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_bfloat16_keeps_rotary_frequencies_and_averages_exactly(two_ranks, expected, stage):
    for result in two_ranks:
        cell = result["bf16"][stage]
        assert cell["parameters"] == "torch.bfloat16"
        assert cell["frequencies"] == {"torch.float32"}
        losses, wanted = ([loss for loss, _ in rows] for rows in (cell["losses"], expected))
        assert losses == pytest.approx(wanted, rel=2e-2)
        # Half a bfloat16 unit of the largest weights; the weights moved by 0.03.
        assert cell["average error"] <= 2**-8
        assert cell["averaged score moved"] > 1e-3


@pytest.mark.deepspeed
def test_weights_of_another_number_of_ranks_are_read_from_the_masters(two_ranks, one_rank):
    assert one_rank["next"] == near(two_ranks[0]["next"], rel=2e-2)


@pytest.mark.deepspeed
def test_optimizer_states_of_another_run_shape_are_refused(one_rank):
    assert "written by 2 ranks" in one_rank["other world"]
    assert "was written with zero_stage 2: got 1" in one_rank["other stage"]
    assert "is no DeepSpeed engine" in one_rank["no engine"]


@pytest.mark.deepspeed
def test_pickled_code_in_a_checkpoint_is_not_run(one_rank):
    assert "weights_only" in one_rank["evil"].lower() or "Unpickling" in one_rank["evil"]
    assert one_rank["evil weights"] != "accepted"
    assert not one_rank["has run"]
    assert one_rank["control"]


@pytest.mark.deepspeed
def test_the_first_start_on_a_cpu_compiles_nothing(one_rank):
    assert one_rank["compiled"] == []


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
