"""An engine's records of its sampling, as tensors of a batch: kept ids and chosen experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightrft.engines.factory import engine_facts
from lightrft.engines.types import KEPT_IDS, ROUTES, SamplingParams
from lightrft.records.columns import MissingRoutesError
from lightrft.records.table import SampleTable

if TYPE_CHECKING:
    from lightrft.models.support import KeptSets, SamplingSupport


def recorded_facts(
    table: SampleTable,
    attention_mask: Tensor,
    response_mask: Tensor,
    support: SamplingSupport | None,
) -> tuple[dict[str, Tensor], SamplingSupport | None]:
    """Return further facts of tokens, and the support with the kept ids, if there are records.

    Args:
        table: Rows of the batch.
        attention_mask, response_mask: [batch, seq] bool, as in the batch.
        support: Truncation of the sampling.
    """
    facts: dict[str, Tensor] = {}
    routes = stored_routes(table, response_mask)
    if routes is not None:
        facts[ROUTES] = routes
    if support is not None and table.facts.get("num_kept", np.zeros(0)).any():
        kept = stored_kept_sets(table, attention_mask)
        facts |= {"kept_starts": kept.starts, "kept_sizes": kept.sizes}
        support = replace(support, kept=kept)
    return facts, support


def stored_routes(table: SampleTable, response_mask: Tensor) -> Tensor | None:
    """Return the bytes of recorded experts, [batch, seq, bytes] uint8; None without any.

    Raises:
        MissingRoutesError: Rows to train on lack them, or have other numbers of experts.
    """
    counts = table.facts.get("num_route_bytes", np.zeros(len(table))).astype(np.int64)
    if not counts.any():
        return None
    widths, rests = np.divmod(counts, np.maximum(table.lengths - 1, 1))
    width = int(widths.max())
    is_trained = response_mask.any(dim=1).cpu().numpy()
    wrong = np.flatnonzero(((widths != width) | (rests > 0)) & (is_trained | (counts > 0)))
    if len(wrong):
        row = wrong[0]
        raise MissingRoutesError(
            f"sample {table.sample_ids[row]} has {counts[row]} bytes of recorded experts for "
            f"{table.lengths[row]} tokens, others have {width} a token; --routing_replay off "
            "trains without them"
        )
    routes = torch.zeros(*response_mask.shape, width, dtype=torch.uint8)
    stops = np.cumsum(counts)
    for row in np.flatnonzero(counts).tolist():
        values = table[ROUTES][stops[row] - counts[row] : stops[row]].reshape(-1, width)
        routes[row, : len(values)] = torch.from_numpy(values.astype(np.uint8))
    return routes.to(response_mask.device)


class SupportError(RuntimeError):
    """Recorded ids of truncated sampling that cannot be those of a token."""


def stored_kept_sets(table: SampleTable, attention_mask: Tensor) -> KeptSets:
    """Return the ids that truncation kept, with their places [batch, seq].

    Raises:
        SupportError: A drawn token is not once among the ids of its place.
    """
    from lightrft.models.support import KeptSets  # of runs with truncated sampling

    flat, counts = table[KEPT_IDS].astype(np.int32), table["num_kept"].astype(np.int64)
    lengths = table.response_lengths
    rows = np.repeat(np.arange(len(table)), lengths)
    first = np.cumsum(counts) - counts
    within = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    sizes = np.where(counts[rows] > 0, flat[np.minimum(first[rows] + within, len(flat) - 1)], 0)
    before = np.cumsum(sizes) - sizes
    starts = before + np.cumsum(np.where(counts > 0, lengths, 0))[rows]
    owners = np.repeat(np.arange(len(rows)), sizes)
    ids = flat[starts[owners] + np.arange(len(owners)) - before[owners]]
    is_response = np.arange(table.lengths.sum()) >= np.repeat(
        np.cumsum(table.lengths) - lengths, table.lengths
    )
    drawn = table.token_ids[is_response]
    num_drawn = np.bincount(owners[ids == drawn[owners]], minlength=len(rows))
    wrong = np.flatnonzero(num_drawn != (sizes > 0))
    if len(wrong):
        token = int(wrong[0])
        raise SupportError(
            f"sample {table.sample_ids[rows[token]]}, response token {within[token]}: id "
            f"{drawn[token]} was drawn, and is {num_drawn[token]} times among the {sizes[token]} "
            "ids that the engine recorded as kept, expected once; report this with the engine's "
            "version"
        )

    def padded(values: NDArray[np.int64]) -> Tensor:
        whole = np.zeros(len(is_response), np.int64)
        whole[is_response] = values
        tensor = torch.zeros_like(attention_mask, dtype=torch.int64)
        tensor[attention_mask] = torch.from_numpy(whole).to(tensor.device)
        return tensor

    return KeptSets(
        torch.from_numpy(flat).to(attention_mask.device),
        padded(starts),
        padded(sizes),
        is_complete=bool((sizes[table.is_sampled] > 0).all()),
    )


def replayed_support(params: SamplingParams, engine_name: str | None) -> SamplingSupport | None:
    """Return the truncation to replay; None if there is none or its order is unknown.

    Args:
        params: Sampling parameters of the samples.
        engine_name: Name of the engine that drew them.
    """
    if not params.truncates:
        return None
    from lightrft.models.support import SamplingSupport

    top_k, top_p, min_p = params.top_k, params.top_p, params.min_p
    facts = engine_facts(engine_name)
    if not facts.has_known_order(top_k=top_k, top_p=top_p, min_p=min_p):
        return None
    is_first = min_p > 0 and facts.known_order == "min_p first"
    return SamplingSupport(top_k, top_p, min_p, min_p_first=is_first)
