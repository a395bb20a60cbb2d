"""Processes that share the models, and the rollout engine."""

from lightrft.config.options import (
    Arguments,
    checks,
    excludes,
    option,
    part,
)
from lightrft.config.parts.data import TemplateOptions
from lightrft.config.parts.scores import ModelOptions, PolicyModelOptions
from lightrft.config.parts.training import HeadOptions, TrainingOptions, WeightOptions
from lightrft.engines.factory import ENGINES, engine_facts


@part("distributed")
class DistributedOptions:
    """Division of the models among processes."""

    fsdp: bool = option(
        False,
        "Use FSDP2 instead of DeepSpeed ZeRO; without that package it is used anyway, unless an "
        "option of DeepSpeed's is set.",
        common=True,
    )
    zero_stage: int = option(2, "DeepSpeed ZeRO stage.", choices=(0, 1, 2, 3), acts_with="not fsdp")
    fsdp_cpu_offload: bool = option(
        False,
        "FSDP2: keep parameters, gradients and optimizer states on the CPU.",
        acts_with="fsdp",
    )
    adam_offload: bool = option(
        False,
        "Keep Adam's states on the CPU (FSDP2: between training phases).",
        acts_with="not fsdp_cpu_offload, which keeps them on the CPU",
        acts_when=lambda c: not (c.fsdp and c.fsdp_cpu_offload),
    )
    adam_8bit: bool = option(
        False,
        "FSDP2 in one process: keep Adam's moments in 8 bits a number (bitsandbytes).",
    )
    zpg: int = option(
        1,
        "ZeRO++ secondary partition size; 1 is off.",
        at_least=1,
        acts_with="not fsdp and with zero_stage 3",
        acts_when=lambda c: not c.fsdp and c.zero_stage == 3,
    )
    grad_accum_dtype: str | None = option(
        None,
        "DeepSpeed: dtype in which gradients accumulate; unset is fp32.",
        choices=("fp32", "bf16", "fp16"),
        acts_with="not fsdp",
    )
    overlap_comm: bool = option(
        False,
        "DeepSpeed: reduce gradients while the backward pass runs.",
        acts_with="not fsdp",
    )
    sp_size: int = option(
        1,
        "Ranks that share one sequence (sequence parallelism).",
        at_least=1,
    )
    local_rank: int = option(
        -1,
        "Index of this process' device on its node; -1 reads LOCAL_RANK.",
        at_least=-1,
        may_change=True,
    )
    async_save: bool = option(
        False,
        "Write checkpoints in the background, from copies in host memory.",
    )
    compile_backend: str | None = option(
        None,
        "FSDP2: compile every block by torch.compile with this backend; unset does not.",
        choices=("inductor", "aot_eager", "eager"),
        acts_with="fsdp",
    )
    devices_shared: bool = option(
        False,
        "Lets ranks that only generate use the GPUs of ranks that train, for trials: slower, and "
        "the memory of both lies on one device.",
        acts_with="rollout_ranks",
        may_change=True,
    )
    fsdp_shard_size: int = option(
        -1,
        "FSDP2: ranks over which a model is divided, mostly those of a node; groups of so many "
        "ranks are replicas (HSDP). -1 divides over all.",
        at_least=-1,
        acts_with="fsdp",
    )

    rules = checks(
        lambda c: (
            c.fsdp_shard_size == 0
            and "fsdp_shard_size: got 0, expected -1 (all ranks) or at least 1"
        ),
        lambda c: (
            c.adam_8bit
            and not c.fsdp
            and "adam_8bit: DeepSpeed lays Adam's moments out itself: add fsdp, or leave it out"
        ),
        *excludes("adam_8bit", {"use_mp_opt": "its weights are float32, the others bfloat16"}),
    )


# Adapters travel as part of the weights that they change.
MERGED, ADAPTER = "merged", "adapter"


ENGINE_TYPES = (*ENGINES, "auto")


@part("engine")
class EngineChoiceOptions:
    """The rollout engine."""

    engine_type: str = option(
        "vllm",
        "Rollout engine.",
        choices=ENGINE_TYPES,
        common=True,
    )
    engine_tp_size: int = option(
        1,
        "Ranks that share one engine (tensor parallelism).",
        at_least=1,
    )
    engine_mem_util: float = option(
        0.5,
        "Share of device memory the engine may take.",
        above=0,
        at_most=1,
        may_change=True,
    )
    engine_args: Arguments = option(
        None,
        "Further options under the engine's own names.",
    )


