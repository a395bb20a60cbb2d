"""Libraries of others: tested versions, and those of their names that no document promises."""

import importlib
import importlib.metadata
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import FunctionType

_logger = logging.getLogger(__name__)
# PEFT imports it, and its CPU part warns of kernels that nobody uses here.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


class LibraryError(ImportError):
    """A library without a name that is needed; the message says which, and what to install."""


@dataclass(frozen=True, slots=True)
class Library:
    """A library and what is used of it.

    Args:
        package: Name of its distribution.
        tested: Versions that the tests pass with: the lowest, and the first that is not tried.
        purpose: Part or option that needs it.
        names: "module:name" of each private or moving name, by the part that needs it.
        single: Further ones, which single models need and whose modules take time to import.
        otherwise: Another way out than to install a tested version.
    """

    package: str
    tested: tuple[tuple[int, ...], tuple[int, ...]]
    purpose: str
    names: Mapping[str, tuple[str, ...]]
    single: Mapping[str, tuple[str, ...]]
    otherwise: str = ""

    @property
    def limits(self) -> str:
        """The tested versions, as pip takes them."""
        low, high = (".".join(map(str, numbers)) for numbers in self.tested)
        return f">={low},<{high}"

    def is_tested(self, version: str) -> bool:
        """Return whether a version is among the tested ones."""
        low, high = self.tested
        return low <= _numbers(version) < high

    def missing(self, names: Mapping[str, tuple[str, ...]]) -> list[tuple[str, str]]:
        """Return the names that do not exist, each with what needs it."""
        return [(path, need) for need, paths in names.items() for path in paths if not _has(path)]


