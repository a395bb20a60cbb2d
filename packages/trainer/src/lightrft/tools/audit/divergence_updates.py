"""The objective of a student: its divergence from a teacher over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.tools.audit.given_rows import check_given, in_items
from lightrft.tools.audit.models import Policy, frozen_state
from lightrft.tools.audit.pairs import Differentiated, Pair
from lightrft.tools.audit.updates import Objective, StageAudit, Term, Update, trained_model


class Student(Policy):
    """A causal language model that gives its divergence from a teacher, and logprobs.

    Args:
        folder, lora_scale, rounds: See `Policy`.
        config: Names the divergence.
        teacher: Folder of the teacher.
    """

    num_outputs: ClassVar = 2

    def __init__(
        self, config: TrainConfig, teacher: Path, folder: Path, lora_scale: float, rounds: bool
    ) -> None:
        super().__init__(folder, temperature=1.0, lora_scale=lora_scale, rounds=rounds)
        self.teacher = Policy(teacher, temperature=1.0, rounds=rounds)
        self.teacher.load(frozen_state(teacher))
        self._form, self._share = config.teacher_form, config.teacher_beta

    def in_bfloat16(self) -> Self:
        """See `Scorer`."""
        found = super().in_bfloat16()
        found.teacher = self.teacher.in_bfloat16()
        return found

    def _outputs(self, tokens: Tensor) -> tuple[Tensor, ...]:
        q = self.logprobs(tokens)
        with torch.no_grad():
            # Ids that only the teacher has stand for no token.
            p = self.teacher.logprobs(tokens, vocab=q.shape[-1])
        chosen = q.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return self._divergence(q, p), chosen

    def _divergence(self, q: Tensor, p: Tensor) -> Tensor:
        """Agarwal et al. 2024, arXiv:2306.13649: KL(q || p), KL(p || q), or both from a mixture."""
        if self._form == "reverse":
            return (q.exp() * (q - p)).sum(dim=-1)
        if self._form == "forward":
            return (p.exp() * (p - q)).sum(dim=-1)
        b = self._share
        m = (b * p.exp() + (1 - b) * q.exp()).log()
        return (b * p.exp() * (p - m) + (1 - b) * q.exp() * (q - m)).sum(dim=-1)


class DivergenceObjective(Objective):
    """The mean divergence of the trained tokens."""

    scores = ""

    def denominator(self, mask: Tensor) -> float:
        """See `Objective`."""
        return float(mask.sum())

    def terms(
        self, update: Update, scores: Pair, error: Tensor, others: Sequence[Tensor]
    ) -> Iterator[Term]:
        """See `Objective`."""
        share = update.mask / max(self.denominator(update.mask), 1.0)
        exact = Differentiated(scores.own * share, share)
        yield Term("policy", 1.0, exact, Differentiated(self.step.unit * share, 0 * share))

    def noises(self, slopes: Sequence[Tensor], moved: Tensor) -> list[Tensor]:
        """A token's gradient is that of many logprobs, which round also where they agree."""
        return [self.step.unit * slopes[0]] * len(slopes)


def divergence_audit(config: TrainConfig, reference: Path | None) -> StageAudit:
    """The audit of a stage; see `stage_named` of `lightrft.tools.audit.report`."""
    return StageAudit(
        in_items(config),
        partial(Student, config, reference or Path(str(config.teacher))),
        lambda step: check_given(step, step.rows.mask),
        lambda step: {"actor": DivergenceObjective(step, trained_model(step))},
    )
