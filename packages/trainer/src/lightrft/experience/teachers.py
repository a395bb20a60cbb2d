"""Teachers of sampled tokens: models, servers, several by row, with prompts of their own."""

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
from lightrft.records.batch import RolloutBatch
from lightrft.strategy.distributed.context import DistributedContext


class TeacherError(Exception):
    """A served teacher gave no usable answer; the message names the server and the remedy."""


@dataclass(frozen=True, slots=True)
class TextScores:
    """A server's numbers of one text.

    Args:
        logprobs: [tokens] float32 of each token after those before it; 0 for the first.
        top_ids: [tokens, k] int32, the likeliest tokens of each place, the likeliest first.
        top_logprobs: [tokens, k] float32; both are 0 for the first.
    """

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


class LogprobServer(Protocol):
    """A language model behind an address, which scores given tokens at temperature 1."""

    def score(self, texts: Sequence[Sequence[int]], *, top_k: int = 0) -> list[TextScores]:
        """Return the numbers of each text, each of two tokens or more.

        Raises:
            TeacherError: There is no usable answer for one of them.
        """
        ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token by itself; TeacherError as for `score`."""
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
    """The numbers of this rank's texts; collective, so that no rank waits for one that failed.

    Of ranks that share sequences the first asks: their numbers must be the same bits.

    Raises:
        TeacherError: On every rank, if the server failed one of them.
    """
    group = context.sp_group
    found: list[TextScores] = []
    problem = ""
    if group is None or dist.get_rank(group) == 0:
        try:
            found = server.score(texts, top_k=top_k) if texts else []
        except TeacherError as error:
            problem = str(error)
    problems = [each for each in context.gather_objects(problem) if each]
    if problems:
        raise TeacherError(problem or problems[0])
    return found if group is None else context.gather_objects(found, group)[0]


@dataclass(frozen=True, slots=True)
class ModelTeacher:
    """A prepared model of the run."""

    model: PolicyModel

    def __call__(self, batch: RolloutBatch, slices: Sequence[slice]) -> Tensor:
        """See `TeacherFunction`."""
        return score_policy(self.model, batch, slices=slices, entropy="none").logprobs


@dataclass(frozen=True, slots=True)
class ServedTeacher:
    """A model behind a server.

    Args:
        server: Is asked for all rows of a step at once.
        context: Agrees on failures.
    """

    server: LogprobServer
    context: DistributedContext

    def __call__(self, batch: RolloutBatch, slices: Sequence[slice]) -> Tensor:
        """See `TeacherFunction`."""
        del slices
        found = torch.zeros(batch.token_ids.shape, dtype=torch.float32)
        mask = batch.response_mask.cpu()
        rows = mask.any(dim=1).nonzero().flatten().tolist()
        ids, is_real = batch.token_ids.cpu(), batch.attention_mask.cpu()
        texts = [ids[row][is_real[row]].tolist() for row in rows]
        for row, scores in zip(rows, ask_together(self.server, texts, self.context), strict=True):
            found[row, : len(scores.logprobs)] = torch.from_numpy(scores.logprobs)
        return torch.where(mask, found, 0.0).to(batch.token_ids.device)


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """Facts of prompts that concern teachers, by the id of the prompt.

    Args:
        prompts: All of the run.
        names: Names of the teachers, in order.
        factors: Weight of each teacher by name; {} with one alone.
        column: Column of the data with the name of a row's teacher.
    """

    prompts: Mapping[int, Prompt]
    factors: Mapping[str, float] = field(default_factory=dict)
    column: str = ""

    @classmethod
    def of_run(cls, prompts: Sequence[Prompt], config: SampledTeacherOptions) -> TeacherRows | None:
        """Return those of the training prompts; None where teachers need none.

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
            RuntimeError: A row's tokens are of another prompt, or nobody says of which.
        """
        if batch.prompt_places is None:
            raise RuntimeError("teachers by row look up the prompts of rows by their places")
        found = [self.prompts[place] for place in batch.prompt_places.tolist()]
        for row, prompt in enumerate(found):
            own = batch.token_ids[row, : len(prompt.token_ids)].tolist()
            if own != list(prompt.token_ids):
                raise RuntimeError(
                    f"row {row} does not begin with prompt {prompt.id} of the data: its teacher "
                    "would read another text"
                )
        return found

    def names_of(self, batch: RolloutBatch) -> list[str]:
        """Return the name of each row's teacher."""
        return [str(prompt.columns[self.column]) for prompt in self.of(batch)]

    def factors_of(self, batch: RolloutBatch) -> Tensor:
        """Return the weight of each row's teacher: [batch, 1] float32."""
        factors = [self.factors[name] for name in self.names_of(batch)]
        return torch.tensor(factors, device=batch.token_ids.device)[:, None]


