"""vLLM rollout engine, in the trainer's process."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lightrft.engines.base import FinishedRows, RolloutEngine
from lightrft.engines.media.families import placeholder_ids
from lightrft.engines.media.media import EncodedPrompt
from lightrft.engines.model_shape import ModelShape, model_configs, model_directory, model_shape
from lightrft.engines.process_state import preserved_process_state
from lightrft.engines.rows import (
    FinishedJob,
    Job,
    RawCompletion,
    RequestedSample,
    first_job,
    stream_in_parts,
)
from lightrft.engines.sampling import pack_ids
from lightrft.engines.types import (
    KEPT_IDS,
    ROUTES,
    EngineConfig,
    EngineStatus,
    FinishReason,
    SamplingParams,
)
from lightrft.engines.vllm.adapters import AdapterBuffers, adapter_request
from lightrft.engines.vllm.backend import (
    StartedEngine,
    clear_caches,
    has_tokenizer,
    start_backend,
    stop_backend,
)
from lightrft.engines.vllm.layout import LayoutReader, check_buffers
from lightrft.engines.vllm.media import check_prompt, forbid_tokens, may_lack, native_prompt
from lightrft.engines.vllm.options import MAX_LOGPROBS, load_format
from lightrft.engines.vllm.weights import VLLMWeights

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput
    from vllm.logprobs import FlatLogprobs

_LAYER = re.compile(r"^(?P<parts>(?:language_model\.)?model\.layers\.)(?P<number>\d+)$")


class VLLMEngine(RolloutEngine):
    """Engine on vLLM beside the trainer.

    Every rank of a tensor-parallel group holds a shard and must make the same calls in the same
    order.

    Args:
        config: Settings; options are fields of vLLM's `EngineArgs`.
        module: Transformers model whose architecture to take if `config.model_path` is empty;
            weights that it holds in full are copied.
    """

    name = "vllm"
    streams = True
    reads_media = True
    weights: VLLMWeights

    sleeps_on_request_only = True

    def __init__(self, config: EngineConfig, *, module: nn.Module | None = None) -> None:
        super().__init__(config)
        self.keeps_base = config.adapters is not None
        hf_config, generation_config, architecture = model_configs(config, module)
        self._read_limits(hf_config, generation_config)
        self._has_tokenizer = bool(config.model_path) and has_tokenizer(config.model_path)
        with model_directory(config.model_path, hf_config, architecture) as path:
            self._backend: StartedEngine | None = start_backend(
                config, path, self._limits, model_type=hf_config.model_type
            )
        forbidden = placeholder_ids(hf_config) if self._limits.reads_media else ()
        if forbidden or self._limits.is_padded:
            forbid_tokens(self._backend.model, forbidden, self._limits.vocab_size)
        self.weights = self._read_weights(
            model_shape(hf_config, architecture), may_lack(hf_config.model_type)
        )
        self._take_over(module)

    def _read_weights(self, shape: ModelShape, lacking: str) -> VLLMWeights:
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        reader = LayoutReader(
            self.started.model,
            shape,
            tp_rank=group.rank_in_group,
            tp_size=group.world_size,
            default_dtype=self._dtype,
            may_lack=lacking,
        )
        buffers, adapters = None, self._config.adapters
        if adapters is not None:
            targets = reader.layer_rows(adapters.layers)
            buffers = AdapterBuffers(self.started.native_runner, adapters, targets)
        weights = VLLMWeights(self.started, reader.read(), self.name, buffers)
        if load_format(self._config, reads_media=self._limits.reads_media) == "dummy":
            check_buffers(self.started.model)
            weights.unwritten.update(weights.owners)
        return weights

    @property
    def started(self) -> StartedEngine:
        """Running backend; raises a RuntimeError if the engine is closed."""
        if self._backend is None:
            raise RuntimeError(f"the {self.name} engine is closed")
        return self._backend

    @property
    def runner_name(self) -> str:
        """Class that executes the model; vLLM has two generations of it."""
        return self.started.runner

    @property
    def native(self) -> object:
        """Engine of vLLM (`vllm.LLM`)."""
        return self.started.llm

    def lend_weights(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> Mapping[str, torch.Tensor]:
        """Lend what lies in one piece in vLLM's tensors, if no update writes it."""
        views = self.weights.equal_views(tensors, device) if self.keeps_base else {}
        self.lent_names = frozenset(views)
        return views

    def _check_params(self, params: SamplingParams) -> None:
        super()._check_params(params)
        if params.stop and not self._has_tokenizer:
            raise FileNotFoundError(
                f"stop strings need a tokenizer, and {self._config.model_path!r} has none; use "
                "stop_token_ids"
            )

    def stream_rows(self, rows: Sequence[RequestedSample], params: SamplingParams) -> FinishedRows:
        """Yield rows as they finish."""

        def run(jobs: Sequence[Job], *, with_stops: bool) -> Iterator[list[FinishedJob]]:
            natives = [
                native_params(
                    job, params, stop_ids, with_stops=with_stops, num_logprobs=num_logprobs
                )
                for job in jobs
            ]
            for answers in self._run(jobs, natives):
                yield [(i, raw_completions_of(jobs[i], out.outputs)) for i, out in answers]

        stop_ids, num_logprobs = self._stop_ids(params), self._num_logprobs(params)
        prompts = [row for row in rows if row.sample_index == 0]
        jobs = [first_job(row, params, num_samples=params.n) for row in prompts]
        decoder = self._text if params.stop else None
        # vLLM draws all samples of a prompt from the seed of its first part.
        yield from stream_in_parts(run, jobs, rows, params, decoder, next_part=1)

    def _num_logprobs(self, params: SamplingParams) -> int:
        """Return how many of the likeliest tokens show which ones truncation kept; 0 without."""
        config = vars(self.started.model_config)
        if not (params.truncates and params.records_support) or config.get("return_sampling_mask"):
            return 0
        allowed = int(config["max_logprobs"]) % 2**31  # -1 allows all
        most = min(MAX_LOGPROBS, allowed, self._limits.num_rows)
        # One more than are kept: it has the probability 0.
        return most if params.top_k == -1 else min(most, params.top_k + 1)

    def _run(
        self, jobs: Sequence[Job], natives: Sequence[object]
    ) -> Iterator[list[tuple[int, RequestOutput]]]:
        """Yield batches of vLLM's answers as they finish, each with the index of its job.

        No request stays queued, even if the caller stops early or vLLM fails.
        """
        llm, num_threads = self.started.llm, self.started.num_threads
        engine = llm.llm_engine  # type: ignore[attr-defined]
        # vLLM numbers its requests.
        first = next(llm.request_counter) + 1  # type: ignore[attr-defined]
        try:
            with preserved_process_state(num_threads):
                llm.enqueue(  # type: ignore[attr-defined]
                    [native_prompt(job) for job in jobs],
                    sampling_params=list(natives),
                    lora_request=adapter_request() if self.keeps_base else None,
                    use_tqdm=False,
                )
            while engine.has_unfinished_requests():
                answers: list[RequestOutput] = []
                with preserved_process_state(num_threads):
                    while not answers and engine.has_unfinished_requests():
                        answers = [answer for answer in engine.step() if answer.finished]
                indexed = [(int(answer.request_id) - first, answer) for answer in answers]
                for index, answer in indexed:
                    check_prompt(answer.prompt_token_ids, jobs[index])
                if indexed:
                    yield indexed
        finally:
            left = list(engine.output_processor.request_states)
            if left:
                engine.abort_request(left, internal=True)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Score a sequence at temperature 1."""
        self.check_usable()
        if not token_ids:
            return []
        parts = self._run([Job(tuple(token_ids), 1, 0)], [scoring_params()])
        (answer,) = [answer for part in parts for _, answer in part]
        entries = zip(token_ids[1:], answer.prompt_logprobs[1:], strict=True)
        return [0.0, *(float(entry[token].logprob) for token, entry in entries)]

    def layer_outputs(
        self, token_ids: Sequence[int], media: EncodedPrompt | None
    ) -> dict[str, torch.Tensor]:
        """Return the layers' outputs for one sequence, if vLLM runs its layers one by one."""
        self.reset_caches()
        with watched_layers(self.started.model) as outputs:
            list(self._run([Job(tuple(token_ids), 1, 0, media=media)], [scoring_params()]))
        return {name: torch.cat(calls) for name, calls in outputs.items()}

    def _release_memory(self, level: int, awake: Sequence[str]) -> None:
        """Release memory on a GPU; elsewhere vLLM keeps its memory and only the state changes."""
        llm = self.started.llm
        if self._lends_memory:
            self.drop_caches()
            llm.collective_rpc("discard", args=(("kv_cache",),))  # type: ignore[attr-defined]
            return
        # `sleep` does not release features of images.
        llm.llm_engine.reset_encoder_cache()  # type: ignore[attr-defined]
        llm.sleep(level=level)  # type: ignore[attr-defined]

    @property
    def _lends_memory(self) -> bool:
        """Return whether the trainer reads weights in memory that vLLM's sleep would free."""
        return bool(self.lent_names) and vars(self.started.model_config)["enable_sleep_mode"]

    def _resume_memory(self, tags: Sequence[str]) -> None:
        llm = self.started.llm
        if not self._lends_memory:
            llm.wake_up(tags=list(tags))  # type: ignore[attr-defined]
        elif "kv_cache" in tags:
            llm.collective_rpc("wake_up", args=(["kv_cache"],))  # type: ignore[attr-defined]
        if "kv_cache" in tags:
            clear_caches(self.started.caches)

    def drop_caches(self) -> None:
        """Drop vLLM's prefix and encoder caches, and the pixels it keeps.

        Raises:
            RuntimeError: vLLM refused because requests are running.
        """
        llm = self.started.llm
        if not llm.reset_prefix_cache():  # type: ignore[attr-defined]
            raise RuntimeError("vLLM did not reset its prefix cache; requests must be finished")
        llm.llm_engine.reset_encoder_cache()  # type: ignore[attr-defined]
        # Pixels do not depend on weights; this only frees their memory.
        llm.reset_mm_cache()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Stop vLLM; the trainer's process group stays."""
        if self._backend is not None:
            self.abort()
            stop_backend(self._backend)
            self._backend = None
            self.weights.forget_engine()
            # vLLM's objects refer to each other; a second engine needs the memory now.
            gc.collect()
            self.status = EngineStatus.SLEEPED


