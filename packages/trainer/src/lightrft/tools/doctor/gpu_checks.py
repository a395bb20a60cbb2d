"""Timed checks of a GPU for `lightrft doctor --gpu`, to judge a new machine.

Each check has a limit. Without a GPU, or a package that it needs, nothing is checked.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightrft.tools.doctor.check import Check, CheckResult, checked, unchecked

if TYPE_CHECKING:
    from lightrft.engines.base import RolloutEngine
    from lightrft.strategy.weight_sync.sync import WeightSyncReport

GIGABYTE = 1e9
ROUNDS = 7
ENGINE_SECONDS = 300.0
MIN_PRODUCT_TFLOPS = 30.0
MIN_COPY_GB_PER_SECOND = 200.0
MIN_PACK_GB_PER_SECOND = 20.0
MIN_HEAD_SHARE = 0.25
MIN_SYNC_GB_PER_SECOND = 20.0
MIN_FREED_SHARE = 0.9
# Largest difference from the float32 result of a bfloat16 one, over the largest value.
MAX_ATTENTION_ERROR = 0.02
MAX_HEAD_ERROR = 1e-3


@dataclass
class EngineProbe:
    """Results of the engine's steps, which its checks read.

    Args:
        report: Report of the second weight synchronisation.
        empty_report: Report of one that only sends vectors: its cost is the least one.
        freed_share: Share of the engine's memory that sleeping gave back; None if it took none of a
            device.
        runner: Name of the code that executes the model.
        parity: Mean difference between trainer and engine in the logprobs of sampled tokens.
    """

    report: WeightSyncReport | None = None
    empty_report: WeightSyncReport | None = None
    freed_share: float | None = None
    runner: str = ""
    parity: float | None = None
    problem: str = "vllm is not installed"
    is_done: bool = False


def gpu_checks() -> list[Check]:
    """Return the checks, kernels first."""
    probe = EngineProbe()
    remedy = (
        "compare `nvidia-smi -q` (clocks, power cap, ECC, other programs) with the vendor's data"
    )
    kernels = "send this line with `lightrft doctor`; --no_fused_linear_logprob does without it"
    engine = "send this line with the engine's log (VLLM_LOGGING_LEVEL=INFO)"
    steps: tuple[tuple[str, str, str, Callable[[], CheckResult]], ...] = (
        ("bf16 product", f">= {MIN_PRODUCT_TFLOPS:g} TFLOP/s", remedy, time_product),
        ("device copy", f">= {MIN_COPY_GB_PER_SECOND:g} GB/s", remedy, time_copy),
        ("attention", f"error <= {MAX_ATTENTION_ERROR:g}", kernels, compare_attention),
        (
            "head",
            f"error <= {MAX_HEAD_ERROR:g} and >= {MIN_HEAD_SHARE:g} of the product's rate",
            kernels,
            time_head,
        ),
        (
            "weight buckets",
            f"same bits as on the host, >= {MIN_PACK_GB_PER_SECOND:g} GB/s",
            "build lightrft-kernels with nvcc",
            time_buckets,
        ),
    )
    of_engine: tuple[tuple[str, str, Callable[[EngineProbe], CheckResult]], ...] = (
        ("engine runner", "has a name", runner_of),
        ("engine sleep", f"frees >= {MIN_FREED_SHARE:.0%}", sleep_of),
        ("weight sync", f">= {MIN_SYNC_GB_PER_SECOND:g} GB/s", rate_of),
        ("canary", "difference <= 5", canary_of),
        ("parity", "mean difference <= 0.05", parity_of),
    )
    steps += tuple(
        (name, limit, engine, partial(of_probe, probe, read)) for name, limit, read in of_engine
    )
    return [
        Check(name, limit, remedy, step, ENGINE_SECONDS, needs_gpu=True)
        for name, limit, remedy, step in steps
    ]


def seconds_of(step: Callable[[], object]) -> float:
    """Return the median duration on the device, after one call to warm up."""
    step()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times)[ROUNDS // 2]


def product_rate() -> float:
    """Return the FLOP/s of a product of bfloat16 matrices."""
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right)


def time_product() -> CheckResult:
    """Time a product, with whose rate others are compared."""
    rate = product_rate() / 1e12
    return checked(rate >= MIN_PRODUCT_TFLOPS, f"{rate:.0f} TFLOP/s")


def time_copy() -> CheckResult:
    """Time a copy on the device, by read and written bytes."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * source.numel() / seconds_of(lambda: target.copy_(source)) / GIGABYTE
    return checked(rate >= MIN_COPY_GB_PER_SECOND, f"{rate:.0f} GB/s")