@dataclass(frozen=True, slots=True)
class TeachersByRow:
    """Several teachers, of which each row has one.

    A teacher scores its rows only; where another rank has some and this one none, its first row
    takes part and counts for nothing, since sharded layers wait for every rank.

    Args:
        teachers: By name.
        rows: Says whose a row is.
        context: Agrees on who has rows.
    """

    teachers: Mapping[str, TeacherFunction]
    rows: TeacherRows
    context: DistributedContext

    def __call__(self, batch: RolloutBatch, slices: Sequence[slice]) -> Tensor:
        """See `TeacherFunction`."""
        names = np.array(self.rows.names_of(batch))
        found = torch.zeros(batch.token_ids.shape, device=batch.token_ids.device)
        own = {
            f"{name}/{i}": int((names[part] == name).any())
            for name in self.teachers
            for i, part in enumerate(slices)
        }
        anyone = self.context.all_reduce(own, op="max")
        for name, teacher in self.teachers.items():
            parts = []
            for i, part in enumerate(slices):
                if anyone[f"{name}/{i}"]:
                    places = np.arange(len(names))[part]
                    is_own = names[part] == name
                    parts.append(places[is_own] if is_own.any() else places[:1])
            if not parts:
                continue
            chosen = torch.from_numpy(np.concatenate(parts))
            stops = np.cumsum([len(each) for each in parts]).tolist()
            cut = [slice(a, b) for a, b in zip([0, *stops], stops, strict=False)]
            logprobs = teacher(take_rows(batch, chosen), cut)
            is_own_row = torch.from_numpy(names == name)[chosen]
            found[chosen[is_own_row], : logprobs.shape[1]] = logprobs[is_own_row]
        return found


@dataclass(frozen=True, slots=True)
class PromptedTeacher:
    """A teacher that reads a prompt of its own before the student's response.

    Args:
        teacher: Scores the rows with their other prompts.
        rows: Has those prompts.
    """

    teacher: TeacherFunction
    rows: TeacherRows

    def __call__(self, batch: RolloutBatch, slices: Sequence[slice]) -> Tensor:
        """See `TeacherFunction`.

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
        response_mask = torch.zeros_like(attention_mask)
        response_mask[attention_mask] = torch.tensor(
            [mark for row in marks for mark in row], device=response_mask.device
        )
        own, other = batch.token_ids[batch.response_mask], token_ids[response_mask]
        if not torch.equal(own, other):
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
        found = torch.zeros(batch.token_ids.shape, device=batch.token_ids.device)
        found[batch.response_mask] = logprobs[response_mask].to(found.dtype)
        return found

    def unprompted(self) -> PromptedTeacher:
        """The same with the student's prompts, which must find what the teacher alone does."""
        prompts = {
            key: replace(prompt, teacher_token_ids=prompt.token_ids)
            for key, prompt in self.rows.prompts.items()
        }
        return replace(self, rows=replace(self.rows, prompts=prompts))


def take_rows(batch: RolloutBatch, rows: Tensor) -> RolloutBatch:
    """Return some rows in a given order."""
    return replace(
        batch,
        token_ids=batch.token_ids[rows],
        attention_mask=batch.attention_mask[rows],
        response_mask=batch.response_mask[rows],
        rollout_logprobs=batch.rollout_logprobs[rows],
        rewards=batch.rewards[rows],
        group_ids=batch.group_ids[rows],
        sample_ids=batch.sample_ids[rows],
        compared_mask=None,
        facts={},
        prompt_places=None if batch.prompt_places is None else batch.prompt_places[rows],
    )
