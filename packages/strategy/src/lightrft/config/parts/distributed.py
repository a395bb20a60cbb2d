"""Options of one part of a run: how models are divided among processes."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    EVAL,
    LANGUAGE,
    NOT_SFT,
    SFT,
    distributed_option,
)


@dataclass(kw_only=True)
class DistributedOptions:
    """How models are divided among processes."""

    fsdp: bool = distributed_option(
        False,
        "Use FSDP2 instead of DeepSpeed ZeRO; without that package it is used anyway, unless an "
        "option of DeepSpeed's is set.",
        common=True,
    )
    zero_stage: int = distributed_option(
        2, "DeepSpeed ZeRO stage.", choices=(0, 1, 2, 3), acts_with="not fsdp"
    )
    fsdp_cpu_offload: bool = distributed_option(
        False,
        "FSDP2: keep parameters, gradients and optimizer states on the CPU.",
        acts_with="fsdp",
    )
    adam_offload: bool = distributed_option(
        False,
        "Keep Adam's states on the CPU (FSDP2: between training phases).",
    )
    adam_8bit: bool = distributed_option(
        False,
        "FSDP2 in one process: keep Adam's moments in 8 bits a number (bitsandbytes).",
    )
    zpg: int = distributed_option(
        1,
        "ZeRO++ secondary partition size; 1 is off.",
        at_least=1,
        acts_with="not fsdp",
    )
    grad_accum_dtype: str | None = distributed_option(
        None,
        "DeepSpeed: dtype in which gradients accumulate; unset is fp32.",
        choices=("fp32", "bf16", "fp16"),
        acts_with="not fsdp",
    )
    overlap_comm: bool = distributed_option(
        False,
        "DeepSpeed: reduce gradients while the backward pass runs.",
        acts_with="not fsdp",
    )
    sp_size: int = distributed_option(
        1,
        "Ranks that share one sequence (sequence parallelism).",
        at_least=1,
    )
    local_rank: int = distributed_option(
        -1,
        "Index of this process' device on its node; -1 reads LOCAL_RANK.",
        at_least=-1,
        may_change=True,
    )
    mixed_mm_data: bool = distributed_option(
        False,
        "Ranks may differ in having images; the vision tower stays in FSDP2's root unit.",
        acts_with="fsdp",
        commands=NOT_SFT,
    )
    async_save: bool = distributed_option(
        False,
        "Write checkpoints in the background, from copies in host memory.",
    )
    meta_init: bool | None = distributed_option(
        None,
        "FSDP2: build models without memory: ranks read their own rows of the files; unset "
        "means yes on GPUs, above 2 GB of weights and without allow_new_weights.",
        acts_with="fsdp",
        by_machine=True,
        commands=LANGUAGE,
    )
    compile_backend: str | None = distributed_option(
        None,
        "FSDP2: compile every block by torch.compile with this backend; unset does not.",
        choices=("inductor", "aot_eager", "eager"),
        acts_with="fsdp",
    )
    timeout_minutes: float = distributed_option(
        60.0,
        "Deadline of every collective and of every phase.",
        above=0,
        at_most=1e6,
        may_change=True,
        commands=(*EVAL, *SFT),
    )
    devices_shared: bool = distributed_option(
        False,
        "Lets ranks that only generate use the GPUs of ranks that train, for trials: slower, and "
        "the memory of both lies on one device.",
        acts_with="rollout_ranks",
        may_change=True,
    )
    fsdp_shard_size: int = distributed_option(
        -1,
        "FSDP2: ranks over which a model is divided, mostly those of a node; groups of so many "
        "ranks are replicas (HSDP). -1 divides over all.",
        at_least=-1,
        acts_with="fsdp",
    )
