"""One audit from end to end, and its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightrft.config import TrainConfig
from lightrft.tools.audit.decisions import (
    check_link,
    check_optimizers,
    decide,
    options_of_step,
    step_before,
)
from lightrft.tools.audit.findings import DIFFERS, NOT_AUDITED, Finding
from lightrft.tools.audit.given_rows import check_places
from lightrft.tools.audit.policy_updates import policy_audit
from lightrft.tools.audit.preference_updates import preference_audit
from lightrft.tools.audit.record import RecordError, read_record
from lightrft.tools.audit.replay import open_step
from lightrft.tools.audit.reward_updates import reward_audit
from lightrft.tools.audit.sources import check_sources, planned_steps
from lightrft.tools.audit.supervised_updates import divergence_audit, supervised_audit
from lightrft.tools.audit.updates import StageAudit, Updates


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Findings of an audit of one step.

    Args:
        run: The folder.
        step: The rollout step.
        rows: Comparisons, in the order of the chain.
        num_borders: Decisions at a bound, within rounding of it, in which the run was followed.
    """

    run: str
    step: int
    rows: tuple[Finding, ...]
    num_borders: int

    @property
    def first_difference(self) -> Finding | None:
        """Where the run differs first; None if it does not."""
        return next((row for row in self.rows if row.verdict == DIFFERS), None)

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        first = self.first_difference
        return {
            "run": self.run,
            "step": self.step,
            "first_difference": None if first is None else first.quantity,
            "decisions_at_a_bound": self.num_borders,
            "rows": [asdict(row) for row in self.rows],
        }


def audit_step(run: Path, step: int | None = None, *, reference: Path | None = None) -> AuditReport:
    """Recompute one recorded step of a run in float64, and compare.

    Args:
        run: Folder of the run.
        step: A recorded rollout step; None takes the newest.
        reference: Folder of the reference model; None takes `pretrain` of the options;
            of distillation on rows the teacher's.

    Raises:
        RecordError: There is no such record, or it is damaged.
    """
    record = read_record(run, step)
    config, is_configured = options_of_step(run, record)
    stage = stage_named(record.facts.stage, config, reference)
    config = stage.config
    before = step_before(run, record, config)
    planned = planned_steps(run, record, config) if is_configured else None
    decided = decide(run, record, before, config, is_configured=is_configured, planned=planned)
    audited = open_step(record, config, decided, stage.build)
    if is_configured and not audited.is_reinforced:
        check_places(audited)
    stage.check_rows(audited)
    if is_configured:
        wanted = {name: audited.trained_names(name) for name in audited.states}
        check_optimizers(audited.found, decided, record, config, audited.states, wanted)
        check_sources(audited, before, planned)
    if before is not None:
        check_link(audited.found, before, audited.states)
    Updates(audited, stage.objectives(audited), is_configured=is_configured).replay()
    if config.enable_ema:
        audited.found.skip("moving average", "it is not recorded")
    rows = tuple(audited.found.rows)
    return AuditReport(str(run), record.facts.step, rows, audited.borders.num_taken)


def stage_named(name: str, config: TrainConfig, reference: Path | None) -> StageAudit:
    """The audit of a stage.

    Args:
        name: As recorded.
        config: Options of the run.
        reference: Folder of the reference model, or of the teacher; None takes that of the options.

    Raises:
        RecordError: No stage has this name.
    """
    known: dict[str, Callable[[TrainConfig, Path | None], StageAudit]] = {
        "policy": policy_audit,
        "sft": supervised_audit,
        "prefer": preference_audit,
        "reward": reward_audit,
        "divergence": divergence_audit,
    }
    if name not in known:
        raise RecordError(f"steps of the stage {name!r} cannot be audited: {', '.join(known)} can")
    return known[name](config, reference)


def as_table(report: AuditReport) -> str:
    """The comparisons as text, and the verdict in the last line."""
    head = ("quantity", "run", "recomputed", "difference", "limit", "verdict")
    lines = [head, *map(_cells, report.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([*text, "", verdict(report)])


def verdict(report: AuditReport) -> str:
    """The outcome in a line."""
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
