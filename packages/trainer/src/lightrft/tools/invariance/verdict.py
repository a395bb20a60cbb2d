"""Verdict on compiling a model's blocks on this machine: whether it is right, and its seconds.

`lightrft doctor --compile_backend` keeps it for the device, the version of torch and the shape of
the model. A run of that shape prints it, and compiles only on request, because compiled blocks
round differently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.files import FileError, read_object, sealed, typed, unsealed
from lightrft.config.toml import write_whole
from lightrft.models import load_config
from lightrft.reporting.files import cache_folder
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.tools.plan.sizes import read_model_size

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

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        return (
            f"{self.compiled_seconds:.3g} s in place of {self.eager_seconds:.3g} s a step of "
            f"{self.tokens} tokens, the same results within rounding"
        )


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
        # A run would gain, and compute the same.
        faster = {
            name: each
            for name, each in verdicts.items()
            if not each.problem and each.eager_seconds >= MIN_GAIN * each.compiled_seconds > 0
        }
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
    with suppress(RuntimeError, OSError, ConfigError):
        folder = cache_folder("compile")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _name_of(path), sealed(values))


def _name_of(path: str) -> str:
    """Return a hash of the device, torch's version, and the kind and sizes of a model."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    kind = load_config(path).model_type
    parts = [device, torch.__version__, kind, repr(read_model_size(path))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
