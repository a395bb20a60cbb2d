"""linear_logprob against its floor, the plain products of the same shape, and against peers.

    pytest benchmarks/test_bench_linear_logprob.py -s [--complete]

prints one line for each provider; ratios, not milliseconds, are what to compare between runs.
"""

from __future__ import annotations

import functools

import harness
import logprob_peers
import pytest
import torch

from lightrft.kernels import Workspace, linear_logprob, linear_policy_loss

CPU_SHAPES = {
    "small head": (128, 256, 8192),
    "135M head": (128, 576, 49152),
    "0.5B head": (64, 896, 151936),
}
# A micro-batch of training: with fewer tokens dL/dweight, which every way needs, hides the logits.
CPU_MEMORY_SHAPES = {"small head": (1024, 256, 32768), "135M head": (1024, 576, 49152)}
GPU_SHAPES = {
    "0.5B": (8192, 896, 151936),
    "7B": (8192, 3584, 152064),
    "Llama-3-8B": (16384, 4096, 128256),
    "72B": (4096, 8192, 152064),
}
SHAPES = GPU_SHAPES if torch.cuda.is_available() else CPU_SHAPES


def cells(values):
    """Parameters that a CPU measures always, and those that it measures with --complete."""
    quick = ("small head", torch.float32)
    return [v if v in quick else pytest.param(v, marks=pytest.mark.complete) for v in values]


MODES = ["forward", "both", "both, half of the rows"]
CHUNK_COLUMNS = 4096
BUDGET_SECONDS = 2.0


def make_inputs(shape, device, dtype):
    num_tokens, size, vocab = shape
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device}
    hidden = torch.randn(num_tokens, size, **options).to(dtype)
    weight = (torch.randn(vocab, size, **options) * (3 / size**0.5)).to(dtype)
    targets = torch.randint(0, vocab, (num_tokens,), **options)
    upstream = torch.randn(num_tokens, **options)
    return hidden, weight, targets, upstream


