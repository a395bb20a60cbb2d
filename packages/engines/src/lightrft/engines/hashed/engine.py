"""Rollout engine whose logits are hashes of weights and tokens, to try a loop without a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from lightrft.engines.backend_options import check_options
from lightrft.engines.base import FinishedRows, RolloutEngine
from lightrft.engines.engine_weights import ParameterStore
from lightrft.engines.hf.engine import build_model
from lightrft.engines.nf4 import stored_tensors
from lightrft.engines.rows import RawCompletion, RequestedSample
from lightrft.engines.sampling import draw_tokens, mix64, row_keys, sampling_logprobs, uniforms
from lightrft.engines.types import EngineConfig, SamplingParams

_CPU = torch.device("cpu")


class HashedEngine(RolloutEngine):
    """Engine with a distribution that depends on the tokens so far and on every weight.

    logits = 4 u(weights, tokens so far), with u in [0, 1) a hash. `score` agrees with the logprobs
    of completions. A prompt keeps the weights that it was first run with until `reset_caches`, as
    in a prefix cache.

    Args:
        config: Settings; `options` must be empty.
        module: Transformers model with parameters to copy, instead of reading
            `config.model_path`.
    """

    name = "hashed"
    runs_on_every_rank = False
    streams = True
    computes_model = False

    def __init__(self, config: EngineConfig, *, module: nn.Module | None = None) -> None:
        check_options(config.options, (), engine_name=self.name)
        super().__init__(config)
        model, unwritten = build_model(config, module)
        self.weights = ParameterStore(stored_tensors(model), self.name)
        self.weights.unwritten.update(unwritten & self.weights.owners)
        self._read_limits(model.config, model.generation_config)
        self._prefix_cache: dict[tuple[int, ...], int] = {}

    @property
    def native(self) -> object:
        """The engine itself."""
        return self

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Score a sequence at temperature 1."""
        self.check_usable()
        if not token_ids:
            return []
        logits = self._logits(_prefix_states(self._fingerprint(), token_ids)[:-1])
        targets = torch.tensor(token_ids[1:], dtype=torch.int64)[:, None]
        logprobs = sampling_logprobs(logits, SamplingParams()).gather(-1, targets)
        return [0.0, *logprobs.squeeze(-1).tolist()]

    def drop_caches(self) -> None:
        """Forget the weights that prompts were run with."""
        self._prefix_cache.clear()

    def stream_rows(self, rows: Sequence[RequestedSample], params: SamplingParams) -> FinishedRows:
        """Yield one row after the other."""
        for row in rows:
            yield [(row, self._draw(row, params))]

    def _check_params(self, params: SamplingParams) -> None:
        if params.stop:
            raise ValueError("the hashed engine knows no stop strings: give stop_token_ids")

    def _draw(self, row: RequestedSample, params: SamplingParams) -> RawCompletion:
        stop_ids = self._stop_ids(params)
        if row.prompt not in self._prefix_cache:
            self._prefix_cache[row.prompt] = self._fingerprint()
        state = _prefix_states(self._prefix_cache[row.prompt], row.prompt)[-1:]
        keys = row_keys(params.seed, [row.request_id], [row.sample_index], device=_CPU)
        numbers = uniforms(keys, 0, row.max_tokens)
        token_ids, logprobs = list[int](), list[float]()
        for step in range(row.max_tokens):
            token, logprob = draw_tokens(self._logits(state), numbers[step], params)
            state = mix64(state ^ token)
            token_ids.append(int(token))
            logprobs.append(float(logprob))
            if token_ids[-1] in stop_ids and step + 1 >= params.min_tokens:
                return RawCompletion(tuple(token_ids), tuple(logprobs), "stop")
        return RawCompletion(tuple(token_ids), tuple(logprobs), "length")

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [states, vocab] float32 in [0, 4)."""
        return (4 * uniforms(states, 0, self.vocab_size).T).float()

    def _fingerprint(self) -> int:
        """Return a number that changes with any bit of any weight."""
        hashes = self.hash_parameters()
        state = torch.zeros(1, dtype=torch.int64)
        for name in sorted(hashes):
            state = mix64(state ^ hashes[name])
        return int(state)


def _prefix_states(fingerprint: int, token_ids: Sequence[int]) -> torch.Tensor:
    """Return one 64-bit state for each prefix of the tokens, [tokens] int64."""
    first = torch.tensor([fingerprint], dtype=torch.int64)
    states = accumulate(token_ids, lambda state, token: mix64(state ^ token), initial=first)
    return torch.cat(list(states)[1:])
