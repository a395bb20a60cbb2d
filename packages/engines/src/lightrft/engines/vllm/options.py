"""Engine options under vLLM's own names: defaults, the user's, and those that are not theirs."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lightrft.engines.types import EngineConfig

# vLLM's name -> where it is set instead.
RESERVED: Mapping[str, str] = {
    "model": "the checkpoint of the trained model",
    "tokenizer": "the checkpoint of the trained model",
    "runner": "the engine, which generates",
    "skip_tokenizer_init": "whether the checkpoint has a tokenizer",
    "dtype": "the strategy's bf16",
    "tensor_parallel_size": "engine_tp_size",
    "pipeline_parallel_size": "the launcher: only tensor parallelism is supported",
    "data_parallel_size": "the number of processes",
    "gpu_memory_utilization": "engine_mem_util",
    "max_model_len": "max_len",
    "seed": "seed",
    "enable_sleep_mode": "enable_engine_sleep",
    "distributed_executor_backend": "the launcher",
    "logprobs_mode": "the trainer, which needs the law that tokens are drawn from",
    "generation_config": "the sampling parameters of each call",
    "override_generation_config": "the sampling parameters of each call",
}


_PLAIN_TYPES: Mapping[str, type] = {
    "bool": bool,
    "int": int,
    "float": float,
    "None": type(None),
    "NoneType": type(None),
}


def check_options(options: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuses names that vLLM does not know or that are set elsewhere.

    Raises:
        ValueError: It lists every such option, with the nearest known name.
    """
    names = sorted(known)
    problems = []
    for name in options:
        if name in RESERVED:
            problems.append(f"{name} (set by {RESERVED[name]})")
        elif name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else "no vLLM option has a similar name"
            problems.append(f"{name} ({hint})")
    if problems:
        raise ValueError(f"unusable options of the vllm engine: {', '.join(problems)}")


def parse_options(
    options: Mapping[str, str | int | float | bool], hints: Mapping[str, object]
) -> dict[str, object]:
    """Values of the types that vLLM declares; strings come from a command line.

    Args:
        options: Names that `check_options` has passed.
        hints: vLLM's name -> declared type.

    Raises:
        ValueError: A string does not spell a value of the declared type.
    """
    return {
        name: _parse(name, value, hints[name]) if isinstance(value, str) else value
        for name, value in options.items()
    }


def _parse(name: str, text: str, hint: object) -> object:
    kinds = _kinds(hint)
    if text.lower() in ("none", "null") and type(None) in kinds:
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    if text[:1] in ("{", "["):
        try:
            value: object = json.loads(text)
        except json.JSONDecodeError as err:
            raise ValueError(f"vLLM option {name}: {text!r} is not valid JSON ({err})") from err
        return value
    if kinds <= {bool, int, float, type(None)}:
        expected = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"vLLM option {name}: got {text!r}, expected a value of type {expected}")
    return text


def _kinds(hint: object) -> set[type]:
    """The plain types that a declaration names; `str` stands for everything else.

    Declarations are read as text: vLLM leaves some as strings that cannot be evaluated.
    """
    words = set(re.findall(r"\w+", str(hint))) - {"class", "typing", "Optional", "Union"}
    return {_PLAIN_TYPES.get(word, str) for word in words}


def engine_arguments(
    config: EngineConfig, *, model_path: str, max_model_len: int, load_format: str | None,
    has_tokenizer: bool, is_on_cpu: bool, executor: str,
) -> dict[str, object]:  # fmt: skip
    """Keyword arguments of `vllm.LLM`.

    Args:
        config: Size, seed and the user's options, which win over defaults.
        model_path: Directory that vLLM reads.
        max_model_len: Longest sequence, with room for the token that scoring must sample.
        load_format: "dummy" if the directory has no weights, else None.
        has_tokenizer: Whether the directory has a tokenizer.
        is_on_cpu: Whether vLLM runs on the CPU.
        executor: vLLM's executor backend.

    Raises:
        ValueError: An option is unknown, reserved or malformed.
    """
    from vllm.engine.arg_utils import EngineArgs

    hints = {field.name: field.type for field in dataclasses.fields(EngineArgs)}
    check_options(config.options, hints)
    arguments: dict[str, object] = {
        "model": model_path,
        "runner": "generate",
        "skip_tokenizer_init": not has_tokenizer,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel_size,
        "gpu_memory_utilization": config.memory_utilization,
        "max_model_len": max_model_len,
        "seed": config.seed,
        "enable_sleep_mode": config.enable_sleep and not is_on_cpu,
        "distributed_executor_backend": executor,
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": is_on_cpu,
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if load_format is not None:
        arguments["load_format"] = load_format
    return {**arguments, **parse_options(config.options, hints)}
