"""Loss, estimator and corrections that the options name."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from lightrft.algorithms import RowAdvantageInputs, TokenAdvantageInputs, TokenAdvantages, TokenLoss
from lightrft.algorithms.interface import (
    AdvantageFunction,
    AdvantageTraits,
    PolicyLossFunction,
    PolicyLossTraits,
    advantage_traits,
    policy_loss,
    policy_loss_traits,
)
from lightrft.config import AlgorithmOptions, ConfigError, LearningOptions, TrainConfig
from lightrft.config.options import CRITIC, options_of
from lightrft.config.parts.learning import UNKNOWN_ORDER
from lightrft.config.parts.rollout import NO_MIN_P
from lightrft.config.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, bind, keyword_options
from lightrft.engines.factory import engine_facts

if TYPE_CHECKING:
    from lightrft.algorithms.correction_terms import CorrectionTerm

# Options for every loss that has an argument of that name; the first one that is set wins.
COMMON_LOSS_OPTIONS = {
    "clip_low": ("eps_clip_low", "eps_clip"),
    "clip_high": ("eps_clip_high", "eps_clip"),
    "dual_clip": ("dual_clip",),
}
_WORDS = {"clip_low": "clip range", "clip_high": "clip range", "dual_clip": "dual clip"}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Loss, estimator and corrections of a run, hyper-parameters included.

    Args:
        policy_loss, loss_traits: Loss of a token, and its declared traits.
        estimator, estimator_traits: Estimator of advantages, and its declared traits.
        corrections: Terms for the difference between engine and trainer; () is none.
        asked_aggregation: `loss_agg_mode` as the user set it; None leaves it to the loss.
    """

    policy_loss: PolicyLossFunction
    loss_traits: PolicyLossTraits
    estimator: AdvantageFunction
    estimator_traits: AdvantageTraits
    corrections: "tuple[CorrectionTerm, ...]" = ()
    asked_aggregation: str | None = None


def build_algorithm(config: LearningOptions) -> Algorithm:
    """Load the named functions, bind hyper-parameters and try custom functions on an example.

    Raises:
        ConfigError: Unknown names or hyper-parameters, a file that cannot be imported, or a
            function that rejects the arguments it will get.
    """
    loss, estimator = build_policy_loss(config), build_estimator(config)
    return Algorithm(
        policy_loss=loss,
        loss_traits=policy_loss_traits(loss),
        estimator=estimator,
        estimator_traits=advantage_traits(estimator),
        asked_aggregation=config.loss_agg_mode,
        corrections=build_corrections(config),
    )


def build_policy_loss(config: AlgorithmOptions) -> PolicyLossFunction:
    """Return the policy loss with its hyper-parameters.

    Raises:
        ConfigError: As `build_algorithm`.
    """
    name = config.policy_loss_name
    function = cast("Callable[..., object]", POLICY_LOSSES.load(name))
    owner = f"policy_loss {name}"
    common = _common_options(config, function, owner=owner)
    bound = bind(function, {**common, **(config.policy_loss_args or {})}, owner=owner)
    if POLICY_LOSSES.is_built_in(name):
        return cast("PolicyLossFunction", bound)
    wrapped = _with_token_loss(bound)
    _try(
        lambda: _try_policy_loss(wrapped),
        owner=owner,
        expected=(
            "a function (logprobs, old_logprobs, advantages, response_mask, *, hyper-parameters), "
            "each [batch, seq], that gives a TokenLoss or a differentiable tensor [batch, seq]"
        ),
    )
    return wrapped


def build_estimator(config: LearningOptions) -> AdvantageFunction:
    """Return the advantage estimator with its hyper-parameters.

    Raises:
        ConfigError: As `build_algorithm`.
    """
    name = config.advantage_estimator
    owner = f"advantage_estimator {name}"
    function = cast("Callable[..., object]", ADVANTAGE_ESTIMATORS.load(name))
    bound = cast("AdvantageFunction", bind(function, config.advantage_args or {}, owner=owner))
    if not ADVANTAGE_ESTIMATORS.is_built_in(name):
        _try(
            lambda: _try_estimator(bound),
            owner=owner,
            expected=(
                "a function of RowAdvantageInputs that gives one finite number per row, or one "
                "declared is_token_level of TokenAdvantageInputs that gives TokenAdvantages"
            ),
        )
    return bound


