"""Trial of compiling a model's blocks: a step with and without the compiler."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import SGD

from lightrft.config import ConfigError
from lightrft.config.files import read_object, typed
from lightrft.engines.text import context_tokens
from lightrft.kernels.names import first_line
from lightrft.models import load_config
from lightrft.tools.invariance.cells import FP32_BOUNDS, Cell, rounding_bounds
from lightrft.tools.invariance.measure import (
    make_strategy,
    measure_cells,
    prepare,
    run_on_ranks,
    write_reference,
)
from lightrft.tools.invariance.verdict import CompileVerdict, keep_verdict

# Tokens of the row whose step is timed, and number of steps for the median.
TIMED_TOKENS, ROUNDS = 2048, 5


def try_compiling(path: str, backend: str, *, timeout_seconds: float) -> CompileVerdict:
    """Run a step of a model with and without a compiler, in a separate process.

    Args:
        path: Checkpoint of a causal language model.
        backend: Backend of torch.compile.
        timeout_seconds: Deadline of both.

    Returns:
        The verdict, which is kept for runs on this machine.
    """
    eager = Cell(backend="fsdp", bf16=torch.cuda.is_available())
    cells = [eager, replace(eager, compiler=backend)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "verdict.json")
        run_on_ranks(try_cells, 1, timeout_seconds, (cells, path, file))
        verdict = typed(CompileVerdict, read_object(file), file)
    keep_verdict(path, backend, verdict)
    return verdict


def try_cells(rank: int, world_size: int, cells: list[Cell], path: str, file: Path) -> None:
    """Write the verdict on the second cell, judged by the first one, to a file."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    reference = file.with_name("reference.safetensors")
    write_reference(path, "actor", reference)
    eager, compiled = cells
    measured = partial(measure_cells, rank, world_size)
    (plainest,) = measured([(eager, path, str(reference))])
    if isinstance(plainest, str):
        raise ConfigError(f"{path} cannot be tried: {plainest}")
    bounds = rounding_bounds(plainest) if eager.bf16 else FP32_BOUNDS
    try:
        (deviations,) = measured([(compiled, path, str(reference))])
        assert not isinstance(deviations, str)  # padded rows are refused by no model
        above = [f"{name} {deviations.value(name):.1e}" for name in deviations.above(bounds)]
        problem = f"differs by more than rounding: {', '.join(above)}" if above else ""
        tokens = min(TIMED_TOKENS, context_tokens(load_config(path)) or TIMED_TOKENS)
        before, after = (seconds_of_step(cell, path, tokens) for cell in cells)
        verdict = CompileVerdict(before, after, tokens, problem)
    except Exception as error:  # noqa: BLE001 - a compiler fails in many ways
        verdict = CompileVerdict(problem=f"{type(error).__name__}: {first_line(error)}")
    file.write_text(json.dumps(asdict(verdict)))


def seconds_of_step(cell: Cell, path: str, tokens: int) -> float:
    """Return median seconds of forward and backward pass over one row, once all is compiled."""
    training = make_strategy(cell).training
    ready = prepare(training, cell, path, lambda model: SGD(model.parameters(), lr=0.0))
    model, optimizer, device = ready.model, ready.optimizer, training.context.device
    assert model is not None
    assert optimizer is not None
    token_ids = torch.arange(tokens, device=device)[None] % 97 + 3
    mask = torch.ones_like(token_ids, dtype=torch.bool)

    def step() -> float:
        begin = _now(device)
        loss: Tensor = -model(token_ids, mask).logprobs.mean()
        training.backward(loss, model, optimizer)
        return _now(device) - begin

    for _ in range(2):
        step()
    return statistics.median(step() for _ in range(ROUNDS))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