TORCH = Library(
    "torch",
    ((2, 11), (2, 16)),
    "everything",
    {
        "a wait of a rank for the others": (
            "torch.distributed.distributed_c10d:_get_default_store",
            "torch.distributed:ProcessGroup._allgather_base",
            "torch.distributed:ProcessGroupGloo.Options._timeout",
        ),
        "a check of values on the device": ("torch:_assert_async",),
        "an output of DeepSpeed's and FSDP2's modules": (
            "torch.utils._pytree:register_pytree_node",
            "torch.utils._pytree:tree_flatten",
        ),
        "Adam": ("torch.optim.adamw:adamw",),
        "dropout that is off": ("torch.nn.modules.dropout:_DropoutNd",),
        "the list of a module's hooks, parts or stored buffers": (
            "torch.nn:Module._buffers",
            "torch.nn:Module._forward_pre_hooks",
            "torch.nn:Module._modules",
            "torch.nn:Module._non_persistent_buffers_set",
        ),
        "the tracing of vLLM's loaders": (
            "torch:ops.aten._local_scalar_dense",
            "torch:ops.aten._to_copy",
            "torch._ops:OpOverload._schema",
            "torch:UntypedStorage._cdata",
        ),
        "a frozen base that lies in the engine": (
            "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.reset_sharded_param",
            "torch.distributed.tensor:DTensor._local_tensor",
        ),
        "FSDP2 without a backward pass": (
            "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
            "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._comm_ctx",
            "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_group",
            "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._post_forward_indices",
        ),
    },
    {},
)
TRANSFORMERS = Library(
    "transformers",
    ((5, 17), (5, 25)),
    "models and tokenizers",
    {
        "the attention of trainer and hf engine": (
            "transformers.integrations.sdpa_attention:sdpa_attention_forward",
            "transformers.masking_utils:sdpa_mask",
            "transformers:PreTrainedModel._supports_attention_backend",
            "transformers:PreTrainedModel._supports_flash_attn",
            "transformers:PreTrainedModel._supports_sdpa",
            "transformers:PretrainedConfig._attn_implementation",
        ),
        "the cache of the hf engine": (
            "transformers.cache_utils:Cache.batch_select_indices",
            "transformers.cache_utils:DynamicLayer.lazy_initialization",
        ),
        "a model without memory of its own": (
            "transformers.initialization:no_init_weights",
            "transformers.modeling_utils:local_torch_dtype",
            "transformers:PreTrainedModel._no_split_modules",
        ),
        "the names of weights in files": (
            "transformers.conversion_mapping:get_model_conversion_mapping",
            "transformers.core_model_loading:WeightConverter",
            "transformers.core_model_loading:dot_natural_key",
            "transformers.core_model_loading:rename_source_key",
            "transformers:PreTrainedModel._adjust_missing_and_unexpected_keys",
            "transformers:AutoModel._model_mapping",
            "transformers:AutoModelForMultimodalLM._model_mapping",
        ),
        "a chat template": (
            "transformers.utils.chat_template_utils:_compile_jinja_template",
            "transformers.utils.chat_template_utils:render_jinja_template",
        ),
    },
    {
        "a picture of Llava-Next or Llava-OneVision": (
            "transformers.models.llava_next:LlavaNextProcessor._get_number_of_features",
            "transformers.models.llava_onevision:LlavaOnevisionProcessor._get_number_of_features",
        ),
        "a picture of Mistral 3": (
            "transformers.models.pixtral.image_processing_pixtral:get_resize_output_image_size",
        ),
    },
)
DEEPSPEED = Library(
    "deepspeed",
    ((0, 19, 8), (0, 20)),
    "ZeRO; --fsdp does without",
    {
        "a start without compiling": ("deepspeed.ops:__compatible_ops__",),
        "the weights and moments of a checkpoint": (
            "deepspeed.utils:lazy_init_hp_params_optimizer_state",
            "deepspeed.utils:safe_get_full_fp32_param",
            "deepspeed.utils:safe_get_full_optimizer_state",
            "deepspeed.utils:safe_get_local_fp32_param",
            "deepspeed.utils:safe_set_full_fp32_param",
            "deepspeed.utils:safe_set_local_fp32_param",
        ),
        "a checkpoint that runs no code": (
            "deepspeed.runtime.fp16.loss_scaler:LossScaler",
            "deepspeed.runtime.zero.config:ZeroStageEnum",
            "deepspeed.utils.tensor_fragment:fragment_address",
        ),
    },
    {},
    "choose --fsdp",
)
VLLM = Library(
    "vllm",
    ((0, 32), (0, 34)),
    "--engine_type vllm",
    {
        "generation": (
            "vllm:LLM.collective_rpc",
            "vllm:LLM.enqueue",
            "vllm:SamplingParams",
            "vllm.v1.engine.llm_engine:LLMEngine.abort_request",
            "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests",
            "vllm.v1.engine.llm_engine:LLMEngine.step",
        ),
        "sleep": (
            "vllm:LLM.sleep",
            "vllm:LLM.wake_up",
            "vllm.v1.worker.gpu_worker:Worker.discard",
        ),
        "a cache of the present weights": (
            "vllm:LLM.reset_mm_cache",
            "vllm:LLM.reset_prefix_cache",
            "vllm.v1.engine.llm_engine:LLMEngine.reset_encoder_cache",
        ),
        "a weight sync": (
            "vllm.config:set_current_vllm_config",
            "vllm.model_executor.model_loader.reload:initialize_layerwise_reload",
            "vllm.model_executor.model_loader.reload:finalize_layerwise_reload",
            "vllm.model_executor.model_loader.reload.layerwise:_layerwise_process",
            "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info",
            "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
            "vllm.model_executor.models.utils:WeightsMapper.map_name",
        ),
        "an engine in the trainer's process": (
            "vllm.engine.arg_utils:EngineArgs",
            "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher._distributed_args",
            "vllm.distributed.parallel_state:_WORLD",
            "vllm.distributed.parallel_state:_NODE_COUNT",
            "vllm.distributed.parallel_state:destroy_distributed_environment",
            "vllm.distributed.parallel_state:destroy_model_parallel",
            "vllm.distributed.parallel_state:get_tp_group",
            "vllm.v1.engine.core_client:InprocClient._finalizer",
        ),
        "adapters": ("vllm.lora.worker_manager:WorkerLoRAManager._adapter_manager",),
    },
    {},
    "choose engine_type='hf'",
)
SGLANG = Library(
    "sglang",
    ((0, 5, 23), (0, 5, 24)),
    "--engine_type sglang",
    {
        "generation": (
            "sglang.srt.entrypoints.engine:Engine.run_scheduler_process_func",
            "sglang.srt.entrypoints.engine:Engine.shutdown",
            "sglang.srt.managers.io_struct:GenerateReqInput.return_sampling_mask",
            "sglang.srt.model_executor.model_runner:ModelRunner.maybe_enable_batch_invariant_mode",
            "sglang.srt.layers.logits_processor:LogitsProcessor._get_logits",
            "sglang.srt.layers.sampler:murmur_hash32",
            "sglang.srt.server_args:DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
        ),
        "sleep": (
            "sglang.srt.entrypoints.engine:Engine.release_memory_occupation",
            "sglang.srt.entrypoints.engine:Engine.resume_memory_occupation",
        ),
        "a weight sync": (
            "sglang.srt.entrypoints.engine:Engine.begin_weight_update",
            "sglang.srt.entrypoints.engine:Engine.end_weight_update",
            "sglang.srt.entrypoints.engine:Engine.update_weights_from_tensor",
            "sglang.srt.entrypoints.engine:Engine.flush_cache",
            "sglang.srt.utils:MultiprocessingSerializer.serialize",
            "sglang.srt.weight_sync.tensor_bucket:FlattenedTensorBucket",
        ),
    },
    {},
    "choose engine_type='hf'",
)
PEFT = Library(
    "peft",
    ((0, 18), (0, 22)),
    "--lora_rank",
    {"a pass without adapters": ("peft.tuners.tuners_utils:BaseTunerLayer._disable_adapters",)},
    {},
)
BITSANDBYTES = Library(
    "bitsandbytes",
    ((0, 50), (0, 51)),
    "--quantize and --adam_8bit",
    {
        "a base of 4 bits": (
            "bitsandbytes.functional:quantize_4bit",
            "torch:ops.bitsandbytes.dequantize_4bit",
        ),
        "Adam in 8 bits": (
            "bitsandbytes.functional:create_dynamic_map",
            "bitsandbytes.functional:optimizer_update_8bit_blockwise",
        ),
    },
    {},
)
LIBRARIES = {
    each.package: each
    for each in (TORCH, TRANSFORMERS, PEFT, BITSANDBYTES, DEEPSPEED, VLLM, SGLANG)
}


