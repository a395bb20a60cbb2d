"""The audit's record of a step on given rows while it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightrft.tools.audit.record import PLACE, RawSamples
from lightrft.tools.audit_recorder import Flat, Recorder, by_row

if TYPE_CHECKING:
    from lightrft.stages.rows.padded_rows import PaddedRows
    from lightrft.stages.rows.row_observer import ObservedRows


class RowRecorder(Recorder[None]):
    """An observer (`lightrft.stages.rows.row_observer`); every rank knows all rows."""

    def __init__(self, step: ObservedRows) -> None:
        self._step, self.num_items = step, step.num_items
        self._values: dict[str, dict[int, Flat]] = {}
        super().__init__(step, step.stage)

    def micro_batch(
        self,
        rows: PaddedRows,
        values: Tensor | None,
        terms: Mapping[str, Tensor],
        reference: Tensor | None = None,
    ) -> None:
        """See `RowObserver`; sums of a reference stand at the last trained token of their row."""
        seen = {"token_ids": rows.token_ids, "response_mask": rows.is_trained}
        if values is not None:
            seen["old_logprobs"] = values
        if reference is not None:
            counts = rows.is_trained.cumsum(dim=1)
            is_last = rows.is_trained & (counts == counts[:, -1:])
            seen["ref_logprobs"] = reference[:, None] * is_last
        own = {name: by_row(each, rows.attention_mask, rows.ids) for name, each in seen.items()}
        self.updates[-1].add(rows.ids, own.get("old_logprobs", {}), terms)
        for name, found in own.items():
            self._values.setdefault(name, {}).update(found)

    def _own_raw(self) -> None:
        return None

    def _own_values(self) -> dict[str, dict[int, Flat]]:
        return self._values

    def _joined_raw(self, shares: Sequence[None]) -> tuple[RawSamples, Tensor]:
        items = self._step.items
        rows, sizes = [row for item in items for row in item], [len(item) for item in items]
        lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
        zeros, never = np.zeros(len(rows)), np.zeros(len(rows), dtype=np.bool_)
        raw = RawSamples(
            sample_ids=np.arange(len(rows), dtype=np.int64),
            group_ids=np.repeat(np.arange(len(items)), sizes),
            prompt_lengths=np.zeros_like(lengths),
            response_lengths=lengths,
            token_ids=np.concatenate([row.token_ids for row in rows]),
            is_sampled=np.concatenate([row.is_trained for row in rows]),
            rollout_logprobs=np.zeros(int(lengths.sum()), dtype=np.float32),
            rewards=zeros,
            accuracies=zeros,
            is_failed=never,
            is_untruncated=~never,
            greedy_rewards=zeros,
            facts={**self._step.facts, PLACE: np.repeat(self._step.places, sizes)},
        )
        return raw, torch.zeros(len(rows))
