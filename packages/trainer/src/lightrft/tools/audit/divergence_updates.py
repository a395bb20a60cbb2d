"""The update of a student by its divergence from a teacher over the whole vocabulary."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.tools.audit.given_rows import check_given, in_items
from lightrft.tools.audit.losses import Term
from lightrft.tools.audit.models import Policy, Scorer, frozen_state
from lightrft.tools.audit.record import Flags
from lightrft.tools.audit.replay import Step
from lightrft.tools.audit.updates import Slopes, StageAudit, Update, Updates, trained_model


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


class DivergenceUpdates(Updates):
    """One update whose loss is the mean divergence of the trained tokens.

    Args:
        step: What is audited.
        scorer: Its plain model.
        is_configured: See `Updates`.
    """

    def __init__(self, step: Step, scorer: Scorer, *, is_configured: bool) -> None:
        super().__init__(step, is_configured=is_configured)
        self._scorer = scorer

    def _denominator(self, mask: Flags) -> float:
        return float(mask.sum())

    def _slopes(self, update: Update) -> Slopes:
        mask, share = update.mask, update.mask / max(self._denominator(update.mask), 1.0)
        self._scorer.load(self._optimizers["actor"].weights)
        values = self._scorer.score(self.step.rows.ids, mask)[0]
        term, moved = Term(values * share, share), Term(self._unit * share, share)
        self._check_loss("policy", update, term, moved)
        # A token's gradient is that of many logprobs, which round also where they agree.
        rounding = self._unit * share
        nothing = np.zeros(mask.shape)
        return self._gradients(update, self._scorer, [share, nothing], [rounding, rounding])


def divergence_audit(config: TrainConfig, reference: Path | None) -> StageAudit:
    """The audit of a stage; see `stage_named` of `lightrft.tools.audit.report`."""

    def updates(step: Step, is_configured: bool) -> Updates:
        return DivergenceUpdates(step, trained_model(step), is_configured=is_configured)

    build = partial(Student, config, reference or Path(str(config.teacher)))
    return StageAudit(in_items(config), build, lambda s: check_given(s, s.rows.mask), updates)