def sends_adapters(lora_sync: str | None, engine: str, *, are_packed: bool) -> bool:
    """Return whether adapters travel alone.

    Args:
        lora_sync: Value of the option.
        engine: Name of the engine.
        are_packed: Whether the layers below the adapters have 4 bits.
    """
    if lora_sync is None:
        return are_packed and engine_facts(engine).takes_packed
    return lora_sync == ADAPTER


def refused_adapters(engine: str, *, are_packed: bool) -> str:
    """Return why adapters cannot travel alone to this engine; "" if they can.

    Args:
        engine: Name of the engine.
        are_packed: Whether the layers below the adapters have 4 bits.
    """
    able = {name: engine_facts(name) for name in ENGINES if engine_facts(name).holds_adapters}
    reason = "holds no adapters beside its weights"
    if are_packed:
        able = {name: facts for name, facts in able.items() if facts.takes_packed}
        reason = "takes no layers of 4 bits (quantize) below adapters"
    if engine in able:
        return ""
    return (
        f"lora_sync adapter: the {engine} engine {reason}: give engine_type "
        f"{' or '.join(sorted(able))}, or lora_sync {MERGED}"
    )


@part("engine")
class EngineOptions(EngineChoiceOptions):
    """The rollout engine, and how weights reach it."""

    enable_engine_sleep: bool = option(
        True,
        "Release the engine's memory while the trainer runs.",
        may_change=True,
    )
    max_len: int | None = option(
        None,
        "Longest prompt plus completion, in tokens.",
        at_least=1,
    )
    weight_bucket_mb: int = option(
        256,
        "Size of one weight transfer bucket.",
        at_least=1,
        may_change=True,
    )
    lora_sync: str | None = option(
        None,
        "What goes to the engine with lora_rank: merged weights, or the adapters alone to an "
        "engine that holds them beside its weights (hf, vllm). Unset, it is adapter where quantize "
        "is set and the engine takes layers of 4 bits (hf), else merged.",
        choices=(MERGED, ADAPTER),
        acts_with="lora_rank",
        by_machine=True,
    )
    verify_weight_sync: bool = option(
        True,
        "Compare hashes of the trainer's and the engine's weights.",
        may_change=True,
    )
    rm_use_engine: bool = option(
        False,
        "Serve reward models by an engine.",
        acts_with="engines of reward models, and there are none",
        acts_when=lambda _: False,
    )
    rm_engine_cudagraph: bool = option(
        False,
        "CUDA graphs in the reward engine.",
        acts_with="engines of reward models, and there are none",
        acts_when=lambda _: False,
    )

    rules = checks(
        lambda c: (
            c.lora_sync == ADAPTER
            and refused_adapters(c.engine_type, are_packed=c.quantize is not None)
        ),
        lambda c: (
            c.lora_sync == ADAPTER
            and c.engine_tp_size > 1
            and (
                f"lora_sync adapter: an engine holds adapters on one rank alone: got "
                f"engine_tp_size {c.engine_tp_size}; leave it out, or give lora_sync {MERGED}"
            )
        ),
        lambda c: (
            c.lora_sync == ADAPTER and c.lora_rank == 0 and "lora_sync adapter needs lora_rank"
        ),
        lambda c: (
            c.max_len is not None
            and c.max_len < c.prompt_max_len + c.generate_max_len
            and (
                f"max_len must hold prompt_max_len + generate_max_len: got {c.max_len} and "
                f"{c.prompt_max_len} + {c.generate_max_len}; raise it or lower one of the others"
            )
        ),
    )


class BackendOptions(PolicyModelOptions, DistributedOptions, TrainingOptions):
    """Preparation of models and optimizers by a backend."""


class MachineOptions(EngineOptions, DistributedOptions, HeadOptions, TrainingOptions):
    """Division of a machine's memory between training and the engine."""


class BuildOptions(
    WeightOptions, TemplateOptions, ModelOptions, DistributedOptions, HeadOptions, TrainingOptions
):
    """Models as they are read, laid out and trained."""

    rules = checks(
        lambda c: (
            c.quantize is not None
            and not c.fsdp
            and "quantize: DeepSpeed moves weights as floats, which would round scales: add fsdp, "
            "or leave it out"
        ),
        *excludes(
            "quantize",
            {
                "compile_backend": "torch.compile has not been tried on bitsandbytes' kernels",
                "fsdp_cpu_offload": "its shards have not been tried on bitsandbytes' kernels",
            },
        ),
    )