def compare_attention(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> CheckResult:
    """Compare packed attention with float64 attention, one sequence after the other."""
    from lightrft.models.attention import SequenceBounds, packed_attention
    from lightrft.models.varlen import KernelShape, try_kernel

    lengths, heads, size = (5, 130, 1, 64), (4, 2), 64
    offsets = torch.tensor((0, *lengths)).cumsum(0)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, n, int(offsets[-1]), size, generator=generator).to(device, dtype)
        for n in (heads[0], heads[1], heads[1])
    )
    bounds = SequenceBounds(tuple(offsets.tolist()), offsets.to(device, torch.int32))
    layer = torch.nn.Identity()
    attended, _ = packed_attention(layer, query, key, value, None, sequence_bounds=bounds)
    expected = []
    for start, stop in zip(bounds.offsets, bounds.offsets[1:], strict=False):
        q, k, v = (x[:, :, start:stop].double() for x in (query, key, value))
        expected.append(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    error = relative_error(attended, torch.cat(expected, dim=2).transpose(1, 2))
    packing = try_kernel(KernelShape(device, dtype, size, size)).packing
    return checked(error <= MAX_ATTENTION_ERROR, f"error {error:.1e}, {packing}")


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((value.double() - expected).abs().max() / expected.abs().max())


def time_head() -> CheckResult:
    """Time log-probabilities with gradients, in the default way of this machine."""
    tokens, hidden, vocab = 4096, 2048, 65536
    error = head_error("cuda", torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(0)
    states, weight = (
        torch.randn(rows, hidden, generator=generator, device="cuda").mul_(hidden**-0.25)
        for rows in (tokens, vocab)
    )
    states, weight = (x.to(torch.bfloat16).requires_grad_() for x in (states, weight))
    targets = torch.arange(tokens, device="cuda")
    seconds = seconds_of(lambda: head_step(states, weight, targets))
    rate = 6 * tokens * hidden * vocab / seconds
    share = rate / product_rate()
    text = f"{rate / 1e12:.0f} TFLOP/s, {share:.0%} of the product's, error {error:.1e}"
    return checked(error <= MAX_HEAD_ERROR and share >= MIN_HEAD_SHARE, text)


def head_step(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Run forward and backward pass; return the log-probabilities."""
    from lightrft.kernels import linear_logprob

    states.grad = weight.grad = None
    logprobs = linear_logprob(states, weight, targets).logprobs
    logprobs.sum().backward()
    return logprobs.detach()


def head_error(device: str, dtype: torch.dtype) -> float:
    """Return the error of log-probabilities, against float64 on the same numbers."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(64, 128, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(1000, 128, generator=generator) / 11).to(device, dtype).requires_grad_()
    targets = torch.arange(64, device=device)
    logits = states.detach().double() @ weight.detach().double().T
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    return relative_error(head_step(states, weight, targets), expected)


def time_buckets() -> CheckResult:
    """Time packing of float32 into bfloat16, and compare hashes with the host's."""
    from lightrft.kernels import hash_tensor, pack

    source = torch.randn(2**28, device="cuda")
    out = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    seconds = seconds_of(lambda: pack([source], out, [0], [torch.bfloat16]))
    rate = source.numel() * 4 / seconds / GIGABYTE
    part = source[: 2**20]
    same = hash_tensor(part) == hash_tensor(part.cpu())
    bits = "same bits" if same else "other bits than on the host"
    return checked(same and rate >= MIN_PACK_GB_PER_SECOND, f"{rate:.0f} GB/s, {bits}")


def of_probe(probe: EngineProbe, read: Callable[[EngineProbe], CheckResult]) -> CheckResult:
    """Run vLLM beside a model of 0.4 billion random parameters, once, then read a result."""
    if not probe.is_done:
        probe.is_done = True
        if find_spec("vllm") is not None:
            probe.problem = "the engine's steps did not end"
            run_probe(probe, "vllm", hidden=2048, layers=8)
    return unchecked(probe.problem) if probe.problem else read(probe)


def run_probe(probe: EngineProbe, engine_type: str, *, hidden: int, layers: int) -> None:
    """Synchronise twice, sample, compare, sleep and measure.

    Args:
        probe: Probe that gets the results.
        engine_type: Type of the engine.
        hidden, layers: Sizes of the model.
    """
    from lightrft.models import Actor
    from lightrft.strategy import get_strategy

    settings = {"fsdp": True, "engine_type": engine_type, "max_len": 256, "timeout_minutes": 5.0}
    settings["engine_mem_util"] = 0.3
    with tempfile.TemporaryDirectory() as folder, get_strategy(settings) as strategy:
        write_random_model(Path(folder), hidden=hidden, layers=layers)
        strategy.config.pretrain = folder
        # Weights that are not trained would not be sent a second time.
        actor = strategy.prepare_model(Actor.from_pretrained(folder), is_training=True)
        engine = strategy.setup_inference_engine(None, engine_type, actor)
        strategy.update_engine_weights(actor)
        probe.report = strategy.last_weight_sync
        for parameter in actor.parameters():
            parameter.requires_grad_(parameter.dim() == 1)
        for _ in range(2):  # what is frozen from now on is sent once more
            strategy.update_engine_weights(actor)
        probe.empty_report = strategy.last_weight_sync
        probe.runner = engine.runner_name
        probe.parity = parity_of_samples(engine, actor, strategy.device)
        if strategy.device.type == "cuda":
            probe.freed_share = freed_by_sleep(engine)
        probe.problem = ""


def write_random_model(folder: Path, *, hidden: int, layers: int) -> None:
    """Write a Qwen3 with random weights and without a tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=hidden,
        head_dim=64,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        num_hidden_layers=layers,
        intermediate_size=3 * hidden,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def parity_of_samples(engine: RolloutEngine, actor: torch.nn.Module, device: torch.device) -> float:
    """Return the mean difference in the logprobs of what the engine sampled."""
    from lightrft.engines.types import GenerationRequest, SamplingParams

    requests = [GenerationRequest(tuple(range(3, 20 + 9 * i)), request_id=i) for i in range(4)]
    differences = []
    for completion in engine.generate(requests, SamplingParams(max_tokens=32, ignore_eos=True)):
        ids = (*completion.prompt_token_ids, *completion.output_token_ids)
        tokens = torch.tensor([ids], device=device)
        with torch.no_grad():
            logprobs = actor(tokens, torch.ones_like(tokens)).logprobs[0]
        local_logprobs = logprobs[len(completion.prompt_token_ids) :].float().cpu()
        differences.append((local_logprobs - torch.tensor(completion.output_logprobs)).abs())
    return float(torch.cat(differences).mean())


def freed_by_sleep(engine: RolloutEngine) -> float:
    """Return the share of memory that sleeping frees, between awake and closed, by the driver."""
    awake, _ = torch.cuda.mem_get_info()
    engine.sleep(level=2)
    asleep, _ = torch.cuda.mem_get_info()
    engine.close()
    torch.cuda.empty_cache()
    closed, _ = torch.cuda.mem_get_info()
    return (asleep - awake) / max(1, closed - awake)


def runner_of(probe: EngineProbe) -> CheckResult:
    """Check that the code that executes the model has a name."""
    return checked(bool(probe.runner), probe.runner or "unknown")


def sleep_of(probe: EngineProbe) -> CheckResult:
    """Check the memory that sleeping gives back."""
    if probe.freed_share is None:
        return unchecked("the engine has no memory of a device")
    return checked(probe.freed_share >= MIN_FREED_SHARE, f"{probe.freed_share:.0%} freed")


def rate_of(probe: EngineProbe) -> CheckResult:
    """Check bytes of weights over the seconds that moved them, without hashes and fixed costs."""
    if probe.report is None or probe.empty_report is None:
        return unchecked("no weights were sent")
    num_bytes = probe.report.num_bytes - probe.empty_report.num_bytes
    whole, fixed = (x.seconds - x.verify_seconds for x in (probe.report, probe.empty_report))
    rate = num_bytes / max(1e-9, whole - fixed) / GIGABYTE
    text = f"{rate:.1f} GB/s, and {1e3 * fixed:.0f} ms whatever is sent"
    return checked(rate >= MIN_SYNC_GB_PER_SECOND, text)


def canary_of(probe: EngineProbe) -> CheckResult:
    """Check the canary prompt's largest difference."""
    difference = None if probe.report is None else probe.report.canary_difference
    if difference is None:
        return unchecked("no canary prompt was scored")
    return checked(difference <= 5.0, f"{difference:.2g}")


def parity_of(probe: EngineProbe) -> CheckResult:
    """Check the parity gate's number."""
    if probe.parity is None:
        return unchecked("nothing was sampled")
    return checked(probe.parity <= 0.05, f"{probe.parity:.2g}")
