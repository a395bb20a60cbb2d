"""One update of a small model on two ranks, with the bytes of its live tensors at the peak."""

import gc

SIZES = {
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
        num_key_value_heads=hidden // 128,
        num_hidden_layers=sizes["layers"],
        intermediate_size=3 * hidden,
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


def build_model(sizes):
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        model_config(sizes), dtype=torch.float32, attn_implementation="sdpa"
    )


def build(sizes, config, strategy):
    from lightrft.models import Actor, LoraActor

    model = build_model(sizes)
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
    from tests.tools.plan.live_bytes import LiveBytes

    from lightrft.strategy import get_strategy
    from lightrft.strategy.deepspeed import engine_config

    engine_config.MAX_BUCKET_ELEMENTS = sizes["bucket"]
    config = run_config(sizes, options)
    with get_strategy(config) as strategy:
        gc.collect()
        live = LiveBytes()
        before = live.total
        with live:
            prepared = build(sizes, config, strategy)
            update(prepared, strategy, sizes)
            gc.collect()
            idle = live.total - before
            live.begin()
            update(prepared, strategy, sizes)
        return {"idle": idle, "peak": live.peak - before}
