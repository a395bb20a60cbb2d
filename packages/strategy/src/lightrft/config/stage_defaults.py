"""Defaults that depend on what a run trains. Standard library only."""

from collections.abc import Mapping

REINFORCEMENT = "policy"
# Peak learning rates of all weights and of adapters, by stage. Where every token of a row teaches
# one can step further than on a few samples' rewards, and adapters move little at the same rate.
LEARNING_RATES: Mapping[str, tuple[float, float]] = {
    REINFORCEMENT: (1e-6, 1e-6),
    "sft": (1e-5, 1e-4),
}
# Commands are named like their stages but for this one.
_COMMANDS = {REINFORCEMENT: "train"}


def default_learning_rate(stage: str = REINFORCEMENT, *, has_adapters: bool = False) -> float:
    """The peak learning rate of a stage; others than those of the table have reinforcement's."""
    return LEARNING_RATES.get(stage, LEARNING_RATES[REINFORCEMENT])[has_adapters]


def shown_learning_rates() -> str:
    """The table in one line, for the help of the option."""
    parts = []
    for stage, (whole, adapters) in LEARNING_RATES.items():
        own = "" if adapters == whole else f" ({adapters} for adapters)"
        parts.append(f"{_COMMANDS.get(stage, stage)} {whole}{own}")
    return ", ".join(parts)
