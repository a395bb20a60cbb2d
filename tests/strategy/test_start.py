"""What is refused before an engine starts or a model is loaded, and what the machine decides."""

import os
import signal
import socket
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tests.machine import seconds, wait_until
from tests.ranks import find_free_port, rank_environment, run_multiprocess
from tests.strategy.backend_world import make

from lightrft.config import TrainConfig
from lightrft.config.train_config import batch_problems
from lightrft.engines.types import EngineConfig
from lightrft.strategy.deepspeed.engine_config import check_whole_model
from lightrft.strategy.engine.session import NodeMemory, check_places

GIGABYTE = 10**9


def engine(tp, *, kind="vllm", share=0.5):
    return EngineConfig(kind, "m", tensor_parallel_size=tp, memory_utilization=share)


def places(*nodes, free=70, total=80):
    return [NodeMemory(node, free * GIGABYTE, total * GIGABYTE) for node in nodes]


def test_an_engine_over_two_nodes_is_refused():
    nodes = ("a 1", "a 1", "b 2", "b 2")
    check_places(places(*nodes), engine(2))
    with pytest.raises(ValueError, match=r"\[0, 1, 2, 3\] of one engine on several nodes \(a, b"):
        check_places(places(*nodes), engine(4))
    # Two systems of one name are two nodes; ranks dealt out in turn share none.
    with pytest.raises(ValueError, match="expected a divisor of the 2 processes"):
        check_places(places("a 1", "a 2", "a 1", "a 2"), engine(2))


def test_a_gpu_with_too_little_left_is_named_before_any_engine_starts():
    found = places("a", "a", free=50)
    check_places(found, engine(1))
    found[1] = NodeMemory("a", 30 * GIGABYTE, 80 * GIGABYTE)
    with pytest.raises(ValueError, match=r"rank 1 has 30\.0 of 80\.0 GB left"):
        check_places(found, engine(1))
    check_places(found, engine(1, kind="hf"))  # takes no share
    check_places([NodeMemory("a")], engine(1))  # no GPU


def test_all_processes_of_this_machine_are_on_one_node():
    assert NodeMemory.here(has_gpu=False) == NodeMemory.here(has_gpu=False)
    assert NodeMemory.here(has_gpu=False).node


def test_b7_deepspeed_refuses_what_does_not_fit_one_device_once_it_is_cast():
    config = TrainConfig(zero_stage=3)
    # It casts to bfloat16 on the host: 64 GB reach the device.
    check_whole_model(config, 32 * 10**9, 80 * GIGABYTE, uses_bf16=True)
    with pytest.raises(ValueError, match=r"82\.0 GB in bfloat16.*80\.0 GB; use --fsdp --meta"):
        check_whole_model(config, 41 * 10**9, 80 * GIGABYTE, uses_bf16=True)
    check_whole_model(config, 19 * 10**9, 80 * GIGABYTE, uses_bf16=False)
    with pytest.raises(ValueError, match=r"128\.0 GB in float32"):
        check_whole_model(config, 32 * 10**9, 80 * GIGABYTE, uses_bf16=False)


def test_models_are_built_without_memory_on_gpus_above_two_gigabytes():
    config = TrainConfig(fsdp=True)
    assert config.builds_on_meta(has_gpu=True, weight_bytes=14 * GIGABYTE)
    assert not config.builds_on_meta(has_gpu=True, weight_bytes=GIGABYTE)
    assert not config.builds_on_meta(has_gpu=False, weight_bytes=14 * GIGABYTE)
    assert not TrainConfig().builds_on_meta(has_gpu=True, weight_bytes=14 * GIGABYTE)
    for given in (True, False):
        config = TrainConfig(fsdp=True, meta_init=given)
        assert config.builds_on_meta(has_gpu=False, weight_bytes=0) is given


