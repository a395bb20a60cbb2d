"""SGLang rollout engine, in a process beside each trainer process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from lightrft.engines.base import FinishedRows, RolloutEngine
from lightrft.engines.engine_weights import AssembledWeights
from lightrft.engines.media.families import family_of
from lightrft.engines.model_shape import model_configs, model_directory, model_shape
from lightrft.engines.process_state import preserved_process_state
from lightrft.engines.rows import (
    FinishedJob,
    Job,
    RawCompletion,
    RequestedSample,
    cut_at_string,
    cut_at_token,
    first_job,
    stream_in_parts,
)
from lightrft.engines.sglang.backend import flattened, generate_native, start_engine
from lightrft.engines.types import (
    EngineConfig,
    EngineParameter,
    EngineStatus,
    FinishReason,
    SamplingParams,
)

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine


class SGLangWeights(AssembledWeights):
    """Weights that are sent whole to the scheduler process.

    Args:
        engine: Started engine.
        manifest: Parameters of the engine, under checkpoint names.
        engine_name: Name of the engine in errors.
    """

    def __init__(
        self, engine: Engine, manifest: Sequence[EngineParameter], engine_name: str
    ) -> None:
        super().__init__(manifest, engine_name)
        self._engine = engine

    def _hand_over(self, tensors: dict[str, torch.Tensor]) -> None:
        if not self._is_updating:
            self._checked("begin_weight_update", self._engine.begin_weight_update)
            self._is_updating = True
        payload = flattened(list(tensors.items()))
        self._checked(
            "update_weights_from_tensor",
            lambda: self._engine.update_weights_from_tensor(
                [payload], load_format="flattened_bucket", flush_cache=False
            ),
        )

    def _end_update(self) -> None:
        self._checked("end_weight_update", self._engine.end_weight_update)

    def _checked(self, name: str, call: Callable[[], tuple[bool, str]]) -> None:
        """Raise a RuntimeError for a failure, which SGLang only returns."""
        is_ok, message = call()
        if not is_ok:
            raise RuntimeError(f"sglang refused {name}: {message}")

    def _stored_hashes(self, names: Sequence[str]) -> list[int]:
        """Return no hashes: the weights lie in another process, in SGLang's layout."""
        del names
        return []


