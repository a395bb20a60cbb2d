"""Two micro-batches of one full row of random tokens, as prime-rl's own baselines train them.

    python3 benchmarks/gpu/rows.py ours|trl NAME SHAPE --tokens N [--steps N] [--lora_rank R]

Ids, advantages and behaviour logprobs are random, activations are computed again, the optimizer is
Adam. A line is written for every step when it ends; for lightrft, before them, one for the relative
difference of the gradient of a shorter row to that of an unfused float32 step of the same weights.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import lines
import numpy as np
import torch

NUM_MICRO, LEARNING_RATE, CLIP = 2, 1e-6, 0.2
GRADIENT_TOKENS, TINY_TOKENS = 2048, 64
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """A full row: [1, tokens] each; the first token is not scored."""

    ids: torch.Tensor
    advantages: torch.Tensor
    old_logprobs: torch.Tensor

    def loss(self, logprobs, entropy, rows, columns):
        """Return the clipped loss of some tokens, whose sum over the row is divided by all."""
        del entropy
        advantages = self.advantages[rows, columns]
        ratio = torch.exp(logprobs - self.old_logprobs[rows, columns])
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        return -gain.sum() / (NUM_MICRO * self.ids.numel())


def random_row(vocab: int, tokens: int, device: torch.device, seed: int) -> Row:
    """Return a row of random tokens; behaviour logprobs lie about those of random weights."""
    generator = torch.Generator(device).manual_seed(seed)
    options = {"generator": generator, "device": device}
    ids = torch.randint(0, vocab, (1, tokens), **options)
    noise = 0.1 * torch.randn(1, tokens, **options)
    return Row(ids, torch.randn(1, tokens, **options), noise - float(np.log(vocab)))


def random_model(size, device: torch.device):
    """Return random float32 weights of a published shape, made where they are used."""
    from transformers import AutoModelForCausalLM

    from lightrft.tools.model_presets import published_config

    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(
            published_config(size), dtype=torch.float32, attn_implementation="sdpa"
        )


def synchronize(device: torch.device) -> float:
    """Return the host's clock once the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Ours:
    """The trained policy of lightrft on one rank, as `lightrft train --fsdp` prepares it."""

    def __init__(self, strategy, config, size) -> None:
        from lightrft.models import Actor
        from lightrft.models.lora import LoraActor
        from lightrft.stages.models import configure_models

        self.strategy, self.config, self.device = strategy, config, strategy.device
        model = random_model(size, self.device)
        self.plain = LoraActor(model, config) if config.lora_rank else Actor(model)
        actor = copy.deepcopy(self.plain)
        prepared = strategy.prepare_models_and_optimizers(actor, None, None, None, config, 10)[0]
        self.model, self.optimizer = prepared.model, prepared.optimizer
        self.scheduler = prepared.scheduler
        configure_models(config, strategy.context, (self.model,), kept="none")
        self.model.train()

    def backward(self, row: Row) -> None:
        """Add the gradient of one micro-batch."""
        mask = torch.ones_like(row.ids, dtype=torch.bool)
        scored = mask.clone()
        scored[:, 0] = False
        output = self.model(row.ids, mask, scored_mask=scored, token_loss=row.loss)
        self.strategy.backward(output.loss, self.model, self.optimizer)

    def step(self, rows: list[Row]) -> None:
        """Take one optimizer step."""
        with self.strategy.accumulation(len(rows), self.optimizer):
            for row in rows:
                self.backward(row)
                self.strategy.optimizer_step(
                    self.optimizer, self.model, self.scheduler, name="actor"
                )

    def gradient_difference(self, row: Row) -> float:
        """Return |g - g32| / |g32| of one row, g32 being that of an unfused float32 step."""
        plain = self.plain.to(self.device).train()
        mask = torch.ones_like(row.ids, dtype=torch.bool)
        logprobs = plain(row.ids, mask).logprobs[:, 1:]
        places = torch.arange(1, row.ids.shape[1], device=self.device)
        row.loss(logprobs[0], None, torch.zeros_like(places), places).backward()
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        plain.zero_grad()
        self.plain = None
        del plain
        with self.strategy.accumulation(1, self.optimizer):
            self.backward(row)
            squares = difference = 0.0
            for name, parameter in self.model.named_parameters():
                if parameter.grad is None:
                    continue
                gradient = parameter.grad
                gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                exact = expected.pop(next(n for n in expected if name.endswith(n)))
                difference += float((gradient.float() - exact).square().sum())
                squares += float(exact.square().sum())
            self.optimizer.zero_grad()
            # The step of the accumulation is not taken: nothing has changed.
            self.strategy.optimizer_step(self.optimizer, self.model, self.scheduler, name="actor")
        assert not expected, f"no gradient of {sorted(expected)}"
        return (difference / squares) ** 0.5


