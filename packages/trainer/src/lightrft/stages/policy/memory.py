"""Memory of a policy stage: KL weight, reward moments, unfinished responses, used request ids."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightrft.algorithms.kl import KlController
from lightrft.algorithms.moments import Moments
from lightrft.config import TrainConfig
from lightrft.experience.maker import StepExperience
from lightrft.rollout.source import PartialRolloutState
from lightrft.stages.stage import stored_number


@dataclass(frozen=True, slots=True)
class PolicyMemory:
    """Memory of reinforcement between steps.

    Args:
        kl: Weight of the KL term.
        moments: Of all rewards so far, or None without running normalisation.
        num_requests: Prompts rolled out so far, over all ranks; the id of the next request.
        carry: Responses that are not finished yet.
    """

    kl: KlController
    moments: Moments | None = None
    num_requests: int = 0
    carry: PartialRolloutState = field(default_factory=PartialRolloutState)

    @classmethod
    def initial(cls, config: TrainConfig) -> PolicyMemory:
        """The memory before the first step."""
        kl = KlController(config.init_kl_coef, config.kl_target, config.kl_horizon)
        return cls(kl, Moments() if config.reward_running_norm else None)

    def after_step(self, step: StepExperience, *, kl: float | None) -> PolicyMemory:
        """The memory after one more step.

        Args:
            step: What was trained on.
            kl: Mean KL to the reference model of a response, or None without one; the weight
                stays as it is where that is not finite.
        """
        partial = step.samples.partial
        controller = self.kl
        if kl is not None and math.isfinite(kl):
            controller = controller.update(kl, num_samples=len(step.table))
        return PolicyMemory(
            kl=controller,
            moments=step.rewards.moments,
            num_requests=self.num_requests + step.samples.num_prompts,
            carry=self.carry if partial is None else partial.carry,
        )

    def to_client_state(self) -> dict[str, object]:
        """See `StageMemory`."""
        found = self.moments
        return {
            "num_requests": self.num_requests,
            "kl_coef": self.kl.coef,
            "carry": self.carry.to_json(),
            "reward_moments": None
            if found is None
            else [found.count, found.mean, found.sum_of_squares],
        }

    def restored(self, client_state: Mapping[str, object]) -> PolicyMemory:
        """See `StageMemory`; how to adapt and shape stays as it is."""
        moments, saved = self.moments, client_state["reward_moments"]
        if moments is not None and isinstance(saved, list):
            count, mean, squares = saved
            moments = Moments(int(count), mean, squares)
        return PolicyMemory(
            kl=replace(self.kl, coef=stored_number(client_state, "kl_coef")),
            moments=moments,
            num_requests=int(stored_number(client_state, "num_requests")),
            carry=PartialRolloutState.from_json(client_state["carry"]),
        )

    def rows(self) -> list[tuple[str, str]]:
        """See `StageMemory`."""
        moments = self.moments
        return [
            ("kl_coef", f"{self.kl.coef:g}"),
            ("reward moments", "not used" if moments is None else f"of {moments.count} rewards"),
        ]
