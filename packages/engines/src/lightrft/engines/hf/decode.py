"""The decode loop: rows of prompts in, tokens and their log-probabilities out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from lightrft.engines.sampling import draw_tokens, uniforms
from lightrft.engines.text import StopStringMatcher
from lightrft.engines.types import SamplingParams

# Steps for which random numbers and output columns are prepared at once.
_BLOCK = 64
# Finished rows are dropped when they make up this share of the batch: dropping copies the cache.
_DROP_SHARE = 1 / 8


class RowForward(Protocol):
    """The model as the decode loop sees it: one token a row in, one row of logits out."""

    can_drop_rows: bool

    def start(self) -> torch.Tensor:
        """Runs the prompts; returns the logits [rows, vocab] of the first new token."""

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Appends tokens [rows] int64; returns the logits [rows, vocab] of the next ones."""

    def keep(self, rows: torch.Tensor) -> None:
        """Drops every row but the given ones, [kept] int64."""


def stop_token_table(
    stop_ids: Sequence[int], vocab_size: int, *, device: torch.device
) -> torch.Tensor:
    """A lookup table of stop tokens: [vocab] bool. Ids beyond the vocabulary cannot be sampled."""
    table = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    known = [i for i in stop_ids if 0 <= i < vocab_size]
    if known:
        table[torch.tensor(known, device=device)] = True
    return table


@dataclass(frozen=True, slots=True)
class StopRule:
    """Ends of rows.

    Args:
        stop_table: [vocab] bool, true at tokens that end a completion; None if there are none.
        matcher: Finds stop strings; None if there are none.
        min_tokens: No stop is honoured before this many tokens.
    """

    stop_table: torch.Tensor | None
    matcher: StopStringMatcher | None
    min_tokens: int

    def is_stop(
        self, tokens: torch.Tensor, row_ids: torch.Tensor, num_tokens: int
    ) -> torch.Tensor | None:
        """Rows that stop with their num_tokens-th token; None if none can.

        Args:
            tokens: [rows] int64, the newest tokens.
            row_ids: [rows] int64, the matcher's number of each row.
            num_tokens: Tokens of each row, the newest included.
        """
        stops = None
        if self.matcher is not None:
            # The matcher must see every token, also those before min_tokens.
            found = [
                self.matcher.push(row, token)
                for row, token in zip(row_ids.tolist(), tokens.tolist(), strict=True)
            ]
            stops = torch.tensor(found, dtype=torch.bool, device=tokens.device)
        if num_tokens < self.min_tokens:
            return None
        if self.stop_table is None:
            return stops
        by_token = self.stop_table[tokens]
        return by_token if stops is None else by_token | stops


class EndedRow(NamedTuple):
    """A row that has ended.

    Args:
        row: Its number.
        token_ids: The stop token included.
        logprobs: Of each token.
        is_stopped: False if it reached its limit.
    """

    row: int
    token_ids: list[int]
    logprobs: list[float]
    is_stopped: bool


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
        self.num_alive = num_rows

    @property
    def num_rows(self) -> int:
        return self.row_ids.numel()

    @property
    def dead_share(self) -> float:
        """Finished rows among those still in the batch."""
        return 1 - self.num_alive / self.num_rows

    def record(
        self, stops: torch.Tensor | None, num_tokens: int
    ) -> tuple[torch.Tensor, list[bool]] | None:
        """Marks rows that stop or reach their limit; which, [ended] int64, and whether by a stop.

        None if there are none.
        """
        ends = stops
        if num_tokens in self.limit_set:
            at_limit = self.limits == num_tokens
            ends = at_limit if ends is None else ends | at_limit
        if ends is None:
            return None
        if self.num_alive < self.num_rows:
            ends = ends & self.is_alive
        if not bool(ends.any()):
            return None
        rows = self.row_ids[ends]
        self.is_alive &= ~ends
        self.num_alive = int(self.is_alive.sum())
        return rows, [False] * rows.numel() if stops is None else stops[ends].tolist()

    def drop_finished(self) -> torch.Tensor:
        """Forgets finished rows; returns the indices of the others, [alive] int64."""
        alive = self.is_alive.nonzero().squeeze(-1)
        self.row_ids = self.row_ids[alive]
        self.keys = self.keys[alive]
        self.limits = self.limits[alive]
        self.is_alive = self.is_alive[alive]
        return alive


def _columns(blocks: list[torch.Tensor], rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The first tokens of some rows, [rows, tokens], from blocks [steps, rows]."""
    return torch.cat([block[:, rows] for block in blocks])[:num_tokens].T


def decode(
    forward: RowForward,
    *,
    keys: torch.Tensor,
    limits: Sequence[int],
    params: SamplingParams,
    rule: StopRule,
) -> Iterator[list[EndedRow]]:
    """Samples every row until it stops or reaches its limit; gives rows as they end, ascending.

    Args:
        forward: The model with its prompts.
        keys: [rows] int64, the rows' random keys (`random.row_keys`).
        limits: Most tokens of each row, >= 1.
        params, rule: The distribution tokens are drawn from, and when rows end.
    """
    progress = _Progress(keys, limits)
    num_rows, device = len(limits), keys.device
    token_blocks: list[torch.Tensor] = []
    logprob_blocks: list[torch.Tensor] = []
    numbers = torch.empty(0)
    logits = forward.start()
    for step in range(max(limits)):
        offset = step % _BLOCK
        if offset == 0:
            numbers = uniforms(progress.keys, step, step + _BLOCK)
            token_blocks.append(torch.zeros(_BLOCK, num_rows, dtype=torch.int64, device=device))
            logprob_blocks.append(torch.zeros(_BLOCK, num_rows, device=device))
        tokens, logprobs = draw_tokens(logits, numbers[offset], params)
        token_blocks[-1][offset].index_copy_(0, progress.row_ids, tokens)
        logprob_blocks[-1][offset].index_copy_(0, progress.row_ids, logprobs)
        stops = rule.is_stop(tokens, progress.row_ids, step + 1)
        ended = progress.record(stops, step + 1)
        if ended is not None:
            rows, is_stopped = ended
            columns = (
                rows.tolist(),
                _columns(token_blocks, rows, step + 1).tolist(),
                _columns(logprob_blocks, rows, step + 1).tolist(),
                is_stopped,
            )
            yield [EndedRow(*values) for values in zip(*columns, strict=True)]
            if progress.num_alive == 0:
                return
            if forward.can_drop_rows and progress.dead_share >= _DROP_SHARE:
                alive = progress.drop_finished()
                forward.keep(alive)
                tokens, numbers = tokens[alive], numbers[:, alive]
        logits = forward.advance(tokens)