def step(function, inputs, mode):
    """One forward pass, or forward and backward with a random signed gradient per token."""
    hidden, weight, targets, upstream = inputs
    if mode == "forward":
        with torch.no_grad():
            return function(hidden, weight, targets)
    leaves = (hidden.detach().requires_grad_(), weight.detach().requires_grad_())
    gradient = upstream.clone()
    if mode != "both":
        gradient[: len(gradient) // 2] = 0
    output = function(*leaves, targets)
    return torch.autograd.grad(output, leaves, gradient.to(output.dtype))


def floor(inputs, mode):
    """The products alone, in float32 on the CPU: chunks of the vocabulary, no epilogue."""
    hidden, weight, _, _ = inputs
    wide = hidden if hidden.is_cuda else hidden.float()
    rows = wide if mode != "both, half of the rows" else wide[len(wide) // 2 :]
    grad_hidden = torch.zeros(len(rows), wide.shape[1], dtype=wide.dtype, device=wide.device)
    grad_weight = torch.empty(weight.shape, dtype=wide.dtype, device=wide.device)
    for start in range(0, len(weight), CHUNK_COLUMNS):
        chunk = weight[start : start + CHUNK_COLUMNS].to(wide.dtype)
        wide @ chunk.T
        if mode != "forward":
            logits = rows @ chunk.T
            grad_hidden.addmm_(logits, chunk)
            grad_weight[start : start + CHUNK_COLUMNS] = logits.T @ rows


def ours(impl, hidden, weight, targets):
    workspace = Workspace(CHUNK_COLUMNS) if impl == "chunked" else None
    return linear_logprob(hidden, weight, targets, impl=impl, workspace=workspace).logprobs


def our_providers(device):
    if device.type != "cuda":
        return {"ours chunked": functools.partial(ours, "chunked")}
    return {
        "ours fused": functools.partial(ours, "triton"),
        "ours products": functools.partial(ours, "cublas"),
    }


def largest_error(function, inputs, num_rows=64):
    """Largest and mean error of logprobs against float64 of the same inputs, on some rows."""
    hidden, weight, targets, _ = inputs
    rows = slice(0, num_rows)
    with torch.no_grad():
        value = function(hidden[rows], weight, targets[rows]).double()
        logits = hidden[rows].double() @ weight.double().T
    exact = torch.log_softmax(logits, 1).gather(1, targets[rows, None]).squeeze(1)
    error = (value - exact).abs()
    return float(error.max()), float(error.mean())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", cells(SHAPES))
@pytest.mark.parametrize("dtype", cells([torch.float32, torch.bfloat16]))
def test_linear_logprob(benchmark, device, shape, mode, dtype):
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("measured on the CPU")
    if shape == "0.5B head" and (mode != "forward" or dtype == torch.float32):
        pytest.skip("too slow on a CPU")
    inputs = make_inputs(SHAPES[shape], device, dtype)
    functions = {**our_providers(device), "naive": logprob_peers.naive}
    found, absent = logprob_peers.load(device)
    functions.update(found)
    runs = {name: functools.partial(step, f, inputs, mode) for name, f in functions.items()}
    for name in list(runs):
        try:
            runs[name]()
        except (RuntimeError, TypeError, ValueError) as error:
            absent[name] = f"failed: {type(error).__name__}: {str(error)[:80]}"
            del runs[name]
    timings = harness.interleave(
        {"floor": functools.partial(floor, inputs, mode), **runs}, device, BUDGET_SECONDS
    )
    num_tokens, size, vocab = SHAPES[shape]
    products = 1 if mode == "forward" else 4 if mode == "both" else 2.5
    work = 2 * num_tokens * size * vocab * products
    best = timings["floor"].median
    print(f"\n{harness.device_name(device)}, {shape} {SHAPES[shape]}, {dtype}, {mode}")
    table = {}
    for name, timing in timings.items():
        row = {
            "seconds": timing.median,
            "p10_p90": timing.spread,
            "ratio_floor": timing.median / best,
        }
        if name in runs:
            row["peak_mib"] = harness.peak_bytes(runs[name], device) / 2**20
            row["max_error"], row["mean_error"] = largest_error(functions[name], inputs)
        table[name] = row
        line = f"  {name:<18} {timing.median * 1e3:9.2f} ms"
        line += f"  {work / timing.median / 1e12:7.3f} TFLOP/s  x{row['ratio_floor']:.2f} of floor"
        if name in runs:
            line += f"  peak {row['peak_mib']:7.0f} MiB  error {row['max_error']:.1e}"
        print(line)
    if absent:
        print("  " + ", ".join(f"{name}: {reason}" for name, reason in absent.items()))
    benchmark.extra_info.update(
        shape=list(SHAPES[shape]), mode=mode, dtype=str(dtype), providers=table, absent=absent
    )
    first = next(iter(our_providers(device)))
    benchmark.pedantic(runs[first], rounds=1, iterations=1)
    assert table[first]["max_error"] < 5e-5


@pytest.mark.parametrize("shape", cells(CPU_MEMORY_SHAPES))
def test_peak_memory_of_a_micro_batch(benchmark, device, shape):
    """Forward and backward of 1024 tokens: peak memory, gradients included and without them."""
    if device.type == "cuda":
        pytest.skip("on a GPU every test above measures it")
    inputs = make_inputs(CPU_MEMORY_SHAPES[shape], device, torch.float32)
    gradients_mib = sum(t.numel() * t.element_size() for t in inputs[:2]) / 2**20
    functions = {"ours chunked": functools.partial(ours, "chunked"), "naive": logprob_peers.naive}
    found, absent = logprob_peers.load(device)
    table = {}
    for name, function in {**functions, **found}.items():
        peak = harness.peak_bytes(functools.partial(step, function, inputs, "both"), device)
        table[name] = {"peak_mib": peak / 2**20, "above_gradients": peak / 2**20 - gradients_mib}
    print(f"\nCPU, memory of {CPU_MEMORY_SHAPES[shape]}, float32, forward and backward")
    naive = table["naive"]["peak_mib"]
    for name, row in table.items():
        ratio = row["peak_mib"] / naive
        print(f"  {name:<18} peak {row['peak_mib']:7.0f} MiB  x{ratio:.2f} of naive", end="")
        print(f"  above the gradients {row['above_gradients']:7.0f} MiB")
    benchmark.extra_info.update(
        shape=list(CPU_MEMORY_SHAPES[shape]), providers=table, absent=absent
    )
    ours_once = functools.partial(step, functions["ours chunked"], inputs, "both")
    benchmark.pedantic(ours_once, rounds=1, iterations=1)
    assert table["ours chunked"]["peak_mib"] < naive / 3


@pytest.mark.parametrize("shape", cells(shape for shape in SHAPES if shape != "0.5B head"))
def test_policy_loss(benchmark, device, shape):
    """Loss inside the output layer (3 products) against the loss after linear_logprob (4)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = make_inputs(SHAPES[shape], device, dtype)
    hidden, weight, targets, advantages = inputs
    with torch.no_grad():
        old = linear_logprob(hidden, weight, targets).logprobs

    def loss_of(logprobs, rows):
        ratio = torch.exp(logprobs - old[rows])
        gain = torch.minimum(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows])
        return -gain.sum() / len(old)

    def token_loss(logprobs, entropy, rows):
        leaf = logprobs.detach().requires_grad_()
        loss = loss_of(leaf, rows)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0], None

    def after():
        leaves = (hidden.detach().requires_grad_(), weight.detach().requires_grad_())
        logprobs = linear_logprob(*leaves, targets).logprobs
        return torch.autograd.grad(loss_of(logprobs, slice(None)), leaves)

    def inside():
        leaves = (hidden.detach().requires_grad_(), weight.detach().requires_grad_())
        return torch.autograd.grad(linear_policy_loss(*leaves, targets, token_loss).loss, leaves)

    def mean_loss(function):
        leaves = (hidden.detach().requires_grad_(), weight.detach().requires_grad_())
        return torch.autograd.grad(function(*leaves, targets), leaves)

    runs = {"loss inside": inside, "loss after": after}
    # They do less: one mean, no number for a token. They bound what three products can cost.
    found, absent = logprob_peers.load(device, "mean loss")
    for name, function in found.items():
        try:
            mean_loss(function)
        except (RuntimeError, TypeError, ValueError) as error:
            absent[name] = f"failed: {type(error).__name__}: {str(error)[:80]}"
        else:
            runs[name] = functools.partial(mean_loss, function)
    timings = harness.interleave(runs, device, BUDGET_SECONDS)
    table = {
        name: {
            "seconds": t.median,
            "p10_p90": t.spread,
            "peak_mib": harness.peak_bytes(runs[name], device) / 2**20,
        }
        for name, t in timings.items()
    }
    ratio = timings["loss inside"].median / timings["loss after"].median
    print(
        f"\n{harness.device_name(device)}, {shape} {SHAPES[shape]}, {dtype}, policy loss, gradients"
    )
    for name, row in table.items():
        print(f"  {name:<16} {row['seconds'] * 1e3:9.2f} ms  peak {row['peak_mib']:7.0f} MiB")
    print(f"  inside / after = {ratio:.2f}")
    if absent:
        print("  " + ", ".join(f"{name}: {reason}" for name, reason in absent.items()))
    benchmark.extra_info.update(
        shape=list(SHAPES[shape]), providers=table, ratio_inside_after=ratio, absent=absent
    )
    benchmark.pedantic(inside, rounds=1, iterations=1)
    for value, reference in zip(inside(), after(), strict=True):
        assert (value - reference).norm() < 5e-3 * reference.norm()
