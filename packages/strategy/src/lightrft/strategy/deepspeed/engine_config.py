"""DeepSpeed's configuration, derived from ours."""

from lightrft.config import BackendOptions, DistributedOptions, TrainingOptions

# Never: DeepSpeed's progress lines would repeat the trainer's.
STEPS_PER_PRINT = 2**62
# Elements of the buffer in which gradients are reduced. DeepSpeed's default of 5e8 would take
# 2 GB of every device for every model in training, whatever its size.
MAX_BUCKET_ELEMENTS = 50_000_000
FP32_BYTES = 4
BF16_BYTES = 2


def check_stage(config: DistributedOptions, *, uses_bf16: bool) -> None:
    """Refuse settings that DeepSpeed gets wrong or does not support.

    Raises:
        ValueError: Stage 0 with bfloat16, or an offload without partitions.
    """
    if config.zero_stage == 0 and uses_bf16:
        raise ValueError(
            "zero_stage 0 cannot train in bfloat16 (DeepSpeed counts an extra Adam step): use "
            "zero_stage 1, or bf16=False"
        )
    if config.zero_stage == 0 and config.adam_offload:
        raise ValueError("adam_offload needs zero_stage 1, 2 or 3: got zero_stage 0")


def check_whole_model(
    config: DistributedOptions, num_elements: int, device_bytes: int, *, uses_bf16: bool
) -> None:
    """Refuse a model that DeepSpeed would place whole on one device before dividing it.

    `DeepSpeedEngine._configure_distributed_model` casts the module to the dtype it computes in,
    then moves it to the device, and only then does stage 3 divide it (DeepSpeed 0.19.8).

    Args:
        config: Options of the strategy.
        num_elements: Number of elements of all parameters of the model.
        device_bytes: Memory of one device.
        uses_bf16: Whether it computes in bfloat16.

    Raises:
        ValueError: They do not fit.
    """
    needed = num_elements * (BF16_BYTES if uses_bf16 else FP32_BYTES)
    if needed > device_bytes:
        divides = " and divides it only then" if config.zero_stage == 3 else ""
        dtype = "bfloat16" if uses_bf16 else "float32"
        raise ValueError(
            f"DeepSpeed places a whole model on one device{divides}: {num_elements:,} parameters "
            f"take {needed / 1e9:.1f} GB in {dtype}, the device has {device_bytes / 1e9:.1f} GB; "
            "use --fsdp --meta_init, by which no rank ever holds a whole model"
        )


def training_config(
    options: BackendOptions,
    *,
    uses_bf16: bool,
    has_gpu: bool,
    num_trained: int = MAX_BUCKET_ELEMENTS,
) -> dict[str, object]:
    """Return the dictionary for `deepspeed.initialize` with an optimizer of torch.

    The strategy drives accumulation, so DeepSpeed sees one micro-batch per step.

    Args:
        options: Options of the strategy.
        uses_bf16: Whether weights and compute are bfloat16.
        has_gpu: Whether offloaded states are pinned.
        num_trained: Trained elements of this model; no buffer of gradients is larger.
    """
    zero: dict[str, object] = {
        "stage": options.zero_stage,
        "overlap_comm": options.overlap_comm,
        "contiguous_gradients": True,
        "reduce_bucket_size": min(num_trained, MAX_BUCKET_ELEMENTS),
        # DeepSpeed would replace torch.nn.functional.linear for the whole process.
        "memory_efficient_linear": False,
    }
    if options.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": has_gpu}
    if options.zero_stage == 3 and options.zpg > 1:
        zero["zero_hpz_partition_size"] = options.zpg
    config = _base_config(options, uses_bf16=uses_bf16)
    config["zero_optimization"] = zero
    # Without ZeRO the strategy clips, because DeepSpeed would not report the norm.
    config["gradient_clipping"] = options.max_norm if options.zero_stage > 0 else 0.0
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    # Left alone, DeepSpeed adds gradients in the dtype of the weights.
    config["data_types"] = {"grad_accum_dtype": options.grad_accum_dtype or "fp32"}
    return config


def inference_config(options: TrainingOptions, *, uses_bf16: bool) -> dict[str, object]:
    """Return the dictionary for a model that is only evaluated, sharded as in stage 3."""
    config = _base_config(options, uses_bf16=uses_bf16)
    config["zero_optimization"] = {
        "stage": 3,
        "memory_efficient_linear": False,
        # Otherwise parameters keep a second, whole copy that a moving average would have to update.
        "stage3_param_persistence_threshold": 0,
    }
    return config


def _base_config(options: TrainingOptions, *, uses_bf16: bool) -> dict[str, object]:
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": options.micro_train_batch_size,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": uses_bf16},
        "steps_per_print": STEPS_PER_PRINT,
        "wall_clock_breakdown": False,
    }
    if uses_bf16:
        # Sums over ranks in bfloat16 would depend on the number of ranks.
        config["communication_data_type"] = "fp32"
    return config
