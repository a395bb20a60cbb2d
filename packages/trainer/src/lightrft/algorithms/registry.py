"""Policy losses and advantage estimators by name, as import strings."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import TYPE_CHECKING, cast

from lightrft.algorithms.lookup import lookup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightrft.algorithms.types import AdvantageFunction, PolicyLossFunction

_POLICY = "lightrft.algorithms.policy"
_ROWS, _TOKENS = (f"lightrft.algorithms.advantages.{level}_level" for level in ("row", "token"))

POLICY_LOSSES: dict[str, str] = {
    "ppo": f"{_POLICY}.clipped:clipped_policy_loss",
    "clipped": f"{_POLICY}.clipped:clipped_policy_loss",
    "dapo": f"{_POLICY}.clipped:dapo_policy_loss",
    "dr_grpo": f"{_POLICY}.clipped:dr_grpo_policy_loss",
    "gspo": f"{_POLICY}.gspo:gspo_policy_loss",
    "gspo-token": f"{_POLICY}.gspo:gspo_token_policy_loss",
    "gmpo": f"{_POLICY}.gmpo:gmpo_policy_loss",
    "cpgd": f"{_POLICY}.cpgd:cpgd_policy_loss",
    "cispo": f"{_POLICY}.cispo:cispo_policy_loss",
    "sapo": f"{_POLICY}.sapo:sapo_policy_loss",
    "clip_cov": f"{_POLICY}.covariance:clip_cov_policy_loss",
    "kl_cov": f"{_POLICY}.covariance:kl_cov_policy_loss",
    "reinforce": f"{_POLICY}.reinforce:reinforce_policy_loss",
}

ADVANTAGE_ESTIMATORS: dict[str, str] = {
    "gae": f"{_TOKENS}:gae_advantages",
    "reinforce": f"{_TOKENS}:reinforce_advantages",
    "reinforce++": f"{_TOKENS}:reinforce_plus_plus_advantages",
    "reinforce_baseline": f"{_ROWS}:reinforce_baseline_advantages",
    "rloo": f"{_ROWS}:rloo_advantages",
    "group_norm": f"{_ROWS}:group_norm_advantages",
    "grpo": f"{_ROWS}:group_norm_advantages",
    "group_mean_batch_std": f"{_ROWS}:group_mean_batch_std_advantages",
    "dr_grpo": f"{_ROWS}:group_centred_advantages",
    "cpgd": f"{_ROWS}:cpgd_advantages",
    "opo": f"{_ROWS}:opo_advantages",
    "remax": f"{_ROWS}:remax_advantages",
}


def get_policy_loss(name: str) -> PolicyLossFunction:
    """The named loss; an unknown name is a ValueError that lists the known ones."""
    return cast("PolicyLossFunction", _load(lookup(POLICY_LOSSES, name, kind="policy loss")))


def build_policy_loss(name: str, options: Mapping[str, float | None]) -> PolicyLossFunction:
    """The named loss with its hyper-parameters bound.

    Args:
        name: A name in `POLICY_LOSSES`.
        options: Hyper-parameters by name; None means the loss's own default.

    Raises:
        ValueError: unknown name, or a value (not None) for an option the loss does not have.
    """
    function = get_policy_loss(name)
    return cast("PolicyLossFunction", _bind(function, options, owner=f"policy loss {name!r}"))


def build_advantage_estimator(
    name: str, options: Mapping[str, float | str | None]
) -> AdvantageFunction:
    """The named estimator with its options bound.

    Args:
        name: A name in `ADVANTAGE_ESTIMATORS`.
        options: By name; None means the estimator's own default.

    Raises:
        ValueError: unknown name, or a value (not None) for an option the estimator does not have.
    """
    function = _load(lookup(ADVANTAGE_ESTIMATORS, name, kind="advantage estimator"))
    bound = _bind(function, options, owner=f"advantage estimator {name!r}")
    return cast("AdvantageFunction", bound)


def option_names(function: Callable[..., object]) -> list[str]:
    """The keyword-only arguments of a function."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


def _load(import_string: str) -> Callable[..., object]:
    module, _, name = import_string.partition(":")
    return cast("Callable[..., object]", getattr(importlib.import_module(module), name))


def _bind(
    function: Callable[..., object], options: Mapping[str, float | str | None], *, owner: str
) -> Callable[..., object]:
    given = {name: value for name, value in options.items() if value is not None}
    known = option_names(function)
    for name in given:
        if name not in known:
            listing = ", ".join(known) or "none"
            raise ValueError(f"{owner} has no option {name!r}: its options are {listing}")
    return partial(function, **given)
