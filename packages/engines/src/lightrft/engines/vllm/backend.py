"""Start of a vLLM engine in this process, and calls of its functions."""

import gc
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightrft.engines.libraries import check_library
from lightrft.engines.process_state import environment, preserved_process_state
from lightrft.engines.rows import Limits
from lightrft.engines.types import EngineConfig
from lightrft.engines.vllm.media import name_tower
from lightrft.engines.vllm.options import engine_arguments

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
# Defaults unless the user has set them. Thread pinning would bind the trainer's threads too, and
# one sampling kernel would be compiled at the first call even in eager mode.
_CPU_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
}


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """Started engine with its parts.

    Args:
        llm: vLLM engine (`vllm.LLM`).
        model: vLLM's model.
        vllm_config: Configuration of vLLM, which must be current during a reload.
        model_config: Part of the configuration that describes the model.
        owns_process_group: Whether vLLM started `torch.distributed`.
        num_threads: torch threads at the start, used for every call: without AVX-512, weights that
            oneDNN packed for one number of threads are multiplied wrongly with another.
        runner: Module and class of the runner that executes the model.
        native_runner: vLLM's runner.
        caches: Caches of keys and values, or of layer states: tensors and lists of tensors.
    """

    llm: object
    model: nn.Module
    vllm_config: object
    model_config: object
    owns_process_group: bool
    num_threads: int
    runner: str = ""
    native_runner: object = None
    caches: Sequence[object] = ()


def prepare_environment() -> bool:
    """Set vLLM's environment variables, without overriding the user.

    Returns:
        Whether vLLM will run on the CPU.

    Raises:
        ValueError: The user's environment puts the engine into another process.
    """
    if os.environ.setdefault(_IN_PROCESS, "0") != "0":
        raise ValueError(
            f"{_IN_PROCESS}={os.environ[_IN_PROCESS]}: the vllm engine runs in the trainer's "
            "process, expected 0; unset the variable"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    is_on_cpu = not torch.cuda.is_available()
    if is_on_cpu:
        for name, value in _CPU_DEFAULTS.items():
            os.environ.setdefault(name, value)
    return is_on_cpu


def choose_executor(tensor_parallel_size: int) -> str:
    """Return vLLM's executor backend: the launcher's processes, or this one alone.

    Raises:
        RuntimeError: Tensor parallelism is set without a process group of the trainer.
    """
    if dist.is_initialized():
        return "external_launcher"
    if tensor_parallel_size > 1:
        raise RuntimeError(
            f"a vllm engine over {tensor_parallel_size} ranks needs the trainer's process group: "
            "torch.distributed is not initialised; start the program with its launcher and create "
            "the strategy first"
        )
    return "uni"


def start_backend(
    config: EngineConfig, model_path: str, limits: Limits, *, model_type: str = ""
) -> StartedEngine:
    """Start vLLM without changing random states and threads of this process.

    Args:
        config: Settings; without a model path, weights are dummies.
        model_path: Directory of the model.
        limits: Vocabulary and longest prompt plus completion.
        model_type: Model type in the model's configuration.
    """
    is_on_cpu = prepare_environment()
    owns_process_group = not dist.is_initialized()
    executor = choose_executor(config.tensor_parallel_size)
    # vLLM replaces torch's thread functions and seeds all generators.
    with (
        preserved_process_state(),
        # `max_model_len` may exceed the model's positions by one token.
        environment({"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}),
        rank_variables(),
    ):
        check_library("vllm")
        arguments = engine_arguments(
            config,
            model_path=model_path,
            # One more: scoring a sequence of full length samples one token after it.
            max_model_len=(limits.max_model_len or 0) + 1,
            has_tokenizer=has_tokenizer(model_path),
            is_on_cpu=is_on_cpu,
            executor=executor,
            reads_media=limits.reads_media,
        )
        name_tower(model_type)
        try:
            with _names_of_this_job(executor):
                return _start(arguments, owns_process_group=owns_process_group)
        except BaseException:
            _leave_groups(owns_process_group=owns_process_group)
            raise


def _start(arguments: dict[str, object], *, owns_process_group: bool) -> StartedEngine:
    from vllm import LLM

    llm = LLM(**arguments)
    workers = llm.collective_rpc(lambda worker: worker)
    if len(workers) != 1:
        raise RuntimeError(f"expected one vLLM worker in this process, got {len(workers)}")
    worker = workers[0]
    runner = type(worker.model_runner)
    return StartedEngine(
        llm=llm,
        model=worker.get_model(),
        vllm_config=worker.vllm_config,
        model_config=worker.vllm_config.model_config,
        owns_process_group=owns_process_group,
        num_threads=torch.get_num_threads(),
        runner=f"{runner.__module__}.{runner.__qualname__}",
        native_runner=worker.model_runner,
        caches=worker.model_runner.kv_caches,
    )


@torch.no_grad()
def clear_caches(caches: Sequence[object]) -> None:
    """Set caches to zero.

    Attention reads whole blocks and weights unwritten places with 0, but 0 times NaN is NaN, and
    memory has arbitrary contents after sleep.
    """
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            cache.zero_()
        elif isinstance(cache, list | tuple):
            clear_caches(cache)


def stop_backend(backend: StartedEngine) -> None:
    """Free an engine; the trainer's process group stays."""
    client = backend.llm.llm_engine.engine_core  # type: ignore[attr-defined]
    core = client.engine_core
    if backend.owns_process_group:
        client.shutdown()
    else:
        # The full shutdown, which the client also runs when it is collected, would destroy the
        # default process group, which is the trainer's.
        client._finalizer.detach()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        gc.unfreeze()
    _leave_groups(owns_process_group=backend.owns_process_group)
    gc.collect()


def _leave_groups(*, owns_process_group: bool) -> None:
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if owns_process_group:
        parallel_state.destroy_distributed_environment()
    elif parallel_state._WORLD is not None:
        # Destroy all but the default group, which is the trainer's. Otherwise vLLM would start the
        # next engine on groups that end with this trainer.
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None


def has_tokenizer(model_path: str) -> bool:
    """Return whether a checkpoint directory has a tokenizer."""
    return any((Path(model_path) / name).is_file() for name in _TOKENIZER_FILES)


@contextmanager
def rank_variables() -> Iterator[None]:
    """Set the launcher's variables, for process groups started without a launcher."""
    if not dist.is_initialized():
        yield
        return
    rank = str(dist.get_rank())
    # The device of this process, which differs from its rank on a second node.
    local = str(torch.cuda.current_device()) if torch.cuda.is_available() else rank
    with environment({"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": str(dist.get_world_size())}):
        yield


@contextmanager
def _names_of_this_job(executor: str) -> Iterator[None]:
    """Give the shared memory of CPU ranks a name unique to this job.

    vLLM derives the name from the rendezvous address, which is "env://" for every job under a
    launcher. Two jobs would share memory, and files of a killed job would block the next.
    """
    if executor != "external_launcher":
        yield
        return
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    original = ExecutorWithExternalLauncher._distributed_args

    def distributed_args(self: object) -> tuple[str, int, int]:
        # The process group exists, so the address is not used for rendezvous.
        _, rank, local_rank = original(self)
        return f"tcp://127.0.0.1:{name[0]}", rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = distributed_args
    try:
        yield
    finally:
        ExecutorWithExternalLauncher._distributed_args = original
