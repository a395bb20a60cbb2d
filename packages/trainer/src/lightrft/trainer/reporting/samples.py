"""A few samples of every step as text, for people to read."""

from collections.abc import Sequence
from pathlib import Path

from lightrft.experience.types import ScoredRollout
from lightrft.trainer.reporting.loggers import JsonLinesFile


class SampleLog(JsonLinesFile):
    """Appends the first samples of each step to a JSONL file.

    Each line has step, prompt_id, prompt, response, label, reward, components, response_length
    and truncated.

    Args:
        path: The file.
        num_samples: Samples of one step.
    """

    def __init__(self, path: Path, *, num_samples: int = 8) -> None:
        super().__init__(path)
        self._num_samples = num_samples

    def log(self, step: int, scored: Sequence[ScoredRollout]) -> None:
        """Writes the samples of a step."""
        for item in scored[: self._num_samples]:
            self.append(_as_line(step, item))


def _as_line(step: int, item: ScoredRollout) -> dict[str, object]:
    rollout = item.rollout
    return {
        "step": step,
        "prompt_id": rollout.prompt.id,
        "sample_id": rollout.sample_id,
        "prompt": rollout.prompt.text,
        "response": rollout.response_text,
        "label": rollout.prompt.label,
        "reward": item.reward,
        "components": dict(item.components),
        "response_length": len(rollout.completion.output_token_ids),
        "truncated": rollout.completion.finish_reason == "length",
    }
