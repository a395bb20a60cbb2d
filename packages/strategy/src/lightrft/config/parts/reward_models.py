"""Options of one part of a run: losses and scores of a reward model."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    Arguments,
    supervised_option,
)
from lightrft.config.registry import (
    REWARD_LOSSES,
    SCORE_POOLINGS,
)


@dataclass(kw_only=True)
class RewardModelOptions:
    """Losses and scores of a reward model."""

    reward_loss: str | None = supervised_option(
        None,
        "Loss of a reward model; unset is bradley_terry for pairs and bce for labelled answers.",
        choices=REWARD_LOSSES,
        common=True,
        commands=("reward",),
    )
    reward_loss_args: Arguments = supervised_option(
        None,
        "Hyper-parameters of the reward loss under their own names.",
        commands=("reward",),
    )
    reward_pooling: str | None = supervised_option(
        None,
        "Hidden states that a score is made of: the last token's, or all, by learned attention; "
        "unset is that of a reward model which is trained on, else last.",
        choices=SCORE_POOLINGS,
        commands=("reward",),
    )
    reward_heads: tuple[str, ...] = supervised_option(
        (),
        "Names of scores, each with a head and rankings of its own (ranks by name in the rows); "
        "unset is one score, or those of a reward model which is trained on.",
        commands=("reward",),
    )
    reward_head_weights: tuple[float, ...] = supervised_option(
        (),
        "Weight of each score in the reward and of its loss; unset is 1 each.",
        commands=("reward",),
        acts_with="reward_heads",
    )
    reward_head_losses: tuple[str, ...] = supervised_option(
        (),
        "Loss of each score; unset is reward_loss for all.",
        choices=REWARD_LOSSES,
        commands=("reward",),
        acts_with="reward_heads",
    )
    centering_coef: float = supervised_option(
        0.0,
        "Weight of (chosen score + rejected score)^2, which keeps scores around 0; 0.01 is usual.",
        at_least=0,
        commands=("reward",),
    )
