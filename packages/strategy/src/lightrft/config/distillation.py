"""Forms of distillation by name, and those that have a wrong gradient."""

from lightrft.config.options import did_you_mean

SAMPLED = "sampled"
FORMS = (SAMPLED, "reverse", "forward", "jsd")
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
