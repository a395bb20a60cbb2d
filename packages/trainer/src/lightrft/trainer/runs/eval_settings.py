"""How an evaluation draws and counts its samples."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """How answers are drawn and counted.

    Args:
        num_samples: Samples of each prompt beside the greedy answer; 0 draws none.
        temperature, top_p, top_k: Of the samples.
        pass_k: The k of pass@k; empty takes 1, 2, 4 ... num_samples.
        threshold: A response is right if its accuracy (the reward, where the reward function
            reports none) is at least this.
    """

    num_samples: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    pass_k: tuple[int, ...] = ()
    threshold: float = 1.0

    def problems(self) -> list[str]:
        """What is wrong with the values, one line each."""
        rules = (
            (self.num_samples < 0, f"num_samples: got {self.num_samples}, expected 0 or more"),
            (self.temperature <= 0, f"temperature: got {self.temperature}, expected more than 0; "
             "the greedy answer is always part of an evaluation"),
            (not 0 < self.top_p <= 1, f"top_p: got {self.top_p}, expected 0 < top_p <= 1"),
            (self.top_k != -1 and self.top_k < 1, f"top_k: got {self.top_k}, expected -1 or more "
             "than 0"),
            (any(not 1 <= k <= self.num_samples for k in self.pass_k),
             f"pass_k: got {list(self.pass_k)}, expected numbers from 1 to num_samples = "
             f"{self.num_samples}"),
        )  # fmt: skip
        return [text for is_broken, text in rules if is_broken]
