"""The embedded rollout engine: transformers in the trainer's own process."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch

from lightrft.engines.base import RolloutEngine
from lightrft.engines.hf.build import build_model
from lightrft.engines.hf.decode import DecodedRows, RowForward, StopRule, decode
from lightrft.engines.hf.forward import ModelTraits, PlainForward, WholeBatchForward
from lightrft.engines.hf.random import row_keys
from lightrft.engines.hf.requests import Limits, chunks_of_rows, rows_of_requests
from lightrft.engines.hf.stopping import StopStringMatcher, end_of_sequence_ids, stop_token_table
from lightrft.engines.hf.text import Text
from lightrft.engines.hf.weights import ParameterStore
from lightrft.engines.types import Completion, EngineStatus, FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn
    from transformers import PreTrainedModel

    from lightrft.engines.hf.requests import Row
    from lightrft.engines.types import (
        EngineConfig,
        EngineParameter,
        GenerationRequest,
        SamplingParams,
        WeightPiece,
    )

_logger = logging.getLogger(__name__)
_TAGS = ("weights", "kv_cache")


class HFEngine(RolloutEngine):
    """Samples with its own decode loop over the transformers forward.

    Each rank generates its own prompts: `tensor_parallel_size` forms no groups here, and
    `memory_utilization` has no effect because the cache is allocated per call.

    Args:
        config: What to load; options: "device", "attn_implementation".
        module: A transformers model whose architecture (and, where it holds them in full, weights)
            to take instead of reading `config.model_path`.
    """

    name = "hf"
    runs_on_every_rank = False

    def __init__(self, config: EngineConfig, *, module: nn.Module | None = None) -> None:
        super().__init__()
        if config.tensor_parallel_size > 1:
            _logger.info(
                "the hf engine generates on each rank by itself; tensor_parallel_size=%d only "
                "forms groups",
                config.tensor_parallel_size,
            )
        built = build_model(config, module)
        self._config = config
        self._model: PreTrainedModel = built.model
        self._traits = ModelTraits(self._model)
        self._weights = ParameterStore(self._model, self.name, unwritten=built.unwritten)
        self._text = Text(config.model_path)
        text_config = self._model.config.get_text_config()
        self._eos_ids = end_of_sequence_ids(self._model.config, self._model.generation_config)
        self._limits = Limits(
            vocab_size=text_config.vocab_size,
            max_model_len=config.max_model_len or text_config.max_position_embeddings,
        )
        self._sleeping_tags: set[str] = set()

    @property
    def native(self) -> PreTrainedModel:
        """The transformers model."""
        return self._model

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
        chunks = chunks_of_rows(
            rows,
            max_rows=self._config.micro_batch_size,
            equal_lengths=not self._traits.can_drop_rows,
        )
        completions: dict[int, Completion] = {}
        for chunk in chunks:
            for row, completion in zip(chunk, self._sample(chunk, sampling_params), strict=True):
                completions[row.index] = completion
        return [completions[index] for index in range(len(rows))]

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Scores a sequence at temperature 1; see `RolloutEngine.score`."""
        self.check_usable()
        if not token_ids:
            return []
        input_ids = torch.tensor([list(token_ids)], device=self._model.device)
        logits = self._model(input_ids=input_ids, use_cache=False).logits[0, :-1]
        logprobs = logits.float().log_softmax(dim=-1).gather(-1, input_ids[0, 1:, None])
        return [0.0, *logprobs.squeeze(-1).tolist()]

    def sleep(self, level: int = 1) -> None:
        """Releases memory; weights that alias the trainer's are left where they are."""
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 or 2: got {level}")
        if self._weights.transaction.is_open:
            raise RuntimeError("the hf engine cannot sleep while a weight update is open")
        self._weights.release(level)
        self._sleeping_tags = set(_TAGS)
        self.status = EngineStatus.SLEEPED

    def wake_up(self, tags: tuple[str, ...] | None = None) -> None:
        """Takes memory back; the engine is awake once both tags are."""
        tags = _TAGS if tags is None else tags
        unknown = sorted(set(tags) - set(_TAGS))
        if unknown:
            raise ValueError(f"unknown wake-up tags {unknown}; known: {', '.join(_TAGS)}")
        if "weights" in tags:
            self._weights.restore()
        self._sleeping_tags -= set(tags)
        if not self._sleeping_tags:
            self.status = EngineStatus.WAKEUP

    @property
    def weights_were_dropped(self) -> bool:
        """Whether some parameter holds no weights, or none was ever sent."""
        return self.weights_version < 0 or bool(self._weights.transaction.unwritten)

    def parameter_manifest(self) -> tuple[EngineParameter, ...]:
        """Every parameter of the model, in its own order."""
        return self._weights.manifest

    def begin_weight_update(self) -> None:
        """Opens an update."""
        self._weights.transaction.begin()

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        """Copies pieces into the parameters."""
        self._weights.load(pieces)

    def finish_weight_update(self) -> None:
        """Closes the update; raises if a parameter was written in part."""
        self._weights.transaction.finish()

    def reset_caches(self) -> None:
        """Ends the update; no activations outlive a call of `generate`."""
        self._weights.transaction.reset_caches()

    def hash_parameters(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Hashes of the parameters themselves; without names, of all that own their storage."""
        return self._weights.hashes(names)

    def alias_weights(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Uses the given tensors as parameters if names, shapes, dtypes and devices agree."""
        return self._weights.alias(tensors)

    def check_usable(self) -> None:
        """Raises unless the engine is awake and holds a complete set of weights."""
        self._weights.transaction.check_settled()
        super().check_usable()

    @torch.inference_mode()
    def _sample(self, rows: Sequence[Row], params: SamplingParams) -> list[Completion]:
        device = self._model.device
        keys = row_keys(
            params.seed,
            [row.request_id for row in rows],
            [row.sample_index for row in rows],
            device=device,
        )
        decoded = decode(
            self._forward(rows),
            keys=keys,
            limits=[row.max_tokens for row in rows],
            params=params,
            rule=self._stop_rule(params, len(rows)),
        )
        return self._completions(rows, decoded, params)

    def _forward(self, rows: Sequence[Row]) -> RowForward:
        if not self._traits.can_drop_rows:
            return WholeBatchForward(self._model, self._traits, [row.prompt for row in rows])
        # Rows with the same prompt share one run over it, whichever request they belong to.
        index_of: dict[tuple[int, ...], int] = {}
        prompt_of_row = [index_of.setdefault(row.prompt, len(index_of)) for row in rows]
        return PlainForward(self._model, self._traits, list(index_of), prompt_of_row)

    def _stop_rule(self, params: SamplingParams, num_rows: int) -> StopRule:
        stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids))
        table = None
        if stop_ids:
            table = stop_token_table(stop_ids, self._limits.vocab_size, device=self._model.device)
        matcher = None
        if params.stop:
            self._text.load()
            matcher = StopStringMatcher(params.stop, self._text, num_rows)
        return StopRule(table, matcher, params.min_tokens)

    def _completions(
        self, rows: Sequence[Row], decoded: DecodedRows, params: SamplingParams
    ) -> list[Completion]:
        completions = []
        for row, tokens, logprobs, length, is_stopped in zip(
            rows,
            decoded.token_ids.T.tolist(),
            decoded.logprobs.T.tolist(),
            decoded.lengths.tolist(),
            decoded.is_stopped.tolist(),
            strict=True,
        ):
            reason: FinishReason = "stop" if is_stopped else "length"
            if not math.isfinite(math.fsum(logprobs[:length])):
                raise FloatingPointError(
                    f"request {row.request_id}: the model's logits are not finite "
                    f"(weights_version {self.weights_version})"
                )
            completions.append(
                Completion(
                    request_id=row.request_id,
                    sample_index=row.sample_index,
                    prompt_token_ids=row.prompt,
                    output_token_ids=tuple(tokens[:length]),
                    output_logprobs=tuple(logprobs[:length]),
                    logprobs_law=params.logprobs_law,
                    finish_reason=reason,
                    weights_version=self.weights_version,
                )
            )
        return completions
