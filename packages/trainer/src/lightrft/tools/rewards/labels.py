"""Rewards that compare responses with the labels of their rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from lightrft.rewards.types import Labels, RewardError

Label = TypeVar("Label")


class LabelReader(ABC, Generic[Label]):
    """Base of rewards that compare responses with what their rows' labels hold."""

    name: str
    needs_labels = True
    how_to_label = "set --label_key"

    @abstractmethod
    def read_label(self, label: str) -> Label:
        """Return what a label holds; raise a ValueError of one line if that is unusable."""

    def label_problem(self, label: str | None) -> str | None:
        """Return why no response to a row with this label can be right; None if one can."""
        if label is None:
            return f"the row has no label: {self.how_to_label}"
        try:
            self.read_label(label)
        except ValueError as err:
            return str(err)
        return None

    def read_labels(self, labels: Labels) -> list[Label]:
        """Return what the label of each sample holds.

        Raises:
            RewardError: A label is missing or unusable.
        """
        for index, label in enumerate(labels):
            problem = self.label_problem(label)
            if problem is not None:
                raise RewardError(f"reward {self.name!r}, label of sample {index}: {problem}")
        return [self.read_label(str(label)) for label in labels]
