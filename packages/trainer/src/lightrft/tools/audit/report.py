"""One audit from end to end, and its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.tools.audit.batches import (
    check_places,
    check_rows,
    check_sampled,
    check_stored,
    in_items,
)
from lightrft.tools.audit.decisions import decide, options_of_step, step_before
from lightrft.tools.audit.findings import DIFFERS, NOT_AUDITED, Finding
from lightrft.tools.audit.models import Classifier, Scorer, Student
from lightrft.tools.audit.pairs import Draw
from lightrft.tools.audit.policy_updates import policy_objectives
from lightrft.tools.audit.preference_updates import answer_places, preference_objectives
from lightrft.tools.audit.record import RecordError, read_record
from lightrft.tools.audit.replay import ReplayedStep, build_policy, open_step
from lightrft.tools.audit.row_updates import (
    divergence_objectives,
    reward_objectives,
    score_places,
    supervised_objectives,
)
from lightrft.tools.audit.sources import check_link, check_optimizers, check_sources, planned_steps
from lightrft.tools.audit.updates import Objectives, replay


@dataclass(frozen=True, slots=True)
class StageAudit:
    """Parts of an audit that depend on the stage; a reference is a folder or None.

    Args:
        build: Builder of the trained plain model from options, reference, folder with config.json,
            scale of adapters, and whether to round weights.
        objectives: Function that compares scores before the update, and returns each model's
            objective in a draw.
        places: Function that returns the tokens that count in rows of the data; None if the stage
            trains on samples.
    """

    build: Callable[[TrainConfig, Path | None, Path, float, bool], Scorer]
    objectives: Callable[[ReplayedStep, Path | None], Objectives]
    places: Callable[[ReplayedStep], Tensor] | None = None


STAGES: Mapping[str, StageAudit] = {
    "policy": StageAudit(build_policy, policy_objectives),
    "sft": StageAudit(build_policy, supervised_objectives, lambda step: step.mask),
    "prefer": StageAudit(build_policy, preference_objectives, answer_places),
    "reward": StageAudit(
        lambda _, __, *how: Classifier(*how),
        reward_objectives,
        score_places,
    ),
    "divergence": StageAudit(
        lambda config, teacher, *how: Student(config, teacher or Path(str(config.teacher)), *how),
        divergence_objectives,
        lambda step: step.mask,
    ),
}


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Findings of an audit of one step.

    Args:
        run: Folder of the run.
        step: Rollout step.
        rows: Comparisons, in the order of the computation.
        num_borders: Decisions within rounding of a bound that were taken from the run.
    """

    run: str
    step: int
    rows: tuple[Finding, ...]
    num_borders: int

    @property
    def first_difference(self) -> Finding | None:
        """First finding that differs; None without."""
        return next((row for row in self.rows if row.verdict == DIFFERS), None)

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        first = self.first_difference
        return {
            "run": self.run,
            "step": self.step,
            "first_difference": None if first is None else first.quantity,
            "decisions_at_a_bound": self.num_borders,
            "rows": [{**asdict(row), "verdict": row.verdict} for row in self.rows],
        }


def audit_step(run: Path, step: int | None = None, *, reference: Path | None = None) -> AuditReport:
    """Recompute one recorded step of a run in float64, and compare.

    Args:
        run: Folder of the run.
        step: Recorded rollout step; None uses the newest.
        reference: Folder of the reference model, or of the teacher for distillation on rows; None
            uses the options.

    Raises:
        RecordError: The record is missing or damaged.
    """
    record = read_record(run, step)
    config, is_configured = options_of_step(run, record)
    stage = STAGES.get(record.facts.stage)
    if stage is None:
        raise RecordError(
            f"steps of the stage {record.facts.stage!r} cannot be audited: {', '.join(STAGES)} can"
        )
    if stage.places is not None:
        config = in_items(config)
    before = step_before(run, record, config)
    planned = planned_steps(run, record, config) if is_configured else None
    decided = decide(run, record, before, config, is_configured=is_configured, planned=planned)
    audited = open_step(record, config, decided, partial(stage.build, config, reference))
    if stage.places is not None:
        audited.rows = replace(audited.rows, mask=stage.places(audited))
    if is_configured:
        check_places(audited, run)
    check_rows(audited)
    (check_sampled if stage.places is None else check_stored)(audited)
    if is_configured:
        check_optimizers(audited)
        check_sources(audited, before, planned)
    if before is not None:
        check_link(audited, before)
    results, objectives = audited.results, stage.objectives(audited, reference)
    exact = Draw(results.tolerances["weights"])
    replay(audited, objectives(exact), exact, is_configured=is_configured)
    if config.enable_ema:
        results.skip("moving average", "it is not recorded")
    for draw in exact.others() if results.doubts else ():
        results.is_settling = True
        replay(audited, objectives(draw), draw, is_configured=is_configured)
    results.settle()
    return AuditReport(str(run), record.facts.step, tuple(results.rows), exact.num_taken)


def as_table(report: AuditReport) -> str:
    """Return the comparisons as text, with the verdict in the last line."""
    head = ("quantity", "run", "recomputed", "difference", "limit", "verdict")
    lines = [head, *map(_cells, report.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([*text, "", verdict(report)])


def verdict(report: AuditReport) -> str:
    """Return the outcome in one line."""
    first = report.first_difference
    skipped = sum(row.verdict == NOT_AUDITED for row in report.rows)
    counts = f"{len(report.rows) - skipped} quantities compared, {skipped} not audited"
    if report.num_borders:
        counts += f", {report.num_borders} decisions at a bound taken from the run"
    if first is None:
        return f"step {report.step}: no difference beyond rounding; {counts}"
    others = sum(row.verdict == DIFFERS for row in report.rows) - 1
    note = f" ({first.note})" if first.note else ""
    return (
        f"step {report.step} differs first in: {first.quantity}{note}; {others} later quantities "
        f"differ, too; {counts}"
    )


def _cells(row: Finding) -> Sequence[str]:
    numbers = (row.run, row.own, row.difference, row.limit)
    shown = ["" if number is None else f"{number:.6g}" for number in numbers]
    note = f" ({row.note})" if row.note else ""
    return (row.quantity, *shown, row.verdict + note)
