"""Training on rows with answers."""

import re

from lightrft.config.options import (
    Arguments,
    checks,
    option,
    part,
)
from lightrft.config.parts.data import (
    MediaOptions,
    PromptOptions,
    RateOptions,
    SourceOptions,
    TemplateOptions,
)
from lightrft.config.parts.learning import SampledTeacherOptions, TeacherOptions
from lightrft.config.parts.machine import BuildOptions
from lightrft.config.parts.rollout import EpisodeOptions
from lightrft.config.parts.run_control import FolderOptions, MonitoringOptions, RunControlOptions
from lightrft.config.parts.scores import ModelOptions
from lightrft.config.parts.training import ComputeOptions
from lightrft.config.registry import (
    PREFERENCE_LOSSES,
    REWARD_LOSSES,
    SCORE_POOLINGS,
    SFT_LOSSES,
    TRAIN_ON,
)


@part("supervised")
class RowLengthOptions:
    """Longest rows."""

    max_row_tokens: int = option(
        2048,
        "Longest row, in tokens; longer ones, and those beyond the model's context, are left out "
        "and counted.",
        at_least=2,
        common=True,
    )


def _regex_problem(name: str, text: str | None) -> str | None:
    try:
        re.compile(text or "")
    except re.error as error:
        return f"{name}: got {text!r}, expected a regular expression of Python: {error}"
    return None


@part("supervised")
class TrainedTokenOptions:
    """Trained tokens of a row."""

    train_on: str | None = option(
        None,
        "Tokens whose loss counts: all, the completion, every assistant turn or the last one; "
        "unset is all of a text, the completion after a prompt, the assistant turns of a chat.",
        choices=TRAIN_ON,
        common=True,
    )
    train_on_regex: str | None = option(
        None,
        "Of these tokens, only those with a character of a match of this regular expression (of "
        "its first group) in the text of the row; rows without one are left out and counted.",
    )

    rules = checks(
        lambda c: _regex_problem("train_on_regex", c.train_on_regex),
    )


@part("supervised")
class SupervisedOptions(TrainedTokenOptions):
    """The loss of supervised rows."""

    sft_loss: str = option(
        "token-mean",
        "Mean of -log p over all trained tokens, mean of the rows' means, or dft, where each "
        "token also weighs its own probability.",
        choices=SFT_LOSSES,
        common=True,
    )


@part("preference")
class PreferenceOptions:
    """Losses of preferences."""

    preference_loss: tuple[str, ...] = option(
        ("dpo",),
        "Preference losses, whose weighted sum is minimised; names of TRL are known, too.",
        choices=PREFERENCE_LOSSES,
        common=True,
    )
    preference_weights: tuple[float, ...] = option(
        (),
        "Weight of each preference loss; unset is 1 each.",
        at_least=0,
    )
    preference_args: Arguments = option(
        None,
        "Hyper-parameters of the preference losses under their own names, such as beta=0.1; one "
        "reaches every loss that has it.",
        common=True,
    )
    ref_logprobs: str | None = option(
        None,
        "File of the reference's log-probabilities of all answers: computed before the first step "
        "where it does not exist, and read instead of a reference model where it does and is of "
        "the same data, template and model. Unset computes them on the way.",
        may_change=True,
    )


@part("supervised")
class RewardModelOptions:
    """Losses and scores of a reward model."""

    reward_loss: str | None = option(
        None,
        "Loss of a reward model; unset is bradley_terry for pairs and bce for labelled answers.",
        choices=REWARD_LOSSES,
        common=True,
    )
    reward_loss_args: Arguments = option(
        None,
        "Hyper-parameters of the reward loss under their own names.",
    )
    reward_pooling: str | None = option(
        None,
        "Hidden states that a score is made of: the last token's, or all, by learned attention; "
        "unset is that of a reward model which is trained on, else last.",
        choices=SCORE_POOLINGS,
    )
    reward_heads: tuple[str, ...] = option(
        (),
        "Names of scores, each with a head and rankings of its own (ranks by name in the rows); "
        "unset is one score, or those of a reward model which is trained on.",
    )
    reward_head_weights: tuple[float, ...] = option(
        (),
        "Weight of each score in the reward and of its loss; unset is 1 each.",
        acts_with="reward_heads",
    )
    reward_head_losses: tuple[str, ...] = option(
        (),
        "Loss of each score; unset is reward_loss for all.",
        choices=REWARD_LOSSES,
        acts_with="reward_heads",
    )
    centering_coef: float = option(
        0.0,
        "Weight of (chosen score + rejected score)^2, which keeps scores around 0; 0.01 is usual.",
        at_least=0,
    )


class PromptDataOptions(
    RateOptions,
    SampledTeacherOptions,
    EpisodeOptions,
    MediaOptions,
    PromptOptions,
    SourceOptions,
    ModelOptions,
    ComputeOptions,
):
    """Rows that become prompts."""


class RowDataOptions(
    TrainedTokenOptions,
    RowLengthOptions,
    TeacherOptions,
    MediaOptions,
    TemplateOptions,
    SourceOptions,
    ModelOptions,
    ComputeOptions,
):
    """Rows with answers."""


class RowRunOptions(
    RewardModelOptions,
    PreferenceOptions,
    SupervisedOptions,
    RowDataOptions,
    MonitoringOptions,
    RunControlOptions,
    FolderOptions,
    TeacherOptions,
    BuildOptions,
):
    """Training on rows with answers."""
