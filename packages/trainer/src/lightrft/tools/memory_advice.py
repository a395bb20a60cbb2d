"""Advice after running out of memory: the phase, and the cheapest remedies."""

import os
import sys

from lightrft.cli.errors import chain, is_memory_error
from lightrft.config import BackendOptions, EngineOptions, MachineOptions, TrainConfig
from lightrft.engines.factory import engine_facts
from lightrft.kernels.names import first_line
from lightrft.reporting.metric_table import PEAK_NOTE

NUM_REMEDIES = 3
# Phases and stages by name, with the kind whose remedies apply.
_KINDS = {
    "train": "train",
    "forward": "forward",
    "rollout": "generate",
    "generate": "generate",
    "wake up the inference engine": "engine",
    "start the inference engine": "engine",
    "weight_sync": "sync",
    "update the engine's weights": "sync",
    "load the models": "models",
    "shard a model": "models",
    "prepare a model for training": "models",
    "load a checkpoint": "models",
    "save a checkpoint": "models",
    "save a model": "models",
}


def memory_report(error: BaseException, phase: str | None, config: TrainConfig | None) -> str:
    """Return the memory that ran out and its phase; with a configuration, the cheapest remedies.

    Args:
        error: Exception to report.
        phase: Phase in which it was raised; None if that is not known.
        config: Options of the run.
    """
    where = "in an unknown phase" if phase is None else f"in phase {phase!r}"
    first = next((link for link in chain(error) if is_memory_error(link)), error)
    headline = f"out of memory {where}: {first_line(first)}{_peak(error)}"
    if config is None:
        return headline
    listed = remedies(_KINDS.get(phase or "", "train"), config)[:NUM_REMEDIES]
    lines = [f"  {number}. {text}" for number, text in enumerate(listed, start=1)]
    return "\n".join([headline, "cheapest remedies, the first one first:", *lines])


def _peak(error: BaseException) -> str:
    """Return the note of `run.assembly` about planned and measured memory, or ""."""
    notes = (note for link in chain(error) for note in link.__dict__.get("__notes__", ()))
    peak = next((note for note in notes if note.startswith(PEAK_NOTE)), "")
    return f"; {peak.removeprefix(PEAK_NOTE)}" if peak else ""


def remedies(kind: str, config: TrainConfig) -> list[str]:
    """Return settings that lower the memory of a phase and are not in use, the cheapest first."""
    shorter = _halved(config, "generate_max_len", "shorter responses")
    no_reference = "--init_kl_coef 0: no reference model" if config.init_kl_coef > 0 else ""
    always = (*_states(config), "more processes or a machine with more memory")
    available = {
        "train": (
            _halved(config, "micro_batch_tokens", "same result, activations of fewer tokens")
            or _halved(
                config, "micro_train_batch_size", "same result, activations of fewer samples"
            ),
            *_activations(config),
            *_states(config),
            shorter,
        ),
        "forward": (
            _halved(config, "micro_batch_tokens", "same result, fewer tokens at once")
            or _halved(config, "micro_rollout_batch_size", "same result, fewer rows at once"),
            *_activations(config),
            no_reference,
            shorter,
        ),
        "generate": (
            *_engine(config),
            _halved(config, "rollout_batch_size", "fewer prompts at once"),
            _halved(config, "n_samples_per_prompt", "fewer samples at once"),
            shorter,
        ),
        "engine": (*_engine(config), shorter),
        "sync": (
            _halved(config, "weight_bucket_mb", "same result, smaller messages"),
            *_engine(config),
        ),
        "models": (no_reference,),
    }[kind]
    return [text for text in dict.fromkeys((*available, *always)) if text]


def _halved(config: TrainConfig, name: str, effect: str) -> str:
    value: int = config.__dict__[name] or 0
    return f"--{name} {value // 2} (now {value}): {effect}" if value > 1 else ""


def _activations(config: MachineOptions) -> list[str]:
    return [
        ""
        if config.gradient_checkpointing
        else "--gradient_checkpointing: same result, activations are computed again",
        ""
        if config.fuses_logprob(has_gpu=_has_gpu())
        else "--fused_linear_logprob: same result, the logits never exist as a whole",
    ]


def _has_gpu() -> bool:
    # Without an import, torch did not run out of memory.
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


def _states(config: BackendOptions) -> list[str]:
    if config.fsdp:
        return [
            ""
            if config.adam_8bit or config.use_mp_opt or os.environ.get("WORLD_SIZE", "1") != "1"
            else "--adam_8bit: Adam's states take 2 bytes a number in place of 8",
            ""
            if config.adam_offload or config.fsdp_cpu_offload
            else "--adam_offload: Adam's states wait on the CPU",
            "" if config.fsdp_cpu_offload else "--fsdp_cpu_offload: parameters stay on the CPU",
        ]
    return [
        ""
        if config.zero_stage == 3
        else f"--zero_stage 3 (now {config.zero_stage}): parameters are divided among processes",
        "" if config.adam_offload else "--adam_offload: Adam's states stay on the CPU",
    ]


def _engine(config: EngineOptions) -> list[str]:
    if not engine_facts(config.engine_type).has_own_memory:
        return []
    share, idle = config.engine_mem_util, "--enable_engine_sleep: the engine's memory is free"
    return [
        f"--engine_mem_util {share / 2:g} (now {share:g}): a smaller cache of the engine",
        "" if config.enable_engine_sleep else f"{idle} while training",
    ]
