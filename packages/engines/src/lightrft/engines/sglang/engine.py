"""The SGLang rollout engine, in a process beside each trainer process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from lightrft.engines.base import RolloutEngine
from lightrft.engines.hf.build import architecture_of
from lightrft.engines.hf.stopping import end_of_sequence_ids
from lightrft.engines.hf.text import Text
from lightrft.engines.model_shape import ModelShape, model_configs, model_shape
from lightrft.engines.parameter_store import is_full_tensor
from lightrft.engines.process_state import preserved_process_state
from lightrft.engines.raw_completions import (
    RawCompletion,
    completion_of,
    cut_at_string,
    cut_at_token,
    joined,
)
from lightrft.engines.requests import Limits, Row, rows_of_requests
from lightrft.engines.sglang.backend import Engine, generate_native, start_engine
from lightrft.engines.sglang.sampling import (
    Job,
    draft_of,
    first_job,
    native_params,
    next_job,
    params_of_native,
)
from lightrft.engines.sglang.weights import SGLangWeights
from lightrft.engines.types import (
    Completion,
    EngineConfig,
    EngineParameter,
    EngineStatus,
    GenerationRequest,
    SamplingParams,
    WeightPiece,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TAGS = ("weights", "kv_cache")


class SGLangEngine(RolloutEngine):
    """Samples with SGLang; each rank has an engine of its own, on its own device.

    Stop strings are found after sampling: a completion is sampled to its end or bound and cut
    where a string ends, since SGLang works on token ids here.

    Args:
        config: What to start; options are fields of SGLang's `ServerArgs`.
        module: A transformers model whose architecture to take where `config.model_path` is empty;
            weights that it holds in full are taken over.

    Raises:
        ValueError: The engine would span several ranks.
    """

    name = "sglang"

    def __init__(self, config: EngineConfig, *, module: nn.Module | None = None) -> None:
        super().__init__()
        if config.dtype not in _DTYPES:
            raise ValueError(
                f"unknown dtype {config.dtype!r} of the sglang engine; known: {', '.join(_DTYPES)}"
            )
        if config.tensor_parallel_size > 1:
            raise ValueError(
                "the sglang engine runs on one device: got engine_tp_size "
                f"{config.tensor_parallel_size}; set it to 1 or use engine_type vllm"
            )
        hf_config, generation_config = model_configs(config, module)
        text_config = hf_config.get_text_config()
        self._config = config
        self._limits = Limits(
            vocab_size=text_config.vocab_size,
            max_model_len=config.max_model_len or text_config.max_position_embeddings,
            engine_name=self.name,
        )
        self._eos_ids = end_of_sequence_ids(hf_config, generation_config)
        self._text = Text(config.model_path)
        architecture = (
            architecture_of(type(module)) if isinstance(module, PreTrainedModel) else None
        )
        self._engine: Engine | None = start_engine(
            config,
            hf_config,
            architecture=None if architecture is None else architecture.__name__,
            max_model_len=self._limits.max_model_len or 0,
            vocab_size=self._limits.vocab_size,
        )
        manifest = _manifest(model_shape(hf_config, architecture), _DTYPES[config.dtype])
        owners = [p.name for p in manifest if p.tied_to is None]
        self._weights = SGLangWeights(
            self._engine, manifest, self.name, unwritten=[] if config.model_path else owners
        )
        self._sleeping_tags: set[str] = set()
        # Without a GPU there is nothing to release, and SGLang fails where it waits for one.
        self._releases_memory = torch.cuda.is_available()
        if not config.model_path and module is not None:
            self._take_over(module)

    def _take_over(self, module: nn.Module) -> None:
        """Loads what a module holds in full; a sharded one is left to the first weight update."""
        held = dict(module.named_parameters(remove_duplicate=False))
        pieces = []
        for parameter in self.parameter_manifest():
            tensor = held.get(parameter.name)
            if parameter.tied_to is not None:
                continue
            if tensor is None or not is_full_tensor(tensor, torch.Size(parameter.shape)):
                return
            flat = tensor.detach().reshape(-1).to(parameter.dtype)
            pieces.append(WeightPiece(parameter.name, parameter.shape, 0, flat))
        self.begin_weight_update()
        self.load_weights(pieces)
        self.finish_weight_update()
        self.reset_caches()

    @property
    def _started(self) -> Engine:
        if self._engine is None:
            raise RuntimeError(f"the {self.name} engine is closed")
        return self._engine

    @property
    def native(self) -> object:
        """The `sglang.Engine`."""
        return self._started

    def params_of_native(self, native: object) -> SamplingParams | None:
        """Ours from SGLang's `SamplingParams`; see `RolloutEngine.params_of_native`."""
        return params_of_native(native)

    def generate(
        self, requests: Sequence[GenerationRequest], sampling_params: SamplingParams
    ) -> list[Completion]:
        """Samples completions, prompt-major; see `RolloutEngine.generate`.

        Raises:
            FloatingPointError: The model's logits are not finite.
        """
        self.check_usable()
        rows = rows_of_requests(
            requests,
            num_samples=sampling_params.n,
            max_tokens=sampling_params.max_tokens,
            limits=self._limits,
            encode=self._text.encode,
        )
        self._check_law(sampling_params)
        if sampling_params.stop:
            if any(not text for text in sampling_params.stop):
                raise ValueError(f"stop strings must not be empty: got {sampling_params.stop!r}")
            self._text.load()
        raws = self._sample(rows, sampling_params)
        return [
            completion_of(row, raw, sampling_params, self.weights_version)
            for row, raw in zip(rows, raws, strict=True)
        ]

    def _check_law(self, params: SamplingParams) -> None:
        # SGLang's sampler ends its process on this combination.
        is_seeded = str(self._config.options.get("enable_deterministic_inference", True)).lower()
        if params.min_p > 0 and not params.is_greedy and is_seeded == "true":
            raise ValueError(
                f"the sglang engine cannot draw by a seed with min_p: got min_p={params.min_p}; "
                "use top_p or top_k, another engine, or --engine_arg "
                "enable_deterministic_inference=false, which draws without the seed"
            )

    def _sample(self, rows: Sequence[Row], params: SamplingParams) -> list[RawCompletion]:
        """One raw a row. Before `min_tokens` nothing stops, so those come as a first part."""
        has_minimum = params.min_tokens > 1
        eos_ids = () if params.ignore_eos else self._eos_ids
        stop_ids = sorted({*params.stop_token_ids, *eos_ids})
        jobs = [first_job(row, params) for row in rows]
        raws = self._run(jobs, params, stop_ids, with_stops=not has_minimum)
        if has_minimum:
            raws = self._continue(rows, raws, params, stop_ids)
        raws = [cut_at_token(d, stop_ids, min_tokens=params.min_tokens) for d in raws]
        if params.stop:
            raws = [cut_at_string(raw, params, self._text) for raw in raws]
        return raws

    def _continue(
        self,
        rows: Sequence[Row],
        raws: Sequence[RawCompletion],
        params: SamplingParams,
        stop_ids: Sequence[int],
    ) -> list[RawCompletion]:
        jobs = [next_job(row, raw, params) for row, raw in zip(rows, raws, strict=True)]
        wanted = [job for job in jobs if job is not None]
        answers = iter(self._run(wanted, params, stop_ids, with_stops=True))
        return [
            raw if job is None else joined(raw, next(answers), params, None)
            for job, raw in zip(jobs, raws, strict=True)
        ]

    def _run(
        self,
        jobs: Sequence[Job],
        params: SamplingParams,
        stop_ids: Sequence[int],
        *,
        with_stops: bool,
    ) -> list[RawCompletion]:
        if not jobs:
            return []
        natives = [
            native_params(
                job,
                params,
                stop_ids,
                with_stops=with_stops,
                vocab_size=self._limits.vocab_size,
            )
            for job in jobs
        ]
        with preserved_process_state():
            answers = generate_native(
                self._started,
                [job.prompt for job in jobs],
                natives,
                wants_support=params.truncates,
            )
        return [draft_of(answer, params) for answer in answers]

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Scores a sequence at temperature 1; see `RolloutEngine.score`."""
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

    def sleep(self, level: int = 1) -> None:
        """Releases memory, on a GPU; elsewhere SGLang keeps it and only the state changes.

        Raises:
            ValueError: The level is neither 1 nor 2.
            RuntimeError: A weight update is open, or sleeping was disabled at the start.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 or 2: got {level}")
        if self._weights.transaction.is_open:
            raise RuntimeError(f"the {self.name} engine cannot sleep while a weight update is open")
        if not self._config.enable_sleep:
            raise RuntimeError(
                f"the {self.name} engine was started without sleep; set enable_engine_sleep"
            )
        awake = [tag for tag in _TAGS if tag not in self._sleeping_tags]
        if awake and self._releases_memory:
            self._started.release_memory_occupation(tags=awake)
        self._weights.release(level)
        self._sleeping_tags = set(_TAGS)
        self.status = EngineStatus.SLEEPED

    def wake_up(self, tags: tuple[str, ...] | None = None) -> None:
        """Takes memory back; the engine is awake once both tags are.

        Raises:
            ValueError: A tag is unknown.
        """
        unknown = sorted(set(tags or ()) - set(_TAGS))
        if unknown:
            raise ValueError(f"unknown wake-up tags {unknown}; known: {', '.join(_TAGS)}")
        woken = [tag for tag in _TAGS if tag in self._sleeping_tags and tag in (tags or _TAGS)]
        if woken and self._releases_memory:
            self._started.resume_memory_occupation(tags=woken)
        self._sleeping_tags -= set(woken)
        self._weights.is_resident = "weights" not in self._sleeping_tags
        if not self._sleeping_tags:
            self.status = EngineStatus.WAKEUP

    @property
    def weights_were_dropped(self) -> bool:
        """Whether some parameter holds no weights, or none was ever sent."""
        return self.weights_version < 0 or bool(self._weights.transaction.unwritten)

    def parameter_manifest(self) -> tuple[EngineParameter, ...]:
        """Every parameter of the checkpoint; none can be read back."""
        return self._weights.manifest

    def begin_weight_update(self) -> None:
        """Opens an update."""
        self._weights.begin()

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        """Sends pieces; a parameter in several pieces goes once it is complete."""
        self._weights.load(pieces)

    def finish_weight_update(self) -> None:
        """Closes the update; raises if a parameter is incomplete."""
        self._weights.finish()

    def reset_caches(self) -> None:
        """Drops SGLang's prefix cache, which ends an update.

        Raises:
            RuntimeError: SGLang refused because requests are running.
        """
        outcome = self._started.flush_cache()  # type: ignore[attr-defined]
        if not outcome.success:
            raise RuntimeError("SGLang did not flush its cache; requests must be finished")
        self._weights.transaction.reset_caches()

    def hash_parameters(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Empty: no parameter can be read back; a sync hashes what it hands over instead."""
        return self._weights.hashes(names)

    def check_usable(self) -> None:
        """Raises unless the engine is awake and holds a complete set of weights."""
        _ = self._started
        self._weights.transaction.check_settled()
        super().check_usable()

    def close(self) -> None:
        """Ends SGLang's processes."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
            self.status = EngineStatus.SLEEPED


def _manifest(shape: ModelShape, dtype: torch.dtype) -> tuple[EngineParameter, ...]:
    return tuple(
        EngineParameter(name, full_shape, dtype, verifiable=False, tied_to=shape.tied.get(name))
        for name, full_shape in shape.shapes.items()
    )
