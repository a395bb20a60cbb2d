"""The audit's record of a supervised step while it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightrft.tools.audit.record import RawSamples
from lightrft.tools.audit_recorder import Flat, Recorder, by_row

if TYPE_CHECKING:
    from lightrft.stages.supervised.supervised_stage import ObservedRows, PaddedRows


class SupervisedRecorder(Recorder[None]):
    """An observer (`lightrft.stages.supervised.supervised_stage`); every rank knows all rows."""

    def __init__(self, step: ObservedRows) -> None:
        self._rows = step.rows
        self._values: dict[str, dict[int, Flat]] = {}
        super().__init__(step, "sft")

    def micro_batch(self, rows: PaddedRows, logprobs: Tensor, terms: Mapping[str, Tensor]) -> None:
        """See `RowObserver`."""
        seen = {
            "token_ids": rows.token_ids,
            "response_mask": rows.is_trained,
            "old_logprobs": logprobs,
        }
        own = {name: by_row(each, rows.attention_mask, rows.ids) for name, each in seen.items()}
        self._updates[-1].add(own["old_logprobs"], terms)
        for name, found in own.items():
            self._values.setdefault(name, {}).update(found)

    def _own_raw(self) -> None:
        return None

    def _own_values(self) -> dict[str, dict[int, Flat]]:
        return self._values

    def _joined_raw(self, shares: Sequence[None]) -> tuple[RawSamples, Tensor]:
        rows = self._rows
        places = np.arange(len(rows), dtype=np.int64)
        lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
        zeros, never = np.zeros(len(rows)), np.zeros(len(rows), dtype=np.bool_)
        raw = RawSamples(
            sample_ids=places,
            group_ids=places,
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
        )
        return raw, torch.zeros(len(rows))
