"""Options of one part of a run: losses of preferences."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    Arguments,
    preference_option,
)
from lightrft.config.registry import (
    PREFERENCE_LOSSES,
)


@dataclass(kw_only=True)
class PreferenceOptions:
    """Losses of preferences."""

    preference_loss: tuple[str, ...] = preference_option(
        ("dpo",),
        "Preference losses, whose weighted sum is minimised; names of TRL are known, too.",
        choices=PREFERENCE_LOSSES,
        common=True,
    )
    preference_weights: tuple[float, ...] = preference_option(
        (),
        "Weight of each preference loss; unset is 1 each.",
        at_least=0,
    )
    preference_args: Arguments = preference_option(
        None,
        "Hyper-parameters of the preference losses under their own names, such as beta=0.1; one "
        "reaches every loss that has it.",
        common=True,
    )
    ref_logprobs: str | None = preference_option(
        None,
        "File of the reference's log-probabilities of all answers: computed before the first step "
        "where it does not exist, and read instead of a reference model where it does and is of "
        "the same data, template and model. Unset computes them on the way.",
        may_change=True,
    )
