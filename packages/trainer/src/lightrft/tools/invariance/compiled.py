"""Verdict on compiling a model's blocks on this machine: whether it is right, and its seconds.

`lightrft doctor --compile_backend` measures a step with and without the compiler. It keeps the
verdict for the device, the version of torch and the shape of the model. A run of that shape prints
it, and compiles only on request, because compiled blocks round differently.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import SGD

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.files import FileError, read_object, sealed, typed, unsealed
from lightrft.config.toml import write_whole
from lightrft.kernels.names import first_line
from lightrft.models import load_config
from lightrft.run.run_inputs import cache_folder
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.tools.invariance.cells import FP32_BOUNDS, Cell, bf16_bounds
from lightrft.tools.invariance.measure import (
    make_strategy,
    measure_cells,
    prepare,
    run_on_ranks,
    write_reference,
)
from lightrft.tools.plan.setup import read_model_size

# Tokens of the row whose step is timed, and number of steps for the median.
TIMED_TOKENS, ROUNDS = 2048, 5
# Smallest gain that is worth a line.
MIN_GAIN = 1.05


@dataclass(frozen=True, slots=True)
class CompileVerdict:
    """Result of a trial of one backend of torch.compile.

    Args:
        eager_seconds, compiled_seconds: Seconds of forward and backward pass over a row; 0 if not
            measured.
        tokens: Tokens of that row.
        problem: Results that are beyond rounding, or the compiler's error; "" if there are none.
    """

    eager_seconds: float = 0.0
    compiled_seconds: float = 0.0
    tokens: int = 0
    problem: str = ""

    @property
    def is_faster(self) -> bool:
        """Whether a run would gain, and compute the same."""
        return not self.problem and self.eager_seconds >= MIN_GAIN * self.compiled_seconds > 0

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        return (
            f"{self.compiled_seconds:.3g} s in place of {self.eager_seconds:.3g} s a step of "
            f"{self.tokens} tokens, the same results within rounding"
        )


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
    bounds = bf16_bounds(plainest) if eager.bf16 else FP32_BOUNDS
    try:
        (deviations,) = measured([(compiled, path, str(reference))])
        assert not isinstance(deviations, str)  # padded rows are refused by no model
        above = [f"{name} {deviations.value(name):.1e}" for name in deviations.above(bounds)]
        problem = f"differs by more than rounding: {', '.join(above)}" if above else ""
        tokens = min(TIMED_TOKENS, load_config(path).get_text_config().max_position_embeddings)
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


def say_verdict(config: TrainConfig, strategy: StrategyBase) -> TrainConfig:
    """Print what was measured of compilers on this machine, where it concerns a run.

    Args:
        config, strategy: Options, which stay as they are, and strategy of the run.
    """
    if not config.fsdp:
        return config
    verdicts = dict(known_verdicts(str(config.pretrain)))
    chosen = config.compile_backend
    if chosen is None:
        faster = {name: each for name, each in verdicts.items() if each.is_faster}
        for name in sorted(faster, key=lambda name: faster[name].compiled_seconds)[:1]:
            strategy.print(f"--compile_backend {name} was tried here: {faster[name]}")
    elif chosen in verdicts and verdicts[chosen].problem:
        strategy.print(f"warning: compile_backend {chosen} was tried here: {verdicts[chosen]}")
    return config


def known_verdicts(path: str) -> Iterator[tuple[str, CompileVerdict]]:
    """Yield each backend that was tried with models of this shape here, and its verdict."""
    with suppress(RuntimeError, OSError, FileError, ConfigError):
        folder = cache_folder("compile")
        if not folder.is_dir():  # nothing was tried here
            return
        name = _name_of(path)
        values = unsealed(read_object(folder / name), name)
        yield from typed(dict[str, CompileVerdict], values["backends"], name).items()


def keep_verdict(path: str, backend: str, verdict: CompileVerdict) -> None:
    """Keep a verdict beside those of other backends, where this user has a folder for it."""
    verdicts = {**dict(known_verdicts(path)), backend: verdict}
    values = {"backends": {name: asdict(each) for name, each in verdicts.items()}}
    with suppress(RuntimeError, OSError):
        folder = cache_folder("compile")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _name_of(path), sealed(values))


def _name_of(path: str) -> str:
    """Return a hash of the device, torch's version, and the kind and sizes of a model."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    kind = load_config(path).model_type
    parts = [device, torch.__version__, kind, repr(read_model_size(path))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
