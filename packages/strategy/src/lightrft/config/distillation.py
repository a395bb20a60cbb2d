"""Forms of distillation by name, and those that have a wrong gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrft.config.options import ConfigError, did_you_mean

if TYPE_CHECKING:
    from lightrft.config.train_config import TrainConfig

SAMPLED = "sampled"
FORMS = (SAMPLED,)
_K3 = (
    "k3 as a reward has the expected gradient of KL(student || teacher) less that of KL(teacher || "
    "student), which vanishes near the teacher"
)
_TOP_K = (
    "a divergence of the top k tokens is equal for whatever token was sampled, so that taken from "
    "its advantage it has no expected gradient"
)
# Names that other projects have for them.
REFUSED = {
    "k1_loss": "k1 as a loss has no expected gradient",
    "k3": _K3,
    "low_var_kl": _K3,
    "topk": _TOP_K,
    "forward_kl_topk": _TOP_K,
    "reverse_kl_topk": _TOP_K,
}
# The estimator without an advantage of the rewards.
NO_REWARDS = "zero"


def form_problem(name: str) -> str | None:
    """The reason why `teacher_form` cannot have this value; None if it can."""
    if name in REFUSED:
        return f"teacher_form: got {name!r}: {REFUSED[name]}; take {SAMPLED}"
    if name not in FORMS:
        return f"teacher_form: got {name!r}{did_you_mean(name, FORMS)}"
    return None


def distilled(config: TrainConfig) -> TrainConfig:
    """The options of a run whose advantages are the teacher's alone.

    Raises:
        ConfigError: There is no teacher, or another advantage estimator was chosen.
    """
    given = config.advantage_estimator
    if given not in (NO_REWARDS, type(config).advantage_estimator):
        raise ConfigError(
            f"advantage_estimator: got {given!r}, and distillation has no advantage but the "
            "teacher's: leave it out, or give --teacher to lightrft train"
        )
    return config.replaced({"advantage_estimator": NO_REWARDS})
