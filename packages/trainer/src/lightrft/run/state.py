"""What a trainer remembers between steps; all of it goes into a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightrft.algorithms.kl import KlController
from lightrft.algorithms.moments import Moments
from lightrft.config import TrainConfig
from lightrft.datasets.prompt_stream import PromptStream
from lightrft.experience.maker import StepExperience
from lightrft.rollout.partial import PartialRolloutState


@dataclass(frozen=True, slots=True)
class BestModel:
    """The best evaluation so far.

    Args:
        value: Of the metric; larger is better.
        step: After which it was reached; 0 is before training.
    """

    value: float
    step: int


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Progress of a run.

    Args:
        num_steps: Completed steps (rollout and update).
        num_requests: Prompts rolled out so far, over all ranks; the id of the next request.
        episode: Pass over the prompts that is under way.
        num_episode_prompts: Prompts of that pass already used, over all ranks.
        carry: Responses that are not finished yet.
        best: The best evaluation so far, or None.
        kl: Weight of the KL term.
        reward_moments: Of all rewards so far, or None without running normalisation.
    """

    kl: KlController
    reward_moments: Moments | None = None
    num_steps: int = 0
    num_requests: int = 0
    episode: int = 0
    num_episode_prompts: int = 0
    carry: PartialRolloutState = field(default_factory=PartialRolloutState)
    best: BestModel | None = None

    def to_client_state(self) -> dict[str, object]:
        """Plain values for `strategy.save_ckpt`."""
        moments = self.reward_moments
        return {
            "num_steps": self.num_steps,
            "num_requests": self.num_requests,
            "episode": self.episode,
            "consumed_samples": self.num_episode_prompts,
            "kl_coef": self.kl.coef,
            "carry": self.carry.to_json(),
            "best": None if self.best is None else [self.best.value, self.best.step],
            "reward_moments": None
            if moments is None
            else [moments.count, moments.mean, moments.sum_of_squares],
        }

    def after_step(
        self, step: StepExperience, *, stream: PromptStream | None, kl: float | None
    ) -> TrainerState:
        """The state after one more step.

        Args:
            step: What was trained on.
            stream: Where they came from, or None if the caller passed them.
            kl: Mean KL to the reference model of a response, or None without one; the weight
                stays as it is where that is not finite.
        """
        partial = step.samples.partial
        return TrainerState(
            kl=self.kl
            if kl is None or not math.isfinite(kl)
            else self.kl.update(kl, num_samples=len(step.table)),
            reward_moments=step.rewards.moments,
            num_steps=self.num_steps + 1,
            num_requests=self.num_requests + step.samples.num_prompts,
            episode=self.episode if stream is None else stream.episode,
            num_episode_prompts=self.num_episode_prompts if stream is None else stream.num_consumed,
            carry=self.carry if partial is None else partial.carry,
            best=self.best,
        )

    def restored(self, client_state: Mapping[str, object]) -> TrainerState:
        """This state with the progress of a checkpoint; how to adapt and shape stays as it is.

        Raises:
            ValueError: The checkpoint was not written by a trainer.
        """
        try:
            moments, saved = self.reward_moments, client_state["reward_moments"]
            if moments is not None and isinstance(saved, list):
                count, mean, squares = saved
                moments = Moments(int(count), mean, squares)
            best = client_state["best"]
            return TrainerState(
                kl=replace(self.kl, coef=_number(client_state["kl_coef"])),
                reward_moments=moments,
                num_steps=int(_number(client_state["num_steps"])),
                num_requests=int(_number(client_state["num_requests"])),
                episode=int(_number(client_state["episode"])),
                num_episode_prompts=int(_number(client_state["consumed_samples"])),
                best=BestModel(_number(best[0]), int(_number(best[1])))
                if isinstance(best, list)
                else None,
                carry=PartialRolloutState.from_json(client_state["carry"]),
            )
        except KeyError as error:
            raise ValueError(
                f"the checkpoint holds no trainer state: {error} is missing from its client state "
                f"(it has {sorted(client_state)}); load it with load_module_only, or start anew"
            ) from error


def initial_state(config: TrainConfig) -> TrainerState:
    """The state before the first step."""
    kl = KlController(config.init_kl_coef, config.kl_target, config.kl_horizon)
    return TrainerState(kl, Moments() if config.reward_running_norm else None)


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"expected a number in the checkpoint's client state, got {value!r}")
    return value
