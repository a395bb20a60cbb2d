"""Engine options under SGLang's names: defaults, the user's, and reserved ones."""

from collections.abc import Mapping

from lightrft.engines.backend_options import check_options, parse_options
from lightrft.engines.types import EngineConfig

# SGLang's name -> where it is set instead.
RESERVED: Mapping[str, str] = {
    "model_path": "the checkpoint of the trained model",
    "tokenizer_path": "the checkpoint of the trained model",
    "skip_tokenizer_init": "the engine, which works on token ids",
    "dtype": "the strategy's bf16",
    "tp_size": "engine_tp_size",
    "dp_size": "the number of processes",
    "pp_size": "the launcher: a model is not split by layers",
    "nnodes": "the launcher",
    "node_rank": "the launcher",
    "device": "the machine",
    "base_gpu_id": "the launcher",
    "port": "the engine, which takes a free one",
    "nccl_port": "the engine, which takes a free one",
    "mem_fraction_static": "engine_mem_util",
    "context_length": "max_len",
    "random_seed": "seed",
    "enable_memory_saver": "enable_engine_sleep",
    "enable_weights_cpu_backup": "enable_engine_sleep",
    "sampling_defaults": "the sampling parameters of each call",
}


_ON_CPU = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    # The default is a share of all memory for each rank of a machine.
    "max_total_tokens": 16384,
}


def engine_arguments(
    config: EngineConfig,
    *,
    model_path: str,
    context_length: int,
    load_format: str,
    vocab_size: int,
    ports: tuple[int, int],
    device_index: int | None,
) -> dict[str, object]:
    """Return the keyword arguments of `sglang.Engine`.

    Args:
        config: Size, seed and the user's options, which win over defaults.
        model_path: Directory that SGLang reads.
        context_length: Longest sequence, with room for the token that scoring must sample.
        load_format: Format "dummy" if the directory has no weights, else "auto".
        vocab_size: Vocabulary size of the model.
        ports: Two free TCP ports of this machine.
        device_index: GPU of this process; None runs on the CPU.

    Raises:
        ValueError: An option is unknown, reserved or malformed.
    """
    from sglang.srt.server_args import ServerArgs

    hints = {name: ServerArgs.__annotations__.get(name, str) for name in _field_names(ServerArgs)}
    check_options(config.options, hints, reserved=RESERVED, engine_name="sglang")
    is_on_cpu = device_index is None
    can_sleep = config.enable_sleep and not is_on_cpu
    arguments: dict[str, object] = {
        "model_path": model_path,
        "load_format": load_format,
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "tp_size": 1,
        "mem_fraction_static": config.memory_utilization,
        "context_length": context_length,
        "random_seed": config.seed,
        "port": ports[0],
        "nccl_port": ports[1],
        "device": "cpu" if is_on_cpu else "cuda",
        "base_gpu_id": device_index or 0,
        # Completions must depend on seed and request only; `run_scheduler` enables it on a CPU.
        "enable_deterministic_inference": True,
        "sampling_backend": "pytorch",
        "sampling_defaults": "openai",
        "grammar_backend": "none",
        # Any number of tokens may be kept by top_p and min_p.
        "sampling_mask_max_tokens": vocab_size,
        "enable_memory_saver": can_sleep,
        "enable_weights_cpu_backup": can_sleep,
        "log_level": "error",
    }
    if is_on_cpu:
        arguments |= _ON_CPU
    return {**arguments, **parse_options(config.options, hints)}


def _field_names(arguments: type) -> tuple[str, ...]:
    names: tuple[str, ...] = arguments.__struct_fields__  # type: ignore[attr-defined]
    return tuple(name for name in names if not name.startswith("_"))
