"""What a weight sync tells about itself."""

from __future__ import annotations

from dataclasses import dataclass

MEGABYTE = 2**20


@dataclass(frozen=True, slots=True)
class WeightSyncReport:
    """What one completed sync did.

    Args:
        weights_version: Version that the engine now has; 0 for the first sync.
        num_bytes: Bytes written into the engine, in its dtypes; 0 if it shares the storage.
        num_buckets: Weight buckets.
        num_payload_collectives: Collectives that carried weights.
        num_resident_bytes: Bytes of frozen parameters that the engine held already.
        num_verified_bytes: Bytes whose hash was read back from the engine's final storage.
        num_unverifiable_bytes: Bytes hashed only as they were handed to the engine.
        engine_hash: `model_hash` of the engine's weights; 0 without verification.
        canary_difference: Largest difference between trainer and engine in a logprob of the
            canary prompt; None if no prompt was scored.
        seconds: Whole duration.
        verify_seconds: Share of it spent on hashes and the canary prompt.
        is_aliased: Whether the engine shares the trainer's storage.
    """

    weights_version: int
    num_bytes: int
    num_buckets: int
    num_payload_collectives: int
    num_resident_bytes: int
    num_verified_bytes: int
    num_unverifiable_bytes: int
    engine_hash: int
    canary_difference: float | None
    seconds: float
    verify_seconds: float
    is_aliased: bool

    def summary(self) -> str:
        """One line for the log."""
        moved = (
            "shared with the trainer"
            if self.is_aliased
            else f"{_megabytes(self.num_bytes)} in {self.num_buckets} buckets and "
            f"{self.num_payload_collectives} collectives, "
            f"{_megabytes(self.num_resident_bytes)} frozen and resident"
        )
        checked = "not verified"
        if self.num_verified_bytes + self.num_unverifiable_bytes > 0:
            checked = (
                f"verified {_megabytes(self.num_verified_bytes)} in final storage and "
                f"{_megabytes(self.num_unverifiable_bytes)} on hand-over, "
                f"hash {self.engine_hash & (2**64 - 1):016x}"
            )
        if self.canary_difference is not None:
            checked += f", canary prompt within {self.canary_difference:.1e}"
        return (
            f"weights version {self.weights_version}: {moved}; {checked}; "
            f"{self.seconds:.2f} s, of it {self.verify_seconds:.2f} s for verification"
        )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / MEGABYTE:.1f} MB"
