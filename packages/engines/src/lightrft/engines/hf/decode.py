"""Decode loop: samples tokens and their log-probabilities for rows of prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple, Protocol

import torch

from lightrft.engines.sampling import draw_from, kept_ids, sampling_logprobs, uniforms
from lightrft.engines.text import StopStringMatcher
from lightrft.engines.types import KEPT_IDS, ROUTES, Facts, SamplingParams

# Steps for which random numbers and output columns are prepared at once.
_BLOCK = 64
# Finished rows are dropped when they make up this share of the batch: dropping copies the cache.
_DROP_SHARE = 1 / 8


class RowForward(Protocol):
    """Model of the decode loop: takes one token per row, returns one row of logits."""

    can_drop_rows: bool

    def start(self) -> torch.Tensor:
        """Run the prompts; return the logits [rows, vocab] of the first new token."""

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens [rows] int64; return the logits [rows, vocab] of the next ones."""

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only these rows, [kept] int64."""

    def routes(self) -> list[str]:
        """Return the fact `ROUTES` of the next token of each row; [] if none are recorded."""


def stop_token_table(
    stop_ids: Sequence[int], vocab_size: int, *, device: torch.device
) -> torch.Tensor:
    """Return a lookup table of stop tokens, [vocab] bool, without ids beyond the vocabulary."""
    table = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    known = [i for i in stop_ids if 0 <= i < vocab_size]
    if known:
        table[torch.tensor(known, device=device)] = True
    return table


@dataclass(frozen=True, slots=True)
class StopRule:
    """Rule for ending rows.

    Args:
        stop_table: [vocab] bool, true at tokens that end a completion; None if there are none.
        matchers: Matcher of stop strings of each row; none without such strings.
        min_tokens: Number of tokens before which no stop is honoured.
    """

    stop_table: torch.Tensor | None
    matchers: Sequence[StopStringMatcher]
    min_tokens: int

    def is_stop(
        self, tokens: torch.Tensor, row_ids: torch.Tensor, num_tokens: int
    ) -> torch.Tensor | None:
        """Return which rows stop with their num_tokens-th token; None if none can.

        Args:
            tokens: [rows] int64, the newest tokens.
            row_ids: [rows] int64, number of each row.
            num_tokens: Number of tokens of each row, the newest included.
        """
        stops = None
        if self.matchers:
            # The matchers must see every token, also those before min_tokens.
            matched = [
                self.matchers[row].push(token)
                for row, token in zip(row_ids.tolist(), tokens.tolist(), strict=True)
            ]
            stops = torch.tensor(matched, dtype=torch.bool, device=tokens.device)
        if num_tokens < self.min_tokens:
            return None
        if self.stop_table is None:
            return stops
        by_token = self.stop_table[tokens]
        return by_token if stops is None else by_token | stops


class EndedRow(NamedTuple):
    """Row that has ended.

    Args:
        row: Number of the row.
        token_ids: Sampled tokens, including the stop token.
        logprobs: Logprob of each token.
        is_stopped: Whether it stopped, or reached its limit.
        facts: Further facts of its tokens.
    """

    row: int
    token_ids: list[int]
    logprobs: list[float]
    is_stopped: bool
    facts: Facts


class _Progress:
    """Bookkeeping of the rows that are still decoded."""

    def __init__(self, keys: torch.Tensor, limits: Sequence[int]) -> None:
        device = keys.device
        num_rows = len(limits)
        self.keys = keys
        self.limits = torch.tensor(limits, dtype=torch.int64, device=device)
        self.limit_set = frozenset(limits)
        self.row_ids = torch.arange(num_rows, device=device)
        self.is_alive = torch.ones(num_rows, dtype=torch.bool, device=device)
        # Copies on the host, which waits for the device once per step.
        self._numbers = list(range(num_rows))
        self._alive = [True] * num_rows

    @property
    def numbers(self) -> list[int]:
        """Numbers of the rows still in the batch."""
        return self._numbers

    @property
    def num_alive(self) -> int:
        return sum(self._alive)

    @property
    def num_rows(self) -> int:
        return self.row_ids.numel()

    def record(
        self, stops: torch.Tensor | None, num_tokens: int
    ) -> tuple[torch.Tensor, list[int], list[bool]] | None:
        """Mark rows that stop or reach their limit; return None if there are none.

        Returns:
            Numbers of the rows, [ended] int64; the same on the host; and whether each stopped.
        """
        ends = stops
        if num_tokens in self.limit_set:
            at_limit = self.limits == num_tokens
            ends = at_limit if ends is None else ends | at_limit
        if ends is None:
            return None
        ends = ends & self.is_alive
        has_ended, is_stopped = torch.stack([ends, ends if stops is None else stops]).tolist()
        if not any(has_ended):
            return None
        self.is_alive &= ~ends
        self._alive = [alive and not end for alive, end in zip(self._alive, has_ended, strict=True)]
        places = torch.nonzero_static(ends, size=sum(has_ended)).squeeze(-1)
        return (
            self.row_ids[places],
            list(compress(self._numbers, has_ended)),
            [stops is not None and stopped for stopped in compress(is_stopped, has_ended)],
        )

    def drop_finished(self) -> torch.Tensor:
        """Drop finished rows; return the indices of the others, [alive] int64."""
        alive = torch.nonzero_static(self.is_alive, size=self.num_alive).squeeze(-1)
        self._numbers = list(compress(self._numbers, self._alive))
        self._alive = [True] * len(self._numbers)
        self.row_ids = self.row_ids[alive]
        self.keys = self.keys[alive]
        self.limits = self.limits[alive]
        self.is_alive = self.is_alive[alive]
        return alive


def _columns(blocks: list[torch.Tensor], rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the first tokens of some rows, [rows, tokens], from blocks [steps, rows]."""
    return torch.cat([block[:, rows] for block in blocks])[:num_tokens].T


