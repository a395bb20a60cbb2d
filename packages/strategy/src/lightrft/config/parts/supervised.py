"""Options of one part of a run: what is trained of given rows."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    SFT_ALONE,
    supervised_option,
)
from lightrft.config.registry import (
    SFT_LOSSES,
    TRAIN_ON,
)


@dataclass(kw_only=True)
class SupervisedOptions:
    """What is trained of given rows."""

    train_on: str | None = supervised_option(
        None,
        "Tokens whose loss counts: all, the completion, every assistant turn or the last one; "
        "unset is all of a text, the completion after a prompt, the assistant turns of a chat.",
        choices=TRAIN_ON,
        common=True,
        commands=SFT_ALONE,
    )
    train_on_regex: str | None = supervised_option(
        None,
        "Of these tokens, only those with a character of a match of this regular expression (of "
        "its first group) in the text of the row; rows without one are left out and counted.",
        commands=SFT_ALONE,
    )
    sft_loss: str = supervised_option(
        "token-mean",
        "Mean of -log p over all trained tokens, mean of the rows' means, or dft, where each "
        "token also weighs its own probability.",
        choices=SFT_LOSSES,
        common=True,
        commands=SFT_ALONE,
    )
    max_row_tokens: int = supervised_option(
        2048,
        "Longest row, in tokens; longer ones, and those beyond the model's context, are left out "
        "and counted.",
        at_least=2,
        common=True,
    )
