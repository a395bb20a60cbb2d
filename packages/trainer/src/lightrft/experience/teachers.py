"""Teachers of sampled tokens: models, servers, several by row, with separate prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightrft.config import SampledTeacherOptions
from lightrft.datasets.render import teacher_name
from lightrft.datasets.types import Prompt
from lightrft.experience.maker import TeacherFunction, score_policy
from lightrft.models.layout import pad_rows
from lightrft.models.types import PolicyModel
from lightrft.records.batch import RolloutBatch, take_rollouts, without_routes
from lightrft.strategy.distributed.context import DistributedContext


class TeacherError(Exception):
    """A served teacher gave no usable answer; the message names the server and the remedy."""


@dataclass(frozen=True, slots=True)
class TextScores:
    """Numbers of a server about one text.

    Args:
        logprobs: [tokens] float32 of each token after those before it; 0 for the first.
        top_ids: [tokens, k] int32, likeliest tokens of each place, in descending order.
        top_logprobs: [tokens, k] float32; both are 0 for the first.
    """

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


class LogprobServer(Protocol):
    """Language model behind an address, which scores tokens at temperature 1."""

    def score(self, texts: Sequence[Sequence[int]], *, top_k: int = 0) -> list[TextScores]:
        """Return the numbers of each text; texts have two tokens or more.

        Raises:
            TeacherError: The answer about one of them is not usable.
        """
        ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone; TeacherError as for `score`."""
        ...

    def close(self) -> None:
        """End the connections; may be called twice."""
        ...


def ask_together(
    server: LogprobServer,
    texts: Sequence[Sequence[int]],
    context: DistributedContext,
    *,
    top_k: int = 0,
) -> list[TextScores]:
    """Return the numbers of this rank's texts; collective, so that ranks fail together.

    If ranks share sequences, the first one asks: their numbers must be equal bit by bit.

    Raises:
        TeacherError: The server failed a rank; all ranks raise.
    """
    group = context.sp_group
    scores: list[TextScores] = []
    problem = ""
    if group is None or dist.get_rank(group) == 0:
        try:
            scores = server.score(texts, top_k=top_k) if texts else []
        except TeacherError as error:
            problem = str(error)
    problems = [each for each in context.gather_objects(problem) if each]
    if problems:
        raise TeacherError(problem or problems[0])
    return scores if group is None else context.gather_objects(scores, group)[0]


@dataclass(frozen=True, slots=True)
class ModelTeacher:
    """Prepared model of the run."""

    model: PolicyModel

    def __call__(self, batch: RolloutBatch, slices: Sequence[slice]) -> Tensor:
        """Score the sampled tokens of a batch."""
        # Another model has other experts.
        plain = without_routes(batch)
        return score_policy(self.model, plain, slices=slices, entropy="none").logprobs


@dataclass(frozen=True, slots=True)
class ServedTeacher:
    """Model behind a server.

    Args:
        server: Server, which is asked for all rows of a step at once.
        context: Process groups, to agree on failures.
    """

    server: LogprobServer
    context: DistributedContext

    def __call__(self, batch: RolloutBatch, slices: Sequence[slice]) -> Tensor:
        """Score the sampled tokens of a batch."""
        del slices
        logprobs = torch.zeros(batch.token_ids.shape, dtype=torch.float32)
        mask = batch.response_mask.cpu()
        rows = mask.any(dim=1).nonzero().flatten().tolist()
        ids, is_real = batch.token_ids.cpu(), batch.attention_mask.cpu()
        texts = [ids[row][is_real[row]].tolist() for row in rows]
        for row, scores in zip(rows, ask_together(self.server, texts, self.context), strict=True):
            logprobs[row, : len(scores.logprobs)] = torch.from_numpy(scores.logprobs)
        return torch.where(mask, logprobs, 0.0).to(batch.token_ids.device)


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """Teachers' data of prompts, by the id of the prompt.

    Args:
        prompts: All prompts of the run.
        factors: Weight of each teacher by name; {} if there is only one.
        column: Column of the data with the name of a row's teacher.
    """

    prompts: Mapping[int, Prompt]
    factors: Mapping[str, float] = field(default_factory=dict)
    column: str = ""

    @classmethod
    def of_run(cls, prompts: Sequence[Prompt], config: SampledTeacherOptions) -> TeacherRows | None:
        """Select the training prompts' data; None if the teachers need none.

        Raises:
            DataError: A row names none of the teachers.
        """
        if not config.teachers and config.teacher_prompt_column is None:
            return None
        factors = config.teacher_factors if config.teachers else {}
        for prompt in prompts if factors else ():
            teacher_name(prompt.columns, config, f"row {prompt.id + 1} of the prompts")
        return cls({prompt.id: prompt for prompt in prompts}, factors, config.teacher_column)

    def of(self, batch: RolloutBatch) -> list[Prompt]:
        """Return the prompt of each row.

        Raises:
            RuntimeError: A row's tokens are of another prompt, or its prompt is unknown.
        """
        if batch.prompt_places is None:
            raise RuntimeError("teachers by row look up the prompts of rows by their places")
        prompts = [self.prompts[place] for place in batch.prompt_places.tolist()]
        for row, prompt in enumerate(prompts):
            beginning = batch.token_ids[row, : len(prompt.token_ids)].tolist()
            if beginning != list(prompt.token_ids):
                raise RuntimeError(
                    f"row {row} does not begin with prompt {prompt.id} of the data: its teacher "
                    "would read another text"
                )
        return prompts

    def names_of(self, batch: RolloutBatch) -> list[str]:
        """Return the name of each row's teacher."""
        return [str(prompt.columns[self.column]) for prompt in self.of(batch)]

    def factors_of(self, batch: RolloutBatch) -> Tensor:
        """Return the weight of each row's teacher: [batch, 1] float32."""
        factors = [self.factors[name] for name in self.names_of(batch)]
        return torch.tensor(factors, device=batch.token_ids.device)[:, None]