@pytest.mark.parametrize("device, chosen", [("cuda", True), ("cpu", False)])
def test_the_decision_is_agreed_and_printed(device, chosen):
    from lightrft.stages.machine_choices import ModelFacts, decide_by_machine

    printed = []
    context = SimpleNamespace(
        has_gpu=device == "cuda",
        chosen_options={},
        print_detail=printed.append,
        all_reduce=lambda facts, op: {**facts, "weights": 7 * 10**9},  # what another rank read
    )
    facts = ModelFacts(num_weights=5, packs=True)
    given = {"fsdp": True, "fused_linear_logprob": False}
    config = TrainConfig(**given)
    assert decide_by_machine(config, context) is config
    decided = decide_by_machine(config, context, facts=facts)
    assert (decided.meta_init, decided.packing_samples) == (chosen, chosen)
    assert printed[0].startswith(f"meta_init = {str(chosen).lower()}: ")
    assert printed[1].startswith(f"packing_samples = {str(chosen).lower()}: ")
    adapted = decide_by_machine(TrainConfig(**given, lora_rank=4), context, facts=facts)
    assert (adapted.meta_init, adapted.packing_samples) == (chosen, chosen)
    # New weights are in no file.
    renewed = TrainConfig(**given, allow_new_weights=("lm_head.*",))
    assert not decide_by_machine(renewed, context, facts=facts).meta_init
    # Rows that a user counted are not replaced by tokens; what was given stays.
    counted = TrainConfig(**given, micro_train_batch_size=2)
    assert not decide_by_machine(counted, context, facts=facts).packing_samples
    for wanted in (True, False):
        config = TrainConfig(**given, meta_init=wanted, packing_samples=wanted)
        assert decide_by_machine(config, context, facts=facts) is config
    padding = ModelFacts(num_weights=5, packs=False)
    assert not decide_by_machine(TrainConfig(**given), context, facts=padding).packing_samples


def test_models_that_mix_packed_sequences_are_known_by_their_configuration():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from lightrft.models.attention import packing_hindrance

    config = Qwen3Config(num_hidden_layers=2)
    assert packing_hindrance(Qwen3ForCausalLM, config) is None
    config.layer_types = ["full_attention", "conv"]
    assert packing_hindrance(Qwen3ForCausalLM, config) is None
    config.layer_types = ["full_attention", "chunked_attention"]
    assert packing_hindrance(Qwen3ForCausalLM, config) == "layers of type chunked_attention"


def test_the_shard_size_must_divide_the_processes():
    config = TrainConfig(fsdp=True, fsdp_shard_size=2, train_batch_size=128)
    assert not any("fsdp_shard_size" in text for text in batch_problems(config, 4))
    config = TrainConfig(fsdp=True, fsdp_shard_size=3, train_batch_size=128)
    assert any("fsdp_shard_size must divide" in text for text in batch_problems(config, 4))
    with pytest.raises(ValueError, match="fsdp_shard_size: got 0"):
        TrainConfig(fsdp=True, fsdp_shard_size=0)


def test_sglangs_deterministic_mode_is_the_users_to_turn_off(monkeypatch):
    from lightrft.engines.sglang.options import engine_arguments

    arguments = ModuleType("sglang.srt.server_args")
    fields = {"enable_deterministic_inference": bool, "model_path": str}
    arguments.ServerArgs = type(
        "ServerArgs", (), {"__annotations__": fields, "__struct_fields__": tuple(fields)}
    )
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", arguments)

    def built(**options):
        config = EngineConfig("sglang", "m", options=options)
        return engine_arguments(
            config,
            model_path="m",
            context_length=8,
            load_format="auto",
            vocab_size=9,
            ports=(1, 2),
            device_index=0,
        )["enable_deterministic_inference"]

    assert built() is True
    assert built(enable_deterministic_inference="false") is False


def sharding_of(rank, world_size, shard_size):
    with make("fsdp2", fsdp_shard_size=shard_size) as strategy:
        model = strategy.prepare_model(torch.nn.Linear(8, 8), is_training=True)
        return tuple(model.weight.device_mesh.shape), model.weight.to_local().shape[0]


def test_replicas_of_shards_are_formed_from_the_command_lines_option():
    assert run_multiprocess(sharding_of, 2, timeout_seconds=240, args=(1,))[0] == ((2, 1), 8)


WAITS = """
from lightrft.strategy.distributed.process_end import StopRequest
from lightrft.strategy.distributed.process_groups import start_process_group
with StopRequest().listening():
    start_process_group(None)
"""


@pytest.mark.full
def test_a_rank_whose_peer_never_comes_ends_when_it_is_told_to():
    """It waits outside of Python, where no handler of Python runs."""
    with socket.create_server(("127.0.0.1", 0)) as first:
        first.settimeout(seconds(120))
        ports = find_free_port(), first.getsockname()[1]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", WAITS], env={**os.environ, **rank_environment(rank, 2, port)}
            )
            for rank, port in enumerate(ports)
        ]
        try:
            # The second one asks a first one that says nothing; the first one listens.
            connection, _ = first.accept()
            assert wait_until(lambda: listens(ports[0]), 120)
            for process in ranks:
                process.terminate()
            codes = [process.wait(seconds(30)) for process in ranks]
            connection.close()
        finally:
            for process in ranks:
                process.kill()
    assert codes == [-signal.SIGTERM, -signal.SIGTERM]


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
