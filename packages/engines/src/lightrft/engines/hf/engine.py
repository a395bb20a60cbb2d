"""The embedded rollout engine: transformers in the trainer's own process."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightrft.engines.hf.build import build_model
from lightrft.engines.hf.decode import DecodedRows, RowForward, StopRule, decode
from lightrft.engines.hf.forward import ModelTraits, PlainForward, WholeBatchForward
from lightrft.engines.hf.random import row_keys
from lightrft.engines.hf.stopping import StopStringMatcher, end_of_sequence_ids, stop_token_table
from lightrft.engines.hf.text import Text
from lightrft.engines.local_engine import LocalEngine
from lightrft.engines.parameter_store import ParameterStore
from lightrft.engines.requests import Limits, Row, chunks_of_rows, rows_of_requests
from lightrft.engines.types import (
    Completion,
    EngineConfig,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_logger = logging.getLogger(__name__)


class HFEngine(LocalEngine):
    """Samples with its own decode loop over the transformers forward.

    Each rank generates its own prompts: `tensor_parallel_size` forms no groups here, and
    `memory_utilization` has no effect because the cache is allocated per call.

    Args:
        config: What to load; options: "device", "attn_implementation".
        module: A transformers model whose architecture (and, where it holds them in full, weights)
            to take instead of reading `config.model_path`.
    """

    name = "hf"

    def __init__(self, config: EngineConfig, *, module: nn.Module | None = None) -> None:
        built = build_model(config, module)
        parameters = dict(built.model.named_parameters(remove_duplicate=False))
        super().__init__(ParameterStore(parameters, self.name, unwritten=built.unwritten))
        if config.tensor_parallel_size > 1:
            _logger.info(
                "the hf engine generates on each rank by itself; tensor_parallel_size=%d only "
                "forms groups",
                config.tensor_parallel_size,
            )
        self._config = config
        self._model: PreTrainedModel = built.model
        self._traits = ModelTraits(self._model)
        self._text = Text(config.model_path)
        text_config = self._model.config.get_text_config()
        self._eos_ids = end_of_sequence_ids(self._model.config, self._model.generation_config)
        self._limits = Limits(
            vocab_size=text_config.vocab_size,
            max_model_len=config.max_model_len
            # Models without positions (state space) have no such field.
            or text_config.to_dict().get("max_position_embeddings"),
            engine_name=self.name,
        )

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
                    logprobs_mode=params.logprobs_mode,
                    finish_reason=reason,
                    weights_version=self.weights_version,
                )
            )
        return completions
