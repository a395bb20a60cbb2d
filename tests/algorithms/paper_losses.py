"""The objectives of the papers in float64 Python, one token at a time, aggregation included.

They import nothing of lightrft, so that a mistake in it cannot be copied here. `PAPER_LOSSES[name]`
takes the rows of an optimizer batch and returns its loss:

    loss = PAPER_LOSSES["gspo"](rows_of(new, old, advantages, mask), clip_low=3e-4, clip_high=4e-4)

with new, old, advantages, mask all [rows, tokens]; hyper-parameters default to the papers' (where
a paper leaves one open, to the value named beside it). A token is its new and old log-probability
and its advantage.
"""

import math

import numpy as np

RESPONSE_BUDGET = 8
"""Default of the divisor of Dr.GRPO, `max_response_tokens`: the longest response of the run."""


def rows_of(new, old, advantages, mask):
    """The tokens inside the mask of each row that has any."""
    arrays, is_token = [np.asarray(array) for array in (new, old, advantages)], np.asarray(mask)
    rows = np.stack(arrays, -1).astype(float)
    return [
        [tuple(token) for token in row[held.astype(bool)].tolist()]
        for row, held in zip(rows, is_token, strict=True)
        if held.any()
    ]


def _clip(value, low, high):
    return min(max(value, low), high)


def _mean(values):
    values = list(values)
    return sum(values) / len(values)


def _mean_over_rows(rows, loss):
    """1/G sum_i 1/|o_i| sum_t."""
    return _mean(_mean(loss(*token) for token in row) for row in rows)


def _mean_over_tokens(rows, loss):
    """1 / sum_i |o_i| sum_i sum_t."""
    return _mean(loss(*token) for row in rows for token in row)


def _log_ratio(row):
    """The log of GSPO's ratio of a row."""
    return _mean(p - q for p, q, _ in row)


def _surrogate(clip_low, clip_high, dual_clip=None):
    """PPO's clipped surrogate of a token."""

    def loss(p, q, a):
        r = math.exp(p - q)
        objective = min(r * a, _clip(r, 1 - clip_low, 1 + clip_high) * a)
        if dual_clip is not None and a < 0:
            objective = max(objective, dual_clip * a)
        return -objective

    return loss


