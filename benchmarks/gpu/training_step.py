"""One training step of random weights under FSDP2: seconds of its phases, MFU, peak against plan.

    python benchmarks/gpu/training_step.py --out training_step.json [--rehearse]

The shape is Qwen2.5-0.5B's, rehearsed a tiny one on any device. Neither a network nor a checkpoint,
DeepSpeed or an engine is needed. The file is written once the numbers are there.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from lightrft.config import TrainConfig
from lightrft.models import Actor
from lightrft.run.gpus import gpu_of
from lightrft.run.throughput import Work, training_flops, utilisation
from lightrft.strategy import get_strategy
from lightrft.strategy.backend import PreparedModel
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.tools.plan.duration import step_seconds
from lightrft.tools.plan.memory import plan_memory
from lightrft.tools.plan.setup import SHAPES, ModelSize, Setup

NUM_STEPS = 3
NUM_MICRO = 4
PROMPT = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """What is trained: a model, rows of a micro batch, and their tokens."""

    size: ModelSize
    num_rows: int
    num_tokens: int


SHAPE = Shape(SHAPES["qwen2.5-0.5b"], 8, 1024)
TINY = Shape(ModelSize(2, 64, 160, 512, 4, 2, 16, is_tied=True, has_qkv_bias=True), 2, 64)


def build(shape: Shape, strategy: StrategyBase, config: TrainConfig) -> PreparedModel:
    """An actor of random weights with its optimizer, sharded."""
    size = shape.size
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.num_heads,
            num_key_value_heads=size.num_kv_heads,
            tie_word_embeddings=size.is_tied,
        ),
        dtype=torch.float32,
        attn_implementation="sdpa",
    )
    actor = Actor(model, fused_linear_logprob=True)
    return strategy.prepare_models_and_optimizers(actor, None, None, None, config, 10)[0]


class Clock:
    """Seconds of phases, once the device has done what was asked of it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, {"score": 0.0, "train": 0.0, "optimizer": 0.0}

    def now(self) -> float:
        """Of the host."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def add(self, phase: str, start: float) -> None:
        """The time since `start` belongs to a phase."""
        self.seconds[phase] += self.now() - start


def step(prepared: PreparedModel, strategy: StrategyBase, shape: Shape) -> dict[str, float]:
    """Seconds of the phases of one step."""
    clock, device = Clock(strategy.device), strategy.device
    rows = (shape.num_rows, shape.num_tokens)
    ids = torch.randint(0, shape.size.vocab, rows, device=device)
    mask = torch.ones(rows, dtype=torch.bool, device=device)
    scored = mask.clone()
    scored[:, :PROMPT] = False
    model, optimizer = prepared.model, prepared.optimizer
    total = NUM_MICRO * int(scored.sum())
    start = clock.now()
    with torch.no_grad():
        for _ in range(NUM_MICRO):
            model(ids, mask, scored_mask=scored)
    clock.add("score", start)
    with strategy.accumulation(NUM_MICRO, optimizer):
        for _ in range(NUM_MICRO):
            start = clock.now()
            output = model(
                ids, mask, scored_mask=scored, token_loss=lambda logp, *_: -logp.sum() / total
            )
            strategy.backward(output.loss, model, optimizer)
            clock.add("train", start)
            start = clock.now()
            strategy.optimizer_step(optimizer, model, prepared.scheduler, name="actor")
            clock.add("optimizer", start)
    return clock.seconds


def measure(shape: Shape) -> dict[str, object]:
    """Medians over steps after the first, beside what is planned."""
    config = TrainConfig(
        fsdp=True,
        engine_type="hf",
        init_kl_coef=0.0,
        micro_train_batch_size=shape.num_rows,
        train_batch_size=NUM_MICRO * shape.num_rows,
        rollout_batch_size=NUM_MICRO * shape.num_rows,
        n_samples_per_prompt=1,
        prompt_max_len=PROMPT,
        generate_max_len=shape.num_tokens - PROMPT,
    )
    with get_strategy(config) as strategy:
        has_gpu = strategy.device.type == "cuda"
        prepared = build(shape, strategy, config)
        step(prepared, strategy, shape)  # Adam's states are made, kernels compiled
        if has_gpu:
            torch.cuda.reset_peak_memory_stats(strategy.device)
        found = [step(prepared, strategy, shape) for _ in range(NUM_STEPS)]
        peak = torch.cuda.max_memory_allocated(strategy.device) if has_gpu else None
        gpu = gpu_of(torch.cuda.get_device_name(strategy.device)) if has_gpu else None
        flops = training_flops(prepared.model, strategy)
    seconds = {name: sorted(each[name] for each in found)[NUM_STEPS // 2] for name in found[0]}
    lengths = np.full(NUM_MICRO * shape.num_rows, shape.num_tokens)
    work = Work(("actor",), lengths=lengths, scored_lengths=lengths - PROMPT)
    rates = utilisation(
        [] if flops is None else [flops],
        work,
        seconds=seconds["train"] + seconds["optimizer"],
        num_devices=1,
        peak=None if gpu is None else gpu.tflops,
    )
    capacity = 80e9 if gpu is None else gpu.memory_bytes
    setup = Setup(config, shape.size, 1, 1, has_gpu, capacity, "hf", mean_length_share=1.0)
    train = next(p for p in plan_memory(setup).phases if p.name == "train")
    context = sum(t.num_bytes for t in train.terms if t.name == "CUDA context and NCCL")
    report: dict[str, object] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if has_gpu else "cpu",
        "tokens": NUM_MICRO * shape.num_rows * shape.num_tokens,
        "seconds": seconds,
        **rates,
        "planned_bytes": train.device_bytes - context,
        "peak_bytes": peak,
    }
    if peak is not None:
        report["planned_over_peak"] = (train.device_bytes - context) / peak
    if gpu is not None:
        predicted = step_seconds(setup, gpu).phases
        report["predicted_seconds"] = {name: predicted[name] for name in ("score", "train")}
    return report


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, on any device")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**one, **place}.items()})
    report = measure(TINY if arguments.rehearse else SHAPE)
    whole = arguments.out.with_suffix(".part")
    whole.write_text(json.dumps(report, indent=1) + "\n")
    whole.replace(arguments.out)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
