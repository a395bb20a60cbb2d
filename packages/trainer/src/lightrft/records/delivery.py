"""Tokens of samples, from the rank that sampled them to the ranks that train them.

Every rank knows every row's lengths (`RowTable`), so a message is the bare tokens: ids as int32,
logprobs as float32; which tokens were sampled, one bit each, for rows with observations only;
versions as int32, for rows with several only.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightrft.records.exchange import RowTable, SampleTable
from lightrft.strategy.strategy_base import StrategyBase


def deliver_rows(
    table: RowTable, own: SampleTable, wanted: Sequence[NDArray[np.int64]], strategy: StrategyBase
) -> SampleTable:
    """The rows that this rank wants, with their tokens; collective.

    Args:
        table: The rows of all ranks.
        own: The samples of this rank, in any order; more than `table` has do no harm.
        wanted: Which rows of `table` each rank wants, the same on every rank.
        strategy: Brings bytes from rank to rank.

    Returns:
        The rows `wanted[rank]`, in that order.
    """
    rank = strategy.get_rank()
    places = {sample_id: place for place, sample_id in enumerate(own.sample_ids.tolist())}
    parts = []
    for rows in wanted:
        mine = rows[table.holders[rows] == rank]
        held = np.array([places[i] for i in table.sample_ids[mine].tolist()], dtype=np.int64)
        parts.append(pack(own.take(held), table.take(mine)))
    rows = wanted[rank]
    holders = table.holders[rows]
    shares = [
        unpack(data, table.take(rows[holders == sender]))
        for sender, data in enumerate(strategy.exchange_bytes(parts))
    ]
    joined = _concatenate(table.take(rows[np.argsort(holders, kind="stable")]), shares)
    return joined.take(np.argsort(np.argsort(holders, kind="stable")).astype(np.int64))


def pack(samples: SampleTable, rows: RowTable) -> bytes:
    """The tokens of some rows.

    Args:
        samples: The rows with their tokens.
        rows: The same rows, as every rank knows them.
    """
    flags = samples.is_sampled[_of_rows(rows, _has_observations(rows))]
    versions = np.zeros(0, np.int32)
    if samples.token_versions is not None and rows.has_token_versions:
        versions = samples.token_versions[_of_rows(rows, rows.has_mixed_versions)]
    columns = (samples.token_ids, samples.rollout_logprobs, np.packbits(flags), versions)
    return b"".join(column.tobytes() for column in columns)


def unpack(data: bytes, rows: RowTable) -> SampleTable:
    """What `pack` made of the rows."""
    num_response = int(rows.response_lengths.sum())
    has_observations = _of_rows(rows, _has_observations(rows))
    is_sampled = np.ones(num_response, dtype=np.bool_)
    num_flags = int(has_observations.sum())
    ids, logprobs, bits, mixed = _split(
        data, 4 * int(rows.lengths.sum()), 4 * num_response, -(-num_flags // 8)
    )
    found = np.unpackbits(np.frombuffer(bits, np.uint8), count=num_flags)
    is_sampled[has_observations] = found.astype(np.bool_)
    versions = None
    if rows.has_token_versions:
        ends = np.repeat(rows.weights_versions, rows.response_lengths)
        versions = np.where(is_sampled, ends, -1).astype(np.int32)
        versions[_of_rows(rows, rows.has_mixed_versions)] = np.frombuffer(mixed, np.int32)
    return SampleTable(
        **rows.columns,  # type: ignore[arg-type]
        token_ids=np.frombuffer(ids, np.int32),
        rollout_logprobs=np.frombuffer(logprobs, np.float32),
        is_sampled=is_sampled,
        token_versions=versions,
    )


def _has_observations(rows: RowTable) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = rows.sampled_lengths < rows.response_lengths
    return found


def _of_rows(rows: RowTable, is_chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[tokens of all responses] bool: whether the row is a chosen one."""
    return np.repeat(is_chosen, rows.response_lengths)


def _split(data: bytes, *sizes: int) -> list[bytes]:
    stops = np.cumsum([0, *sizes]).tolist()
    pieces = [data[start:stop] for start, stop in pairwise(stops)]
    return [*pieces, data[stops[-1] :]]


def _concatenate(rows: RowTable, shares: Sequence[SampleTable]) -> SampleTable:
    versions = [share.token_versions for share in shares if share.token_versions is not None]
    return SampleTable(
        **rows.columns,  # type: ignore[arg-type]
        token_ids=np.concatenate([share.token_ids for share in shares]),
        rollout_logprobs=np.concatenate([share.rollout_logprobs for share in shares]),
        is_sampled=np.concatenate([share.is_sampled for share in shares]),
        token_versions=np.concatenate(versions) if rows.has_token_versions else None,
    )
