"""Token rewards, returns, and the estimators that work on them.

Masked tokens inside a response (tool output, say) are skipped: the value and the advantage of the
next sampled token carry over them, discounted like any step of theirs. The state after the last
sampled token has value 0, of truncated responses too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrft.algorithms.interface import (
    AdvantageFunction,
    TokenAdvantageInputs,
    TokenAdvantages,
    advantage_estimator,
    advantage_traits,
)
from lightrft.algorithms.masking import at_least_float32, mask_out


def estimate_token_advantages(
    estimator: AdvantageFunction, inputs: TokenAdvantageInputs
) -> TokenAdvantages:
    """Advantages and returns of local rows.

    Raises:
        ValueError: the estimator works on rows, or does not return `TokenAdvantages`.
    """
    if not advantage_traits(estimator).is_token_level:
        raise ValueError("this estimator works on rows: call estimate_row_advantages")
    result = estimator(inputs)
    if not isinstance(result, TokenAdvantages):
        raise ValueError(f"{estimator} must return TokenAdvantages: got {type(result).__name__}")
    return result


@advantage_estimator(is_token_level=True, needs_critic=True, whitens=True)
def gae_advantages(
    inputs: TokenAdvantageInputs,
    *,
    policy_lambd: float | None = None,
    length_alpha: float | None = None,
) -> TokenAdvantages:
    """Generalised advantage estimation with a critic; see `generalized_advantages`.

    The critic's targets use `--lambd`. Advantages use it, too, or `policy_lambd` if that is set
    (VC-PPO). With `length_alpha` they use max(0, 1 - 1 / (length_alpha L_i)), L_i the response
    tokens of the row (VAPO).

    Source: Yuan et al. 2025, arXiv:2503.01491, sec. 4.2; Yue et al. 2025, arXiv:2504.05118, sec. 4.

    Raises:
        ValueError: `values` is missing, or arguments exclude each other or are out of range.
    """
    values, mask = inputs.values, inputs.response_mask
    if values is None:
        raise ValueError("the gae estimator needs the critic's values")
    if length_alpha is not None and (length_alpha <= 0 or policy_lambd is not None):
        raise ValueError(
            "length_alpha of the gae estimator must be > 0 and leaves no place for policy_lambd: "
            f"got {length_alpha} and {policy_lambd}"
        )
    lambd: float | Tensor = inputs.lambd if policy_lambd is None else policy_lambd
    if length_alpha is not None:
        lengths = mask.sum(dim=1).clamp(min=1).double()
        lambd = (1 - 1 / (length_alpha * lengths)).clamp(min=0)

    def with_lambd(lambd: float | Tensor) -> TokenAdvantages:
        return generalized_advantages(
            inputs.token_rewards, values, mask, gamma=inputs.gamma, lambd=lambd
        )

    estimated = with_lambd(inputs.lambd)
    if lambd is inputs.lambd:
        return estimated
    return TokenAdvantages(with_lambd(lambd).advantages, estimated.returns)


@advantage_estimator(is_token_level=True)
def reinforce_advantages(inputs: TokenAdvantageInputs) -> TokenAdvantages:
    """REINFORCE: the advantage is the discounted return of the token rewards.

    Source: Williams 1992, Machine Learning 8.
    """
    returns = discounted_returns(inputs.token_rewards, inputs.response_mask, gamma=inputs.gamma)
    return TokenAdvantages(advantages=returns, returns=returns)


@advantage_estimator(is_token_level=True, whitens=True)
def reinforce_plus_plus_advantages(inputs: TokenAdvantageInputs) -> TokenAdvantages:
    """REINFORCE++: the discounted return, whitened over all tokens of the step.

    Source: Hu 2025, arXiv:2501.03262.
    """
    return reinforce_advantages(inputs)


def broadcast_to_tokens(
    row_advantages: Tensor,
    response_mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float | Tensor = 1.0,
) -> TokenAdvantages:
    """Row advantages as tokens', with a KL penalty in the reward.

    A_t = gamma^(T - t) A_i - kl_coef sum_{s >= t} gamma^(s - t) kl_s,  T the last response token,
    steps counted over response tokens

    The penalty is discounted like the advantage: it is a reward of its token, and the return of
    token rewards is what OpenRLHF and verl compute, too. Without a KL penalty and with gamma = 1
    every response token of a row gets the row's number.

    Args:
        row_advantages: [batch], local rows.
        response_mask: [batch, seq] bool.
        kl, kl_coef: Per-token KL penalty in the reward, see `token_rewards`.
        gamma: As in `discounted_returns`.
    """
    shaped = token_rewards(row_advantages, response_mask, kl=kl, kl_coef=kl_coef)
    return reinforce_advantages(TokenAdvantageInputs(shaped, response_mask, gamma=gamma))


def token_rewards(
    rewards: Tensor,
    response_mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    turn_rewards: Tensor | None = None,
) -> Tensor:
    """R_t = -kl_coef kl_t, plus the row's reward on its last response token: [batch, seq].

    Of the row's reward, what its turns were paid stands where they end, the rest on the last token.

    A row without response tokens has no place for its reward and stays 0.

    Args:
        rewards: [batch].
        response_mask: [batch, seq] bool.
        kl: [batch, seq] per-token estimate against the reference (k1 is the unbiased one here).
        kl_coef: Weight of the penalty.
        turn_rewards: [batch, seq], 0 outside the response; parts of `rewards`.

    Raises:
        ValueError: kl_coef is negative, or not 0 without `kl`.
    """
    if kl_coef < 0 or (kl_coef > 0 and kl is None):
        raise ValueError(f"kl_coef must be >= 0 and comes with a kl tensor: got {kl_coef}")
    tokens_from_here = response_mask.flip(-1).cumsum(-1).flip(-1)
    is_last = response_mask & (tokens_from_here == 1)
    rewards = at_least_float32(rewards.detach())
    if turn_rewards is not None:
        rewards = rewards - turn_rewards.sum(-1)
    shaped = mask_out(rewards.unsqueeze(-1).expand(response_mask.shape), is_last)
    if turn_rewards is not None:
        shaped = shaped + turn_rewards
    if kl is None:
        return shaped
    return shaped - kl_coef * mask_out(at_least_float32(kl.detach()), response_mask)


def turn_discounts(response_mask: Tensor, *, gamma: float) -> Tensor:
    """Gamma from the end of a turn to the next one, 1 within a turn: [batch, seq] float64.

    A turn is a run of sampled tokens; between two turns stands at least one token of an
    observation.

    Args:
        response_mask: [batch, seq] bool.
        gamma: Discount per turn.
    """
    _check_unit_interval(gamma=gamma)
    goes_on = torch.nn.functional.pad(response_mask[:, 1:], (0, 1))
    ones = torch.ones(response_mask.shape, dtype=torch.float64, device=response_mask.device)
    return ones.masked_fill(response_mask & ~goes_on, gamma)


@torch.no_grad()
def discounted_returns(
    rewards: Tensor, response_mask: Tensor, *, gamma: float | Tensor = 1.0
) -> Tensor:
    """G_t = R_t + gamma_t G_next, next the following response token: [batch, seq].

    Args:
        rewards: [batch, seq] token rewards.
        response_mask: [batch, seq] bool.
        gamma: Discount per sampled token, or [batch, seq] the discount after each.
    """
    rewards = mask_out(at_least_float32(rewards), response_mask)
    discounts = _by_column(gamma, rewards)
    returns = torch.zeros_like(rewards)
    following = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        going_on = rewards[:, t] + discounts[t] * following
        following = torch.where(response_mask[:, t], going_on, following)
        returns[:, t] = following
    return mask_out(returns, response_mask)


@torch.no_grad()
def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float | Tensor,
    lambd: float | Tensor,
) -> TokenAdvantages:
    """Generalised advantage estimation.

    delta_t = R_t + gamma_t V_next - V_t;  A_t = delta_t + gamma_t lambd A_next;  returns = A + V

    Source: Schulman et al. 2015, arXiv:1506.02438.

    Args:
        rewards: [batch, seq] token rewards.
        values: [batch, seq], entry t the value before token t is sampled.
        response_mask: [batch, seq] bool.
        gamma: As in `discounted_returns`.
        lambd: Mixes one-step (0) and Monte Carlo (1) estimates; [batch] is that of each row.
    """
    if isinstance(lambd, Tensor):
        lambd = lambd.to(at_least_float32(rewards).dtype)
    else:
        _check_unit_interval(lambd=lambd)
    rewards = mask_out(at_least_float32(rewards), response_mask)
    values = mask_out(at_least_float32(values), response_mask)
    discounts = _by_column(gamma, rewards)
    advantages = torch.zeros_like(rewards)
    next_value = rewards.new_zeros(len(rewards))
    next_advantage = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        is_sampled = response_mask[:, t]
        delta = rewards[:, t] + discounts[t] * next_value - values[:, t]
        advantage = delta + discounts[t] * lambd * next_advantage
        next_value = torch.where(is_sampled, values[:, t], next_value)
        next_advantage = torch.where(is_sampled, advantage, next_advantage)
        advantages[:, t] = next_advantage
    advantages = mask_out(advantages, response_mask)
    return TokenAdvantages(advantages, mask_out(advantages + values, response_mask))


def _by_column(gamma: float | Tensor, like: Tensor) -> Sequence[float | Tensor]:
    """Return the discount after the token of each column: a number, or [batch] of them."""
    if isinstance(gamma, Tensor):
        return gamma.to(like.dtype).unbind(dim=1)
    _check_unit_interval(gamma=gamma)
    return [gamma] * like.shape[1]


def _check_unit_interval(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must lie in [0, 1]: got {number}")