def build_corrections(config: LearningOptions) -> "tuple[CorrectionTerm, ...]":
    """Return the terms of `off_policy_correction`; () if it is not set.

    Raises:
        ConfigError: A term cannot be parsed.
    """
    if not config.correction:
        return ()
    from lightrft.algorithms.correction_terms import parse_correction  # of runs with some

    bounds = {"low": config.correction_low, "high": config.correction_high}
    set_bounds = {name: bound for name, bound in bounds.items() if bound is not None}
    parse = bind(
        parse_correction, {**set_bounds, **(config.correction_args or {})}, owner="correction_args"
    )
    try:
        return parse(config.correction)
    except ValueError as error:
        raise ConfigError(f"off_policy_correction: {error}") from error


def algorithm_problems(config: LearningOptions) -> list[str]:
    """Return the reasons why the algorithm cannot be computed, one line each.

    Only for options that are valid by themselves.
    """
    problems: list[str] = []
    for build in (build_policy_loss, build_estimator, build_corrections):
        try:
            build(config)
        except ConfigError as error:
            problems += str(error).splitlines()
    return problems or requirement_problems(config, build_algorithm(config))


def requirement_problems(config: LearningOptions, algorithm: Algorithm) -> list[str]:
    """Return the requirements of the algorithm that the options do not meet, one line each."""
    name, traits = config.advantage_estimator, algorithm.estimator_traits
    rules = (
        (
            traits.needs_groups and config.n_samples_per_prompt < 2,
            f"advantage_estimator {name} compares the samples of one prompt: it needs "
            f"n_samples_per_prompt >= 2, got {config.n_samples_per_prompt}",
        ),
        (
            traits.reads_components and (config.reward_running_norm or config.reward_clip > 0),
            f"advantage_estimator {name} normalises the components of rewards: leave out "
            "reward_running_norm and reward_clip, which do not change them",
        ),
        (
            config.freezing_actor_steps > 0 and not traits.needs_critic,
            "freezing_actor_steps trains only the critic: it needs an advantage_estimator with a "
            f"critic, such as gae, got {name}",
        ),
        (
            config.stream_chunk is not None and traits.needs_greedy_rewards,
            f"stream_chunk and advantage_estimator {name} exclude each other: leave one of "
            "them out",
        ),
        (
            config.init_kl_coef > 0 and not config.use_kl_loss and config.kl_estimator_name != "k1",
            f"kl_estimator {config.kl_estimator} is for the loss: in the reward its expected "
            "gradient is not that of the KL divergence and may push the policy away from the "
            "reference; leave kl_estimator out (it is then k1), or add use_kl_loss",
        ),
    )
    return [text for is_broken, text in rules if is_broken]


def unused_algorithm_options(
    config: TrainConfig, algorithm: Algorithm, *, has_reference: bool = True
) -> list[str]:
    """Return one sentence for each changed option that this algorithm does not use."""
    warnings = [
        f"{name} acts only with an advantage_estimator that has a critic"
        for name, (entry, info) in options_of(TrainConfig).items()
        if info.acts_with == CRITIC
        and not algorithm.estimator_traits.needs_critic
        and config.__dict__[name] != entry.default
    ]
    if config.lora_dropout:
        warnings.append("lora_dropout is off in reinforcement, where it would change the ratios")
    if config.kl_target is not None and not has_reference:
        warnings.append("kl_target acts only with a reference model and init_kl_coef > 0")
    return warnings


def decide(config: TrainConfig) -> tuple[TrainConfig, Algorithm]:
    """Return the configuration with the algorithm's defaults filled in, and the algorithm.

    Raises:
        ConfigError: As `build_algorithm`.
    """
    algorithm = build_algorithm(config)
    decided = {
        "policy_loss": config.policy_loss_name,
        "loss_agg_mode": config.loss_agg_mode or algorithm.loss_traits.aggregation,
    }
    return config.replaced(decided), algorithm


def check_algorithm(
    config: LearningOptions,
    algorithm: Algorithm,
    *,
    has_critic: bool,
    has_reference: bool,
    engine_type: str | None,
    has_teacher: bool = False,
) -> None:
    """Check that a trainer has what its algorithm needs.

    Args:
        config, algorithm: Options and algorithm of the run.
        has_critic, has_reference, has_teacher: Models that the trainer has.
        engine_type: Name of the engine that samples; None if there is none yet.

    Raises:
        ConfigError: A model is missing, or the engine hides which tokens it kept.
    """
    problems = requirement_problems(config, algorithm)
    if algorithm.estimator_traits.needs_critic and not has_critic:
        problems.append(
            f"advantage_estimator {config.advantage_estimator!r} needs a critic: pass one, or "
            "choose group_norm, rloo, reinforce++ or another estimator without a critic"
        )
    if config.use_kl_loss and not has_reference:
        problems.append(
            "use_kl_loss needs a reference model: pass initial_model and init_kl_coef > 0, or "
            "leave use_kl_loss out"
        )
    if has_teacher != bool(config.teacher_folders):
        problems.append(
            "teacher_model goes with the option teacher, its folder: got teacher "
            f"{config.teacher!r} and {'a' if has_teacher else 'no'} teacher_model"
        )
    facts = engine_facts(engine_type)
    if config.min_p > 0 and not facts.draws_min_p:
        problems.append(NO_MIN_P.format(engine=engine_type))
    is_known = facts.has_known_order(top_k=config.top_k, top_p=config.top_p, min_p=config.min_p)
    if algorithm.corrections and not is_known:
        problems.append(UNKNOWN_ORDER.format(engine=engine_type))
    if problems:
        raise ConfigError("\n".join(problems))


