"""The embedded rollout engine: transformers in the trainer's own process."""

import logging
from collections.abc import Sequence

import torch
from torch import nn

from lightrft.engines.base import FinishedRows, RolloutEngine
from lightrft.engines.hf.build import build_model
from lightrft.engines.hf.decode import RowForward, StopRule, decode, stop_token_table
from lightrft.engines.hf.forward import ModelTraits, PlainForward, WholeBatchForward
from lightrft.engines.hf.layers import module_outputs
from lightrft.engines.media.prompts import EncodedPrompt
from lightrft.engines.parameter_store import ParameterStore
from lightrft.engines.random import row_keys
from lightrft.engines.raw_completions import RawCompletion
from lightrft.engines.requests import Row, chunks_of_rows
from lightrft.engines.text import StopStringMatcher
from lightrft.engines.types import EngineConfig, SamplingParams

_logger = logging.getLogger(__name__)


class HFEngine(RolloutEngine):
    """Engine with its own decode loop over the transformers forward.

    Each rank generates its own prompts: `tensor_parallel_size` forms no groups here, and
    `memory_utilization` has no effect because the cache is allocated per call.

    Args:
        config: What to load; options: "device", "attn_implementation".
        module: A transformers model whose architecture (and, where it holds them in full, weights)
            to take instead of reading `config.model_path`.
    """

    name = "hf"
    runs_on_every_rank = False
    streams = True
    reads_media = True

    def __init__(self, config: EngineConfig, *, module: nn.Module | None = None) -> None:
        super().__init__(config)
        self._model, unwritten = build_model(config, module)
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        self._weights = ParameterStore(parameters, self.name)
        self._weights.unwritten.update(unwritten)
        if config.tensor_parallel_size > 1:
            _logger.info(
                "the hf engine generates on each rank by itself; tensor_parallel_size=%d only "
                "forms groups",
                config.tensor_parallel_size,
            )
        self._traits = ModelTraits(self._model)
        self._read_limits(self._model.config, self._model.generation_config)

    @property
    def native(self) -> object:
        """The transformers model."""
        return self._model

    def _stream(self, rows: Sequence[Row], params: SamplingParams) -> FinishedRows:
        chunks = chunks_of_rows(
            rows,
            max_rows=self._config.micro_batch_size,
            equal_lengths=not self._traits.can_drop_rows,
        )
        for chunk in chunks:
            yield from self._decode(chunk, params)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Scores a sequence at temperature 1; see `RolloutEngine.score`."""
        self.check_usable()
        if not token_ids:
            return []
        input_ids = torch.tensor([list(token_ids)], device=self._model.device)
        logits = self._model(input_ids=input_ids, use_cache=False).logits[0, :-1]
        if self._traits.forbidden is not None:
            logits = logits.index_fill(-1, self._traits.forbidden, float("-inf"))
        logprobs = logits.float().log_softmax(dim=-1).gather(-1, input_ids[0, 1:, None])
        return [0.0, *logprobs.squeeze(-1).tolist()]

    @torch.inference_mode()
    def layer_outputs(
        self, token_ids: Sequence[int], media: EncodedPrompt | None
    ) -> dict[str, torch.Tensor]:
        """Outputs of all modules for one sequence of text."""
        if media is not None:
            return {}
        tokens = torch.tensor([list(token_ids)], device=self._model.device)
        mask = torch.ones_like(tokens)
        return module_outputs(
            self._model, lambda: self._model(input_ids=tokens, attention_mask=mask, use_cache=False)
        )

    @torch.inference_mode()
    def _decode(self, rows: Sequence[Row], params: SamplingParams) -> FinishedRows:
        device = self._model.device
        keys = row_keys(
            params.seed,
            [row.request_id for row in rows],
            [row.sample_index for row in rows],
            device=device,
        )
        for ended in decode(
            self._forward(rows),
            keys=keys,
            limits=[row.max_tokens for row in rows],
            params=params,
            rule=self._stop_rule(params, len(rows)),
        ):
            yield [
                (
                    rows[row],
                    RawCompletion(tuple(tokens), tuple(logprobs), "stop" if stops else "length"),
                )
                for row, tokens, logprobs, stops in ended
            ]

    def _forward(self, rows: Sequence[Row]) -> RowForward:
        if not self._traits.can_drop_rows:
            prompts, media = [row.prompt for row in rows], [row.media for row in rows]
            return WholeBatchForward(self._model, self._traits, prompts, media)
        # Rows with the same prompt share one run over it, whichever request they belong to.
        index_of: dict[tuple[tuple[int, ...], EncodedPrompt | None], int] = {}
        prompt_of_row = [
            index_of.setdefault((row.prompt, row.media), len(index_of)) for row in rows
        ]
        prompts, media = [key[0] for key in index_of], [key[1] for key in index_of]
        return PlainForward(self._model, self._traits, prompts, prompt_of_row, media)

    def _stop_rule(self, params: SamplingParams, num_rows: int) -> StopRule:
        stop_ids = self._stop_ids(params)
        table = None
        if stop_ids:
            table = stop_token_table(stop_ids, self._limits.vocab_size, device=self._model.device)
        matcher = StopStringMatcher(params.stop, self._text, num_rows) if params.stop else None
        return StopRule(table, matcher, params.min_tokens)
