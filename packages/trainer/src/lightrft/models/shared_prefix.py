"""Prefixes that rows of a stream share: each is laid out once, and read by every row.

The rows form a tree. If a row begins like an earlier one, the stream holds only the tokens after
that, its tail. The row's path is the runs of tokens that make it up, the tail last. Attention of a
tail reads keys and values along the path: every token sees what it sees in its row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

# Runs of a row in a stream, (first token, end) each.
Path = tuple[tuple[int, int], ...]
# Shorter prefixes cost more calls than they save.
MIN_SHARED_TOKENS = 16
# Prefixes of less than one eighth of a row do not pay: reading their keys costs what they save.
MIN_PART = 8
# Bits of a token id.
MEDIA_SHIFT = 32


@dataclass(frozen=True, slots=True)
class SharedRuns:
    """Paths of the rows of a stream in which prefixes stand once.

    Args:
        paths: Path of each row. Tails follow each other in the order of the rows, and cover the
            stream.
        offsets: First token of each row among the tokens of all rows, then their number.
        offsets_tensor: [rows + 1] int32, the offsets on the stream's device.
    """

    paths: tuple[Path, ...]
    offsets: tuple[int, ...]
    offsets_tensor: Tensor

    def read(self, values: Tensor, dim: int = -2) -> Tensor:
        """Return the values of all rows, one after the other, of those of the stream.

        Args:
            values: Values of the stream's tokens along `dim`.
            dim: Dimension of the tokens.
        """
        rows: Tensor = ReadRows.apply(values, self.paths, dim)  # type: ignore[no-untyped-call, unused-ignore]
        return rows


def offsets_of(lengths: Sequence[int], device: torch.device) -> tuple[tuple[int, ...], Tensor]:
    """Return the sums of the lengths before each one and of all, also [n + 1] int32 on a device."""
    offsets = tuple(accumulate(lengths, initial=0))
    # Pinned: a copy from ordinary host memory would wait for the device's queue.
    host = torch.tensor(offsets, dtype=torch.int32, pin_memory=device.type == "cuda")
    return offsets, host.to(device, non_blocking=True)


def shared_runs(paths: Sequence[Path], device: torch.device) -> SharedRuns:
    """Return the rows of a stream, on a device, by their paths."""
    lengths = [sum(stop - start for start, stop in path) for path in paths]
    return SharedRuns(tuple(paths), *offsets_of(lengths, device))


class ReadRows(torch.autograd.Function):
    """Values of rows along their paths; the gradient of a token is the sum over its rows."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, paths: tuple[Path, ...], dim: int) -> Tensor:
        """Read values along each path, one path after the other."""
        ctx.paths, ctx.dim = paths, dim  # type: ignore[attr-defined]
        runs = [values.narrow(dim, a, b - a) for path in paths for a, b in path]
        return torch.cat(runs, dim=dim)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Add up the gradients of each value."""
        paths: tuple[Path, ...] = ctx.paths  # type: ignore[attr-defined]
        dim: int = ctx.dim  # type: ignore[attr-defined]
        (gradient,) = gradients
        runs = [run for path in paths for run in path]
        parts = torch.split(gradient, [b - a for a, b in runs], dim=dim)
        shape = list(gradient.shape)
        shape[dim] = paths[-1][-1][1]
        # Half precision would round the sum once for every row.
        total = gradient.new_zeros(shape, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for part, (a, b) in zip(parts, runs, strict=True):
            total.narrow(dim, a, b - a).add_(part)
        return total.to(gradient.dtype), None, None


def worth_sharing(shared: Tensor, lengths: Tensor, min_tokens: int) -> Tensor:
    """Return [rows] shared tokens of rows; 0 where there are too few, or too few for the row.

    Args:
        shared: [rows] tokens with which each row begins like an earlier one.
        lengths: [rows] tokens of each row.
        min_tokens: Least number of shared tokens.
    """
    is_enough = (shared >= min_tokens) & (MIN_PART * shared >= lengths)
    return torch.where(is_enough, shared, 0)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Tokens that rows may share: those before the first that differs.

    Args:
        min_tokens: Least number of shared tokens.
        routes: [batch, seq, bytes] uint8, recorded experts of tokens, which differ, too. None has
            no record.
        media: [batch, seq] int64, equal for tokens of the same media and 0 for others; media are
            shared whole. None has no media.
    """

    min_tokens: int
    routes: Tensor | None = None
    media: Tensor | None = None


def find_prefixes(token_ids: Tensor, is_real: Tensor, sharing: Sharing) -> Tensor:
    """Return [2, batch]: the earlier row that each row is most alike, and its shared tokens.

    A row keeps at least its last token; see `worth_sharing`.

    Args:
        token_ids: [batch, seq] int64.
        is_real: [batch, seq] bool, True on real tokens.
        sharing: Tells the tokens that rows may share.
    """
    routes, media = sharing.routes, sharing.media
    counts = F.pad(is_real.long().cumsum(dim=1), (1, 0))
    # Ids, media and padding of a row in one number.
    marks = token_ids if media is None else token_ids + (media << MEDIA_SHIFT)
    marks = torch.where(is_real, marks, -1)
    parents, shared = [marks.new_zeros(())], [marks.new_zeros(())]
    for row in range(1, len(marks)):
        differs = F.pad(marks[:row] != marks[row], (0, 1), value=True)
        columns = differs.to(torch.uint8).argmax(dim=1)
        longest, parent = counts[row][columns].max(dim=0)
        parents.append(parent)
        shared.append(torch.minimum(longest, counts[row, -1] - 1))
    # A batch may have no rows.
    parent, tokens = (torch.stack(each)[: len(marks)] for each in (parents, shared))
    if routes is not None:
        differs = F.pad((routes[parent] != routes).any(dim=-1), (0, 1), value=True)
        columns = differs.to(torch.uint8).argmax(dim=1, keepdim=True)
        tokens = torch.minimum(tokens, counts.gather(1, columns)[:, 0])
    if media is not None:
        tokens = _before_media(tokens, counts, media)
    return torch.stack([parent, worth_sharing(tokens, counts[:, -1], sharing.min_tokens)])


def _before_media(tokens: Tensor, counts: Tensor, media: Tensor) -> Tensor:
    """Return [rows] shared tokens, at most those before media that would be shared in part.

    Args:
        tokens: [rows] shared tokens, fewer than the row has.
        counts: [rows, seq + 1] real tokens before each column.
        media: [rows, seq] as in `Sharing`.
    """
    continues = F.pad((media[:, 1:] == media[:, :-1]) & (media[:, 1:] > 0), (1, 0))
    # Number of tokens before the media of each column, or before the column itself.
    starts = torch.where(continues, 0, counts[:, :-1]).cummax(dim=1).values
    first = (counts[:, 1:] > tokens[:, None]).to(torch.uint8).argmax(dim=1, keepdim=True)
    return starts.gather(1, first)[:, 0]