class SGLangEngine(RolloutEngine):
    """Engine on SGLang; each rank has one, on its device.

    Stop strings are matched after sampling, since SGLang works on token ids here: a completion is
    sampled to its end or bound and cut where a string ends.

    Args:
        config: Settings; options are fields of SGLang's `ServerArgs`.
        module: Transformers model whose architecture to take if `config.model_path` is empty;
            weights that it holds in full are copied.

    Raises:
        ValueError: The engine would span several ranks, or the model reads images.
    """

    name = "sglang"

    sleeps_on_request_only = True

    def __init__(self, config: EngineConfig, *, module: nn.Module | None = None) -> None:
        super().__init__(config)
        if config.tensor_parallel_size > 1:
            raise ValueError(
                "the sglang engine runs on one device: got engine_tp_size "
                f"{config.tensor_parallel_size}, but SGLang starts the ranks of a group as "
                "processes of its own and cannot run within those of a launcher "
                "(https://github.com/sgl-project/sglang/issues/2736); set it to 1 or use "
                "engine_type vllm"
            )
        hf_config, generation_config, architecture = model_configs(config, module)
        if family_of(hf_config) is not None:
            raise ValueError(
                f"the sglang engine takes models of text: got a model of type "
                f"{hf_config.model_type!r}, whose images could not be compared with the trainer's "
                f"(without a GPU, SGLang registers no processor for them: its "
                "kernel fused_sigmoid_mul_cpu is missing); use engine_type vllm or hf"
            )
        self._read_limits(hf_config, generation_config)
        with model_directory(config.model_path, hf_config, architecture) as path:
            self._engine: Engine | None = start_engine(config, path, self._limits)
        shape = model_shape(hf_config, architecture)
        manifest = [
            EngineParameter(name, size, self._dtype, verifiable=False, tied_to=shape.tied.get(name))
            for name, size in shape.shapes.items()
        ]
        self.weights = SGLangWeights(self._engine, manifest, self.name)
        if not config.model_path:
            self.weights.unwritten.update(self.weights.owners)
        # Without a GPU there is no memory to release, and SGLang fails when it waits for one.
        self._releases_memory = torch.cuda.is_available()
        self._take_over(module)

    @property
    def _started(self) -> Engine:
        if self._engine is None:
            raise RuntimeError(f"the {self.name} engine is closed")
        return self._engine

    @property
    def native(self) -> object:
        """SGLang engine (`sglang.Engine`)."""
        return self._started

    def _check_params(self, params: SamplingParams) -> None:
        super()._check_params(params)
        # SGLang's sampler ends its process on this combination.
        is_seeded = str(self._config.options.get("enable_deterministic_inference", True)).lower()
        if params.min_p > 0 and not params.is_greedy and is_seeded == "true":
            raise ValueError(
                f"the sglang engine cannot draw by a seed with min_p: got min_p={params.min_p}; "
                "use top_p or top_k, another engine, or --engine_arg "
                "enable_deterministic_inference=false, which draws without the seed"
            )

    def stream_rows(self, rows: Sequence[RequestedSample], params: SamplingParams) -> FinishedRows:
        """Yield rows as they finish."""

        def run(jobs: Sequence[Job], *, with_stops: bool) -> list[list[FinishedJob]]:
            vocab_size = self._limits.vocab_size
            natives = [
                native_params(job, params, stop_ids, with_stops=with_stops, vocab_size=vocab_size)
                for job in jobs
            ]
            prompts = [job.prompt for job in jobs]
            with preserved_process_state():
                answers = generate_native(
                    self._started, prompts, natives, wants_support=params.truncates
                )
            return [[(i, [raw_of(answer, params)]) for i, answer in enumerate(answers)]]

        stop_ids = self._stop_ids(params)
        jobs = [first_job(row, params) for row in rows]
        # A token's random number depends on seed and position, so both parts have the same seed.
        for part in stream_in_parts(run, jobs, rows, params, None, next_part=0):
            yield [(row, self._cut(raw, params, stop_ids)) for row, raw in part]

    def _cut(
        self, raw: RawCompletion, params: SamplingParams, stop_ids: Sequence[int]
    ) -> RawCompletion:
        raw = cut_at_token(raw, stop_ids, min_tokens=params.min_tokens)
        return cut_at_string(raw, params, self._text) if params.stop else raw

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Score a sequence at temperature 1."""
        self.check_usable()
        if not token_ids:
            return []
        with preserved_process_state():
            answers = generate_native(
                self._started,
                [tuple(token_ids)],
                [{"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 0}],
                logprob_start=0,
            )
        about = cast("Mapping[str, object]", answers[0]["meta_info"])
        entries = cast("Sequence[tuple[float | None, int, None]]", about["input_token_logprobs"])
        return [0.0, *(float(entry[0] or 0.0) for entry in entries[1:])]

    def _release_memory(self, level: int, awake: Sequence[str]) -> None:
        del level
        if awake and self._releases_memory:
            self._started.release_memory_occupation(tags=list(awake))

    def _resume_memory(self, tags: Sequence[str]) -> None:
        if self._releases_memory:
            self._started.resume_memory_occupation(tags=list(tags))

    def drop_caches(self) -> None:
        """Drop SGLang's prefix cache.

        Raises:
            RuntimeError: SGLang refused because requests are running.
        """
        outcome = self._started.flush_cache()
        if not outcome.success:
            raise RuntimeError("SGLang did not flush its cache; requests must be finished")

    def close(self) -> None:
        """End SGLang's processes."""
        if self._engine is not None:
            self.abort()
            self._engine.shutdown()
            self._engine = None
            self.status = EngineStatus.SLEEPED


def native_params(
    job: Job, params: SamplingParams, stop_ids: Sequence[int], *, with_stops: bool, vocab_size: int
) -> dict[str, object]:
    """Return sampling parameters under SGLang's names.

    Args:
        job: Job to sample.
        params: Our sampling parameters.
        stop_ids: All ids that end a completion.
        with_stops: Whether stops count. SGLang ignores them together with end-of-sequence ids.
        vocab_size: Vocabulary size of the model.
    """
    top_k = -1
    if params.truncates:
        # SGLang returns the distribution over the kept tokens only if their number is bounded.
        top_k = vocab_size if params.top_k == -1 else min(params.top_k, vocab_size)
    return {
        "max_new_tokens": job.max_tokens,
        "temperature": params.temperature,
        "top_p": 1.0 if params.is_greedy else params.top_p,
        "top_k": top_k,
        "min_p": 0.0 if params.is_greedy else params.min_p,
        "sampling_seed": job.seed,
        "stop_token_ids": list(stop_ids),
        "ignore_eos": params.ignore_eos or not with_stops,
        "no_stop_trim": True,
    }


def raw_of(answer: Mapping[str, object], params: SamplingParams) -> RawCompletion:
    """Return the tokens and logprobs of one answer.

    Raises:
        RuntimeError: SGLang aborted the request; the message has SGLang's reason.
    """
    about = cast("Mapping[str, object]", answer["meta_info"])
    reason = cast("Mapping[str, object]", about["finish_reason"])
    if reason["type"] == "abort":
        raise RuntimeError(f"sglang gave a request up: {reason.get('message', 'no reason given')}")
    tokens = tuple(cast("Sequence[int]", answer["output_ids"]))
    if params.truncates:
        logprobs = tuple(cast("Sequence[float]", about["output_token_sampling_logprobs"]))
    else:
        entries = cast("Sequence[tuple[float, int, None]]", about["output_token_logprobs"])
        logprobs = tuple(entry[0] for entry in entries)
    finish: FinishReason = "stop" if reason["type"] == "stop" else "length"
    return RawCompletion(tokens, logprobs[: len(tokens)], finish)
