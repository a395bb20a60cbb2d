"""Rows of a step with served teachers: the likeliest tokens of each place, and a tail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightrft.algorithms.kl import top_and_tail, with_tail
from lightrft.config import TrainConfig
from lightrft.config.parts.learning import is_served
from lightrft.datasets.row_data import SupervisedRow
from lightrft.experience.teachers import LogprobServer, TeacherError, TextScores, ask_together
from lightrft.models.types import Projected
from lightrft.stages.teachers import open_server
from lightrft.strategy.distributed.context import DistributedContext


@dataclass(frozen=True, slots=True)
class TopTokens:
    """Likeliest tokens of a teacher; all other tokens are one outcome. See `Targets`.

    Args:
        token_ids: [tokens, k] int64.
        logprobs: [tokens, k].
    """

    token_ids: Tensor
    logprobs: Tensor

    def compared(self, own: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return logits of both models over the top tokens and the tail."""
        other = with_tail(self.logprobs[rows].to(own.dtype))
        return top_and_tail(own, self.token_ids[rows]), other

    def at(self, index: Tensor) -> TopTokens:
        """Return the targets of some tokens."""
        return TopTokens(self.token_ids[index], self.logprobs[index])


def served_targets(
    scores: Mapping[int, TextScores], places: Sequence[int], student: Projected
) -> TopTokens:
    """Return the teacher's side of the student's tokens.

    Args:
        scores: Answers of a server, by the place of a row in the step.
        places: Place in the step of each row of the batch.
        student: Projection of the student for a micro-batch.

    Raises:
        RuntimeError: The places of the tokens are unknown.
        TeacherError: The server's model has likely tokens that the student lacks.
    """
    if student.rows is None or student.columns is None:
        raise RuntimeError("a served teacher is read at the places of the student's tokens")
    rows, columns = student.rows.tolist(), student.columns.tolist()
    answers = [scores[places[row]] for row in rows]
    ids = [each.top_ids[t] for each, t in zip(answers, columns, strict=True)]
    logprobs = [each.top_logprobs[t] for each, t in zip(answers, columns, strict=True)]
    if not answers:
        return TopTokens(student.rows.new_zeros(0, 1), student.hidden.new_zeros(0, 1))
    token_ids, device = torch.from_numpy(np.stack(ids)).long(), student.hidden.device
    vocab_size = student.layer.weight.shape[0]
    if int(token_ids.max()) >= vocab_size:
        raise TeacherError(
            f"teacher: token {int(token_ids.max())} is among the likeliest of the server, and "
            f"the student has {vocab_size}: serve a model with the same tokens"
        )
    return TopTokens(token_ids.to(device), torch.from_numpy(np.stack(logprobs)).to(device))


def open_servers(config: TrainConfig) -> dict[str, LogprobServer]:
    """Return the servers among the teachers, by name."""
    places = config.teacher_places.items()
    return {name: open_server(at, config) for name, at in places if is_served(at)}


def ask_for_rows(
    server: LogprobServer,
    rows: Mapping[int, SupervisedRow],
    context: DistributedContext,
    *,
    top_k: int,
) -> dict[int, TextScores]:
    """Return a server's answers about this rank's rows, by place in the step; collective.

    Raises:
        TeacherError: The server failed a rank; all ranks raise.
    """
    texts = [row.token_ids.tolist() for row in rows.values()]
    scores = ask_together(server, texts, context, top_k=top_k)
    return dict(zip(rows, scores, strict=True))
