"""Layout of a padded batch for a model's forward pass, with the places of its scored tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightrft.engines.media.media import NO_MEDIA, RowMedia
from lightrft.models.attention import SequenceBounds
from lightrft.models.shared_prefix import (
    Path,
    SharedRuns,
    Sharing,
    find_prefixes,
    offsets_of,
    shared_runs,
)
from lightrft.models.types import HeadReader, TokenLossFunction


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Inputs of the forward pass of one batch; the head sees only the scored positions.

    Padded: the rows as they are. Packed: one stream of the real tokens, row after row. Shared: a
    stream that holds a common prefix of rows once. Split: this rank's slice of the stream. Token t
    is scored from the hidden state of token t - 1 of its row.

    Args:
        shape: (batch, seq) of the batch.
        input_ids: [batch, seq], or [1, tokens] of a stream or slice, int64.
        position_ids: Like `input_ids`; counts the tokens of each sequence from 0. In right-padded
            rows the padding counts on: a model without a mask takes a step other than 1 as the
            start of another sequence.
        attention_mask: Like `input_ids`, bool, True on real tokens.
        rows: [scored] row of each scored token, ascending; in a split stream only tokens whose
            hidden states this rank computes.
        columns: [scored] column of each scored token, at least 1.
        targets: [scored] id of each scored token.
        sources: [scored] place of its hidden state in the flattened forward pass.
        is_real: [batch, seq] bool, True on real tokens of the batch.
        token_ids: [batch, seq] int64, of the batch.
        num_shared: [batch] int64, first tokens of each row that stand in an earlier row's place.
        bounds: Sequences of a stream; None for padded rows.
        own: This rank's slice of a split stream whose inputs are whole; None if the inputs are that
            slice already.
        is_right_padded: No padding stands before a token. Causal attention then needs no mask: no
            token sees later ones.
        places: [batch, seq] place of each real token in the whole stream; None for padded rows.
    """

    shape: tuple[int, int]
    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor
    sources: Tensor
    is_real: Tensor
    token_ids: Tensor
    num_shared: Tensor
    bounds: SequenceBounds | None = None
    own: slice | None = None
    is_right_padded: bool = False
    places: Tensor | None = None

    @classmethod
    def padded(
        cls, token_ids: Tensor, attention_mask: Tensor, scored_mask: Tensor | None = None
    ) -> Self:
        """Return the layout of padded rows.

        Args:
            token_ids: [batch, seq] int64.
            attention_mask: [batch, seq] bool, True on real tokens.
            scored_mask: [batch, seq] bool, True on tokens to score; None scores every token that
                follows another one.

        Raises:
            ValueError: Shapes differ, or the mask marks padding or a token without predecessor.
        """
        is_real = attention_mask.bool()
        scored = _scored_tokens(token_ids, attention_mask, scored_mask)
        rows, columns, is_right_padded = scored.rows, scored.columns, scored.is_right_padded
        batch, seq = token_ids.shape
        places = torch.arange(seq, device=token_ids.device).expand(batch, seq)
        return cls(
            shape=(batch, seq),
            input_ids=token_ids,
            position_ids=places if is_right_padded else _positions(is_real),
            attention_mask=is_real,
            rows=rows,
            columns=columns,
            targets=token_ids[rows, columns],
            sources=rows * seq + columns - 1,
            is_real=is_real,
            token_ids=token_ids,
            num_shared=token_ids.new_zeros(batch),
            is_right_padded=is_right_padded,
        )

    @classmethod
    def packed(
        cls,
        token_ids: Tensor,
        attention_mask: Tensor,
        scored_mask: Tensor | None = None,
        *,
        group: ProcessGroup | None = None,
        is_cut_late: bool = False,
        sharing: Sharing | None = None,
    ) -> Self:
        """Return the layout of one stream, or of this rank's slice of it.

        The stream is filled up to a multiple of the ranks; the filling is a separate sequence.

        Args:
            token_ids, attention_mask, scored_mask: As for `padded`; equal on all ranks of `group`.
            group: Ranks that share the stream; None gives this rank all of it.
            is_cut_late: Keep the whole stream as input, so that media can be put into it first.
            sharing: Tells the tokens that rows may share; None shares none.

        Raises:
            ValueError: As for `padded`, or the ranks of the group hold different batches.
        """
        scored = _scored_tokens(token_ids, attention_mask, scored_mask, sharing)
        is_real = attention_mask.bool()
        if group is not None:
            check_same_batch(token_ids, is_real, scored.mask, group=group)
        num_ranks, num_tokens = _num_ranks(group), scored.num_stored
        # An empty stream gets a token per rank: models do not take empty input.
        num_filling = -num_tokens % num_ranks if num_tokens else num_ranks
        num_all = num_tokens + num_filling
        rows, columns, bounds = scored.rows, scored.columns, scored.bounds(num_filling, group)
        places = _places(scored.is_stored, is_real, bounds.shared)
        sources = places[rows, columns - 1]
        local = _own_slice(num_all, group)
        if group is not None:
            is_local = (sources >= local.start) & (sources < local.stop)
            rows, columns = rows[is_local], columns[is_local]
            sources = sources[is_local] - local.start
        filling = torch.arange(num_filling, device=token_ids.device)
        is_token = torch.arange(num_all, device=token_ids.device) < num_tokens
        real = torch.nonzero_static(scored.is_stored.flatten(), size=num_tokens).squeeze(1)
        positions = torch.cat([_positions(is_real).flatten()[real], filling])
        seen = slice(0, num_all) if is_cut_late else local
        return cls(
            shape=(token_ids.shape[0], token_ids.shape[1]),
            input_ids=F.pad(token_ids.flatten()[real], (0, num_filling))[None, seen],
            position_ids=positions[None, seen],
            attention_mask=is_token[None, local],
            rows=rows,
            columns=columns,
            targets=token_ids[rows, columns],
            sources=sources,
            is_real=is_real,
            token_ids=token_ids,
            num_shared=(is_real & ~scored.is_stored).sum(dim=1),
            bounds=bounds,
            own=local if is_cut_late and group is not None else None,
            places=places,
        )

    def attention_inputs(self, *, is_causal: bool = True) -> dict[str, object]:
        """Return the inputs that tell the model which tokens see each other.

        If causality suffices there is no mask: a mask of all pairs of positions takes the square of
        the row's length, and rules out kernels that read none.

        Args:
            is_causal: Whether no token sees a later one, whatever the inputs.
        """
        if self.bounds is not None:
            return self.bounds.inputs()
        if is_causal and self.is_right_padded:
            return {}
        return {"attention_mask": self.attention_mask.long()}

    @property
    def rows_of_tokens(self) -> tuple[Tensor, ...]:
        """Real tokens of each row of the batch, [tokens] int64 each."""
        pairs = zip(self.token_ids, self.is_real, strict=True)
        return tuple(tokens[mask] for tokens, mask in pairs)

    def place(self, rows: Sequence[Tensor]) -> Tensor:
        """Lay out values of each row's real tokens, [..., tokens of the row] each, like the inputs.

        Shared tokens get the values of the first row that has them.

        Returns:
            [..., batch, seq] or [..., 1, tokens]; 0 on padding. The filling of a stream counts
            from 0.
        """
        values = torch.cat([row.to(self.is_real.device) for row in rows], dim=-1)
        if self.bounds is None:
            placed = values.new_zeros((*values.shape[:-1], *self.shape))
            placed[..., self.is_real] = values
            return placed
        if self.bounds.shared is not None:
            is_stored = self.is_real.cumsum(dim=1) > self.num_shared[:, None]
            values = values[..., is_stored[self.is_real]]
        num_filling = self.input_ids.shape[1] - values.shape[-1]
        filling = torch.arange(num_filling, device=values.device).to(values)
        return torch.cat([values, filling.expand(*values.shape[:-1], -1)], dim=-1).unsqueeze(-2)

    def select(self, hidden: Tensor) -> Tensor:
        """Return the states that predict the scored tokens: [.., tokens, h] -> [scored, h]."""
        return hidden.flatten(0, 1)[self.sources]

    def read_at(self, is_read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, columns and places of hidden states of some real tokens, [n] each.

        Args:
            is_read: [batch, seq] bool, the tokens; in a split stream only this rank's count.
        """
        rows, columns = (is_read & self.is_real).nonzero(as_tuple=True)
        if self.bounds is None or self.places is None:
            return rows, columns, rows * self.shape[1] + columns
        places = self.places[rows, columns]
        if self.bounds.group is None:
            return rows, columns, places
        size = self.attention_mask.shape[1]
        places -= dist.get_rank(self.bounds.group) * size
        is_local = (places >= 0) & (places < size)
        return rows[is_local], columns[is_local], places[is_local]

    def placed(
        self, token_loss: TokenLossFunction | HeadReader
    ) -> Callable[[Tensor, Tensor | None, Tensor], Tensor] | HeadReader:
        """Return the loss as a function of indices into the scored tokens instead of their places.

        A reader gets the places of the tokens of the head.
        """
        if isinstance(token_loss, HeadReader):
            read = token_loss.read
            return HeadReader(lambda p: read(replace(p, rows=self.rows, columns=self.columns)))

        def loss(logprobs: Tensor, entropy: Tensor | None, index: Tensor) -> Tensor:
            return token_loss(logprobs, entropy, self.rows[index], self.columns[index])

        return loss

    def scatter(self, values: Tensor) -> Tensor:
        """Put one value per scored token back into [batch, seq]; all other entries are 0.

        In a split stream every rank gets the values of all ranks. Collective then.
        """
        # A new tensor, not a view: FSDP2 attaches hooks to the output of a module.
        placed = values.new_zeros(self.shape).index_put((self.rows, self.columns), values)
        return self.join(placed)

    def join(self, sums: Tensor) -> Tensor:
        """Turn sums over this rank's tokens into sums over all; collective for a split stream."""
        if self.bounds is None or self.bounds.group is None:
            return sums
        from lightrft.models.ulysses import sum_over_ranks

        return sum_over_ranks(sums, self.bounds.group)


@dataclass(frozen=True, slots=True)
class LayoutPolicy:
    """Choice of a model's layout.

    Args:
        packs_samples: Lay batches out as streams.
        sp_group: Ranks that share one stream; implies packing. None does not split.
        min_shared_tokens: Length from which common prefixes of rows are shared; None shares none.
    """

    packs_samples: bool = False
    sp_group: ProcessGroup | None = None
    min_shared_tokens: int | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        # A copied model works with the same ranks; process groups cannot be copied.
        return self

    @property
    def is_packed(self) -> bool:
        """Return whether the forward pass sees a stream."""
        return self.packs_samples or self.sp_group is not None

    @property
    def sp_size(self) -> int:
        """Number of ranks that share one stream."""
        return _num_ranks(self.sp_group)

    def lay_out(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        scored_mask: Tensor | None = None,
        *,
        is_cut_late: bool = False,
        routes: Tensor | None = None,
        media: RowMedia = NO_MEDIA,
    ) -> TokenLayout:
        """Return the layout of a batch; arguments and errors as for `TokenLayout.packed`.

        Args:
            token_ids, attention_mask, scored_mask, is_cut_late: As there.
            routes: [batch, seq, bytes] uint8, recorded experts of tokens; None has no record.
            media: Media of the rows.
        """
        if self.is_packed:
            sharing = None
            if self.min_shared_tokens is not None:
                numbers = _media_numbers(token_ids, attention_mask.bool(), media)
                sharing = Sharing(self.min_shared_tokens, routes, numbers)
            return TokenLayout.packed(
                token_ids,
                attention_mask,
                scored_mask,
                group=self.sp_group,
                is_cut_late=is_cut_late,
                sharing=sharing,
            )
        return TokenLayout.padded(token_ids, attention_mask, scored_mask)


@dataclass(frozen=True, slots=True)
class _ScoredTokens:
    """Tokens to score, and the batch's facts that the host needs.

    Args:
        mask: [batch, seq] bool.
        rows, columns: [scored] int64, places of the tokens, ascending.
        paths: Path of each row with tokens in a stream.
        is_stored: [batch, seq] bool, real tokens that are no shared ones of an earlier row.
        is_right_padded: No padding stands before a token.
        is_shared: Some paths share runs.
    """

    mask: Tensor
    rows: Tensor
    columns: Tensor
    paths: list[Path]
    is_stored: Tensor
    is_right_padded: bool
    is_shared: bool

    @property
    def num_stored(self) -> int:
        """Tokens of a stream of the rows."""
        return self.paths[-1][-1][1] if self.paths else 0

    def bounds(self, num_filling: int, group: ProcessGroup | None) -> SequenceBounds:
        """Return the bounds of the rows in one stream, and of filling after them."""
        device, paths = self.mask.device, self.paths
        if num_filling:
            paths = [*paths, ((self.num_stored, self.num_stored + num_filling),)]
        bounds = stream_bounds([path[-1][1] - path[-1][0] for path in paths], device, group)
        return replace(bounds, shared=shared_runs(paths, device)) if self.is_shared else bounds


def _num_ranks(group: ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _own_slice(num_tokens: int, group: ProcessGroup | None) -> slice:
    """Return the slice of a stream's tokens that this rank of `group` has."""
    if group is None:
        return slice(0, num_tokens)
    size, rank = num_tokens // dist.get_world_size(group), dist.get_rank(group)
    return slice(rank * size, (rank + 1) * size)


def _scored_tokens(
    token_ids: Tensor,
    attention_mask: Tensor,
    scored_mask: Tensor | None,
    sharing: Sharing | None = None,
) -> _ScoredTokens:
    """Find the tokens to score; waits for the device once. Arguments as for `packed`."""
    for name, mask in (("attention_mask", attention_mask), ("scored_mask", scored_mask)):
        if mask is not None and (mask.shape != token_ids.shape or token_ids.dim() != 2):
            raise ValueError(
                f"{name} and token_ids must both be [batch, seq]: got {tuple(mask.shape)} and "
                f"{tuple(token_ids.shape)}"
            )
    is_real = attention_mask.bool()
    can_score = is_real.clone()
    can_score[:, :1] = False
    can_score[:, 1:] &= is_real[:, :-1]
    is_scored = can_score if scored_mask is None else scored_mask.bool()
    is_wrong = is_scored & ~can_score
    has_gap = is_real[:, 1:] & ~is_real[:, :-1]
    counts = torch.stack([is_wrong.sum(), has_gap.sum(), is_scored.sum()])
    num_rows = len(token_ids)
    prefixes = counts.new_zeros(2, num_rows)
    if sharing is not None:
        prefixes = find_prefixes(token_ids, is_real, sharing)
    numbers: list[int] = torch.cat([counts, is_real.sum(dim=1), prefixes.flatten()]).tolist()
    num_wrong, num_gaps, num_scored = numbers[:3]
    lengths, parents, shared = (numbers[3 + i * num_rows :][:num_rows] for i in range(3))
    is_shared, paths = any(shared), paths_of(lengths, parents, shared)
    if num_wrong:
        row, column = is_wrong.nonzero()[0].tolist()
        raise ValueError(
            "scored_mask must mark only tokens that follow another token and are no padding: "
            f"got {num_wrong} others, the first at row {row}, position {column}"
        )
    rows, columns = torch.nonzero_static(is_scored, size=num_scored).unbind(1)
    paths = [path for path in paths if path[-1][0] < path[-1][1]]
    is_stored = is_real & (is_real.cumsum(dim=1) > prefixes[1][:, None]) if is_shared else is_real
    return _ScoredTokens(is_scored, rows, columns, paths, is_stored, num_gaps == 0, is_shared)


def _media_numbers(token_ids: Tensor, is_real: Tensor, media: RowMedia) -> Tensor | None:
    """Return [batch, seq] int64, see `media_numbers`; None where no row has media."""
    if not media.kinds:
        return None
    from lightrft.engines.media.inputs import media_numbers  # of rows with media

    rows = [ids[mask] for ids, mask in zip(token_ids, is_real, strict=True)]
    numbers = torch.cat(media_numbers(rows, media.of_rows(len(rows))))
    return torch.zeros_like(token_ids).masked_scatter(is_real, numbers.to(token_ids.device))


def _places(is_stored: Tensor, is_real: Tensor, shared: SharedRuns | None) -> Tensor:
    """Return the place of each real token in a stream of rows or of their tails."""
    places = is_stored.flatten().long().cumsum(0).view_as(is_real) - 1
    if shared is None:
        return places
    num_tokens = shared.paths[-1][-1][1]
    return places.masked_scatter(
        is_real, shared.read(torch.arange(num_tokens, device=places.device), dim=0)
    )


def _positions(is_real: Tensor) -> Tensor:
    return (is_real.long().cumsum(dim=1) - 1).clamp_(min=0)


def stream_bounds(
    lengths: list[int], device: torch.device, group: ProcessGroup | None
) -> SequenceBounds:
    """Return the bounds of sequences in one stream, on the device."""
    return SequenceBounds(*offsets_of(lengths, device), group)


def pad_rows(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids [batch, seq] int64, right-padded with 0, and the mask of real tokens."""
    lengths = torch.tensor([len(text) for text in texts])
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    token_ids = torch.zeros(mask.shape, dtype=torch.int64)
    token_ids[mask] = torch.tensor([token for text in texts for token in text]).long()
    return token_ids.to(device), mask.to(device)


def paths_of(lengths: Sequence[int], parents: Sequence[int], shared: Sequence[int]) -> list[Path]:
    """Return the path of each row in a stream of their tails, in the order of the rows.

    Args:
        lengths: Real tokens of each row.
        parents, shared: Rows of `find_prefixes`.
    """
    paths: list[Path] = []
    start = 0
    for length, parent, count in zip(lengths, parents, shared, strict=True):
        stop = start + length - count
        prefix = _beginning(paths[parent], count) if count else ()
        paths.append((*prefix, (start, stop)))
        start = stop
    return paths


def _beginning(path: Path, count: int) -> Path:
    """Return the first tokens of a path."""
    runs: list[tuple[int, int]] = []
    for start, stop in path:
        if count > 0:
            runs.append((start, min(stop, start + count)))
            count -= stop - start
    return tuple(runs)


def check_same_batch(token_ids: Tensor, *masks: Tensor, group: ProcessGroup) -> None:
    """Raise ValueError unless all ranks of the group hold the same batch. Collective.

    Ranks with batches of different sizes would otherwise wait for each other inside a collective.
    """
    index = torch.arange(1, token_ids.numel() + 1, device=token_ids.device)
    content = token_ids.long().flatten() + 1
    for factor, mask in enumerate(masks, start=1):
        content = content + 1_000_003 * factor * mask.long().flatten()
    fingerprint = torch.stack([*index.new_tensor(token_ids.shape), (content * index).sum()])
    bounds = torch.cat([fingerprint, -fingerprint])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = bounds.chunk(2)
    if not torch.equal(highest, -lowest):
        raise ValueError(
            "the ranks of a sequence-parallel group must pass the same batch: got different ones; "
            "share them with strategy.sp_data_processor.preprocess"
        )
