"""What stands in a run's folder before its first step and after its last."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.trainer.reporting.loggers import drop_steps_after
from lightrft.trainer.runs.resume_banner import resume_rows, resume_table
from lightrft.trainer.runs.files import (
    CONFIG_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    START_FILE,
    SUMMARY_FILE,
    TRAJECTORIES_FILE,
    write_event,
    write_start,
)
from lightrft.trainer.runs.plan import describe_inputs
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.config import TrainConfig
from lightrft.trainer.runs.plan import RunPlan
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer



def start_run(config: TrainConfig, trainer: SPMDPPOTrainer, plan: RunPlan) -> int:
    """Continues from a checkpoint if that is the plan, and writes the first files of the run.

    Lines of steps that the checkpoint does not have are removed: they are about to come again.

    Returns:
        Steps that the checkpoint brought along.
    """
    strategy = trainer.strategy
    resumed = plan.resumes and trainer.load_checkpoint()
    num_steps = trainer.state.num_steps
    rows = resume_rows(config, trainer, plan.changes) if resumed else []
    if resumed:
        strategy.print(resume_table(config, num_steps, rows))
    elif plan.resumes:
        strategy.print(f"no complete checkpoint under {config.checkpoint_dir}: starting anew")
    if strategy.is_rank_0():
        folder = Path(config.output_dir)
        config.save(folder / CONFIG_FILE)
        write_start(
            folder / START_FILE, world_size=strategy.world_size, inputs=describe_inputs(config)
        )
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        for name in (METRICS_FILE, SAMPLES_FILE, TRAJECTORIES_FILE):
            # The evaluation before the first step comes again, too.
            drop_steps_after(folder / name, num_steps or -1)
        details: dict[str, object] = {"world_size": strategy.world_size}
        if resumed:
            details["restored"] = dict(rows)
            details["changes"] = [asdict(change) for change in plan.changes]
        write_event(folder, "resumed" if resumed else "started", step=num_steps, details=details)
    strategy.barrier()
    return num_steps


def end_run(config: TrainConfig, strategy: StrategyBase, event: str, num_steps: int) -> None:
    """Records how a run ended; no rank returns before that."""
    if strategy.is_rank_0():
        write_event(Path(config.output_dir), event, step=num_steps, details={})
    strategy.barrier()
