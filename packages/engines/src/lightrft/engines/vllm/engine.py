"""The vLLM rollout engine, in the trainer's own process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from lightrft.engines.base import RolloutEngine
from lightrft.engines.hf.build import architecture_of
from lightrft.engines.hf.stopping import end_of_sequence_ids
from lightrft.engines.hf.text import Text
from lightrft.engines.model_shape import model_configs, model_shape
from lightrft.engines.parameter_store import is_full_tensor
from lightrft.engines.process_state import preserved_process_state
from lightrft.engines.raw_completions import RawCompletion, completion_of, joined
from lightrft.engines.requests import Limits, Row, rows_of_requests
from lightrft.engines.types import (
    Completion,
    EngineConfig,
    EngineParameter,
    EngineStatus,
    GenerationRequest,
    SamplingParams,
    WeightPiece,
)
from lightrft.engines.vllm.backend import Backend, has_tokenizer, start_backend, stop_backend
from lightrft.engines.vllm.layout import LayoutReader
from lightrft.engines.vllm.sampling import (
    Job,
    first_jobs,
    native_params,
    next_job,
    params_of_native,
    raw_completions_of,
    scoring_params,
)
from lightrft.engines.vllm.weights import VLLMWeights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TAGS = ("weights", "kv_cache")


class VLLMEngine(RolloutEngine):
    """Samples with vLLM beside the trainer.

    Every rank of a tensor-parallel group holds a shard and must make the same calls in the same
    order.

    Args:
        config: What to start; options are fields of vLLM's `EngineArgs`.
        module: A transformers model whose architecture to take where `config.model_path` is empty;
            weights that it holds in full are taken over.
    """

    name = "vllm"

    def __init__(self, config: EngineConfig, *, module: nn.Module | None = None) -> None:
        super().__init__()
        if config.dtype not in _DTYPES:
            raise ValueError(
                f"unknown dtype {config.dtype!r} of the vllm engine; known: {', '.join(_DTYPES)}"
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
        self._has_tokenizer = bool(config.model_path) and has_tokenizer(config.model_path)
        architecture = (
            architecture_of(type(module)) if isinstance(module, PreTrainedModel) else None
        )
        self._backend: Backend | None = start_backend(
            config,
            hf_config,
            architecture=None if architecture is None else architecture.__name__,
            max_model_len=self._limits.max_model_len or 0,
        )
        self._weights = self._read_weights(hf_config, architecture)
        self._sleeping_tags: set[str] = set()
        if not config.model_path and module is not None:
            self._take_over(module)

    def _read_weights(
        self, hf_config: PretrainedConfig, architecture: type[PreTrainedModel] | None
    ) -> VLLMWeights:
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        layout = LayoutReader(
            self._started.model,
            model_shape(hf_config, architecture),
            tp_rank=group.rank_in_group,
            tp_size=group.world_size,
            default_dtype=_DTYPES[self._config.dtype],
        ).read()
        has_no_weights = (
            not self._config.model_path or self._config.options.get("load_format") == "dummy"
        )
        owners = [p.name for p in layout.manifest if p.tied_to is None]
        unwritten = owners if has_no_weights else []
        return VLLMWeights(self._started, layout, self.name, unwritten=unwritten)

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
    def _started(self) -> Backend:
        if self._backend is None:
            raise RuntimeError(f"the {self.name} engine is closed")
        return self._backend

    @property
    def native(self) -> object:
        """The `vllm.LLM`."""
        return self._started.llm

    def params_of_native(self, native: object) -> SamplingParams | None:
        """Ours from a `vllm.SamplingParams`; see `RolloutEngine.params_of_native`."""
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
        if sampling_params.stop:
            self._check_stop_strings(sampling_params)
        raws = self._sample(rows, sampling_params)
        return [
            completion_of(row, raw, sampling_params, self.weights_version)
            for row, raw in zip(rows, raws, strict=True)
        ]

    def _check_stop_strings(self, params: SamplingParams) -> None:
        if any(not text for text in params.stop):
            raise ValueError(f"stop strings must not be empty: got {params.stop!r}")
        self._text.load()
        if not self._has_tokenizer:
            raise FileNotFoundError(
                f"stop strings need a tokenizer, and {self._config.model_path!r} has none; use "
                "stop_token_ids"
            )

    def _sample(self, rows: Sequence[Row], params: SamplingParams) -> list[RawCompletion]:
        """One raw a row. Before `min_tokens` nothing stops, so those come as a first part."""
        has_minimum = params.min_tokens > 1
        parts = self._run(first_jobs(rows, params), params, with_stops=not has_minimum)
        raws = [raw for part in parts for raw in part]
        if not has_minimum:
            return raws
        jobs = [next_job(row, d, params) for row, d in zip(rows, raws, strict=True)]
        answers = iter(self._run([job for job in jobs if job], params, with_stops=True))
        decoder = self._text if params.stop else None
        return [
            raw if job is None else joined(raw, next(answers)[0], params, decoder)
            for job, raw in zip(jobs, raws, strict=True)
        ]

    def _run(
        self, jobs: Sequence[Job], params: SamplingParams, *, with_stops: bool
    ) -> list[list[RawCompletion]]:
        if not jobs:
            return []
        eos_ids = () if params.ignore_eos else self._eos_ids
        stop_ids = sorted({*params.stop_token_ids, *eos_ids})
        natives = [native_params(job, params, stop_ids, with_stops=with_stops) for job in jobs]
        outputs = self._call([job.prompt for job in jobs], natives)
        return [raw_completions_of(job, o.outputs) for job, o in zip(jobs, outputs, strict=True)]

    def _call(self, prompts: Sequence[tuple[int, ...]], natives: Sequence[object]):  # type: ignore[no-untyped-def]  # noqa: ANN202
        """Answers of vLLM in the order of the prompts; nothing is left queued after a failure."""
        llm = self._started.llm
        with preserved_process_state():
            try:
                return llm.generate(  # type: ignore[attr-defined]
                    [{"prompt_token_ids": list(prompt)} for prompt in prompts],
                    sampling_params=list(natives),
                    use_tqdm=False,
                )
            except BaseException:
                engine = llm.llm_engine  # type: ignore[attr-defined]
                engine.abort_request(list(engine.output_processor.request_states), internal=True)
                raise

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Scores a sequence at temperature 1; see `RolloutEngine.score`."""
        self.check_usable()
        if not token_ids:
            return []
        answer = self._call([tuple(token_ids)], [scoring_params()])[0]
        entries = zip(token_ids[1:], answer.prompt_logprobs[1:], strict=True)
        return [0.0, *(float(entry[token].logprob) for token, entry in entries)]

    def sleep(self, level: int = 1) -> None:
        """Releases memory, on a GPU; elsewhere vLLM keeps it and only the state changes.

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
        self._started.llm.sleep(level=level)  # type: ignore[attr-defined]
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
        if woken:
            self._started.llm.wake_up(tags=woken)  # type: ignore[attr-defined]
        self._sleeping_tags -= set(woken)
        self._weights.is_resident = "weights" not in self._sleeping_tags
        if not self._sleeping_tags:
            self.status = EngineStatus.WAKEUP

    @property
    def weights_were_dropped(self) -> bool:
        """Whether some parameter holds no weights, or none was ever sent."""
        return self.weights_version < 0 or bool(self._weights.transaction.unwritten)

    def parameter_manifest(self) -> tuple[EngineParameter, ...]:
        """Every parameter of the checkpoint, in the model's order."""
        return self._weights.manifest

    def begin_weight_update(self) -> None:
        """Opens an update."""
        self._weights.begin()

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        """Copies pieces; complete modules go into vLLM."""
        self._weights.load(pieces)

    def finish_weight_update(self) -> None:
        """Closes the update; raises if a parameter or a fused module is incomplete."""
        self._weights.finish()

    def reset_caches(self) -> None:
        """Drops vLLM's prefix and encoder caches, which ends an update.

        Raises:
            RuntimeError: vLLM refused because requests are running.
        """
        llm = self._started.llm
        if not llm.reset_prefix_cache():  # type: ignore[attr-defined]
            raise RuntimeError("vLLM did not reset its prefix cache; requests must be finished")
        llm.llm_engine.reset_encoder_cache()  # type: ignore[attr-defined]
        self._weights.transaction.reset_caches()

    def hash_parameters(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Hashes of vLLM's tensors; without names, of all that can be read back."""
        return self._weights.hashes(names)

    def check_usable(self) -> None:
        """Raises unless the engine is awake and holds a complete set of weights."""
        _ = self._started
        self._weights.transaction.check_settled()
        super().check_usable()

    def close(self) -> None:
        """Stops vLLM; the trainer's process group stays."""
        if self._backend is not None:
            stop_backend(self._backend)
            self._backend = None
            self.status = EngineStatus.SLEEPED