def check_library(package: str, single: str = "") -> None:
    """Compare an installed library with its table; a line says that its version is not tested.

    Args:
        package: Name of the library.
        single: What needs names of single models; "" looks for those that every run needs.

    Raises:
        LibraryError: A name is missing.
    """
    library = LIBRARIES[package]
    version = installed_version(package) or "(version unknown)"
    if not library.is_tested(version) and os.environ.get("RANK", "0") == "0":
        say_untested(package, version)
    missing = library.missing({single: library.single[single]} if single else library.names)
    if missing:
        paths = ", ".join(path.replace(":", ".") for path, _ in missing)
        needs = " and ".join(dict.fromkeys(need for _, need in missing))
        remedy = f"install {package}{library.limits}"
        remedy += f", or {library.otherwise}" if library.otherwise else ""
        raise LibraryError(f"{package} {version} lacks {paths}, which {needs} needs: {remedy}")


def explained(error: ImportError) -> ImportError:
    """Return the error of `check_library` for the library that an import failed in, or `error`."""
    package = (error.name or "").partition(".")[0]
    if package in LIBRARIES and installed_version(package) is not None:
        try:
            check_library(package)
        except LibraryError as lacking:
            return lacking
    return error


@cache
def say_untested(package: str, version: str) -> None:
    """Warn once of a version outside of the tested range."""
    _logger.warning(
        "%s %s: tested are %s; the comparisons at load and at each weight sync decide",
        package,
        version,
        LIBRARIES[package].limits,
    )


def installed_version(package: str) -> str | None:
    """Return the version of a package or its build for processors; None if there is neither."""
    for candidate in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers: (2, 13, 0) of "2.13.0+cu130"."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _has(path: str) -> bool:
    """Return whether a name exists, or is an attribute that methods of its class name."""
    module, _, name = path.partition(":")
    *outer, last = name.split(".")
    try:
        owner: object = importlib.import_module(module)
        for part in outer:
            owner = getattr(owner, part)
    except (ImportError, AttributeError):
        return False
    functions = (each for kind in getattr(owner, "__mro__", ()) for each in vars(kind).values())
    codes = (each.__code__ for each in functions if isinstance(each, FunctionType))
    return hasattr(owner, last) or any(last in (*code.co_names, *code.co_consts) for code in codes)
