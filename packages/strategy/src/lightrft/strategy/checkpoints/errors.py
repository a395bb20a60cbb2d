"""What is wrong with a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, damaged, or of another kind than expected."""
