"""Options of one part of a run: where models and scores come from."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    CRITIC,
    DATA_AND_EVAL,
    SFT,
    models_option,
)


@dataclass(kw_only=True)
class ModelOptions:
    """Where models and scores come from."""

    pretrain: str | None = models_option(
        None,
        "Checkpoint directory of the actor.",
        common=True,
        path="folder",
        commands=("data", *SFT),
    )
    critic_pretrain: str | bool | None = models_option(
        False,
        "Checkpoint directory of the critic; unset trains no critic.",
        path="folder",
        acts_with=CRITIC,
    )
    remote_rm_url: str | tuple[str, ...] | None = models_option(
        None,
        "Address of a reward service, in which ${NAME} is an environment variable; local "
        "reward models are then left alone.",
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    pretrain_data: str | None = models_option(
        None,
        "Rows as those of lightrft sft, whose loss is mixed in: texts, conversations, answers.",
        acts_with="ptx_coef",
        path="file",
    )
