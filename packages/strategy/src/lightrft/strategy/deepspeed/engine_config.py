"""DeepSpeed's configuration, derived from ours."""

from __future__ import annotations

from dataclasses import dataclass

# Never: DeepSpeed's own progress lines would repeat what the trainer reports.
STEPS_PER_PRINT = 2**62
# Elements of the buffer in which gradients are reduced. DeepSpeed's default of 5e8 would take 2 GB
# of every device for every model that is trained, whatever its size.
MAX_BUCKET_ELEMENTS = 50_000_000


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """What the engine of one model depends on.

    Args:
        stage: ZeRO stage, 0 to 3.
        uses_bf16: Compute in bfloat16 with float32 masters.
        max_norm: Global gradient norm above which gradients are scaled down; 0 never clips.
        micro_batch_size: Samples per rank and micro-batch.
        offloads_adam: Keep masters and Adam's states on the CPU.
        pins_memory: Whether there is a GPU to copy to.
        zpg: ZeRO++ secondary partition size (stage 3); 1 is off.
        grad_accum_dtype: "fp32", "bf16", "fp16" or None for DeepSpeed's choice.
        overlap_comm: Reduce gradients while the backward pass runs.

    Raises:
        ValueError: Stage 0 with bfloat16, or an offload without partitions.
    """

    stage: int
    uses_bf16: bool
    max_norm: float = 0.0
    micro_batch_size: int = 1
    offloads_adam: bool = False
    pins_memory: bool = False
    zpg: int = 1
    grad_accum_dtype: str | None = None
    overlap_comm: bool = False

    def __post_init__(self) -> None:
        if self.stage == 0 and self.uses_bf16:
            raise ValueError(
                "zero_stage 0 cannot train in bfloat16 (DeepSpeed counts an extra Adam step): use "
                "zero_stage 1, or bf16=False"
            )
        if self.stage == 0 and self.offloads_adam:
            raise ValueError("adam_offload needs zero_stage 1, 2 or 3: got zero_stage 0")


def training_config(
    settings: ZeroSettings, *, num_elements: int = MAX_BUCKET_ELEMENTS
) -> dict[str, object]:
    """The dictionary for `deepspeed.initialize` with an optimizer of torch.

    Accumulation is driven by the strategy, so DeepSpeed is told of one micro-batch per step.

    Args:
        settings: Of all models.
        num_elements: Of all parameters of this model; no buffer is larger.
    """
    zero: dict[str, object] = {
        "stage": settings.stage,
        "overlap_comm": settings.overlap_comm,
        "contiguous_gradients": True,
        "reduce_bucket_size": min(num_elements, MAX_BUCKET_ELEMENTS),
        # It would replace torch.nn.functional.linear for the whole process.
        "memory_efficient_linear": False,
    }
    if settings.offloads_adam:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": settings.pins_memory}
    if settings.stage == 3 and settings.zpg > 1:
        zero["zero_hpz_partition_size"] = settings.zpg
    config = _base_config(settings)
    config["zero_optimization"] = zero
    # Without ZeRO the strategy clips, because DeepSpeed would not report the norm.
    config["gradient_clipping"] = settings.max_norm if settings.stage > 0 else 0.0
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    if settings.grad_accum_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": settings.grad_accum_dtype}
    return config


def inference_config(settings: ZeroSettings) -> dict[str, object]:
    """The dictionary for a model that is only evaluated, sharded as in stage 3."""
    config = _base_config(settings)
    config["zero_optimization"] = {
        "stage": 3,
        "memory_efficient_linear": False,
        # No parameter keeps a second, whole copy that a moving average would have to update.
        "stage3_param_persistence_threshold": 0,
    }
    return config


def _base_config(settings: ZeroSettings) -> dict[str, object]:
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": settings.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": settings.uses_bf16},
        "steps_per_print": STEPS_PER_PRINT,
        "wall_clock_breakdown": False,
    }
    if settings.uses_bf16:
        # Sums over ranks in bfloat16 would depend on the number of ranks.
        config["communication_data_type"] = "fp32"
    return config
