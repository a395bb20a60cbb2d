"""Steps, evaluations and checkpoints in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.trainer.training.run_control import RunControl


@dataclass(frozen=True, slots=True)
class LoopSchedule:
    """How long a run is and what happens on the way; counted in steps (rollout and update).

    Args:
        num_steps: Steps of the whole run, those before a resume included.
        eval_steps: Steps between evaluations; -1 evaluates at both ends only.
        save_steps: Steps between checkpoints; -1 writes one at the end only.
    """

    num_steps: int
    eval_steps: int = -1
    save_steps: int = -1


@dataclass(frozen=True, slots=True)
class LoopResult:
    """What a run ended with.

    Args:
        num_steps: Completed steps, those before a resume included.
        first_eval: Metrics of the evaluation before the first step of this process; empty
            without evaluation prompts, or after a resume.
        last_eval: Metrics of the last evaluation.
        last_metrics: Metrics of the last step; empty if there was none.
        was_stopped: The run was asked to stop before its last step.
    """

    num_steps: int
    first_eval: dict[str, float]
    last_eval: dict[str, float]
    last_metrics: dict[str, float]
    was_stopped: bool = False


def run_loop(trainer: RunControl, cadence: LoopSchedule) -> LoopResult:
    """Trains until `cadence.num_steps` steps are complete, an alarm stops, or a request to stop.

    A request is looked at before each step and between its rollout and its update; the rollout is
    then dropped, and a resumed run samples it again.
    """
    first_eval: dict[str, float] = {}
    last_eval: dict[str, float] = {}
    metrics: dict[str, float] = {}
    if trainer.state.num_steps == 0:
        first_eval = last_eval = trainer.evaluate()
        trainer.keep_best(0, first_eval)
        if first_eval:
            trainer.log_metrics(0, first_eval)
    num_saved = -1
    was_stopped = False
    while trainer.state.num_steps < cadence.num_steps:
        if was_stopped := trainer.is_asked_to_stop():
            break
        step = trainer.state.num_steps + 1
        trainer.make_experience()
        if was_stopped := trainer.is_asked_to_stop():
            break
        metrics = trainer.ppo_train(step)
        is_alarmed = trainer.check_alarms(metrics)
        is_last = is_alarmed or step == cadence.num_steps
        is_evaluated = is_last or _is_due(step, cadence.eval_steps)
        if is_evaluated:
            last_eval = trainer.evaluate()
            trainer.keep_best(step, last_eval)
        trainer.log_metrics(step, {**metrics, **last_eval} if is_evaluated else metrics)
        if is_last or _is_due(step, cadence.save_steps):
            trainer.save_checkpoint()
            num_saved = step
        if is_alarmed:
            break
    if was_stopped and num_saved != trainer.state.num_steps:
        trainer.save_checkpoint()
    return LoopResult(trainer.state.num_steps, first_eval, last_eval, metrics, was_stopped)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