def ppo(rows, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    """GRPO, arXiv:2402.03300: 1/G sum_i 1/|o_i| sum_t of PPO's clipped surrogate."""
    return _mean_over_rows(rows, _surrogate(clip_low, clip_high, dual_clip))


def dapo(rows, *, clip_low=0.2, clip_high=0.28, dual_clip=None):
    """DAPO, arXiv:2503.14476: 1 / sum_i |o_i| sum_i sum_t."""
    return _mean_over_tokens(rows, _surrogate(clip_low, clip_high, dual_clip))


def dr_grpo(
    rows, *, clip_low=0.2, clip_high=0.2, dual_clip=None, max_response_tokens=RESPONSE_BUDGET
):
    """Dr.GRPO, arXiv:2503.20783: the sum over a row divided by the generation budget."""
    loss = _surrogate(clip_low, clip_high, dual_clip)
    return _mean(sum(loss(*token) for token in row) / max_response_tokens for row in rows)


def gspo(rows, *, clip_low=3e-4, clip_high=4e-4):
    """GSPO, arXiv:2507.18071: one clipped ratio a row; GSPO-token has an advantage per token."""
    total = []
    for row in rows:
        s = math.exp(_log_ratio(row))
        clipped = _clip(s, 1 - clip_low, 1 + clip_high)
        total.append(-_mean(min(s * a, clipped * a) for _, _, a in row))
    return _mean(total)


def gmpo(rows, *, max_log_ratio=0.4, max_log_fall=None):
    """GMPO, arXiv:2507.20673, with token-level clipping to e^-0.4 and e^0.4."""
    total = []
    for row in rows:
        logs = []
        for p, q, a in row:
            d = p - q
            if a > 0:
                d = min(d, max_log_ratio)
            elif a < 0:
                d = max(d, -(max_log_fall or max_log_ratio))
            logs.append(d)
        rho = math.exp(_mean(logs))
        total.append(-_mean(rho * a for _, _, a in row))
    return _mean(total)


def cpgd(rows, *, clip_low=0.2, clip_high=0.2, drift_coef=0.001, drift_cap=2.0):
    """CPGD, arXiv:2505.12504: clipped log-probability plus the drift with its detached weight."""

    def loss(p, q, a):
        bounded = (
            min(p, q + math.log(1 + clip_high)) if a > 0 else max(p, q + math.log(1 - clip_low))
        )
        return -bounded * a + drift_coef * min(math.exp(p - q) - 1, drift_cap) * p

    return _mean_over_rows(rows, loss)


def cispo(rows, *, clip_low=1.0, clip_high=0.28):
    """CISPO, MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5; clip_high is left open there."""
    return _mean_over_tokens(
        rows, lambda p, q, a: -_clip(math.exp(p - q), 1 - clip_low, 1 + clip_high) * a * p
    )


def _gate(log_ratio, a, temperature_positive, temperature_negative):
    tau = temperature_positive if a > 0 else temperature_negative
    return -4 / tau / (1 + math.exp(-tau * (math.exp(log_ratio) - 1))) * a


def sapo(rows, *, temperature_positive=1.0, temperature_negative=1.05):
    """SAPO, arXiv:2511.20347: 1/G sum_i 1/|o_i| sum_t of the gate times the advantage."""
    taus = (temperature_positive, temperature_negative)
    return _mean_over_rows(rows, lambda p, q, a: _gate(p - q, a, *taus))


def sapo_sequence(rows, *, temperature_positive=1.0, temperature_negative=1.05):
    """The gate of SAPO on the ratio of GSPO."""
    taus = (temperature_positive, temperature_negative)
    return _mean(_mean(_gate(_log_ratio(row), a, *taus) for _, _, a in row) for row in rows)


def ppo_sequence(rows, *, clip_low=0.2, clip_high=0.2):
    """A response as one action, arXiv:2402.14740: PPO's surrogate of the product of ratios."""
    loss, total = _surrogate(clip_low, clip_high), []
    for row in rows:
        log_ratio = sum(p - q for p, q, _ in row)
        total.append(_mean(loss(log_ratio, 0.0, a) for _, _, a in row))
    return _mean(total)


def dro(rows, *, penalty=0.1):
    """DRO, arXiv:2405.19107, token by token: -A log p and half the squared log-ratio."""
    return _mean_over_tokens(rows, lambda p, q, a: -a * p + penalty / 2 * (p - q) ** 2)


def reinforce(rows):
    """Williams 1992 over all tokens of the batch: -A log p."""
    return _mean_over_tokens(rows, lambda p, _, a: -a * p)


def _tokens_and_covariances(rows):
    tokens = [token for row in rows for token in row]
    mean_p, mean_a = _mean(p for p, _, _ in tokens), _mean(a for _, _, a in tokens)
    return tokens, [(p - mean_p) * (a - mean_a) for p, _, a in tokens]


def _number_of(tokens, cov_ratio):
    return 0 if cov_ratio == 0 else max(1, math.floor(cov_ratio * len(tokens) + 1e-9))


def clip_cov(rows, *, clip_low=1.0, clip_high=1.0, cov_ratio=2e-4, cov_low=1.0, cov_high=5.0):
    """Clip-Cov, arXiv:2505.22617: systematic in place of random selection."""
    tokens, covariances = _tokens_and_covariances(rows)
    candidates = []
    for index, (covariance, (p, q, a)) in enumerate(zip(covariances, tokens, strict=True)):
        r = math.exp(p - q)
        is_clipped = (a > 0 and r > 1 + clip_high) or (a < 0 and r < 1 - clip_low)
        if cov_low < covariance < cov_high and not is_clipped:
            candidates.append(index)
    count = min(_number_of(tokens, cov_ratio), len(candidates))
    left_out = {candidates[math.floor((k + 0.5) * len(candidates) / count)] for k in range(count)}
    loss = _surrogate(clip_low, clip_high)
    kept = (token for i, token in enumerate(tokens) if i not in left_out)
    return sum(loss(*token) for token in kept) / len(tokens)


def kl_cov(rows, *, cov_ratio=2e-3, kl_coef=1.0):
    """KL-Cov, arXiv:2505.22617: |log ratio| on the tokens of largest covariance."""
    tokens, covariances = _tokens_and_covariances(rows)
    order = sorted(range(len(tokens)), key=lambda i: -covariances[i])
    held = set(order[: _number_of(tokens, cov_ratio)])
    return _mean(
        -math.exp(p - q) * a + (kl_coef * abs(p - q) if i in held else 0.0)
        for i, (p, q, a) in enumerate(tokens)
    )


PAPER_LOSSES = {
    "ppo": ppo,
    "clipped": ppo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "gspo-token": gspo,
    "gmpo": gmpo,
    "cpgd": cpgd,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
    "dro": dro,
    "ppo-sequence": ppo_sequence,
    "sapo-sequence": sapo_sequence,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