def options_of(tokens: int, lora_rank: int):
    """Return the options of the run that this is a step of."""
    from lightrft.config import TrainConfig

    return TrainConfig(
        fsdp=True,
        engine_type="hf",
        init_kl_coef=0.0,
        gradient_checkpointing=True,
        actor_learning_rate=LEARNING_RATE,
        lora_rank=lora_rank,
        lora_alpha=max(1, 2 * lora_rank),
        micro_train_batch_size=1,
        train_batch_size=NUM_MICRO,
        rollout_batch_size=NUM_MICRO,
        n_samples_per_prompt=1,
        prompt_max_len=1,
        generate_max_len=tokens - 1,
        fused_linear_logprob=True,
        packing_samples=True,
    )


def planned_bytes(config, size, device: torch.device) -> float:
    """Return what the plan has for the update, without what torch does not allocate."""
    from lightrft.tools.plan.memory import plan_memory
    from lightrft.tools.plan.setup import Setup

    has_gpu = device.type == "cuda"
    capacity = torch.cuda.mem_get_info()[1] if has_gpu else 80e9
    setup = Setup(config, size, 1, 1, has_gpu, capacity, "hf", mean_length_share=1.0)
    train = next(phase for phase in plan_memory(setup).phases if phase.name == "train")
    context = sum(t.num_bytes for t in train.terms if t.name == "CUDA context and NCCL")
    return train.device_bytes - context


def run_ours(options: argparse.Namespace, size, tokens: int) -> None:
    """Measure lightrft."""
    from lightrft.run.gpus import gpu_of
    from lightrft.run.throughput import Work, training_flops, utilisation
    from lightrft.strategy import get_strategy

    name, config = options.name, options_of(tokens, options.lora_rank)
    with get_strategy(config) as strategy:
        device = strategy.device
        has_gpu = device.type == "cuda"
        add = lambda **values: lines.add("rows", name, kind="ours", **values)  # noqa: E731
        ours = Ours(strategy, config, size)
        short = min(tokens, GRADIENT_TOKENS)
        add(gradient_difference=ours.gradient_difference(random_row(size.vocab, short, device, 9)))
        rows = [random_row(size.vocab, tokens, device, seed) for seed in range(NUM_MICRO)]
        flops = training_flops(ours.model, strategy.parameter_source(ours.model))
        lengths = np.full(NUM_MICRO, tokens)
        gpu = gpu_of(torch.cuda.get_device_name(device)) if has_gpu else None
        planned = planned_bytes(config, size, device) / GIB
        for step in range(1, 1 + options.steps):
            if has_gpu and step == 2:
                torch.cuda.reset_peak_memory_stats(device)
            begin = synchronize(device)
            ours.step(rows)
            seconds = synchronize(device) - begin
            rates = utilisation(
                [flops],
                Work(("actor",), lengths=lengths, scored_lengths=lengths - 1),
                seconds=seconds,
                num_devices=1,
                peak=None if gpu is None else gpu.tflops,
            )
            peak = torch.cuda.max_memory_allocated(device) / GIB if has_gpu else None
            memory = {"planned_gib": planned, "peak_gib": peak}
            add(step=step, tokens=tokens, step_seconds=seconds, **rates, **memory)
        if has_gpu:
            free, total = torch.cuda.mem_get_info()
            add(context_gb=(total - free - torch.cuda.memory_reserved()) / 1e9)
        mask = torch.ones_like(rows[0].ids, dtype=torch.bool)
        for _ in range(2):  # the first is cold
            begin = synchronize(device)
            with torch.no_grad():
                ours.model(rows[0].ids, mask)
            seconds = synchronize(device) - begin
        if gpu is not None:
            work = flops.total(lengths[:1], lengths[:1] - 1) / 3
            add(score_mfu=work / seconds / 1e12 / gpu.tflops)