@dataclass(frozen=True, slots=True)
class TeachersByRow:
    """Several teachers, one for each row.

    A teacher scores only its rows. If another rank has rows for it and this one has none, the
    first row takes part without counting, since sharded layers wait for every rank.

    Args:
        teachers: Teachers by name.
        rows: Names the teacher of each row.
        context: Process groups, to agree on who has rows.
    """

    teachers: Mapping[str, TeacherFunction]
    rows: TeacherRows
    context: DistributedContext

    def __call__(self, batch: RolloutBatch, slices: Sequence[slice]) -> Tensor:
        """Score each row's sampled tokens by its teacher."""
        names = np.array(self.rows.names_of(batch))
        scored = torch.zeros(batch.token_ids.shape, device=batch.token_ids.device)
        local_rows = {
            f"{name}/{i}": int((names[part] == name).any())
            for name in self.teachers
            for i, part in enumerate(slices)
        }
        anyone = self.context.all_reduce(local_rows, op="max")
        for name, teacher in self.teachers.items():
            parts = []
            for i, part in enumerate(slices):
                if anyone[f"{name}/{i}"]:
                    places = np.arange(len(names))[part]
                    is_its_row = names[part] == name
                    parts.append(places[is_its_row] if is_its_row.any() else places[:1])
            if not parts:
                continue
            chosen = torch.from_numpy(np.concatenate(parts))
            stops = np.cumsum([len(each) for each in parts]).tolist()
            cut = [slice(a, b) for a, b in zip([0, *stops], stops, strict=False)]
            logprobs = teacher(take_rollouts(batch, chosen), cut)
            is_counted = torch.from_numpy(names == name)[chosen]
            scored[chosen[is_counted], : logprobs.shape[1]] = logprobs[is_counted]
        return scored


@dataclass(frozen=True, slots=True)
class PromptedTeacher:
    """Teacher that reads a separate prompt before the student's response.

    Args:
        teacher: Teacher that scores the rows with the separate prompts.
        rows: Holds those prompts.
    """

    teacher: TeacherFunction
    rows: TeacherRows

    def __call__(self, batch: RolloutBatch, slices: Sequence[slice]) -> Tensor:
        """Score the student's tokens behind the teacher's prompts.

        Raises:
            RuntimeError: The scored tokens are not the student's.
        """
        prompts = self.rows.of(batch)
        lengths = batch.attention_mask.sum(dim=1).tolist()
        texts, marks = [], []
        for row, prompt in enumerate(prompts):
            tail = slice(len(prompt.token_ids), lengths[row])
            texts.append([*prompt.teacher_token_ids, *batch.token_ids[row, tail].tolist()])
            unscored = [False] * len(prompt.teacher_token_ids)
            marks.append([*unscored, *batch.response_mask[row, tail].tolist()])
        token_ids, attention_mask = pad_rows(texts, batch.token_ids.device)
        response_mask = pad_rows(marks, batch.token_ids.device)[0].bool()
        sampled, other = batch.token_ids[batch.response_mask], token_ids[response_mask]
        if not torch.equal(sampled, other):
            raise RuntimeError("a teacher with a prompt of its own scores the student's tokens")
        shown = replace(
            batch,
            token_ids=token_ids,
            attention_mask=attention_mask,
            response_mask=response_mask,
            rollout_logprobs=torch.zeros_like(token_ids, dtype=torch.float32),
            compared_mask=None,
            facts={},
            prompt_places=None,
        )
        logprobs = self.teacher(shown, slices)
        moved = torch.zeros(batch.token_ids.shape, device=batch.token_ids.device)
        moved[batch.response_mask] = logprobs[response_mask].to(moved.dtype)
        return moved

    def unprompted(self) -> PromptedTeacher:
        """Return it with the student's prompts, under which it must score like `teacher`."""
        prompts = {
            key: replace(prompt, teacher_token_ids=prompt.token_ids)
            for key, prompt in self.rows.prompts.items()
        }
        return replace(self, rows=replace(self.rows, prompts=prompts))
