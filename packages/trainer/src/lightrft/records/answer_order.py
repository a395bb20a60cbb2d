"""Metrics of questions asked in both orders of two answers: whether verdicts agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightrft.datasets.types import Prompt
from lightrft.records.table import RowTable

# Column of prompts with the place of their pair; and component of rewards that is 1 where a verdict
# names the better answer, -1 where it names the worse one, 0 where it names none.
PAIR_COLUMN, VERDICT = "swapped_pair", "verdict"


def position_metrics(table: RowTable, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Return `consistency` and `consistent_accuracy`; {} if no question has both orders.

    consistency          share of pairs whose verdicts name the same answer in both orders
    consistent_accuracy  share of these that name the better one

    An unreadable verdict names no answer. Pairs with a masked row are left out. With several
    samples, the n-th of one order is compared with the n-th of the other.

    Args:
        table: Rows, equally many of each prompt; group i is prompt i on every rank.
        prompts: Prompts of the evaluation.
    """
    if VERDICT not in table.component_names or not prompts:
        return {}
    column = table.component_names.index(VERDICT)
    verdicts = np.where(table.is_masked, np.nan, table.components[:, column])
    by_prompt = verdicts[np.argsort(table.group_ids, kind="stable")].reshape(len(prompts), -1)
    places: dict[object, list[int]] = {}
    for place, prompt in enumerate(prompts):
        pair = prompt.columns.get(PAIR_COLUMN)
        if pair is not None:
            places.setdefault(pair, []).append(place)
    both = [by_prompt[pair_places] for pair_places in places.values() if len(pair_places) == 2]
    pairs = np.concatenate(both, axis=1) if both else np.empty((2, 0))
    first, second = pairs[:, ~np.isnan(pairs).any(axis=0)]
    if not len(first):
        return {}
    is_consistent = (first == second) & (first != 0)
    metrics = {"consistency": float(is_consistent.mean())}
    if is_consistent.any():
        metrics["consistent_accuracy"] = float((first[is_consistent] > 0).mean())
    return metrics
