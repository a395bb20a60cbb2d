"""Scalars for TensorBoard, the finite ones, readable after every step."""

from collections.abc import Mapping

from lightrft.config import OutputOptions
from lightrft.reporting.trackers.best_effort import BestEffortLogger, finite

FOLDER = "tensorboard"


def open_tensorboard(config: OutputOptions) -> BestEffortLogger:
    """Open a writer of event files."""
    from torch.utils.tensorboard import SummaryWriter

    chosen = config.use_tensorboard
    writer = SummaryWriter(chosen if isinstance(chosen, str) else f"{config.output_dir}/{FOLDER}")

    def send(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in finite(metrics).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return BestEffortLogger("use_tensorboard", send, writer.close)
