"""The error of checkpoints, which needs no torch."""


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, damaged, or of another kind than expected."""
