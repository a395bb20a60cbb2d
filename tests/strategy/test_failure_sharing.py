"""One rank cannot start its engine, or fails in it, while the other waits in a collective of it.

Each case starts two processes of this file without any launcher that would end the other one.
"""

import os
import sys
import time

import pytest
from tests.ranks import RankFailure, run_multiprocess
from tests.strategy.lone_ranks import note_fault, scaled, seconds_since_fault, texts, two_programs

pytestmark = pytest.mark.shard("start_vllm")

LIMIT_SECONDS = 60.0
START_SECONDS = 900.0
CAUSE = "the GPU of this rank has 3 bytes left"
SETTINGS = {
    "fsdp": True,
    "bf16": False,
    "train_batch_size": 2,
    "micro_train_batch_size": 1,
    "timeout_minutes": 30.0,
    "engine_args": {},
}


def fail_if_faulty(folder):
    if os.environ["RANK"] == "1":
        note_fault(folder)
        raise MemoryError(CAUSE)


def run_vllm(place, folder):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from lightrft.strategy import get_strategy

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "head_dim": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    }
    torch.manual_seed(0)  # the same weights on both ranks
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, max_position_embeddings=64))
    settings = {**SETTINGS, "engine_tp_size": 2, "max_len": 32, "engine_args": {"block_size": 32}}
    with get_strategy(settings) as strategy:
        from vllm.v1.worker.cpu_worker import CPUWorker

        name = {
            "memory": "determine_available_memory",
            "load": "load_model",
            "canary": "execute_model",
            "generate": "execute_model",
        }[place]
        original = getattr(CPUWorker, name)
        is_faulty = place != "generate"

        def faulty(self, *args, **kwargs):
            if is_faulty:
                fail_if_faulty(folder)
            return original(self, *args, **kwargs)

        setattr(CPUWorker, name, faulty)
        strategy.setup_inference_engine(None, "vllm", model)
        strategy.update_engine_weights(model)
        is_faulty = True
        strategy.gather_and_generate({"max_tokens": 2}, [[1, 2]])


def fail_on_rank_1(rank, world_size, place, stays):
    """Rank 1 fails; "inside" rank 0 waits for it meanwhile, "after" it has done its part."""
    import torch
    import torch.distributed as dist

    from lightrft.strategy.distributed import failure_sharing

    del world_size
    failure_sharing.GRACE_SECONDS, failure_sharing.MARGIN_SECONDS = 1.0, 1.0
    dist.init_process_group("gloo")

    def action():
        if rank == 1 and place != "nowhere":
            raise MemoryError(CAUSE)
        if place != "after":
            dist.all_reduce(torch.zeros(1))
        return rank

    try:
        return failure_sharing.run_without_collective(action, None, what="the engine did not start")
    except MemoryError:
        if stays:  # its end would free rank 0
            time.sleep(6.0)
        raise


@pytest.mark.cover(2)
@pytest.mark.parametrize("place, stays", [("inside", True), ("inside", False), ("after", True)])
def test_a_rank_that_waits_for_a_failed_one_ends_with_the_cause(place, stays, capfd):
    told = f"the engine did not start on rank 1: MemoryError: {CAUSE}"
    with pytest.raises(RankFailure) as failure:
        run_multiprocess(fail_on_rank_1, 2, timeout_seconds=50, args=(place, stays))
    of_rank_0, of_rank_1 = str(failure.value).split("--- rank 1 ---")
    assert f"MemoryError: {CAUSE}" in of_rank_1 or "did not finish" in of_rank_1
    if stays and place == "inside":
        assert "died with exit code 1" in of_rank_0
        assert f"ended because another rank failed: {told}" in capfd.readouterr().err
    else:
        assert f"PeerFailedError: {told}" in of_rank_0


def test_without_a_failure_every_rank_has_all_results():
    ranks = run_multiprocess(fail_on_rank_1, 2, args=("nowhere", False))
    assert ranks == [[0, 1], [0, 1]]


@pytest.mark.vllm
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "place",
    [
        "memory",
        pytest.param("load", marks=pytest.mark.slow),
        pytest.param("canary", marks=pytest.mark.slow),
        pytest.param("generate", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_end_when_one_fails_inside_vllms_collectives(place, tmp_path):
    limit = time.monotonic() + scaled(START_SECONDS)
    with two_programs(__file__, tmp_path, place) as processes:
        while time.monotonic() < limit and None in [process.poll() for process in processes]:
            time.sleep(0.1)
        took = seconds_since_fault(tmp_path, time.time())
        codes = [process.poll() for process in processes]
    first, second = texts(tmp_path)
    shown = f"{first[-3000:]}\n--- rank 1\n{second[-3000:]}"
    assert codes == [1, 1], shown
    assert took <= scaled(LIMIT_SECONDS), shown
    told = {"generate": "generation failed", "canary": "the weight sync failed"}
    what = told.get(place, "the engine did not start")
    assert f"{what} on rank 1: MemoryError: {CAUSE}" in first, shown
    assert f"MemoryError: {CAUSE}" in second, shown
    assert "on rank 1 of 2" in second, shown


if __name__ == "__main__":
    run_vllm(*sys.argv[1:])