def _common_options(
    config: AlgorithmOptions, function: Callable[..., object], *, owner: str
) -> dict[str, object]:
    """Return the values of the common options that are arguments of the loss.

    Raises:
        ConfigError: An option is set, and the loss has no such argument.
    """
    known, values = keyword_options(function), {}
    for argument, names in COMMON_LOSS_OPTIONS.items():
        set_names = [name for name in names if config.__dict__[name] is not None]
        if set_names and argument not in known:
            raise ConfigError(
                f"{owner} has no {_WORDS[argument]}: leave out {' and '.join(set_names)} "
                f"(its options are {', '.join(known) or 'none'})"
            )
        if set_names:
            values[argument] = config.__dict__[set_names[0]]
    return values


def _with_token_loss(function: Callable[..., object]) -> PolicyLossFunction:
    """Wrap a loss that may return a bare tensor so that it returns a TokenLoss."""

    def loss(
        logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> TokenLoss:
        result = function(logprobs, old_logprobs, advantages, response_mask)
        if not isinstance(result, Tensor):
            return cast("TokenLoss", result)
        if result.shape != response_mask.shape:
            raise ValueError(
                f"its loss has the shape {list(result.shape)} for tensors of the shape "
                f"{list(response_mask.shape)}"
            )
        difference = torch.where(response_mask, logprobs.detach() - old_logprobs, 0.0)
        return TokenLoss.unclipped(result, difference.clamp(-20, 20).exp(), response_mask)

    return policy_loss(**asdict(policy_loss_traits(function)))(loss)


def _try(check: Callable[[], str | None], *, owner: str, expected: str) -> None:
    """Run a custom function on an example batch.

    Raises:
        ConfigError: It raises, or its result is not the expected one.
    """
    try:
        problem = check()
    except Exception as error:
        raise ConfigError(
            f"{owner} fails on an example batch: {type(error).__name__}: {error}; expected "
            f"{expected}"
        ) from error
    if problem is not None:
        raise ConfigError(f"{owner}: {problem}; expected {expected}")


def _try_policy_loss(loss: PolicyLossFunction) -> str | None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(2, 4, generator=generator)
    logprobs = (old + 0.1 * torch.randn(2, 4, generator=generator)).requires_grad_()
    advantages = torch.randn(2, 4, generator=generator)
    mask = torch.tensor([[False, True, True, True], [False, True, True, False]])
    result: object = loss(logprobs, old, advantages, mask)
    if not isinstance(result, TokenLoss):
        return f"it gives {type(result).__name__}"
    if result.loss.shape != mask.shape:
        return f"its loss has the shape {list(result.loss.shape)} for tensors {list(mask.shape)}"
    if not result.loss.requires_grad:
        return "no gradient flows from its loss to logprobs"
    if not bool(result.loss.isfinite().all()):
        return "its loss is not finite"
    return None


def _try_estimator(estimator: AdvantageFunction) -> str | None:
    if advantage_traits(estimator).is_token_level:
        mask = torch.tensor([[False, True, True, True], [False, True, True, False]])
        rewards = torch.where(mask, 0.5, 0.0)
        tokens: object = estimator(TokenAdvantageInputs(rewards, mask, torch.zeros(2, 4)))
        if not isinstance(tokens, TokenAdvantages):
            return f"it gives {type(tokens).__name__}"
        return None if tokens.advantages.shape == mask.shape else "its advantages are misshapen"
    rows: object = estimator(
        RowAdvantageInputs(
            rewards=torch.tensor([1.0, 0.0, 0.5, 0.5]),
            group_ids=torch.tensor([0, 0, 1, 1]),
            lengths=torch.tensor([3, 2, 4, 1]),
            greedy_rewards=torch.zeros(4),
        )
    )
    if not isinstance(rows, Tensor) or rows.shape != (4,):
        return f"it gives {list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__}"
    return None if bool(rows.isfinite().all()) else "its advantages are not finite"
