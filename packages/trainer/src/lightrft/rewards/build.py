"""Reward functions by name or by file."""

from __future__ import annotations

import difflib
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from lightrft.rewards.math_rules import BOXED_MATH, GSM8K, MathReward
from lightrft.rewards.remote import RemoteReward
from lightrft.rewards.types import RewardFunction, RewardResult
from lightrft.rewards.user import UserReward
from lightrft.strategy.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """Deadlines and processes.

    Args:
        timeout_seconds: Deadline of one call of a user's function.
        grading_seconds: Deadline of one comparison by math-verify.
        num_workers: Processes for math-verify, at most.
    """

    timeout_seconds: float = 120.0
    grading_seconds: float = 10.0
    num_workers: int = 2

    def __post_init__(self) -> None:
        if min(self.timeout_seconds, self.grading_seconds) <= 0 or self.num_workers < 1:
            raise ConfigError(
                "reward deadlines must be positive and num_workers at least 1: got "
                f"{self.timeout_seconds}, {self.grading_seconds}, {self.num_workers}"
            )


def _boxed_math(settings: RewardSettings) -> RewardFunction:
    return MathReward(
        BOXED_MATH, grading_seconds=settings.grading_seconds, num_workers=settings.num_workers
    )


def _gsm8k(settings: RewardSettings) -> RewardFunction:
    return MathReward(
        GSM8K, grading_seconds=settings.grading_seconds, num_workers=settings.num_workers
    )


REWARDS: dict[str, Callable[[RewardSettings], RewardFunction]] = {
    "boxed_math": _boxed_math,
    "gsm8k": _gsm8k,
}


class CombinedReward:
    """The weighted sum of reward functions; a context manager that ends their processes.

    Components of all functions are reported unweighted under their own names; where two functions
    use one name, the later one's becomes `function/name`.

    Args:
        functions: At least one.
        weights: One per function.
    """

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float]) -> None:
        self._functions = tuple(functions)
        self._weights = tuple(weights)
        self.name = "+".join(function.name for function in functions)

    @property
    def needs_labels(self) -> bool:
        """One of the functions does."""
        return any(function.needs_labels for function in self._functions)

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        labels: Sequence[str | None],
        columns: Mapping[str, Sequence[object]],
    ) -> list[RewardResult]:
        """See `RewardFunction.score`."""

        def score(function: RewardFunction) -> list[RewardResult]:
            return function.score(prompts, responses, labels, columns)

        # Functions wait for processes and services, so threads are enough to overlap them.
        with ThreadPoolExecutor(len(self._functions), thread_name_prefix="reward") as threads:
            by_function = list(threads.map(score, self._functions))
        return [self._combine(results) for results in zip(*by_function, strict=True)]

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise a RewardError if a user's function needs an argument that is no column."""
        for function in self._functions:
            if isinstance(function, UserReward):
                function.check_columns(columns)

    def close(self) -> None:
        """Ends the worker processes; may be called twice."""
        for function in self._functions:
            function.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _combine(self, results: Sequence[RewardResult]) -> RewardResult:
        components: dict[str, float] = {}
        for function, result in zip(self._functions, results, strict=True):
            for name, value in result.components.items():
                components[f"{function.name}/{name}" if name in components else name] = value
        total = sum(
            weight * result.reward for weight, result in zip(self._weights, results, strict=True)
        )
        return RewardResult(total, components)


def build_reward(
    names: Sequence[str],
    *,
    urls: Sequence[str] = (),
    weights: Sequence[float] | None = None,
    settings: RewardSettings | None = None,
) -> CombinedReward:
    """Loads and checks reward functions, before any model exists.

    Args:
        names: Names in `REWARDS` or `FILE.py:FUNCTION`; their rewards are summed.
        urls: Addresses of reward services, see `lightrft.rewards.remote`.
        weights: One factor per name and then per address; None means 1 each.
        settings: Deadlines and processes.

    Returns:
        The sum; close it, or use it as a context manager.

    Raises:
        ConfigError: no names, an unknown name, file or function, one twice, or wrong weights.
        RewardError: a user's file cannot be imported or its function not be called.
    """
    if not names and not urls:
        raise ConfigError(f"no reward: set --reward_fn to {', '.join(REWARDS)} or FILE.py:FUNCTION")
    count = len(names) + len(urls)
    factors = [1.0] * count if weights is None else list(weights)
    if len(factors) != count or not all(math.isfinite(factor) for factor in factors):
        raise ConfigError(f"reward weights: expected {count} finite numbers, got {factors}")
    if len({*names, *urls}) < count:
        raise ConfigError(f"reward functions must differ: got {', '.join((*names, *urls))}")
    with ExitStack() as opened:
        settings = settings or RewardSettings()
        functions: list[RewardFunction] = []
        for name in names:
            function = _build_one(name, settings)
            opened.callback(function.close)
            functions.append(function)
        for index, url in enumerate(urls):
            name = "remote" if len(urls) == 1 else f"remote_{index}"
            functions.append(RemoteReward(url, name=name, timeout_seconds=settings.timeout_seconds))
        opened.pop_all()
    return CombinedReward(functions, factors)


def _build_one(name: str, settings: RewardSettings) -> RewardFunction:
    if name in REWARDS:
        return REWARDS[name](settings)
    path, separator, function = name.rpartition(":")
    if separator and path.endswith(".py") and function.isidentifier():
        return UserReward(path, function, timeout_seconds=settings.timeout_seconds)
    if name.endswith(".py"):
        raise ConfigError(f"reward function {name}: expected FILE.py:FUNCTION, say {name}:reward")
    nearest = difflib.get_close_matches(name, REWARDS, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise ConfigError(
        f"unknown reward function {name!r}: expected {', '.join(REWARDS)} or FILE.py:FUNCTION{hint}"
    )
