"""What vLLM reads after sleep was written after it, and a closed engine is gone.

On a GPU, memory that slept at level 2 comes back with any contents. Here a real vLLM on the CPU
gets not-a-number into all its parameters and buffers and its cache, as it falls asleep.
"""

import gc
import math
import weakref

import pytest
import torch
from tests.models.tiny import WIDE, tiny_model

from lightrft.engines.types import EngineConfig, GenerationRequest, SamplingParams
from lightrft.kernels.weight_bucket.layout import WeightPiece

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
# The second shares its first 40 tokens with the third, so that cached blocks are reused.
PROMPTS = [[7, 8, 9], [9 + j % 50 for j in range(41)], [9 + j % 50 for j in range(45)]]


def start(folder, module):
    from lightrft.engines.factory import build_engine

    config = EngineConfig(
        engine_type="vllm",
        model_path=str(folder),
        dtype="float32",
        tensor_parallel_size=1,
        memory_utilization=0.3,
        max_model_len=100,
        seed=1,
        enable_sleep=True,
        options={"block_size": 32},
    )
    return build_engine(config, module=module)


def poison(tensors):
    """Fills what has floating point numbers; tensors that share memory count once."""
    seen = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.data.fill_(math.nan)
            seen[tensor.data_ptr()] = tensor
    return len(seen)


def poison_worker(worker):
    """Everything with a tag of vLLM's pool: weights and the cache."""
    return poison([*worker.model_runner.model.parameters(), *worker.model_runner.kv_caches])


@pytest.fixture
def poisoning(monkeypatch):
    """Lets vLLM's CPU worker lose its memory as the GPU worker does at level 2."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    counts = []

    def sleep(self, level=1):
        model = self.model_runner.model
        assert level == 2
        self.saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
        counts.append(poison_worker(self))
        poison(model.buffers())

    def wake_up(self, tags=None):
        if tags is None or "weights" in tags:
            for name, buffer in self.model_runner.model.named_buffers():
                buffer.data.copy_(self.saved[name])

    monkeypatch.setattr(CPUWorker, "sleep", sleep)
    monkeypatch.setattr(CPUWorker, "wake_up", wake_up)
    return counts


def generate(engine):
    requests = [GenerationRequest(tuple(ids), request_id=i) for i, ids in enumerate(PROMPTS)]
    return [
        (found.output_token_ids, found.output_logprobs)
        for found in engine.generate(requests, GREEDY)
    ]


def rewrite(engine, module, *, without=""):
    """Sends every weight again, as a sync after sleep does."""
    held = dict(module.named_parameters(remove_duplicate=False))
    pieces = [
        WeightPiece(entry.name, entry.shape, 0, held[entry.name].detach().reshape(-1))
        for entry in engine.parameter_manifest()
        if entry.tied_to is None and entry.name != without
    ]
    engine.wake_up(("weights",))
    engine.begin_weight_update()
    engine.load_weights(pieces)
    engine.finish_weight_update()
    engine.wake_up(("kv_cache",))
    engine.reset_caches()


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_tied", [True, False])
def test_nothing_of_an_engine_that_slept_is_read_before_it_is_rewritten(
    is_tied, tmp_path, poisoning
):
    module = tiny_model(**WIDE, tie_word_embeddings=is_tied)
    module.save_pretrained(tmp_path)
    engine = start(tmp_path, module)
    try:
        before = generate(engine)
        for _ in range(2):
            engine.sleep(level=2)
            rewrite(engine, module)
            for (ids, logprobs), (wanted, expected) in zip(generate(engine), before, strict=True):
                assert ids == wanted
                assert logprobs == pytest.approx(expected, abs=1e-5)
        # Both caches, and of a layer two norms and two of its heads, four products fused of seven.
        assert min(poisoning) >= 13
        # What is not rewritten shows: in one tensor, and in all of the memory.
        engine.sleep(level=2)
        rewrite(engine, module, without="model.norm.weight")
        with pytest.raises(Exception, match=r"hold no weights \(first: model.norm.weight\)"):
            generate(engine)
        engine.sleep(level=2)
        rewrite(engine, module)
        poison_worker(engine.native.collective_rpc(lambda worker: worker)[0])
        with pytest.raises(FloatingPointError):
            generate(engine)
    finally:
        engine.close()


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_closed_engine_is_collected_and_a_second_one_starts(tmp_path):
    module = tiny_model(**WIDE, tie_word_embeddings=True)
    module.save_pretrained(tmp_path)
    first = start(tmp_path, module)
    before = generate(first)
    worker = first.native.collective_rpc(lambda worker: worker)[0]
    gone = [weakref.ref(worker.get_model()), weakref.ref(first.native)]
    del worker
    first.close()
    gc.collect()
    # The engine itself is still held; its model and cache are not.
    assert [found() is None for found in gone] == [True, True]
    second = start(tmp_path, module)
    try:
        assert [ids for ids, _ in generate(second)] == [ids for ids, _ in before]
    finally:
        second.close()
