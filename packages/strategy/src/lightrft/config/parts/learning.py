"""Losses of reinforcement, and teachers."""

import math

from lightrft.config.options import (
    CRITIC,
    Arguments,
    checks,
    did_you_mean,
    excludes,
    option,
    part,
)
from lightrft.config.parts.rollout import SamplingOptions, ShapingOptions, StreamingOptions
from lightrft.config.parts.run_control import RunControlOptions
from lightrft.config.parts.training import HeadOptions, TrainingOptions
from lightrft.config.registry import (
    AGGREGATIONS,
    POLICY_LOSSES,
)
from lightrft.engines.factory import engine_facts

UNKNOWN_ORDER = (
    "off_policy_correction cannot tell which tokens the {engine} engine kept with top_p, top_k and "
    "min_p together: keep one of them, take engine_type hf, or train without a correction: "
    "off_policy_correction none"
)
# Correction of rows from older weights if the option is unset; value that switches it off.
STALE_CORRECTION, NO_CORRECTION = "tis", "none"
# The estimator without an advantage of the rewards.
NO_REWARDS = "zero"


@part("algorithm")
class AlgorithmOptions:
    """The loss of a step of reinforcement."""

    agent_denominator: str = option(
        "episode",
        "What counts as one sequence where a loss is a mean over sequences: an episode of the "
        "agent with all its branches, or each branch.",
        acts_with="agent or agent_command",
        choices=("episode", "branch"),
    )
    policy_loss: str | None = option(
        None,
        "Policy loss; unset is ppo, the clipped surrogate.",
        choices=POLICY_LOSSES,
        common=True,
    )
    policy_loss_args: Arguments = option(
        None,
        "Hyper-parameters of the policy loss under their own names.",
    )
    loss_agg_mode: str | None = option(
        None,
        "How the losses of tokens become one number; unset is that of the loss's paper.",
        choices=AGGREGATIONS,
    )
    eps_clip: float | None = option(
        None,
        "Clip range of the ratio; unset is that of the loss's paper.",
        at_least=0,
    )
    eps_clip_low: float | None = option(
        None,
        "Lower clip range; unset is eps_clip.",
        at_least=0,
        at_most=1,
    )
    eps_clip_high: float | None = option(
        None,
        "Upper clip range; unset is eps_clip.",
        at_least=0,
    )
    dual_clip: float | None = option(
        None,
        "Cap of the ratio where the advantage is negative; unset is off.",
        above=1,
    )
    high_entropy_token_ratio: float = option(
        0.0,
        "Train on this share of tokens, the least certain ones; 0 takes all.",
        at_least=0,
        at_most=1,
    )
    high_entropy_scope: str = option(
        "batch",
        "Take that share of the optimizer batch or of each response.",
        choices=("batch", "sequence"),
        acts_with="high_entropy_token_ratio",
    )
    off_policy_correction: str | tuple[str, ...] | None = option(
        None,
        "Corrections for the difference between engine and trainer: presets (tis, icepop, "
        "mis, geometric ...) or terms such as reject:k3:sequence:high=0.01; several at once. dppo, "
        "off-policy-mask and pairs new/engine, new/old bound the policy that each update moves. "
        "Unset is none, and tis with rollout_lag and stream_chunk, where none must be given.",
    )
    truncated_logprobs: str = option(
        "kept",
        "Logprobs of policy and reference where top_p, top_k or min_p act: kept renormalises them "
        "over the tokens that could be drawn, as recorded, which is the gradient of what was "
        "sampled from; all takes the whole vocabulary, as for tokens without a record.",
        choices=("kept", "all"),
        acts_with="top_p, top_k or min_p",
        acts_when=lambda c: c.truncates,
    )
    advantage_args: Arguments = option(
        None,
        "Hyper-parameters of the advantage estimator under their own names.",
    )
    correction_args: Arguments = option(
        None,
        "Bounds and further arguments of off_policy_correction.",
    )
    correction_low: float | None = option(
        None,
        "Lower bound of off_policy_correction; unset is its own.",
        at_least=0,
        acts_with="off_policy_correction or rollout_lag or stream_chunk",
    )
    correction_high: float | None = option(
        None,
        "Upper bound of off_policy_correction; unset is its own.",
        above=0,
        acts_with="off_policy_correction or rollout_lag or stream_chunk",
    )
    value_clip: float = option(
        0.2,
        "Clip range of the change of a value; 0 is off.",
        at_least=0,
        acts_with=CRITIC,
    )
    gamma: float = option(1.0, "Discount per token.", at_least=0, at_most=1)
    lambd: float = option(
        0.95,
        "Lambda of generalised advantage estimation. With `policy_lambd` or `length_alpha` in "
        "advantage_args it is that of the critic's targets alone.",
        at_least=0,
        at_most=1,
        acts_with=CRITIC,
    )
    init_kl_coef: float = option(
        0.0,
        "Weight of the KL divergence to the initial policy; 0 loads no reference model.",
        at_least=0,
        common=True,
    )
    kl_target: float | None = option(
        None,
        "Adapt the weight towards this KL divergence per response.",
        above=0,
        acts_with="init_kl_coef",
    )
    kl_horizon: int = option(
        10_000,
        "Samples over which the weight adapts to kl_target.",
        at_least=1,
        acts_with="kl_target",
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", at_least=0)
    aux_loss_coef: float = option(
        0.0,
        "Weight of the loss that balances the experts of a mixture-of-experts model.",
        at_least=0,
    )
    ptx_coef: float = option(
        0.05,
        "Weight of the language-modelling loss on pretrain_data.",
        at_least=0,
        acts_with="pretrain_data",
    )
    pretrain_column: str = option(
        "text",
        "Column of the texts in pretrain_data, where it has texts.",
        acts_with="pretrain_data",
        group="data",
    )
    ptx_batch_size: int | None = option(
        None,
        "Rows of pretrain_data per optimizer step over all ranks; unset is train_batch_size.",
        at_least=1,
        acts_with="pretrain_data",
    )
    freezing_actor_steps: int = option(
        -1,
        "Train only the critic in the first N steps; -1 is off.",
        at_least=-1,
    )
    enable_ema: bool = option(
        False,
        "Keep a moving average of the actor and save it in OUTPUT_DIR/model_ema.",
    )
    ema_beta: float = option(
        0.992,
        "Weight of the past in the moving average.",
        at_least=0,
        at_most=1,
        acts_with="enable_ema",
    )
    turn_credit: str = option(
        "last",
        "What gamma counts from the reward at the end of an episode backwards: last, its "
        "tokens; discounted, its turns.",
        choices=("last", "discounted"),
        acts_when=lambda c: c.has_episodes and c.gamma < 1,
        acts_with="environment, tools or agent and gamma below 1",
    )

    rules = checks(
        *excludes(
            "quantize",
            {
                "enable_ema": "codes of 4 bits have no average",
                "audit_every": "an audit computes with the weights of files",
            },
        ),
        lambda c: (
            c.correction
            and not engine_facts(c.engine_type).has_known_order(
                top_k=c.top_k, top_p=c.top_p, min_p=c.min_p
            )
            and UNKNOWN_ORDER.format(engine=c.engine_type)
        ),
        lambda c: (
            c.correction
            and c.use_fire
            and c.truncates
            and (
                "off_policy_correction cannot tell which first tokens top_p, top_k and min_p left "
                "at first_token_temperature: leave them out, or use_fire, or the correction"
            )
        ),
        lambda c: (
            not c.correction
            and (c.correction_low is not None or c.correction_high is not None)
            and "correction_low and correction_high need off_policy_correction"
        ),
        lambda c: (
            c.correction_low is not None
            and c.correction_high is not None
            and c.correction_low >= c.correction_high
            and (
                f"correction_low must be below correction_high: got {c.correction_low} and "
                f"{c.correction_high}"
            )
        ),
        lambda c: (
            c.advantage_estimator == "zero"
            and not c.teacher_places
            and "--teacher is missing: with advantage_estimator zero rewards teach nothing"
        ),
    )

    @property
    def policy_loss_name(self) -> str:
        """The policy loss, by default the clipped surrogate."""
        return self.policy_loss or "ppo"


# Forms of distillation; forms with a wrong gradient have the names of other projects.
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


REFUSED = {
    "k1_loss": "k1 as a loss has no expected gradient",
    "k3": _K3,
    "low_var_kl": _K3,
    "topk": _TOP_K,
    "forward_kl_topk": _TOP_K,
    "reverse_kl_topk": _TOP_K,
}


def form_problem(name: str) -> str | None:
    """Return the reason why `teacher_form` cannot have this value; None if it can."""
    if name in REFUSED:
        return f"teacher_form: got {name!r}: {REFUSED[name]}; take {SAMPLED}"
    if name not in FORMS:
        return f"teacher_form: got {name!r}{did_you_mean(name, FORMS)}"
    return None


def is_served(place: str) -> bool:
    """Return True if a teacher is the address of a server, not a folder."""
    return place.startswith(("http://", "https://"))


def _teacher_names_problem(c: "TeacherOptions") -> str | None:
    names = [each.partition("=")[0] for each in c.teachers]
    wrong = [each for each in c.teachers if not all(each.partition("="))]
    if wrong:
        return f"teachers: got {wrong[0]!r}, expected NAME=FOLDER or NAME=http://HOST:PORT/v1"
    if len(set(names)) < len(names):
        return f"teachers: got two of one name in {', '.join(names)}: give each its own"
    if c.teacher is not None and c.teachers:
        return "teacher and teachers exclude each other: give the one as NAME=TEACHER, too"
    if len(c.teacher_weights) not in (0, len(names)):
        return (
            f"teacher_weights: got {len(c.teacher_weights)} numbers for {len(names)} teachers: "
            "give one for each"
        )
    if not all(0 < each < math.inf for each in c.teacher_weights):
        return f"teacher_weights: got {list(c.teacher_weights)}, expected numbers > 0"
    return None


@part("algorithm")
class TeacherOptions:
    """Teachers of a student."""

    teacher: str | None = option(
        None,
        "Frozen model with the same tokens whose log-probabilities of the sampled tokens are an "
        "advantage: teacher_coef * (log p - log q). A folder; or http://HOST:PORT/v1[#MODEL], an "
        "OpenAI-compatible server with prompt_logprobs, whose key is the environment variable "
        "LIGHTRFT_TEACHER_KEY.",
        common=True,
        path="folder",
    )
    teachers: tuple[str, ...] = option(
        (),
        "Several teachers, NAME=TEACHER each; teacher_column says which one a row has.",
    )
    teacher_column: str = option(
        "teacher",
        "Column of the data with the name of the row's teacher.",
        acts_with="teachers",
    )
    teacher_weights: tuple[float, ...] = option(
        (),
        "Factor of each of the teachers, in their order; unset is 1 each.",
        acts_with="teachers",
    )
    teacher_top_k: int | None = option(
        None,
        "Number of likely tokens whose probabilities a served teacher returns, for divergences on "
        "rows; all other tokens count as one outcome.",
        at_least=1,
        acts_with="teacher_form reverse or teacher_form forward or teacher_form jsd",
    )
    teacher_tolerance: float = option(
        0.01,
        "Mean difference in nats a token up to which a server's answers to one question are alike.",
        above=0,
        may_change=True,
    )
    teacher_timeout_seconds: float = option(
        600.0,
        "Deadline of a server's answers to the rows of one step, repetitions included.",
        above=0,
        may_change=True,
    )
    offpolicy_fraction: float = option(
        1.0,
        "Share of the rows of a step whose completions are those of the data; the student samples "
        "the others. Of the divergences on rows.",
        at_least=0,
        at_most=1,
        acts_with="teacher_form reverse or teacher_form forward or teacher_form jsd",
    )
    teacher_form: str = option(
        "sampled",
        "Divergence from the teacher: sampled is that of sampled tokens; reverse, forward and jsd "
        "are those of the whole vocabulary, of the rows of lightrft distill.",
        acts_with="teacher or teachers",
    )
    teacher_beta: float = option(
        0.5,
        "Weight of the teacher in the mixture of jsd.",
        above=0,
        at_most=0.99,
        acts_with="teacher_form jsd",
    )

    rules = checks(
        lambda c: form_problem(c.teacher_form),
        _teacher_names_problem,
        lambda c: (
            c.teacher_form == SAMPLED
            and c.has_served_teacher
            and c.temperature != 1
            and (
                "temperature: a server's log-probabilities of a prompt are those of temperature 1: "
                f"got {c.temperature:g}; leave it out, or take a teacher from a folder"
            )
        ),
        lambda c: (
            c.teacher_form != SAMPLED
            and c.has_served_teacher
            and c.teacher_top_k is None
            and (
                "teacher_top_k: a server does not give the whole distribution: say of how many "
                "tokens it is to, up to its --max-logprobs (vLLM: 20)"
            )
        ),
        lambda c: (
            c.teacher_top_k is not None
            and c.teacher_places
            and not c.has_served_teacher
            and "teacher_top_k works only with a teacher behind a server: a folder gives all tokens"
        ),
        lambda c: (
            c.teacher_form == SAMPLED
            and (c.teacher_top_k is not None or c.offpolicy_fraction != 1)
            and (
                "teacher_top_k and offpolicy_fraction are of the divergences reverse, forward and "
                "jsd: add teacher_form, or leave them out"
            )
        ),
        lambda c: (
            c.teacher_places
            and c.teacher_form == SAMPLED
            and (c.truncates or c.use_fire)
            and (
                "teacher needs tokens drawn from the whole distribution of the student, or the "
                "mean of its term is no KL divergence: leave out top_p, top_k, min_p and use_fire"
            )
        ),
    )

    @property
    def teacher_places(self) -> dict[str, str]:
        """Folder or address of each teacher by name; the name of the only one is ""."""
        if self.teacher is not None:
            return {"": self.teacher}
        pairs = (each.partition("=") for each in self.teachers)
        return {name: place for name, _, place in pairs}

    @property
    def teacher_factors(self) -> dict[str, float]:
        """Weight of each teacher by name."""
        names = list(self.teacher_places)
        return dict(zip(names, self.teacher_weights or [1.0] * len(names), strict=True))

    @property
    def distillation_stage(self) -> str:
        """The stage of `lightrft distill`: on sampled tokens, or on rows with answers."""
        return "policy" if self.teacher_form == SAMPLED else "divergence"

    @property
    def teacher_folders(self) -> dict[str, str]:
        """Folder of each teacher that is no server, by name."""
        return {name: at for name, at in self.teacher_places.items() if not is_served(at)}

    @property
    def has_served_teacher(self) -> bool:
        """True if a teacher is a server."""
        return any(map(is_served, self.teacher_places.values()))


@part("algorithm")
class SampledTeacherOptions(TeacherOptions):
    """Teachers of a student's samples."""

    teacher_prompt_column: str | None = option(
        None,
        "Column of the data that the teacher reads after the prompt, and the student does not: a "
        "solution, or feedback.",
        acts_with="teacher or teachers",
    )
    teacher_coef: float = option(
        1.0,
        "Weight of the teacher's advantage beside that of the rewards.",
        above=0,
        acts_with="teacher or teachers",
    )

    rules = checks(
        lambda c: (
            c.teacher_form != SAMPLED
            and c.teacher_prompt_column is not None
            and "teacher_prompt_column is of teacher_form sampled: leave it out"
        ),
    )


class LearningOptions(
    RunControlOptions,
    SampledTeacherOptions,
    AlgorithmOptions,
    StreamingOptions,
    SamplingOptions,
    ShapingOptions,
    HeadOptions,
    TrainingOptions,
):
    """Learning of a policy in a step, and the samples it learns from."""

    @property
    def correction(self) -> str | tuple[str, ...] | None:
        """Terms of the off-policy correction, by default those that the age of rows needs."""
        terms = self.off_policy_correction
        if terms is None and self.keeps_rows and not self.use_rollout_logprobs:
            return STALE_CORRECTION
        return None if terms in (NO_CORRECTION, (NO_CORRECTION,)) else terms

    @property
    def num_minibatches(self) -> int:
        """Optimizer batches in which the samples of one step are trained."""
        return self.rollout_batch_size * self.n_samples_per_prompt // self.train_batch_size

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps after each rollout."""
        return self.num_minibatches * self.max_epochs

    @property
    def asks_policy_first(self) -> bool:
        """Return whether an option needs the policy's logprobs before an update computes them.

        A KL term in the rewards needs them as well.
        """
        has_teacher = self.teacher or self.teachers or self.teacher_prompt_column is not None
        return self.max_epochs > 1 or self.high_entropy_token_ratio > 0 or bool(has_teacher)

    @property
    def num_frozen_updates(self) -> int:
        """Optimizer steps at the start of the run that the actor does not take."""
        return max(self.freezing_actor_steps, 0) * self.steps_per_rollout
