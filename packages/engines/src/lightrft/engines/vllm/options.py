"""Engine options under vLLM's own names: defaults, the user's, and reserved ones."""

import dataclasses
from collections.abc import Mapping

from lightrft.engines.backend_options import check_options, parse_options
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
    "logprobs_mode": "the trainer, which needs the distribution that tokens are drawn from",
    "generation_config": "the sampling parameters of each call",
    "override_generation_config": "the sampling parameters of each call",
}

# Of collectives between the ranks of an engine, over the host: gloo's own is half an hour. Ranks
# enter together and differ by the time that reading a large model takes.
GROUP_SECONDS = 600


def engine_arguments(
    config: EngineConfig,
    *,
    model_path: str,
    max_model_len: int,
    load_format: str,
    has_tokenizer: bool,
    is_on_cpu: bool,
    executor: str,
) -> dict[str, object]:
    """Keyword arguments of `vllm.LLM`.

    Args:
        config: Size, seed and the user's options, which win over defaults.
        model_path: Directory that vLLM reads.
        max_model_len: Longest sequence, with room for the token that scoring must sample.
        load_format: "dummy" if the directory has no weights, else "auto".
        has_tokenizer: Whether the directory has a tokenizer.
        is_on_cpu: Whether vLLM runs on the CPU.
        executor: vLLM's executor backend.

    Raises:
        ValueError: An option is unknown, reserved or malformed.
    """
    from vllm.engine.arg_utils import EngineArgs

    hints = {field.name: field.type for field in dataclasses.fields(EngineArgs)}
    check_options(config.options, hints, reserved=RESERVED, engine_name="vllm")
    arguments: dict[str, object] = {
        "model": model_path,
        "load_format": load_format,
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
    if "cpu_distributed_timeout_seconds" in hints:  # not in older versions
        arguments["cpu_distributed_timeout_seconds"] = GROUP_SECONDS
    return {**arguments, **parse_options(config.options, hints)}
