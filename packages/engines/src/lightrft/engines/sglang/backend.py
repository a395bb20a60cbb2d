"""Start of an SGLang engine beside this process, and calls of its functions."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrft.engines.libraries import check_library
from lightrft.engines.process_state import (
    environment,
    preserved_process_state,
    replaced_environment,
)
from lightrft.engines.rows import Limits
from lightrft.engines.sampling import mix64
from lightrft.engines.sglang.options import engine_arguments
from lightrft.engines.types import EngineConfig

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

# Set by the trainer's launcher; with them SGLang's processes would join the trainer's job.
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_LAUNCHER_NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def start_engine(config: EngineConfig, model_path: str, limits: Limits) -> Engine:
    """Start SGLang without changing random states and threads of this process.

    Args:
        config: Settings; without a model path, weights are dummies.
        model_path: Directory of the model.
        limits: Vocabulary and longest prompt plus completion.

    Raises:
        LibraryError: The installed SGLang lacks a needed name.
        ValueError: An option is unknown, reserved or malformed.
    """
    is_on_cpu = not torch.cuda.is_available()
    if is_on_cpu:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        # Otherwise the sampler is compiled at its first call, for half a minute.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    with preserved_process_state(), replaced_environment(_hidden_variables()):
        check_library("sglang")
        arguments = engine_arguments(
            config,
            model_path=model_path,
            # One more: scoring a sequence of full length samples one token after it.
            context_length=(limits.max_model_len or 0) + 1,
            load_format="auto" if config.model_path else "dummy",
            vocab_size=limits.vocab_size,
            ports=_free_ports(),
            device_index=None if is_on_cpu else torch.cuda.current_device(),
        )
        num_tokens = limits.vocab_size if limits.is_padded else None
        return _build(arguments, is_on_cpu=is_on_cpu, num_tokens=num_tokens)


def _build(arguments: Mapping[str, object], *, is_on_cpu: bool, num_tokens: int | None) -> Engine:
    from sglang.srt.entrypoints.engine import Engine as NativeEngine
    from sglang.srt.server_args import DETERMINISTIC_ATTENTION_BACKEND_CHOICES

    class SeededEngine(NativeEngine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(partial(run_scheduler, num_tokens))

    choices = DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    # torch's attention gives equal rows in any batch up to rounding, which is all we promise.
    if is_on_cpu and "torch_native" not in choices:
        choices.append("torch_native")
    # The scheduler may use a longer model length than the configuration has.
    name = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
    with environment({name: "1"}):
        return SeededEngine(**arguments)


def generate_native(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[Mapping[str, object]],
    *,
    wants_support: bool = False,
    logprob_start: int = -1,
) -> list[Mapping[str, object]]:
    """Return SGLang's answers in the order of the prompts.

    Args:
        engine: SGLang engine.
        prompts: Token ids of the prompts.
        params: Sampling parameters under SGLang's names, one for each prompt.
        wants_support: Whether to return logprobs renormalised over the kept tokens as well.
        logprob_start: First prompt token to score; -1 scores none.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=[list(prompt) for prompt in prompts],
        sampling_params=[dict(entry) for entry in params],
        return_logprob=True,
        logprob_start_len=[logprob_start] * len(prompts),
        return_sampling_mask=[wants_support] * len(prompts),
    )
    stream = engine.tokenizer_manager.generate_request(request, None)
    answers: list[Mapping[str, object]] = engine.loop.run_until_complete(stream.__anext__())
    return answers


def flattened(named: Sequence[tuple[str, Tensor]]) -> object:
    """Pack whole tensors into one payload for `update_weights_from_tensor`."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=list(named))
    payload: object = MultiprocessingSerializer.serialize(
        {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()},
        output_str=True,
    )
    return payload


def _free_ports() -> tuple[int, int]:
    """Return two TCP ports that are currently free."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])


def _hidden_variables() -> dict[str, None]:
    """Return the launcher's variables, which SGLang's processes must not see."""
    return {
        name: None
        for name in os.environ
        if name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES)
    }


def run_scheduler(num_tokens: int | None, *args: object, **keywords: object) -> None:
    """Run SGLang's scheduler in a separate process, with sampling by seed even without a GPU.

    SGLang draws by the seed of a request only in its deterministic mode. That mode replaces matrix
    products by Triton kernels and hashes by a compiled function. A CPU has neither, so the products
    stay unchanged and torch computes the hash.

    Args:
        num_tokens: Number of ids that are tokens; the logits of later ids become -inf. None
            changes none.
        args, keywords: Arguments of SGLang's function.
    """
    from sglang.srt.layers import sampler
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.model_executor.model_runner import ModelRunner

    if not torch.cuda.is_available():
        ModelRunner.maybe_enable_batch_invariant_mode = lambda _: None
        sampler.murmur_hash32 = hash_uint32
    compute = LogitsProcessor._get_logits

    def get_logits(*parts: object, **options: object) -> Tensor:
        logits: Tensor = compute(*parts, **options)
        logits[..., num_tokens:] = float("-inf")
        return logits

    if num_tokens is not None:
        LogitsProcessor._get_logits = get_logits
    run_scheduler_process(*args, **keywords)


def hash_uint32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Return one pseudorandom 32-bit number for each row and column.

    Args:
        seed: [rows] uint64.
        positions: [rows] integer.
        columns: [vocab] integer.

    Returns:
        [rows, vocab] int64 in [0, 2^32).
    """
    keys = mix64(mix64(seed.to(torch.int64)) ^ positions.to(torch.int64))
    bits = mix64(keys[:, None] ^ mix64(columns.to(torch.int64))[None, :])
    return (bits >> 32) & 0xFFFFFFFF
