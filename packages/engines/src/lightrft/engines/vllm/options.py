"""Engine options under vLLM's names: defaults, the user's, and reserved ones."""

import dataclasses
from collections.abc import Mapping

from lightrft.engines.backend_options import check_options, parse_options
from lightrft.engines.types import EngineConfig, MediaBounds
from lightrft.engines.vllm.adapters import adapter_arguments

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
    "enable_batch_sharded_sampling": "nowhere: it samples past the logits that are checked",
}

# Timeout of collectives between the ranks of an engine, over the host; gloo's default is half an
# hour. Ranks enter together, give or take the time for reading a large model.
GROUP_SECONDS = 600


# Most logprobs to ask vLLM for at each token, to see which tokens truncation kept. Each costs an
# entry in three lists. Larger kept sets are not recorded.
MAX_LOGPROBS = 128


# Options with which vLLM needs more from a checkpoint than the trainer writes.
_READ_MORE = ("hf_overrides", "model_loader_extra_config", "quantization", "speculative_config")


def load_format(config: EngineConfig, *, reads_media: bool) -> str:
    """Return "auto" if vLLM reads its weights, "dummy" if it waits for the trainer's.

    If a trainer writes all weights, the ranks need not read the checkpoint. Models that read media
    need "auto": "dummy" also overwrites the normalisation of pixels, which vLLM computes from the
    processor and stores beside the weights.
    """
    if not config.model_path:
        return "dummy"
    if config.adapters is not None:  # no update writes the base
        return "auto"
    if "load_format" in config.options:
        return str(config.options["load_format"])
    reads_more = any(name in config.options for name in _READ_MORE)
    return "dummy" if config.awaits_weights and not (reads_more or reads_media) else "auto"


def engine_arguments(
    config: EngineConfig,
    *,
    model_path: str,
    max_model_len: int,
    has_tokenizer: bool,
    is_on_cpu: bool,
    executor: str,
    reads_media: bool = False,
) -> dict[str, object]:
    """Return the keyword arguments of `vllm.LLM`.

    Args:
        config: Size, seed and the user's options, which win over defaults.
        model_path: Directory that vLLM reads.
        max_model_len: Longest sequence, with room for the token that scoring must sample.
        has_tokenizer: Whether the directory has a tokenizer.
        is_on_cpu: Whether vLLM runs on the CPU.
        executor: vLLM's executor backend.
        reads_media: Whether the model reads media; vLLM then reserves memory for those of prompts.

    Raises:
        ValueError: An option is unknown, reserved or malformed.
    """
    from vllm.engine.arg_utils import EngineArgs

    hints = {field.name: field.type for field in dataclasses.fields(EngineArgs)}
    check_options(config.options, hints, reserved=RESERVED, engine_name="vllm")
    arguments: dict[str, object] = {
        "model": model_path,
        "load_format": load_format(config, reads_media=reads_media),
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
        "max_logprobs": MAX_LOGPROBS,
        "enforce_eager": is_on_cpu,
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if "cpu_distributed_timeout_seconds" in hints:  # not in older versions
        arguments["cpu_distributed_timeout_seconds"] = GROUP_SECONDS
    if reads_media:
        arguments |= media_arguments(config.media)
    arguments |= adapter_arguments(config)
    return {**arguments, **parse_options(config.options, hints)}


def media_arguments(bounds: MediaBounds) -> dict[str, object]:
    """Return vLLM's arguments for a run's bounds; sizes are for images only, as in the trainer."""
    bounds_by_name = {"max_pixels": bounds.max_pixels, "min_pixels": bounds.min_pixels}
    sizes = {name: value for name, value in bounds_by_name.items() if value is not None}
    arguments: dict[str, object] = (
        {"mm_processor_kwargs": {"images_kwargs": sizes}} if sizes else {}
    )
    if bounds.per_prompt:
        arguments["limit_mm_per_prompt"] = dict(bounds.per_prompt)
    return arguments
