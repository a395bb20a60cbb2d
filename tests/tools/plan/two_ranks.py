"""One update of a small model on two ranks, with the bytes of its live tensors at the peak."""

import ctypes
import gc
from pathlib import Path

from tests.tools.plan import live_bytes

SIZES = {
    "world": 2,
    "hidden": 256,
    "rows": 1,
    "seq": 64,
    "layers": 3,
    "vocab": 4000,
    "is_tied": False,
    "bf16": False,
    "bucket": 50_000_000,
}


def model_config(sizes):
    from transformers import Qwen2Config

    hidden = sizes["hidden"]
    return Qwen2Config(
        vocab_size=sizes["vocab"],
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        num_key_value_heads=sizes.get("kv_heads", hidden // 128),
        num_hidden_layers=sizes["layers"],
        intermediate_size=sizes.get("intermediate", 3 * hidden),
        tie_word_embeddings=sizes["is_tied"],
    )


def run_config(sizes, options):
    from lightrft.config import TrainConfig

    return TrainConfig(
        init_kl_coef=0,
        engine_type="hf",
        train_batch_size=4 * sizes["rows"],
        rollout_batch_size=4 * sizes["rows"],
        n_samples_per_prompt=1,
        micro_train_batch_size=sizes["rows"],
        prompt_max_len=1,
        bf16=sizes["bf16"],
        generate_max_len=sizes["seq"] - 1,
        **options,
    )


def resident_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM")


def return_freed_memory_at_once():
    """Tensors get pages of their own: the heap keeps none of them, nor gaps where they were."""
    threshold = -3  # M_MMAP_THRESHOLD of malloc.h
    assert ctypes.CDLL(None).mallopt(threshold, 64 * 1024) == 1


def touching():
    """A mode in which memory counts from its allocation on, as on a GPU, not from a first write."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    names = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

    class Touching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if function.overloadpacket.__name__ in names and type(made) is torch.Tensor:
                made.zero_()
            return made

    return Touching()


def build(sizes, config, strategy):
    import torch
    from transformers import AutoModelForCausalLM

    from lightrft.models import Actor, LoraActor

    torch.manual_seed(0)
    wanted = model_config(sizes)
    model = AutoModelForCausalLM.from_config(
        wanted, dtype=torch.float32, attn_implementation="sdpa"
    )
    actor = LoraActor(model, config) if config.lora_rank else Actor(model)
    if config.gradient_checkpointing:
        actor.gradient_checkpointing_enable()
    return strategy.prepare_models_and_optimizers(actor, None, None, None, config, 10)[0]


def update(prepared, strategy, sizes):
    import torch

    ids = torch.full((sizes["rows"], sizes["seq"]), 5)
    mask = torch.ones_like(ids, dtype=torch.bool)
    with strategy.accumulation(2, prepared.optimizer):
        for _ in range(2):
            loss = prepared.model(ids, mask).logprobs.sum()
            strategy.backward(loss, prepared.model, prepared.optimizer)
            strategy.optimizer_step(
                prepared.optimizer, prepared.model, prepared.scheduler, name="actor"
            )


def measure(rank, world_size, sizes, options):
    """Live bytes at the peak of the second update."""
    del rank, world_size
    from lightrft.strategy import get_strategy
    from lightrft.strategy.deepspeed import engine_config

    engine_config.MAX_BUCKET_ELEMENTS = sizes["bucket"]
    config = run_config(sizes, options)
    with get_strategy(config) as strategy:
        gc.collect()
        live = live_bytes.LiveBytes()
        before = live.total
        with live:
            prepared = build(sizes, config, strategy)
            update(prepared, strategy, sizes)
            gc.collect()
            idle = live.total - before
            live.begin()
            update(prepared, strategy, sizes)
        return {"idle": idle, "peak": live.peak - before}


def measure_with_engine(rank, world_size, sizes, options):
    """Live bytes at the peaks of a rollout and of the update after it, beside the engine."""
    del rank, world_size
    from lightrft.engines import GenerationRequest, SamplingParams
    from lightrft.strategy import get_strategy

    config = run_config(sizes, options)
    params = SamplingParams(max_tokens=sizes["seq"] - 1, ignore_eos=True)
    with get_strategy(config) as strategy:
        gc.collect()
        live = live_bytes.LiveBytes()
        before, peaks = live.total, {}
        with live:
            prepared = build(sizes, config, strategy)
            update(prepared, strategy, sizes)
            engine = strategy.setup_inference_engine(None, "hf", actor=prepared)
            for name, run in {
                "rollout": lambda: engine.generate(
                    [GenerationRequest((5 + i,), request_id=i) for i in range(4 * sizes["rows"])],
                    params,
                ),
                "train": lambda: update(prepared, strategy, sizes),
            }.items():
                gc.collect()
                live.begin()
                run()
                peaks[name] = live.peak - before
        return peaks


def measure_resident(rank, world_size, sizes, options):
    """Growth of the resident memory above what imports and a process group take."""
    del rank, world_size
    import torch
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import lightrft.models.actor  # noqa: F401
    from lightrft.strategy import get_strategy

    return_freed_memory_at_once()
    config = run_config(sizes, options)
    with get_strategy(config) as strategy:
        tiny = {**SIZES, "hidden": 128, "layers": 1, "vocab": 64, "rows": sizes["rows"]}
        update(build(tiny, config, strategy), strategy, {**tiny, "seq": 8})
        gc.collect()
        torch.zeros(1)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes()
        with touching():
            prepared = build(sizes, config, strategy)
            for _ in range(2):
                update(prepared, strategy, sizes)
        return {"resident": resident_bytes() - before}