class _RowFacts:
    """Further facts of the tokens of each row, if any are recorded."""

    def __init__(self, num_rows: int, params: SamplingParams) -> None:
        self._records_support = params.truncates and params.records_support
        self._values: list[dict[str, list[str]]] = [{} for _ in range(num_rows)]

    def note(self, numbers: Sequence[int], law: torch.Tensor, routes: Sequence[str]) -> None:
        """Note a token of these rows, drawn from logprobs [rows, vocab]."""
        facts = {ROUTES: routes} if routes else {}
        if self._records_support:
            facts[KEPT_IDS] = kept_ids(law)
        for name, values in facts.items():
            for row, value in zip(numbers, values, strict=True):
                self._values[row].setdefault(name, []).append(value)

    def of(self, row: int, num_tokens: int) -> Facts:
        """Return the facts of a row's first tokens."""
        return {name: tuple(each[:num_tokens]) for name, each in self._values[row].items()}


def decode(
    forward: RowForward,
    *,
    keys: torch.Tensor,
    limits: Sequence[int],
    params: SamplingParams,
    rule: StopRule,
) -> Iterator[list[EndedRow]]:
    """Sample every row until it stops or reaches its limit; yield ended rows in ascending order.

    Args:
        forward: Model with its prompts.
        keys: Random keys of the rows (`random.row_keys`), [rows] int64.
        limits: Most tokens of each row, >= 1.
        params, rule: Distribution of tokens, and rule for ending rows.
    """
    progress = _Progress(keys, limits)
    num_rows, device = len(limits), keys.device
    token_blocks: list[torch.Tensor] = []
    logprob_blocks: list[torch.Tensor] = []
    facts = _RowFacts(num_rows, params)
    numbers = torch.empty(0)
    logits = forward.start()
    for step in range(max(limits)):
        offset = step % _BLOCK
        if offset == 0:
            numbers = uniforms(progress.keys, step, step + _BLOCK)
            token_blocks.append(torch.zeros(_BLOCK, num_rows, dtype=torch.int64, device=device))
            logprob_blocks.append(torch.zeros(_BLOCK, num_rows, device=device))
        law = sampling_logprobs(logits, params)
        tokens, logprobs = draw_from(law, logits, numbers[offset], params)
        facts.note(progress.numbers, law, forward.routes())
        token_blocks[-1][offset].index_copy_(0, progress.row_ids, tokens)
        logprob_blocks[-1][offset].index_copy_(0, progress.row_ids, logprobs)
        stops = rule.is_stop(tokens, progress.row_ids, step + 1)
        ended = progress.record(stops, step + 1)
        if ended is not None:
            rows, row_numbers, is_stopped = ended
            # Both in one copy: float64 holds token ids and float32 exactly.
            both = [_columns(b, rows, step + 1) for b in (token_blocks, logprob_blocks)]
            tokens_on_host, logprobs_on_host = torch.stack([x.double() for x in both]).cpu()
            columns = (
                row_numbers,
                tokens_on_host.long().tolist(),
                logprobs_on_host.tolist(),
                is_stopped,
                [facts.of(row, step + 1) for row in row_numbers],
            )
            yield [EndedRow(*values) for values in zip(*columns, strict=True)]
            if progress.num_alive == 0:
                return
            dead_share = 1 - progress.num_alive / progress.num_rows
            if forward.can_drop_rows and dead_share >= _DROP_SHARE:
                alive = progress.drop_finished()
                forward.keep(alive)
                tokens, numbers = tokens[alive], numbers[:, alive]
        logits = forward.advance(tokens)