@contextmanager
def watched_layers(model: nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Collect the outputs of the language model's layers, call by call.

    Args:
        model: vLLM's model.

    Yields:
        transformers' name of a layer -> [tokens, hidden] of each call. Empty if vLLM replays a
        recorded graph.
    """
    calls: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            del module, inputs
            # vLLM adds the residual in the next layer.
            parts = output if isinstance(output, tuple) else (output,)
            tensors = [part for part in parts if isinstance(part, torch.Tensor)]
            if tensors:
                calls.setdefault(name, []).append(torch.stack(tensors).sum(dim=0).cpu())

        return hook

    handles = []
    for name, module in model.named_modules():
        match = _LAYER.match(name)
        if match is not None:
            is_part = match["parts"].startswith("language_model")
            prefix = "model.language_model.layers." if is_part else "model.layers."
            handles.append(module.register_forward_hook(keep(prefix + match["number"])))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def native_params(
    job: Job,
    params: SamplingParams,
    stop_ids: Sequence[int],
    *,
    with_stops: bool,
    num_logprobs: int = 0,
) -> object:
    """Return vLLM's sampling parameters for one job.

    End-of-sequence ids are passed as plain stop ids. `min_tokens` is never passed: vLLM would
    exclude the stop tokens from the sampled distribution.

    Args:
        job: Job to sample.
        params: Our sampling parameters.
        stop_ids: All ids that end a completion.
        with_stops: Whether stop ids and strings count.
        num_logprobs: Number of likeliest tokens to return beside each sampled one.
    """
    from vllm import SamplingParams as NativeParams

    # A few lists of numbers instead of a dictionary and an object for each token.
    flat = {"flat_logprobs": True} if "flat_logprobs" in NativeParams.__struct_fields__ else {}
    stops = list(params.stop) if with_stops else []
    return NativeParams(
        n=1 if params.is_greedy else job.num_samples,
        temperature=params.temperature,
        top_p=1.0 if params.is_greedy else params.top_p,
        top_k=-1 if params.is_greedy else params.top_k,
        min_p=0.0 if params.is_greedy else params.min_p,
        seed=job.seed,
        max_tokens=job.max_tokens,
        stop=stops,
        stop_token_ids=list(stop_ids) if with_stops else [],
        ignore_eos=True,
        logprobs=num_logprobs,
        detokenize=bool(stops),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        **flat,
    )


def raw_completions_of(job: Job, outputs: Sequence[CompletionOutput]) -> list[RawCompletion]:
    """Return the samples of one job, in order; a greedy sample is repeated `num_samples` times."""
    raws = []
    for output in sorted(outputs, key=lambda o: o.index):
        tokens = tuple(int(t) for t in output.token_ids)
        logprobs, kept = _sampled_logprobs(tokens, output.logprobs)
        mask = vars(output).get("sampling_mask")  # of vLLM's second runner, if switched on
        if mask is not None:
            kept = [pack_ids(sorted(ids)) for ids in mask.token_ids]
        facts = {KEPT_IDS: tuple(kept)} if kept else {}
        routes = vars(output).get("routed_experts")  # of the second runner, too
        if routes is not None:
            facts[ROUTES] = _routes(routes, len(job.prompt), len(tokens))
        raws.append(RawCompletion(tokens, logprobs, _reason(output.finish_reason), facts))
    return raws * job.num_samples if len(raws) == 1 else raws


def _routes(routes: NDArray[np.integer], num_prompt: int, num_tokens: int) -> tuple[str, ...]:
    """Return the fact `ROUTES` of tokens, from the experts of all positions but the last.

    Raises:
        RuntimeError: They are not of so many positions.
    """
    if len(routes) != num_prompt + num_tokens - 1:
        raise RuntimeError(
            f"vLLM gave the experts of {len(routes)} positions, expected "
            f"{num_prompt + num_tokens - 1}: report this with vLLM's version"
        )
    stops = range(num_prompt, num_prompt + num_tokens)
    starts = [0, *stops[:-1]]
    pairs = zip(starts, stops, strict=True)
    return tuple(routes[start:stop].tobytes().hex() for start, stop in pairs)


def _sampled_logprobs(
    tokens: tuple[int, ...], logprobs: object
) -> tuple[tuple[float, ...], list[str]]:
    """Return the logprob of each sampled token, and the kept ids if more tokens were returned.

    Tokens that cannot be drawn have -inf. If none of those returned has, more may be kept.
    """
    if isinstance(logprobs, list):
        pairs = zip(tokens, logprobs, strict=True)
        places = [(token, {i: float(each.logprob) for i, each in e.items()}) for token, e in pairs]
    else:
        flat = cast("FlatLogprobs", logprobs)
        if tuple(flat.token_ids) == tokens:
            return tuple(flat.logprobs), []
        starts, stops = flat.start_indices, flat.end_indices
        if tuple(flat.token_ids[start] for start in starts) != tokens:
            raise RuntimeError(
                f"vLLM gave logprobs of {len(starts)} tokens that are not the {len(tokens)} "
                "sampled ones: report this with vLLM's version"
            )
        places = [
            (token, dict(zip(flat.token_ids[a:b], flat.logprobs[a:b], strict=True)))
            for token, a, b in zip(tokens, starts, stops, strict=True)
        ]
    sampled = tuple(entry[token] for token, entry in places)
    if all(len(entry) == 1 for _, entry in places):
        return sampled, []
    kept = [[i for i, value in entry.items() if value > -math.inf] for _, entry in places]
    return sampled, [
        pack_ids(sorted(ids) if len(ids) < len(entry) else ())
        for ids, (_, entry) in zip(kept, places, strict=True)
    ]


def _reason(native: str | None) -> FinishReason:
    reasons: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}
    return reasons.get(native, "abort")


def scoring_params() -> object:
    """Return parameters for the logprobs of a prompt; the one sampled token is discarded."""
    from vllm import SamplingParams as NativeParams

    return NativeParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
