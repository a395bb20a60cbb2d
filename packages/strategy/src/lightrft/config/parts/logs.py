"""Options of one part of a run: logs of a strategy, and how strict it is."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    NOT_SFT,
    monitoring_option,
)


@dataclass(kw_only=True)
class LogOptions:
    """Logs of a strategy, and how strict it is."""

    log_dir: str | None = monitoring_option(
        None,
        "Folder of logs and of length distributions.",
        commands=NOT_SFT,
    )
    plot_every: int = monitoring_option(
        -1,
        "Write the generation length distribution every N steps; 0 or less never.",
        acts_with="log_dir",
        commands=NOT_SFT,
    )
    use_tensorboard: str | bool | None = monitoring_option(
        False,
        "Write TensorBoard logs, into this folder or OUTPUT_DIR/tensorboard.",
    )
    strict: bool = monitoring_option(
        False,
        "Options without effect are errors instead of warnings.",
    )