def trl_settings(options: argparse.Namespace, *, has_gpu: bool) -> object:
    """Return the GRPOConfig of one row a pass and `NUM_MICRO` passes a step."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(Path(os.environ["LIGHTRFT_SCRATCH"]) / f"trl_{options.name}"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=NUM_MICRO,
        num_generations=NUM_MICRO,
        max_steps=options.steps,
        learning_rate=LEARNING_RATE,
        beta=0.0,
        bf16=has_gpu,
        use_cpu=not has_gpu,
        gradient_checkpointing=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def trl_adapters(lora_rank: int) -> object:
    """Return the LoraConfig of all linear layers, None without a rank."""
    if not lora_rank:
        return None
    from peft import LoraConfig

    return LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")


def run_trl(options: argparse.Namespace, size, tokens: int) -> None:
    """Measure TRL's own trainer on the same rows, given to it in place of a rollout's."""
    name, lora_rank = options.name, options.lora_rank
    try:
        from datasets import Dataset
        from trl import GRPOTrainer
    except ImportError as error:
        lines.add("absent", "trl", text=f"{name}: {error}: carry benchmarks/gpu/wheels")
        return
    from transformers import TrainerCallback

    from lightrft.tools.model_presets import byte_level_tokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    has_gpu = device.type == "cuda"
    rows = [random_row(size.vocab, tokens, device, seed) for seed in range(NUM_MICRO)]
    batches = [
        {
            "prompt_ids": row.ids[:, :1],
            "prompt_mask": torch.ones_like(row.ids[:, :1]),
            "completion_ids": row.ids[:, 1:],
            "completion_mask": torch.ones_like(row.ids[:, 1:]),
            "advantages": row.advantages[:, 1:],
            "old_per_token_logps": row.old_logprobs[:, 1:],
            "num_items_in_batch": torch.tensor(NUM_MICRO * (tokens - 1), device=device),
        }
        for row in rows
    ]

    class FixedRows(GRPOTrainer):
        count = 0

        def _prepare_inputs(self, generation_batch: object) -> dict[str, torch.Tensor]:
            self.count += 1
            return dict(batches[self.count % NUM_MICRO])

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            if has_gpu and state.global_step == 1:
                torch.cuda.reset_peak_memory_stats(device)
            self.begin = synchronize(device)

        def on_step_end(self, args, state, control, **others):
            seconds = synchronize(device) - self.begin
            peak = torch.cuda.max_memory_allocated(device) / GIB if has_gpu else None
            values = {"step": state.global_step, "tokens": tokens, "step_seconds": seconds}
            lines.add("rows", name, kind="trl", peak_gib=peak, **values)

    trainer = FixedRows(
        model=random_model(size, device),
        reward_funcs=lambda completions, **others: [0.0] * len(completions),
        args=trl_settings(options, has_gpu=has_gpu),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
        processing_class=byte_level_tokenizer(),
        peft_config=trl_adapters(lora_rank),
        callbacks=[Clock()],
    )
    trainer.train()


def main() -> None:
    """Measure as the options say."""
    from lightrft.tools.plan.sizes import SHAPES, ModelSize

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["ours", "trl"])
    parser.add_argument("name")
    parser.add_argument("shape")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lora_rank", type=int, default=0)
    options = parser.parse_args()
    if options.lora_rank and importlib.util.find_spec("peft") is None:
        text = "adapters need peft, which is not installed"
        return lines.add("absent", options.name, text=text)
    size, tokens = SHAPES[options.shape], options.tokens
    if lines.is_rehearsal():
        size, tokens = ModelSize(2, 64, 160, 512, 4, 2, 16, True, has_qk_norm=True), TINY_TOKENS
    if options.kind == "trl":  # in one plain process: with a world of one rank it would take DDP
        return run_trl(options, size, tokens)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    return run_ours(options, size, tokens)


if __name__ == "__main__":
    sys.exit(main())
