"""Options of one part of a run: what a step of reinforcement minimises."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    CRITIC,
    SFT,
    Arguments,
    algorithm_option,
)
from lightrft.config.registry import (
    AGGREGATIONS,
    POLICY_LOSSES,
)


@dataclass(kw_only=True)
class AlgorithmOptions:
    """What a step of reinforcement minimises."""

    agent_denominator: str = algorithm_option(
        "episode",
        "What counts as one sequence where a loss is a mean over sequences: an episode of the "
        "agent with all its branches, or each branch.",
        acts_with="agent or agent_command",
        choices=("episode", "branch"),
    )
    policy_loss: str | None = algorithm_option(
        None,
        "Policy loss; unset is ppo, the clipped surrogate.",
        choices=POLICY_LOSSES,
        common=True,
    )
    policy_loss_args: Arguments = algorithm_option(
        None,
        "Hyper-parameters of the policy loss under their own names.",
    )
    loss_agg_mode: str | None = algorithm_option(
        None,
        "How the losses of tokens become one number; unset is that of the loss's paper.",
        choices=AGGREGATIONS,
    )
    eps_clip: float | None = algorithm_option(
        None,
        "Clip range of the ratio; unset is that of the loss's paper.",
        at_least=0,
    )
    eps_clip_low: float | None = algorithm_option(
        None,
        "Lower clip range; unset is eps_clip.",
        at_least=0,
        at_most=1,
    )
    eps_clip_high: float | None = algorithm_option(
        None,
        "Upper clip range; unset is eps_clip.",
        at_least=0,
    )
    use_gspo: bool = algorithm_option(
        False,
        "The same as policy_loss gspo.",
    )
    use_cpg_loss: bool = algorithm_option(
        False,
        "The same as policy_loss cpgd.",
    )
    dual_clip: float | None = algorithm_option(
        None,
        "Cap of the ratio where the advantage is negative; unset is off.",
        above=1,
    )
    high_entropy_token_ratio: float = algorithm_option(
        0.0,
        "Train on this share of tokens, the least certain ones; 0 takes all.",
        at_least=0,
        at_most=1,
    )
    high_entropy_scope: str = algorithm_option(
        "batch",
        "Take that share of the optimizer batch or of each response.",
        choices=("batch", "sequence"),
        acts_with="high_entropy_token_ratio",
    )
    off_policy_correction: str | tuple[str, ...] | None = algorithm_option(
        None,
        "Corrections for the difference between engine and trainer: presets (tis, icepop, "
        "mis, geometric ...) or terms such as reject:k3:sequence:high=0.01; several at once. dppo, "
        "off-policy-mask and pairs new/engine, new/old bound the policy that each update moves. "
        "Unset is none, and tis with rollout_lag and stream_chunk, where none must be given.",
    )
    advantage_args: Arguments = algorithm_option(
        None,
        "Hyper-parameters of the advantage estimator under their own names.",
    )
    correction_args: Arguments = algorithm_option(
        None,
        "Bounds and further arguments of off_policy_correction.",
    )
    correction_low: float | None = algorithm_option(
        None,
        "Lower bound of off_policy_correction; unset is its own.",
        at_least=0,
        acts_with="off_policy_correction or rollout_lag or stream_chunk",
    )
    correction_high: float | None = algorithm_option(
        None,
        "Upper bound of off_policy_correction; unset is its own.",
        above=0,
        acts_with="off_policy_correction or rollout_lag or stream_chunk",
    )
    value_clip: float = algorithm_option(
        0.2,
        "Clip range of the change of a value; 0 is off.",
        at_least=0,
        acts_with=CRITIC,
    )
    gamma: float = algorithm_option(1.0, "Discount per token.", at_least=0, at_most=1)
    lambd: float = algorithm_option(
        0.95,
        "Lambda of generalised advantage estimation; `policy_lambd` or `length_alpha` in "
        "advantage_args give the policy one of its own, and this is that of the returns.",
        at_least=0,
        at_most=1,
        acts_with=CRITIC,
    )
    init_kl_coef: float = algorithm_option(
        0.0,
        "Weight of the KL divergence to the initial policy; 0 loads no reference model.",
        at_least=0,
        common=True,
    )
    kl_target: float | None = algorithm_option(
        None,
        "Adapt the weight towards this KL divergence per response.",
        above=0,
        acts_with="init_kl_coef",
    )
    kl_horizon: int = algorithm_option(
        10_000,
        "Samples over which the weight adapts to kl_target.",
        at_least=1,
        acts_with="kl_target",
    )
    entropy_coef: float = algorithm_option(0.0, "Weight of the entropy bonus.", at_least=0)
    aux_loss_coef: float = algorithm_option(
        0.0,
        "Weight of the loss that balances the experts of a mixture-of-experts model.",
        at_least=0,
    )
    ptx_coef: float = algorithm_option(
        0.05,
        "Weight of the language-modelling loss on pretrain_data.",
        at_least=0,
        acts_with="pretrain_data",
    )
    ptx_batch_size: int | None = algorithm_option(
        None,
        "Rows of pretrain_data per optimizer step over all ranks; unset is train_batch_size.",
        at_least=1,
        acts_with="pretrain_data",
    )
    max_epochs: int = algorithm_option(
        1,
        "Passes over the samples of one step; of sft, prefer and reward, over their rows.",
        at_least=1,
        commands=SFT,
    )
    freezing_actor_steps: int = algorithm_option(
        -1,
        "Train only the critic in the first N steps; -1 is off.",
        at_least=-1,
    )
    enable_ema: bool = algorithm_option(
        False,
        "Keep a moving average of the actor and save it in OUTPUT_DIR/model_ema.",
    )
    ema_beta: float = algorithm_option(
        0.992,
        "Weight of the past in the moving average.",
        at_least=0,
        at_most=1,
        acts_with="enable_ema",
    )
    turn_credit: str = algorithm_option(
        "last",
        "What gamma counts from the reward at the end of an episode backwards: last, its "
        "tokens; discounted, its turns.",
        acts_with="environment or tools or agent or agent_command",
        choices=("last", "discounted"),
    )
