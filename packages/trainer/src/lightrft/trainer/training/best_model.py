"""The model of the best evaluation so far."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class BestModel:
    """What was best.

    Args:
        value: Of the metric; larger is better.
        step: After which it was reached; 0 is before training.
    """

    value: float
    step: int


def keep_best(
    best: BestModel | None,
    metrics: Mapping[str, float],
    *,
    metric: str,
    step: int,
    actor: nn.Module,
    tokenizer: object,
    folder: Path,
    strategy: StrategyBase,
) -> BestModel | None:
    """Writes the actor in Hugging Face format if its evaluation is better than all before.

    Collective. The former best stays in place until the new one is complete.

    Args:
        best: Of the evaluations before, or None.
        metrics: Of this one, the same on every rank; empty means there was none.
        metric: Which of them decides.
        step: Completed steps.
        actor, tokenizer: What is written.
        folder: Where.
        strategy: Writes.

    Returns:
        The best now.

    Raises:
        ValueError: The evaluation has no such metric; the message lists those it has.
    """
    if not metrics:
        return best
    if metric not in metrics:
        raise ValueError(
            f"best_metric: the evaluation has no {metric!r}, it has {', '.join(sorted(metrics))}"
        )
    value = metrics[metric]
    if best is not None and not value > best.value:
        return best
    partial = folder.with_name(f"{folder.name}.partial")
    strategy.save_model(actor, tokenizer, str(partial))
    if strategy.is_rank_0():
        former = folder.with_name(f"{folder.name}.former")
        shutil.rmtree(former, ignore_errors=True)
        if folder.exists():
            folder.rename(former)
        partial.rename(folder)
        shutil.rmtree(former, ignore_errors=True)
    strategy.barrier()
    strategy.print(f"best {metric} so far: {value:.6g} after step {step}, saved in {folder}")
    return BestModel(value, step)
